"""Computes a rank's experts with one kernel launch per product.

Transformer Engine needs one launch per product and expert. The parameters are those of Megatron-core's
``TEGroupedMLP`` (``linear_fc1.weight0`` and so on), so that nothing changes for checkpoints, optimizer and
FP8. Only the products are ours (:mod:`megatron_vl.kernels.grouped_gemm`). They read each expert's token count
on the device, so the host waits for no counts unless ranks exchange tokens.

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

from megatron_vl.kernels.grouped_gemm import Addresses, Plan, plan, row_product, weight_product
from megatron_vl.kernels.swiglu import swiglu
from megatron_vl.parallel.ddp import ReplicaDDP

_placeholders: dict[tuple[torch.Size, torch.dtype, torch.device], Tensor] = {}


def _placeholder(weight: Tensor) -> Tensor:
    """The gradient to give autograd for a weight whose real gradient is already in ``main_grad``."""
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _placeholders:
        _placeholders[key] = torch.zeros_like(weight)
    return _placeholders[key].detach()  # a separate tensor, or autograd copies it


class ExpertWeights:
    """The weights of one linear of all local experts, as the kernels need them."""

    def __init__(self, module: nn.Module, experts: int) -> None:
        self.module = module
        self.parameters = [getattr(module, f"weight{expert}") for expert in range(experts)]
        self.ddp: ReplicaDDP | None = None
        """The DDP to notify when gradients are ready; None: autograd calls DDP's hooks."""
        self._addresses, self._grad_addresses = Addresses(), Addresses()

    @property
    def addresses(self) -> Tensor:
        return self._addresses.of(self.parameters)

    def inputs(self) -> list[nn.Parameter]:
        """The weights that are in the autograd graph, because autograd must call their DDP hooks."""
        return self.parameters if self.ddp is None else self.parameters[:1]

    def gradients(self, dy: Tensor, x: Tensor, where: Plan) -> list[Tensor | None]:
        """Computes the weight gradients from dy [rows, out] and x [rows, in].

        Returns:
            The gradients of :meth:`inputs` for autograd.
        """
        first = self.parameters[0]
        inputs = self.inputs()
        if not first.requires_grad:
            return [None] * len(inputs)

        if not (getattr(self.module, "fuse_wgrad_accumulation", False) and hasattr(first, "main_grad")):
            packed = x.new_empty(len(self.parameters), *first.shape)
            step = packed[0].numel() * packed.element_size()
            addresses = torch.arange(len(self.parameters), device=x.device) * step + packed.data_ptr()
            weight_product(dy, x, addresses, where, packed, add=False)
            return list(packed.unbind())

        grads = [parameter.main_grad for parameter in self.parameters]
        weight_product(dy, x, self._grad_addresses.of(grads), where, grads[0], add=True)
        for parameter in inputs:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if self.ddp is not None:
            self.ddp.gradients_ready(self.parameters[1:])  # autograd calls the hook of the first one next
        return [_placeholder(first) for _ in inputs]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, where: Plan, weights: ExpertWeights, *inputs: Tensor) -> Tensor:
        x = x.contiguous()
        addresses = weights.addresses
        ctx.save_for_backward(x, addresses, *where)
        ctx.weights = weights
        return row_product(x, addresses, where, inputs[0].shape[0], transposed=True)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, addresses, *where = ctx.saved_tensors
        dy = dy.contiguous()
        where = Plan(*where)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = row_product(dy, addresses, where, x.shape[1], transposed=False)
        return dx, None, None, *ctx.weights.gradients(dy, x, where)


class PlannedLinear:
    """A mixin for Transformer Engine's grouped linears that takes a :class:`Plan` instead of row counts."""

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        """x [rows, in], sorted by expert -> [rows, out] and no bias."""
        if not isinstance(m_splits, Plan):
            return super().forward(x, m_splits)  # type: ignore[misc]
        weights = self.expert_weights
        return _GroupedLinear.apply(x, m_splits, weights, *weights.inputs()), None

    @property
    def expert_weights(self) -> ExpertWeights:
        known = self.__dict__.get("_expert_weights")
        if known is None:
            known = self.__dict__["_expert_weights"] = ExpertWeights(self, self.num_gemms)  # type: ignore[arg-type, attr-defined]
        return known


class GroupedExperts(TEGroupedMLP):
    """Core's grouped experts. In bf16 without FP8, they use our products."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planned = self.config.params_dtype == torch.bfloat16 and not self.config.fp8
        """Whether our kernels are used."""

    def forward(self, hidden: Tensor, counts: Tensor, probs: Tensor, *buffers: Any) -> tuple[Tensor, None]:
        """Runs each expert on its rows.

        Args:
            hidden: [rows, H], sorted by expert. Rows after those of the last expert are ignored.
            counts: [local experts], number of rows of each.
            probs: [rows], the weight of each row.

        Returns:
            [rows, H] (a part of the sum under expert tensor parallelism) and no bias.
        """
        if not self.planned:
            return super().forward(hidden, counts, probs, *buffers)

        where = plan(counts, hidden.shape[0])
        middle, _ = self.linear_fc1(hidden, where)
        if not self.activation_recompute:
            return self.linear_fc2(swiglu(middle, probs), where)

        # fp8=None: Transformer Engine keeps no FP8 state.
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
        out, _ = self.linear_fc2(checkpoint.checkpoint(swiglu, middle, probs), where)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def report_to(self, ddp: ReplicaDDP) -> None:
        """Makes weights notify ``ddp`` directly when their gradients are ready, instead of by one hook each.

        Weights keep their hooks if their gradients are not added to ``main_grad``
        (``fuse_wgrad_accumulation``).
        """
        for linear in (self.linear_fc1, self.linear_fc2):
            if self.planned and getattr(linear, "fuse_wgrad_accumulation", False):
                linear.expert_weights.ddp = ddp
