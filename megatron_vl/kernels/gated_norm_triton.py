"""RMSNorm of each head times the SiLU of its gate, in Triton; see
:func:`megatron_vl.kernels.gated_delta_rule.gated_norm`.

The gradient of the weight is summed over a program's rows, then over the programs, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Rows of a block. A row is one head of one token."""
_STEPS = 8
"""Blocks that one program of the backward pass processes."""


@triton.jit
def _forward(
    x,
    gate,
    weight,
    out,
    rows,
    gate_stride,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None]
    at = row[:, None] * WIDTH + n[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    there = (row // HEADS)[:, None] * gate_stride + (row % HEADS)[:, None] * WIDTH + n[None, :]
    z = tl.load(gate + there, mask=mask, other=0.0).to(tl.float32)

    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + EPS)
    # Rounded here, as in transformers.
    normed = (wide * scale[:, None]).to(x.dtype.element_ty).to(tl.float32)
    y = tl.load(weight + n).to(tl.float32)[None, :] * normed * (z * tl.sigmoid(z))
    tl.store(out + at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    x,
    gate,
    weight,
    dout,
    dx,
    dgate,
    dweight,
    rows,
    gate_stride,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):
    n = tl.arange(0, WIDTH)
    w = tl.load(weight + n).to(tl.float32)[None, :]
    of_weight = tl.zeros((ROWS, WIDTH), tl.float32)

    for step in tl.range(0, STEPS, num_stages=1):
        row = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None]
        at = row[:, None] * WIDTH + n[None, :]
        wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        there = (row // HEADS)[:, None] * gate_stride + (row % HEADS)[:, None] * WIDTH + n[None, :]
        z = tl.load(gate + there, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(dout + at, mask=mask, other=0.0).to(tl.float32)

        scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + EPS)[:, None]
        exact = wide * scale
        normed = exact.to(x.dtype.element_ty).to(tl.float32)
        sigmoid = tl.sigmoid(z)
        silu = z * sigmoid
        of_weight += grad * normed * silu

        of_gate = grad * w * normed * sigmoid * (1 + z * (1 - sigmoid))
        tl.store(dgate + at, of_gate.to(dgate.dtype.element_ty), mask=mask)

        of_normed = grad * w * silu
        along = tl.sum(of_normed * exact, 1)[:, None] / WIDTH
        tl.store(dx + at, (scale * (of_normed - exact * along)).to(dx.dtype.element_ty), mask=mask)

    tl.store(dweight + tl.program_id(0).to(tl.int64) * WIDTH + n, tl.sum(of_weight, 0))


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.eps = eps
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = x.shape[0] * x.shape[1]
        _forward[triton.cdiv(rows, _ROWS),](
            x, gate, weight, out, rows, gate.stride(0),
            EPS=eps, HEADS=x.shape[1], WIDTH=x.shape[2], ROWS=_ROWS, num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        x, gate, weight = ctx.saved_tensors
        dout = dout.contiguous()
        dx, dgate = (torch.empty(x.shape, dtype=t.dtype, device=x.device) for t in (x, gate))
        rows = x.shape[0] * x.shape[1]
        programs = triton.cdiv(rows, _ROWS * _STEPS)
        dweight = torch.empty(programs, x.shape[2], dtype=torch.float32, device=x.device)
        _backward[programs,](
            x, gate, weight, dout, dx, dgate, dweight, rows, gate.stride(0),
            EPS=ctx.eps, HEADS=x.shape[1], WIDTH=x.shape[2], ROWS=_ROWS, STEPS=_STEPS, num_warps=4,
        )  # fmt: skip
        return dx, dgate, dweight.sum(0).to(weight.dtype), None


def fits(x: Tensor) -> bool:
    """Whether the kernels support x [S, heads, V]: V is a power of two from 16 to 256, and S is not 0."""
    width = x.shape[2]
    return 16 <= width <= 256 and width & (width - 1) == 0 and x.shape[0] > 0


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x, gate [S, heads, V], weight [V] -> [S, heads, V]. The gate may have any stride between tokens."""
    close = gate.stride(2) == 1 and gate.stride(1) == gate.shape[2]
    return _GatedNorm.apply(x.contiguous(), gate if close else gate.contiguous(), weight.contiguous(), eps)
