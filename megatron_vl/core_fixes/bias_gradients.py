"""Gradients of biases that linears add, by our kernel instead of cuBLASLt's (Transformer Engine 2.20.2).

In bf16, Transformer Engine asks the weight gradient's product for the bias gradient too. cuBLASLt then reads
the output's gradient once more, at 1.7 of an H200's 4.8 TB/s. With FP8, a step before that product computes
the bias gradient. Here that step does so in every precision. This fix can go when cuBLASLt sums columns
within the product.
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
    """Transformer Engine's ``prepare``, with the bias gradient [out] if that is left to the product."""
    from megatron_vl.kernels.biased_sum import column_sums

    prepared_grad, bias_grad = prepare(ctx, output_grad, is_row, quantizer)
    # A linear with a frozen weight has no such product, and no bias gradient.
    if bias_grad is None and ctx.use_bias and ctx.requires_wgrad:
        bias_grad = column_sums(prepared_grad)
    return prepared_grad, bias_grad
