"""Gradients of biases that linears add, by our kernel instead of cuBLASLt's (Transformer Engine 2.20.2).

In bf16, Transformer Engine asks the weight gradient's product for the bias gradient too. cuBLASLt then reads
the output's gradient once more, at 1.7 of an H200's 4.8 TB/s. With FP8, torch sums it before the cast. Here
our kernel does so in both. This fix can go when cuBLASLt sums columns within the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

Prepared = tuple[Any, Tensor | None]
"""The gradient of a linear's output [N, out], gathered or quantised, and the bias gradient if it is known."""


def use_column_sums() -> None:
    """Makes all linears of Transformer Engine compute bias gradients with our kernel. Idempotent."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    prepare = TransformerEngineBaseModule.grad_output_preprocess
    if not isinstance(prepare, partial):
        TransformerEngineBaseModule.grad_output_preprocess = staticmethod(partial(_prepare, prepare))


def _prepare(
    prepare: Callable[..., Prepared], ctx: Any, output_grad: Tensor, is_row: bool, quantizer: Any
) -> Prepared:
    """Transformer Engine's ``prepare``, with the bias gradient [out] from our kernel."""
    from megatron_vl.kernels.layers.biased_layers import column_sums

    # A linear with a frozen weight has no bias gradient. Gathered gradients are summed by what gathers them.
    has_weight_gradient = getattr(ctx, "requires_wgrad", False)  # layers of two linears have none
    if not ctx.use_bias or not has_weight_gradient or (is_row and ctx.sequence_parallel):
        return prepare(ctx, output_grad, is_row, quantizer)

    bias_grad = column_sums(output_grad)
    ctx.use_bias = False
    prepared_grad, _ = prepare(ctx, output_grad, is_row, quantizer)
    ctx.use_bias = True
    return prepared_grad, bias_grad
