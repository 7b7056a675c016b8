"""Attention with RoPE within small windows, as one Triton kernel for each direction.

Qwen2.5-VL's tower attends within windows of at most 8 x 8 patches in 28 of its 32 layers. A window of one
head fits into one thread block, so forward and backward each read ``qkv`` once and write once. They need no
rotated copies of query and key, no log-sum-exp and no separate pass for ``delta``. Kernels for long sequences
spend most of their time on blocks that are mostly empty here (figures: docs/log/speed.md).

The input is the output of Megatron-core's ``linear_qkv``: ``[P, heads * 3 * d]``, with query, key and value
for each head. The rotation is computed in fp32 and rounded once, as in ``apply_rotary_pos_emb_vision`` of
transformers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_WINDOW = 128
"""Largest number of patches in a window that the kernels support. A tile of scores is its square."""


@triton.jit
def _rotated(first, second, cos, sin):
    """Rotates a vector given as its two halves (rotate-half convention), and rounds to its type."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _scores(q1, q2, k1, k2, inside, scale):
    """The softmax over the window's keys, fp32 [B, B]; zero for keys outside the window."""
    s = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    s = tl.where(inside[None, :], s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def _forward(
    qkv, cos, sin, cu, out, scale, heads, HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """Computes the attention of one head in one window.

    BLOCK is the number of patches in a tile, HALF is d / 2, and TILE is HALF rounded up to a power of two.
    """
    window, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu + window)
    length = tl.load(cu + window + 1) - start
    row, column = tl.arange(0, BLOCK), tl.arange(0, TILE)
    inside = row < length
    mask = inside[:, None] & (column[None, :] < HALF)
    patch = (start + row).to(tl.int64)

    angle = patch[:, None] * HALF + column[None, :]
    c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)

    base = qkv + patch[:, None] * (heads * 6 * HALF) + head * 6 * HALF + column[None, :]
    q1, q2 = tl.load(base, mask=mask, other=0.0), tl.load(base + HALF, mask=mask, other=0.0)
    k1, k2 = tl.load(base + 2 * HALF, mask=mask, other=0.0), tl.load(base + 3 * HALF, mask=mask, other=0.0)
    v1, v2 = tl.load(base + 4 * HALF, mask=mask, other=0.0), tl.load(base + 5 * HALF, mask=mask, other=0.0)

    q1, q2 = _rotated(q1, q2, c, s)
    k1, k2 = _rotated(k1, k2, c, s)
    p = _scores(q1, q2, k1, k2, inside, scale).to(v1.dtype)
    pointers = out + patch[:, None] * (heads * 2 * HALF) + head * 2 * HALF + column[None, :]
    tl.store(pointers, tl.dot(p, v1).to(v1.dtype), mask=mask)
    tl.store(pointers + HALF, tl.dot(p, v2).to(v1.dtype), mask=mask)


