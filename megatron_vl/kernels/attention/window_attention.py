"""Attention with RoPE within small windows, as one Triton kernel for each direction.

Qwen2.5-VL's tower attends within windows of at most 8 x 8 patches in 28 of its 32 layers. A window of one
head fits into one thread block, so forward and backward each read ``qkv`` once and write once. A program
loads the next heads of its window while it computes one. The kernels need no rotated copies of query and
key, no log-sum-exp and no separate pass for ``delta``. Kernels for long sequences spend most of their time on
blocks that are mostly empty here (figures: benchmarks/log/speed.md).

The input is the output of Megatron-core's ``linear_qkv``: ``[P, heads * 3 * d]``, with query, key and value
for each head. The rotation is computed in fp32 and rounded once, as in ``apply_rotary_pos_emb_vision`` of
transformers.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.sizes import next_power_of_2
from megatron_vl.kernels.where_kernels_run import has_large_shared_memory

HEADS_OF_PROGRAM = 4
"""Heads that a program computes, one after the other: it keeps the angles and loads ahead."""
MAX_WINDOW_PATCHES = 128
"""Largest number of patches in a window that the kernels support. A tile of scores is its square."""


@triton.jit
def _load_window(cos, sin, cu_seqlens, HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """This program's window: (patches, columns, which patches it has, mask of its tile, cos, sin)."""
    window_index = tl.program_id(0)
    window_start = tl.load(cu_seqlens + window_index)
    window_length = tl.load(cu_seqlens + window_index + 1) - window_start
    row_index, column_index = tl.arange(0, BLOCK), tl.arange(0, TILE)
    is_inside = row_index < window_length
    tile_mask = is_inside[:, None] & (column_index[None, :] < HALF)
    patch_index = (window_start + row_index).to(tl.int64)

    angle_offsets = patch_index[:, None] * HALF + column_index[None, :]
    cos_tile = tl.load(cos + angle_offsets, mask=tile_mask, other=0.0)
    sin_tile = tl.load(sin + angle_offsets, mask=tile_mask, other=0.0)
    return patch_index, column_index, is_inside, tile_mask, cos_tile, sin_tile


@triton.jit
def _load_halves(pointers, tile_mask, HALF: tl.constexpr):
    first_half = tl.load(pointers, mask=tile_mask, other=0.0)
    second_half = tl.load(pointers + HALF, mask=tile_mask, other=0.0)
    return first_half, second_half


@triton.jit
def _rotate_halves(first_half, second_half, cos, sin):
    """Rotates a vector given as its two halves (rotate-half convention), and rounds to its type."""
    first_fp32 = first_half.to(tl.float32)
    second_fp32 = second_half.to(tl.float32)
    return (first_fp32 * cos - second_fp32 * sin).to(first_half.dtype), (
        second_fp32 * cos + first_fp32 * sin
    ).to(first_half.dtype)


@triton.jit
def _softmax_scores(q1, q2, k1, k2, is_key_inside, scale):
    """The softmax over the window's keys, fp32 [B, B]; zero for keys outside the window."""
    scaled_scores = (tl.dot(q1, tl.trans(k1)) + tl.dot(q2, tl.trans(k2))) * scale
    scaled_scores = tl.where(is_key_inside[None, :], scaled_scores, float("-inf"))
    exponentials = tl.exp(scaled_scores - tl.max(scaled_scores, 1)[:, None])
    return exponentials / tl.sum(exponentials, 1)[:, None]


