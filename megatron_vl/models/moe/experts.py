"""Computes a rank's experts with one kernel launch per product.

Transformer Engine needs one launch per product and expert. The parameters are those of Megatron-core's
``TEGroupedMLP`` (``linear_fc1.weight0`` and so on), so that nothing changes for checkpoints and the
optimizer. Only the products are ours (:mod:`megatron_vl.kernels.experts.grouped_gemm`), which are in bf16
even in an FP8 run. They read each expert's token count on the device, so the host waits for no counts unless
ranks exchange tokens.

A model has many experts, so the host avoids work per expert: the kernel adds weight gradients to
``main_grad``, and DDP is notified that they are ready without an autograd node for each weight
(:meth:`GroupedExperts.report_to`).
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch import Tensor, nn

from megatron_vl.kernels.experts.grouped_gemm import (
    AddressTable,
    TilePlan,
    plan_tiles,
    row_product,
    weight_product,
)
from megatron_vl.kernels.experts.token_copies import scatter_parts, scatter_rows, sum_rows
from megatron_vl.kernels.layers.swiglu import swiglu, swiglu_backward, swiglu_forward
from megatron_vl.models.attention import is_recomputing, keep_output, known_output
from megatron_vl.models.fused_layers import recompute_in_backward
from megatron_vl.models.moe.dispatch import ExpertRows
from megatron_vl.parallel.ddp import ReplicaDDP


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
        # DDP's hook needs a gradient, which it does not read.
        return [torch.empty_like(first_parameter)] * len(autograd_parameters)


def plan_gather(rows: ExpertRows) -> TilePlan:
    """The plan of products of tokens. The host does not wait for the device."""
    tokens = torch.arange(rows.row_ids.shape[0], dtype=torch.int32, device=rows.row_ids.device)
    source_rows = scatter_parts(tokens[:, None].expand_as(rows.row_ids), rows.row_ids, rows.num_rows)
    row_plan = plan_tiles(rows.per_expert, rows.num_rows)
    return row_plan._replace(source_rows=source_rows.flatten(), row_ids=rows.row_ids)


class ActivatedRows(NamedTuple):
    """SwiGLU, as the first half of a linear's product."""

    tile_plan: TilePlan
    row_weights: Tensor
    """[rows], what each activated row is multiplied by."""


class _GroupedLinear(torch.autograd.Function):
    """x [rows or tokens, in] -> [rows, out].

    Of tokens, autograd keeps the tokens alone. Their copies for the weights' gradients are made again in the
    backward pass, in the time that the forward pass spares by reading tokens through ``source_rows``.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        tile_plan: TilePlan,
        expert_weights: ExpertWeights,
        known_output: Tensor | None,
        *autograd_parameters: Tensor,
    ) -> Tensor:
        x = x.contiguous()
        weight_addresses = expert_weights.weight_addresses
        # Only the weights' gradients need the input.
        kept_input = x if autograd_parameters[0].requires_grad else None
        ctx.save_for_backward(kept_input, weight_addresses, *tile_plan)
        ctx.weights = expert_weights
        ctx.input_width = x.shape[1]
        if known_output is not None:
            return known_output.view_as(known_output)
        return row_product(
            x, weight_addresses, tile_plan, autograd_parameters[0].shape[0], is_transposed=True
        )

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, weight_addresses, *tile_plan = ctx.saved_tensors
        output_grad = output_grad.contiguous()
        gathering_plan = TilePlan(*tile_plan)
        row_ids, row_plan = gathering_plan.row_ids, gathering_plan.without_gather()
        if x is not None and row_ids is not None:
            x = scatter_rows(x, row_ids, output_grad.shape[0])
        weight_grads = ctx.weights.compute_gradients(output_grad, x, row_plan)
        del x

        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = row_product(
                output_grad, weight_addresses, row_plan, ctx.input_width, is_transposed=False
            )
            if row_ids is not None:
                input_grad = sum_rows(input_grad, row_ids)
        return input_grad, None, None, None, *weight_grads


class _ActivatedLinear(torch.autograd.Function):
    """x [rows, 2 * in] -> SwiGLU, weighted by row -> [rows, out]. Autograd keeps SwiGLU's input alone."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        row_weights: Tensor,
        tile_plan: TilePlan,
        expert_weights: ExpertWeights,
        is_output_read: bool,
        *autograd_parameters: Tensor,
    ) -> Tensor:
        x, row_weights = x.contiguous(), row_weights.contiguous()
        weight_addresses = expert_weights.weight_addresses
        ctx.save_for_backward(x, row_weights, weight_addresses, *tile_plan)
        ctx.weights = expert_weights
        if not is_output_read:
            return x.new_empty(x.shape[0], autograd_parameters[0].shape[0])
        return row_product(
            swiglu_forward(x, row_weights),
            weight_addresses,
            tile_plan,
            autograd_parameters[0].shape[0],
            is_transposed=True,
        )

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, row_weights, weight_addresses, *tile_plan = ctx.saved_tensors
        output_grad, row_plan = output_grad.contiguous(), TilePlan(*tile_plan)
        activated_grad = row_product(
            output_grad, weight_addresses, row_plan, x.shape[1] // 2, is_transposed=False
        )
        x_grad, row_weight_grad, activated = swiglu_backward(x, row_weights, activated_grad, with_output=True)
        weight_grads = ctx.weights.compute_gradients(output_grad, activated, row_plan)
        return x_grad, row_weight_grad, None, None, None, *weight_grads