@triton.jit
def _backward(
    qkv, cos, sin, cu, dout, dqkv, scale, heads, HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr
):
    """The gradient of :func:`_forward`. Scores are recomputed."""
    window, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu + window)
    length = tl.load(cu + window + 1) - start
    row, column = tl.arange(0, BLOCK), tl.arange(0, TILE)
    inside = row < length
    mask = inside[:, None] & (column[None, :] < HALF)
    patch = (start + row).to(tl.int64)

    angle = patch[:, None] * HALF + column[None, :]
    c, s = tl.load(cos + angle, mask=mask, other=0.0), tl.load(sin + angle, mask=mask, other=0.0)

    offset = patch[:, None] * (heads * 6 * HALF) + head * 6 * HALF + column[None, :]
    base, grad = qkv + offset, dqkv + offset
    q1, q2 = tl.load(base, mask=mask, other=0.0), tl.load(base + HALF, mask=mask, other=0.0)
    k1, k2 = tl.load(base + 2 * HALF, mask=mask, other=0.0), tl.load(base + 3 * HALF, mask=mask, other=0.0)

    q1, q2 = _rotated(q1, q2, c, s)
    k1, k2 = _rotated(k1, k2, c, s)
    p = _scores(q1, q2, k1, k2, inside, scale)

    # The gradient of v.
    pointers = dout + patch[:, None] * (heads * 2 * HALF) + head * 2 * HALF + column[None, :]
    o1, o2 = tl.load(pointers, mask=mask, other=0.0), tl.load(pointers + HALF, mask=mask, other=0.0)
    rounded = tl.trans(p.to(o1.dtype))
    tl.store(grad + 4 * HALF, tl.dot(rounded, o1).to(o1.dtype), mask=mask)
    tl.store(grad + 5 * HALF, tl.dot(rounded, o2).to(o1.dtype), mask=mask)

    # The gradient of the scores.
    v1, v2 = tl.load(base + 4 * HALF, mask=mask, other=0.0), tl.load(base + 5 * HALF, mask=mask, other=0.0)
    dp = tl.dot(o1, tl.trans(v1)) + tl.dot(o2, tl.trans(v2))
    ds = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(o1.dtype)

    # The gradients of q and k. The inverse of a rotation rotates by the negative angle.
    dq1, dq2 = _rotated(tl.dot(ds, k1), tl.dot(ds, k2), c, -s)
    tl.store(grad, dq1.to(o1.dtype), mask=mask)
    tl.store(grad + HALF, dq2.to(o1.dtype), mask=mask)

    turned = tl.trans(ds)
    dk1, dk2 = _rotated(tl.dot(turned, q1), tl.dot(turned, q2), c, -s)
    tl.store(grad + 2 * HALF, dk1.to(o1.dtype), mask=mask)
    tl.store(grad + 3 * HALF, dk2.to(o1.dtype), mask=mask)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: int, head_dim: int
    ) -> Tensor:
        heads = qkv.shape[1] // (3 * head_dim)
        out = qkv.new_empty(qkv.shape[0], heads * head_dim)
        _launch(_forward, (qkv, cos, sin, cu_seqlens, out), longest, head_dim, heads)
        ctx.save_for_backward(qkv, cos, sin, cu_seqlens)
        ctx.shape = longest, head_dim, heads
        return out

    @staticmethod
    def backward(ctx, dout: Tensor):
        qkv, cos, sin, cu_seqlens = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        _launch(_backward, (qkv, cos, sin, cu_seqlens, dout.contiguous(), dqkv), *ctx.shape)
        return dqkv, None, None, None, None, None


def _launch(kernel, tensors: tuple[Tensor, ...], longest: int, head_dim: int, heads: int) -> None:
    half = head_dim // 2
    block = max(16, triton.next_power_of_2(longest))
    windows = tensors[3].numel() - 1
    kernel[(windows, heads)](
        *tensors,
        head_dim**-0.5,
        heads,
        HALF=half,
        BLOCK=block,
        TILE=max(16, triton.next_power_of_2(half)),
        num_warps=4 if block <= 64 else 8,
    )


def window_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, longest: int, head_dim: int
) -> Tensor:
    """RoPE and softmax attention within windows.

    Args:
        qkv: [P, heads * 3 * head_dim] with query, key and value for each head.
        cos, sin: fp32 [P, head_dim / 2], of each patch's angles.
        cu_seqlens: int32 [windows + 1], covering all P patches.
        longest: number of patches in the longest window, at most :data:`MAX_WINDOW`.

    Returns:
        [P, heads * head_dim].

    Raises:
        ValueError: ``longest`` is larger than :data:`MAX_WINDOW`.
    """
    if longest > MAX_WINDOW:
        raise ValueError(f"a window of {longest} patches; the kernel takes at most {MAX_WINDOW}")
    return _WindowAttention.apply(qkv.contiguous(), cos, sin, cu_seqlens, longest, head_dim)
