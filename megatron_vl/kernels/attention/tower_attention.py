"""Triton kernels for full attention within the segments of a vision tower.

They are made for heads whose size is not a power of two. Heads of 72 (Qwen3-VL) and 80 (Qwen2-VL, Qwen2.5-VL)
are slow in kernels that round them up to 96 or 128. Here a head is cut into two parts, 64 and 16 wide, with
almost no padding. A product that sums over the head dimension is the sum of two products. A product whose
result has the head dimension becomes two products.

The forward pass uses online softmax in base 2 (FlashAttention, arXiv 2205.14135 and 2307.08691): scores never
leave the chip, and one log-sum-exp per row is kept. The backward pass has one kernel for dQ and one for dK
and dV. Neither uses atomics, so gradients are equal in every run. Products take operands in the input's type
and accumulate in fp32.

The grid cannot depend on the segments' lengths, which only the device knows. Segment ``i`` owns the tiles
from ``cu_seqlens[i] // OWN + i`` up to the first tile of the next segment. Each segment then has enough tiles
and at most one too many, and the host knows the size of the whole grid.

Query, key and value are packed as ``[3 * heads, P, d]`` and read through tensor descriptors (TMA on Hopper).
The packing kernel also applies RoPE in fp32 and rounds once, as in
``apply_rotary_pos_emb_vision`` of transformers. It puts the two members of each rotated pair next to each
other. Scores do not depend on the order, and the backward kernels have both members in one thread when they
rotate the gradients back.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vl.kernels.attention.tower_backward import attention_backward
from megatron_vl.kernels.attention.tower_forward import attention_forward, pack_with_rope
from megatron_vl.kernels.attention.tower_tiles import DEFAULT_TILES, AttentionTiles


class _TowerAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, head_dim: int, tiles: AttentionTiles
    ) -> Tensor:
        packed_qkv = pack_with_rope(qkv, cos, sin, head_dim)
        attention_output, lse = attention_forward(packed_qkv, cu_seqlens, tiles.forward_tile)
        ctx.save_for_backward(packed_qkv, cos, sin, attention_output, lse, cu_seqlens)
        ctx.tiles = tiles
        return attention_output.flatten(1)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        packed_qkv, cos, sin, attention_output, lse, cu_seqlens = ctx.saved_tensors
        dqkv = attention_backward(
            packed_qkv, attention_output, output_grad, lse, cu_seqlens, (cos, sin), ctx.tiles
        )
        return dqkv.flatten(1), None, None, None, None, None


def tower_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cu_seqlens: Tensor,
    head_dim: int,
    tiles: AttentionTiles = DEFAULT_TILES,
) -> Tensor:
    """RoPE and softmax attention within segments.

    Args:
        qkv: [P, heads * 3 * head_dim], with query, key and value for each head: the output of Megatron-core's
            ``linear_qkv``.
        cos, sin: fp32 [P, head_dim / 2], contiguous, of each patch's angles.
        cu_seqlens: int32 [segments + 1], covering all P patches; segments may be empty.
        head_dim: one of :data:`~megatron_vl.kernels.sizes.TOWER_HEAD_DIMS`.

    Returns:
        [P, heads * head_dim].
    """
    return _TowerAttention.apply(qkv.contiguous(), cos, sin, cu_seqlens, head_dim, tiles)