class PlannedLinear:
    """A mixin for Transformer Engine's grouped linears.

    They then also take a :class:`~megatron_vl.kernels.experts.grouped_gemm.TilePlan` instead of row counts,
    or :class:`ActivatedRows`.
    """

    takes_tile_plan = False

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        """x [rows, in], sorted by expert (or tokens, see the plan) -> [rows, out] and no bias."""
        if not isinstance(m_splits, TilePlan | ActivatedRows):
            return super().forward(x, m_splits)  # type: ignore[misc]
        weights = self.expert_weights
        if isinstance(m_splits, ActivatedRows):
            tile_plan, row_weights = m_splits
            arguments = x, row_weights, tile_plan, weights, not is_recomputing()
            return _ActivatedLinear.apply(*arguments, *weights.autograd_inputs()), None
        output = _GroupedLinear.apply(x, m_splits, weights, known_output(weights), *weights.autograd_inputs())
        if m_splits.source_rows is not None:
            keep_output("experts", weights, output)
        return output, None

    @functools.cached_property
    def expert_weights(self) -> ExpertWeights:
        return ExpertWeights(self, self.num_gemms)  # type: ignore[arg-type, attr-defined]


class GroupedExperts(TEGroupedMLP):
    """Core's grouped experts. In bf16, they use our products.

    Args:
        recompute_activation: whether to recompute the activation where an adapter, or a linear of Transformer
            Engine, would keep it.
    """

    def __init__(self, *args: Any, recompute_activation: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_recomputed_whole = "moe" in (self.config.recompute_modules or ())
        self.activation_recompute = recompute_activation and not is_recomputed_whole
        self.planned = self.config.params_dtype == torch.bfloat16
        for grouped_linear in (self.linear_fc1, self.linear_fc2):
            grouped_linear.takes_tile_plan = self.planned

    def forward(
        self, hidden_states: Tensor, rows: Tensor | ExpertRows, row_probs: Tensor, *buffers: Any
    ) -> tuple[Tensor, None]:
        """Runs each expert on its rows.

        Args:
            hidden_states: [tokens, H]; if ``rows`` are counts, [rows, H], sorted by expert. Rows after those
                of the last expert are ignored.
            rows: where tokens go, or the number of rows of each expert [local experts].
            row_probs: [rows], the weight of each row.

        Returns:
            [rows, H] (a part of the sum under expert tensor parallelism) and no bias.
        """
        if not self.planned:
            return super().forward(hidden_states, rows, row_probs, *buffers)

        # The plan is made on the device from the counts there, so that the host does not wait for them.
        tile_plan = (
            plan_gather(rows) if isinstance(rows, ExpertRows) else plan_tiles(rows, len(hidden_states))
        )
        intermediate_states, _ = self.linear_fc1(hidden_states, tile_plan)
        row_plan = tile_plan.without_gather()

        # Rows are multiplied by their probabilities before the second linear, which is linear in them. SwiGLU
        # does it in the same kernel.
        if getattr(self.linear_fc2, "adapter", None) is None:
            return self.linear_fc2(intermediate_states, ActivatedRows(row_plan, row_probs))

        # An adapter reads what the linear reads.
        activated_states = swiglu(intermediate_states, row_probs)
        recompute = recompute_in_backward(activated_states, swiglu, intermediate_states, row_probs)
        with recompute if self.activation_recompute else nullcontext():
            return self.linear_fc2(activated_states, row_plan)

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


# --- LoRA adapters of the experts, with one kernel launch per factor (megatron_vl.models.lora) --------------

MIN_RANK_MULTIPLE = 8
"""The kernels read 16 bytes at a time, so that a row of ``rank`` numbers must be a multiple of them."""


class _GroupedFactor(PlannedLinear, nn.Module):
    """One factor of all local experts, with parameters ``weight0``, ``weight1`` and so on."""

    def __init__(self, initial_values: Sequence[Tensor], is_expert_parallel: bool) -> None:
        super().__init__()
        self.num_gemms = len(initial_values)
        # The kernel adds gradients to main_grad, as for the experts' own weights.
        self.fuse_wgrad_accumulation = True
        for expert, initial_value in enumerate(initial_values):
            self.register_parameter(f"weight{expert}", nn.Parameter(initial_value))
        # Core reduces the gradients of experts over other ranks than those of dense parameters.
        for parameter in self.parameters():
            parameter.allreduce = not is_expert_parallel  # type: ignore[attr-defined]


class GroupedAdapter(nn.Module):
    """The adapters of one linear layer of all local experts.

    Args:
        factors_a, factors_b: A [rank, in] and B [out, rank] of each expert.
    """

    def __init__(
        self, factors_a: Sequence[Tensor], factors_b: Sequence[Tensor], scale: float, is_expert_parallel: bool
    ) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A = _GroupedFactor(factors_a, is_expert_parallel)
        self.lora_B = _GroupedFactor(factors_b, is_expert_parallel)

    def forward(self, x: Tensor, output: Tensor, tile_plan: TilePlan) -> Tensor:
        """x [rows, in], sorted by expert (or tokens, see the plan), output [rows, out] -> [rows, out].

        Rows of no expert are ignored.
        """
        inner_states, _ = self.lora_A(x, tile_plan)
        adapter_output, _ = self.lora_B(inner_states * self.scale, tile_plan.without_gather())
        return output + adapter_output