@triton.jit
def _forward_kernel(
    qkv, cos, sin, cu_seqlens, output_pointer, score_scale, heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes the attention of HEADS heads in one window.

    BLOCK is the number of patches in a tile, HALF is d / 2, and TILE is HALF rounded up to a power of two.
    Heads are loaded STAGES - 1 heads ahead.
    """
    patch_index, column_index, is_inside, tile_mask, cos_tile, sin_tile = _load_window(
        cos, sin, cu_seqlens, HALF, BLOCK, TILE
    )
    first_head = tl.program_id(1) * HEADS
    for head_index in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        qkv_pointers = (
            qkv + patch_index[:, None] * (heads * 6 * HALF) + head_index * 6 * HALF + column_index[None, :]
        )
        q1, q2 = _load_halves(qkv_pointers, tile_mask, HALF)
        k1, k2 = _load_halves(qkv_pointers + 2 * HALF, tile_mask, HALF)
        v1, v2 = _load_halves(qkv_pointers + 4 * HALF, tile_mask, HALF)

        q1, q2 = _rotate_halves(q1, q2, cos_tile, sin_tile)
        k1, k2 = _rotate_halves(k1, k2, cos_tile, sin_tile)
        probabilities = _softmax_scores(q1, q2, k1, k2, is_inside, score_scale).to(v1.dtype)
        output_pointers = (
            output_pointer
            + patch_index[:, None] * (heads * 2 * HALF)
            + head_index * 2 * HALF
            + column_index[None, :]
        )
        tl.store(output_pointers, tl.dot(probabilities, v1).to(v1.dtype), mask=tile_mask)
        tl.store(output_pointers + HALF, tl.dot(probabilities, v2).to(v1.dtype), mask=tile_mask)


@triton.jit
def _backward_kernel(
    qkv, cos, sin, cu_seqlens, output_grad_pointer, dqkv, score_scale, heads,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, HEADS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of :func:`_forward_kernel`. Scores are recomputed."""
    patch_index, column_index, is_inside, tile_mask, cos_tile, sin_tile = _load_window(
        cos, sin, cu_seqlens, HALF, BLOCK, TILE
    )
    first_head = tl.program_id(1) * HEADS
    for head_index in tl.range(first_head, first_head + HEADS, num_stages=STAGES):
        qkv_offsets = (
            patch_index[:, None] * (heads * 6 * HALF) + head_index * 6 * HALF + column_index[None, :]
        )
        qkv_pointers, grad_pointers = qkv + qkv_offsets, dqkv + qkv_offsets
        q1, q2 = _load_halves(qkv_pointers, tile_mask, HALF)
        k1, k2 = _load_halves(qkv_pointers + 2 * HALF, tile_mask, HALF)

        q1, q2 = _rotate_halves(q1, q2, cos_tile, sin_tile)
        k1, k2 = _rotate_halves(k1, k2, cos_tile, sin_tile)
        probabilities = _softmax_scores(q1, q2, k1, k2, is_inside, score_scale)

        # The gradient of v.
        output_grad_pointers = (
            output_grad_pointer
            + patch_index[:, None] * (heads * 2 * HALF)
            + head_index * 2 * HALF
            + column_index[None, :]
        )
        o1, o2 = _load_halves(output_grad_pointers, tile_mask, HALF)
        transposed_probabilities = tl.trans(probabilities.to(o1.dtype))
        tl.store(grad_pointers + 4 * HALF, tl.dot(transposed_probabilities, o1).to(o1.dtype), mask=tile_mask)
        tl.store(grad_pointers + 5 * HALF, tl.dot(transposed_probabilities, o2).to(o1.dtype), mask=tile_mask)

        # The gradient of the scores.
        v1, v2 = _load_halves(qkv_pointers + 4 * HALF, tile_mask, HALF)
        probability_grads = tl.dot(o1, tl.trans(v1)) + tl.dot(o2, tl.trans(v2))
        score_grads = (
            probabilities
            * (probability_grads - tl.sum(probabilities * probability_grads, 1)[:, None])
            * score_scale
        ).to(o1.dtype)

        # The gradients of q and k. The inverse of a rotation rotates by the negative angle.
        dq1, dq2 = _rotate_halves(tl.dot(score_grads, k1), tl.dot(score_grads, k2), cos_tile, -sin_tile)
        tl.store(grad_pointers, dq1.to(o1.dtype), mask=tile_mask)
        tl.store(grad_pointers + HALF, dq2.to(o1.dtype), mask=tile_mask)

        transposed_score_grads = tl.trans(score_grads)
        dk1, dk2 = _rotate_halves(
            tl.dot(transposed_score_grads, q1), tl.dot(transposed_score_grads, q2), cos_tile, -sin_tile
        )
        tl.store(grad_pointers + 2 * HALF, dk1.to(o1.dtype), mask=tile_mask)
        tl.store(grad_pointers + 3 * HALF, dk2.to(o1.dtype), mask=tile_mask)


class _WindowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int, head_dim: int
    ) -> Tensor:
        num_heads = qkv.shape[1] // (3 * head_dim)
        attention_output = qkv.new_empty(qkv.shape[0], num_heads * head_dim)
        kernel_tensors = qkv, cos, sin, cu_seqlens, attention_output
        _launch_kernel(
            _forward_kernel, kernel_tensors, max_seqlen, head_dim, num_heads, num_warps=4, num_stages=2
        )
        ctx.save_for_backward(qkv, cos, sin, cu_seqlens)
        ctx.shape = max_seqlen, head_dim, num_heads
        return attention_output

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        qkv, cos, sin, cu_seqlens = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        kernel_tensors = qkv, cos, sin, cu_seqlens, output_grad.contiguous(), dqkv
        _launch_kernel(_backward_kernel, kernel_tensors, *ctx.shape, num_warps=8, num_stages=3)
        return dqkv, None, None, None, None, None


def supports_windows(max_seqlen: int, device: torch.device) -> bool:
    """Whether the kernels can compute windows of ``max_seqlen`` patches on ``device``."""
    return max_seqlen <= 64 or max_seqlen <= MAX_WINDOW_PATCHES and has_large_shared_memory(device)


def _launch_kernel(
    kernel,
    kernel_tensors: tuple[Tensor, ...],
    max_seqlen: int,
    head_dim: int,
    num_heads: int,
    *,
    num_warps: int,
    num_stages: int,
) -> None:
    """Launches a kernel. Windows of more than 64 patches (128 to 192 KiB) and heads of more than 128 leave no
    shared memory to load ahead, which takes 136 KiB on A100, 200 on Hopper and 208 on Blackwell.
    """
    half_dim = head_dim // 2
    block_patches = max(16, next_power_of_2(max_seqlen))
    num_windows = kernel_tensors[3].numel() - 1
    has_small_tiles = block_patches <= 64
    program_heads = math.gcd(num_heads, HEADS_OF_PROGRAM) if has_small_tiles else 1
    loads_ahead = has_small_tiles and head_dim <= 128 and has_large_shared_memory(kernel_tensors[0].device)
    kernel[(num_windows, num_heads // program_heads)](
        *kernel_tensors, head_dim**-0.5, num_heads,
        HALF=half_dim, BLOCK=block_patches, TILE=max(16, next_power_of_2(half_dim)), HEADS=program_heads,
        STAGES=num_stages if loads_ahead else 1, num_warps=num_warps if has_small_tiles else 8,
    )  # fmt: skip


def window_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int, head_dim: int
) -> Tensor:
    """RoPE and softmax attention within windows.

    Args:
        qkv: [P, heads * 3 * head_dim] with query, key and value for each head.
        cos, sin: fp32 [P, head_dim / 2], of each patch's angles.
        cu_seqlens: int32 [windows + 1], covering all P patches.
        max_seqlen: number of patches in the longest window, which :func:`supports_windows` accepts.

    Returns:
        [P, heads * head_dim].
    """
    return _WindowAttention.apply(qkv.contiguous(), cos, sin, cu_seqlens, max_seqlen, head_dim)
