"""Computes a rank's experts with one kernel launch per product.

Transformer Engine needs one launch per product and expert. The parameters are those of Megatron-core's
``TEGroupedMLP`` (``linear_fc1.weight0`` and so on), so that nothing changes for checkpoints, optimizer and
FP8. Only the products are ours (:mod:`megatron_vl.kernels.experts.grouped_gemm`). They read each expert's
token count on the device, so the host waits for no counts unless ranks exchange tokens.

A model has many experts, so the host avoids work per expert: the kernel adds weight gradients to
``main_grad``, and DDP is notified that they are ready without an autograd node for each weight
(:meth:`GroupedExperts.report_to`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_vl.kernels.experts.grouped_gemm import (
    AddressTable,
    TilePlan,
    plan_tiles,
    row_product,
    weight_product,
)
from megatron_vl.kernels.layers.swiglu import swiglu
from megatron_vl.parallel.ddp import ReplicaDDP

_placeholder_gradients: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _placeholder_gradient(weight: Tensor) -> Tensor:
    """The gradient to give autograd for a weight whose real gradient is already in ``main_grad``."""
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _placeholder_gradients:
        _placeholder_gradients[key] = torch.zeros_like(weight)
    return _placeholder_gradients[key].detach()  # a separate tensor, or autograd copies it


class ExpertWeights:
    """The weights of one linear of all local experts, as the kernels need them."""

    def __init__(self, linear_module: nn.Module, num_experts: int) -> None:
        self.linear_module = linear_module
        self.expert_parameters = [getattr(linear_module, f"weight{expert}") for expert in range(num_experts)]
        self.ddp: ReplicaDDP | None = None
        """The DDP to notify when gradients are ready; None: autograd calls DDP's hooks."""
        self._weight_addresses, self._grad_addresses = AddressTable(), AddressTable()

    @property
    def weight_addresses(self) -> Tensor:
        return self._weight_addresses.device_addresses(self.expert_parameters)

    def autograd_inputs(self) -> list[nn.Parameter]:
        """The weights that are in the autograd graph, because autograd must call their DDP hooks."""
        return self.expert_parameters if self.ddp is None else self.expert_parameters[:1]

    def compute_gradients(self, output_grad: Tensor, x: Tensor, tile_plan: TilePlan) -> list[Tensor | None]:
        """Computes the weight gradients from dy [rows, out] and x [rows, in].

        Returns:
            The gradients of :meth:`autograd_inputs` for autograd.
        """
        first_parameter = self.expert_parameters[0]
        autograd_parameters = self.autograd_inputs()
        if not first_parameter.requires_grad:
            return [None] * len(autograd_parameters)

        adds_to_main_grad = getattr(self.linear_module, "fuse_wgrad_accumulation", False)
        if not (adds_to_main_grad and hasattr(first_parameter, "main_grad")):
            packed_grads = x.new_empty(len(self.expert_parameters), *first_parameter.shape)
            bytes_per_expert = packed_grads[0].numel() * packed_grads.element_size()
            grad_addresses = (
                torch.arange(len(self.expert_parameters), device=x.device) * bytes_per_expert
                + packed_grads.data_ptr()
            )
            weight_product(output_grad, x, grad_addresses, tile_plan, packed_grads, accumulate=False)
            return list(packed_grads.unbind())

        main_grads = [parameter.main_grad for parameter in self.expert_parameters]
        grad_addresses = self._grad_addresses.device_addresses(main_grads)
        weight_product(output_grad, x, grad_addresses, tile_plan, main_grads[0], accumulate=True)
        for parameter in autograd_parameters:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if self.ddp is not None:
            # Autograd calls the hook of the first weight itself, after this function.
            self.ddp.report_gradients_ready(self.expert_parameters[1:])
        return [_placeholder_gradient(first_parameter) for _ in autograd_parameters]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, tile_plan: TilePlan, expert_weights: ExpertWeights, *autograd_parameters: Tensor
    ) -> Tensor:
        x = x.contiguous()
        weight_addresses = expert_weights.weight_addresses
        # Only the weights' gradients need the input.
        kept_input = x if autograd_parameters[0].requires_grad else None
        ctx.save_for_backward(kept_input, weight_addresses, *tile_plan)
        ctx.weights = expert_weights
        ctx.input_width = x.shape[1]
        return row_product(
            x, weight_addresses, tile_plan, autograd_parameters[0].shape[0], is_transposed=True
        )

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, weight_addresses, *tile_plan = ctx.saved_tensors
        output_grad = output_grad.contiguous()
        tile_plan = TilePlan(*tile_plan)
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = row_product(
                output_grad, weight_addresses, tile_plan, ctx.input_width, is_transposed=False
            )
        return input_grad, None, None, *ctx.weights.compute_gradients(output_grad, x, tile_plan)


