"""A rank's experts as one kernel launch a product, in place of Transformer Engine's one a product and expert.

Parameters are those of Megatron-core's ``TEGroupedMLP`` (``linear_fc1.weight0`` and so on), so checkpoints,
optimizer and FP8 know no difference; only the products are ours (:mod:`megatron_vl.kernels.grouped_gemm`).
They take the tokens of each expert from the device, and so the host waits for no token counts unless ranks
exchange tokens.

Experts outnumber everything else of a model, hence nothing is done for each of them on the host that can be
done once: weight gradients are added to ``main_grad`` in the kernel, and Megatron-core's DDP is told that
they are ready without one autograd node for each (:meth:`GroupedExperts.report_to`).
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
    """What autograd is given as the gradient of a weight whose gradient is in ``main_grad`` already."""
    key = (weight.shape, weight.dtype, weight.device)
    if key not in _placeholders:
        _placeholders[key] = torch.zeros_like(weight)
    return _placeholders[key].detach()  # a tensor of its own, or autograd copies it


class ExpertWeights:
    """One linear's weights of all local experts, as the kernels take them."""

    def __init__(self, module: nn.Module, experts: int) -> None:
        self.module = module
        self.parameters = [getattr(module, f"weight{expert}") for expert in range(experts)]
        self.ddp: ReplicaDDP | None = None
        """Who is told that gradients are ready; None: its hooks, by way of autograd."""
        self._addresses, self._grad_addresses = Addresses(), Addresses()

    @property
    def addresses(self) -> Tensor:
        return self._addresses.of(self.parameters)

    def inputs(self) -> list[nn.Parameter]:
        """The weights that take part in the autograd graph: those whose DDP hooks it has to call."""
        return self.parameters if self.ddp is None else self.parameters[:1]

    def gradients(self, dy: Tensor, x: Tensor, where: Plan) -> list[Tensor | None]:
        """Computes the weight gradients; returns what autograd gets for :meth:`inputs`."""
        first, inputs = self.parameters[0], self.inputs()
        if not first.requires_grad:
            return [None] * len(inputs)
        if not (getattr(self.module, "fuse_wgrad_accumulation", False) and hasattr(first, "main_grad")):
            packed = x.new_empty(len(self.parameters), *first.shape)
            step = packed[0].numel() * packed.element_size()
            places = torch.arange(len(self.parameters), device=x.device) * step + packed.data_ptr()
            weight_product(dy, x, places, where, packed, add=False)
            return list(packed.unbind())
        grads = [parameter.main_grad for parameter in self.parameters]
        weight_product(dy, x, self._grad_addresses.of(grads), where, grads[0], add=True)
        for parameter in inputs:
            parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if self.ddp is not None:
            self.ddp.gradients_ready(self.parameters[1:])  # all but the first, whose hook autograd calls next
        return [_placeholder(first) for _ in inputs]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, where: Plan, weights: ExpertWeights, *inputs: Tensor) -> Tensor:
        x, addresses = x.contiguous(), weights.addresses
        ctx.save_for_backward(x, addresses, *where)
        ctx.weights = weights
        return row_product(x, addresses, where, inputs[0].shape[0], transposed=True)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, addresses, *where = ctx.saved_tensors
        dy, where = dy.contiguous(), Plan(*where)
        dx = (
            row_product(dy, addresses, where, x.shape[1], transposed=False)
            if ctx.needs_input_grad[0]
            else None
        )
        return dx, None, None, *ctx.weights.gradients(dy, x, where)


class PlannedLinear:
    """Mixed into Transformer Engine's grouped linears: takes a :class:`Plan` in place of the list of row
    counts."""

    def forward(self, x: Tensor, m_splits: Any) -> tuple[Tensor, None]:
        """x [rows, in], sorted by expert -> [rows, out], and no bias."""
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
    """Core's grouped experts with our products where they can compute what is asked: bf16 without FP8."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planned = self.config.params_dtype == torch.bfloat16 and not self.config.fp8
        """Whether our kernels run."""

    def forward(self, hidden: Tensor, counts: Tensor, probs: Tensor, *buffers: Any) -> tuple[Tensor, None]:
        """Runs each expert on its rows.

        Args:
            hidden: [rows, H], sorted by expert. Rows after the last expert's may hold anything; nothing that
                counts is computed of them.
            counts: [local experts], rows of each.
            probs: [rows], each row's weight.

        Returns:
            [rows, H] (a part of the sum under expert tensor parallelism), and no bias.
        """
        if not self.planned:
            return super().forward(hidden, counts, probs, *buffers)
        where = plan(counts, hidden.shape[0])
        middle, _ = self.linear_fc1(hidden, where)
        if not self.activation_recompute:
            return self.linear_fc2(swiglu(middle, probs), where)
        checkpoint = tensor_parallel.CheckpointWithoutOutput(
            fp8=None
        )  # ask Transformer Engine for no state of FP8
        out, _ = self.linear_fc2(checkpoint.checkpoint(swiglu, middle, probs), where)
        checkpoint.discard_output_and_register_recompute(out)
        return out, None

    def report_to(self, ddp: ReplicaDDP) -> None:
        """Lets weights tell ``ddp`` that their gradients are ready, in place of one hook each.

        Weights that do not get their gradients in ``main_grad`` (``fuse_wgrad_accumulation``) keep their
        hooks.
        """
        for linear in (self.linear_fc1, self.linear_fc2):
            if self.planned and getattr(linear, "fuse_wgrad_accumulation", False):
                linear.expert_weights.ddp = ddp
