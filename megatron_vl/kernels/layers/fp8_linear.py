"""A linear whose three products are in FP8 (e4m3), with a scale for each row of what is multiplied.

It needs no state: a row's scale is the power of two that brings its largest element to between 128 and 256. The
weight gradient sums over rows, so both of its operands are transposed, with the largest scale of their rows.
Between powers of two this is exact, apart from elements that become too small.

It is for the vision tower, whose rows are too short and too different in length for Transformer Engine's
linears: these need 0.3 to 0.4 ms of the host each (benchmarks/log/speed.md), more than the GPU computes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.layers.biased_layers import column_sums

TILE = 128
"""Rows and columns of a transposed tile. Tiles of 64 columns are not faster."""


class Scaled(NamedTuple):
    """A matrix in FP8."""

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

    # Bits of the largest element: its exponent, 127 more than that of two, is above those of the fraction.
    exponent = tl.max(tl.abs(elements), 0).to(tl.int32, bitcast=True) >> 23
    exponent = tl.maximum(exponent, 16)  # also for a row of zeros, so that both powers are normal numbers
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    inverse = ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(values + row * width + columns, (elements * inverse).to(tl.float8e4nv), mask)
    tl.store(scales + row, scale)


@triton.jit
def _transpose_kernel(x, scales, largest, values, new_scales, num_rows, width, TILE: tl.constexpr):
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    elements = tl.load(x + rows.to(tl.int64)[:, None] * width + columns[None, :], mask, 0.0).to(tl.float32)

    new_scale = tl.load(largest)
    factor = tl.load(scales + rows, rows < num_rows, 0.0) / new_scale
    rescaled = tl.trans((elements * factor[:, None]).to(tl.float8e4nv))
    offsets = columns.to(tl.int64)[:, None] * num_rows + rows[None, :]
    tl.store(values + offsets, rescaled, tl.trans(mask))
    if tl.program_id(1) == 0:
        tl.store(new_scales + columns, tl.broadcast_to(new_scale, (TILE,)), columns < width)


def quantize_rows(x: Tensor) -> Scaled:
    """``x``, contiguous [rows, width], in FP8."""
    rows, width = x.shape
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    _quantize_kernel[rows,](x, values, scale, width, BLOCK=triton.next_power_of_2(width), num_warps=4)
    return Scaled(values, scale)


def transpose(x: Scaled) -> Scaled:
    """``x`` [rows, width] as [width, rows], all with the largest scale of the rows."""
    rows, width = x.values.shape
    values = x.values.new_empty((width, rows))
    scale = x.scale.new_empty((width, 1))
    grid = (triton.cdiv(width, TILE), triton.cdiv(rows, TILE))
    _transpose_kernel[grid](x.values, x.scale, x.scale.amax(), values, scale, rows, width, TILE, num_warps=8)
    return Scaled(values, scale)


def product(left: Scaled, right: Scaled, bias: Tensor | None = None, *, fast: bool) -> Tensor:
    """bf16 [M, N] of ``left`` [M, K] and ``right`` [N, K], plus ``bias`` [N].

    K and N must be multiples of 16.

    Args:
        fast: whether to add up in the Tensor Cores' own registers, with 14 bits.
    """
    return torch._scaled_mm(
        left.values,
        right.values.t(),
        left.scale,
        right.scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, adds_to_main_grad: bool) -> Tensor:
        rows = quantize_rows(x)
        ctx.save_for_backward(*rows)
        ctx.weight, ctx.has_bias, ctx.adds_to_main_grad = weight, bias is not None, adds_to_main_grad
        return product(rows, quantize_rows(weight), bias, fast=True)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        weight, grads = ctx.weight, quantize_rows(output_grad := output_grad.contiguous())
        x_grad = weight_grad = bias_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = product(grads, transpose(quantize_rows(weight)), fast=False)
        if ctx.needs_input_grad[1]:
            weight_grad = _weight_gradient(grads, Scaled(*ctx.saved_tensors), weight, ctx.adds_to_main_grad)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad = column_sums(output_grad)
        return x_grad, weight_grad, bias_grad, None


def _weight_gradient(grads: Scaled, rows: Scaled, weight: Tensor, adds_to_main_grad: bool) -> Tensor:
    """[out, in] of ``grads`` [N, out] and ``rows`` [N, in]; or it is added to ``weight.main_grad``."""
    left, right = transpose(grads), transpose(rows)
    # One scale for all: 1.2 times as fast as one for each row.
    sums = torch._scaled_mm(
        left.values,
        right.values.t(),
        left.scale[0],
        right.scale[0],
        out_dtype=torch.float32 if adds_to_main_grad else weight.dtype,
        use_fast_accum=False,
    )
    if not adds_to_main_grad:
        return sums
    weight.main_grad.add_(sums)  # type: ignore[attr-defined]
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)  # DDP's hook runs, and does not read it


def fp8_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, adds_to_main_grad: bool = False
) -> Tensor:
    """bf16 [N, in] -> [N, out], with ``weight`` [out, in] and ``bias`` [out]. All sizes are multiples of 16.

    Args:
        adds_to_main_grad: whether the weight's gradient is added to its ``main_grad``, which must exist.
    """
    if not x.numel():
        return torch.nn.functional.linear(x, weight, bias)
    return _Fp8Linear.apply(x.contiguous(), weight, bias, adds_to_main_grad)