class PlannedLinear:
    """A mixin for Transformer Engine's grouped linears.

    They then also take a :class:`~megatron_vl.kernels.experts.grouped_gemm.TilePlan` instead of row counts.
    """

    takes_tile_plan = False
    """Whether the layer gets tile plans, and not row counts."""

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        """x [rows, in], sorted by expert -> [rows, out] and no bias."""
        if not isinstance(m_splits, TilePlan):
            return super().forward(x, m_splits)  # type: ignore[misc]
        weights = self.expert_weights
        return _GroupedLinear.apply(x, m_splits, weights, *weights.autograd_inputs()), None

    @property
    def expert_weights(self) -> ExpertWeights:
        cached_weights = self.__dict__.get("_expert_weights")
        if cached_weights is None:
            cached_weights = self.__dict__["_expert_weights"] = ExpertWeights(self, self.num_gemms)  # type: ignore[arg-type, attr-defined]
        return cached_weights


class GroupedExperts(TEGroupedMLP):
    """Core's grouped experts. In bf16 without FP8, they use our products."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planned = self.config.params_dtype == torch.bfloat16 and not self.config.fp8
        """Whether our kernels are used."""
        for grouped_linear in (self.linear_fc1, self.linear_fc2):
            grouped_linear.takes_tile_plan = self.planned

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        *buffers: Any,
    ) -> tuple[Tensor, None]:
        """Runs each expert on its rows.

        Args:
            permuted_local_hidden_states: [rows, H], sorted by expert. Rows after those of the last expert are
                ignored.
            tokens_per_expert: [local experts], number of rows of each.
            permuted_probs: [rows], the weight of each row.

        Returns:
            [rows, H] (a part of the sum under expert tensor parallelism) and no bias.
        """
        if not self.planned:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs, *buffers)

        # The plan is made on the device from the counts there, so that the host does not wait for them.
        tile_plan = plan_tiles(tokens_per_expert, permuted_local_hidden_states.shape[0])
        intermediate_states, _ = self.linear_fc1(permuted_local_hidden_states, tile_plan)

        # Rows are multiplied by their probabilities before the second linear, which is linear in them. SwiGLU
        # does it in the same kernel.
        if not self.activation_recompute:
            return self.linear_fc2(swiglu(intermediate_states, permuted_probs), tile_plan)

        # fp8=None: Transformer Engine keeps no FP8 state.
        activation_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
        expert_output, _ = self.linear_fc2(
            activation_checkpoint.checkpoint(swiglu, intermediate_states, permuted_probs), tile_plan
        )
        activation_checkpoint.discard_output_and_register_recompute(expert_output)
        return expert_output, None

    def report_to(self, ddp: ReplicaDDP) -> None:
        """Makes weights notify ``ddp`` directly when their gradients are ready, instead of by one hook each.

        Weights keep their hooks if their gradients are not added to ``main_grad``
        (``fuse_wgrad_accumulation``).
        """
        for grouped_linear in (self.linear_fc1, self.linear_fc2):
            if self.planned and getattr(grouped_linear, "fuse_wgrad_accumulation", False):
                grouped_linear.expert_weights.ddp = ddp
            if (adapter := getattr(grouped_linear, "adapter", None)) is not None:
                adapter.lora_A.expert_weights.ddp = ddp
                adapter.lora_B.expert_weights.ddp = ddp
