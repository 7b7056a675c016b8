"""Matrices in FP8 (e4m3) with a scale for each row, and their product, in Triton and by cuBLASLt.

A row's scale is the power of two that brings its largest element to between 128 and 256, so it needs no state
and one kernel. Kernels that write whole rows for a linear in FP8 write them in FP8 too
(:func:`keep_empty_rows`), so that none reads them again to quantise them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.held_tensor import HeldTensor
from megatron_vl.kernels.sizes import next_power_of_2


class ScaledRows(NamedTuple):
    """Both are transposed in the right factor of a product."""

    values: Tensor
    """e4m3 [rows, width]"""
    scale: Tensor
    """fp32 [rows, 1], which the values are multiplied by"""


@triton.jit
def store_in_fp8(elements, largest, mask, values, scales, row_mask=None):
    """``elements`` of rows with the largest magnitudes ``largest``; ``values``, ``scales``: pointers."""
    # The exponent is in the bits from 23 on, as 127 more than the power of two.
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 16)  # also for a row of zeros: both powers below must be normal numbers
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(values, (elements * inverse).to(tl.float8e4nv), mask)
    tl.store(scales, scale, row_mask)


@triton.jit
def _quantize_kernel(x, values, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    elements = tl.load(x + row * width + columns, mask, 0.0).to(tl.float32)
    largest = tl.max(tl.abs(elements), 0)
    store_in_fp8(elements, largest, mask, values + row * width + columns, scales + row)


def quantize_rows(x: Tensor) -> ScaledRows:
    """``x``, contiguous [rows, width], in FP8."""
    rows, width = x.shape
    quantized = empty_rows(x)
    _quantize_kernel[rows,](x, *quantized, width, BLOCK=next_power_of_2(width), num_warps=4)
    return quantized


def empty_rows(x: Tensor) -> ScaledRows:
    """Memory for ``x``, contiguous [..., width], in FP8."""
    width = x.shape[-1]
    values = x.new_empty(x.numel() // width, width, dtype=torch.float8_e4m3fn)
    return ScaledRows(values, x.new_empty(len(values), 1, dtype=torch.float32))


_kept: list[tuple[HeldTensor, ScaledRows]] = []
"""None or one: a tensor and its rows in FP8."""


def keep_empty_rows(x: Tensor) -> ScaledRows:
    """Memory for ``x`` in FP8, for a kernel that writes both. The linear that reads ``x`` next takes it."""
    rows = empty_rows(x)
    _kept[:] = [(HeldTensor(x), rows)]
    return rows


def rows_of(x: Tensor) -> ScaledRows:
    """``x``, contiguous [rows, width], in FP8: the rows that were kept, if they are its, else quantised."""
    if _kept:
        held_tensor, rows = _kept.pop()
        if held_tensor.has_values_of(x) and x.shape == rows.values.shape:
            return rows
    return quantize_rows(x)


def row_scaled_product(left: ScaledRows, right: ScaledRows, bias: Tensor | None = None) -> Tensor:
    """bf16 [M, N] of ``left`` [M, K] and ``right`` [K, N], plus ``bias`` [N]; 16 must divide K and N."""
    return torch._scaled_mm(
        left.values,
        right.values,
        left.scale,
        right.scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        # Sums of 128 products in fp32 would take up to 1.3 times as long. Transformer Engine and torchao do
        # without them in the forward pass too, torchao with such scales also in the backward pass.
        use_fast_accum=True,
    )


def quantize_columns(x: Tensor) -> ScaledRows:
    """``x`` [N, K] in FP8 as the right factor of a product: values [K, N] and scale [1, N]."""
    rows = quantize_rows(x)
    return ScaledRows(rows.values.t(), rows.scale.t())
