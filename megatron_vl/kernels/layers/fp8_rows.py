"""Matrices in FP8 (e4m3) with a scale for each row, and their product, in Triton and by cuBLASLt.

A row's scale is the power of two that brings its largest element to between 128 and 256, so it needs no state
and one kernel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class ScaledRows(NamedTuple):
    values: Tensor
    """e4m3 [rows, width]"""
    scale: Tensor
    """fp32 [rows, 1], which the values are multiplied by"""


@triton.jit
def _quantize_kernel(x, values, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    elements = tl.load(x + row * width + columns, mask, 0.0).to(tl.float32)

    # The exponent of the largest element is in the bits from 23 on, as 127 more than the power of two.
    exponent = tl.max(tl.abs(elements), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 16)  # also for a row of zeros: both powers below must be normal numbers
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(values + row * width + columns, (elements * inverse).to(tl.float8e4nv), mask)
    tl.store(scales + row, scale)


def quantize_rows(x: Tensor) -> ScaledRows:
    """``x``, contiguous [rows, width], in FP8."""
    rows, width = x.shape
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _quantize_kernel[rows,](x, values, scale, width, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return ScaledRows(values, scale)


def row_scaled_product(left: ScaledRows, right: ScaledRows, bias: Tensor | None = None) -> Tensor:
    """bf16 [M, N] of ``left`` [M, K] and ``right`` [N, K], plus ``bias`` [N]; 16 must divide K and N."""
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        left.scale,
        right.scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        # Sums of 128 products in fp32 would take up to 1.3 times as long. Transformer Engine and torchao do
        # without them in the forward pass too, torchao with such scales also in the backward pass.
        use_fast_accum=True,
    )
