"""SwiGLU as one Triton kernel for each direction, optionally weighted per row (mixture of experts).

Megatron-core leaves SwiGLU to torch.compile, whose backward pass writes the two halves through a masked
concatenation. On an H200, this is five times slower than memory bandwidth allows and takes 9 % of a training
step of Qwen2.5-VL-7B (docs/log/speed.md). The arithmetic is in fp32, and results are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _forward(x, weight, out, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x + row * 2 * width + column, mask=mask).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=mask).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        y *= tl.load(weight + row).to(tl.float32)
    tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(x, weight, dout, dx, dweight, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient of :func:`_forward`.

    A weighted row is one block, so that the gradient of its weight is one sum.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(dout + row * width + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    if WEIGHTED:
        tl.store(dweight + row, tl.sum(grad * silu * up, 0).to(dweight.dtype.element_ty))
        grad *= tl.load(weight + row).to(tl.float32)

    tl.store(
        dx + row * 2 * width + column,
        (grad * up * (sigmoid + silu * (1 - sigmoid))).to(dx.dtype.element_ty),
        mask=mask,
    )
    tl.store(dx + row * 2 * width + width + column, (grad * silu).to(dx.dtype.element_ty), mask=mask)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        if out.numel():
            _forward[_grid(out, weight)](x, weight, out, out.shape[1], **_options(out, weight))
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        x, weight = ctx.saved_tensors
        dout = dout.contiguous()
        dx = torch.empty_like(x)
        dweight = torch.empty_like(weight) if weight is not None else None
        if dout.numel():
            _backward[_grid(dout, weight)](
                x, weight, dout, dx, dweight, dout.shape[1], **_options(dout, weight)
            )
        return dx, dweight


def _block(out: Tensor, weight: Tensor | None) -> int:
    widest = triton.next_power_of_2(out.shape[1])
    return widest if weight is not None else min(widest, 2048)


def _grid(out: Tensor, weight: Tensor | None) -> tuple[int, int]:
    return out.shape[0], triton.cdiv(out.shape[1], _block(out, weight))


def _options(out: Tensor, weight: Tensor | None) -> dict[str, int | bool]:
    block = _block(out, weight)
    return {"WEIGHTED": weight is not None, "BLOCK": block, "num_warps": 4 if block <= 2048 else 8}


def swiglu(x: Tensor, weight: Tensor | None = None) -> Tensor:
    """silu(first half) * second half of the last dimension, times the row's ``weight``.

    Args:
        x: [..., 2 * F], gate, then up.
        weight: one number for each row of ``x`` (any shape with as many elements), or None.

    Returns:
        [..., F] in the type of ``x``.
    """
    flat = x.reshape(-1, x.shape[-1])
    out = _SwiGLU.apply(flat.contiguous(), None if weight is None else weight.reshape(-1).contiguous())
    return out.view(*x.shape[:-1], x.shape[-1] // 2)
