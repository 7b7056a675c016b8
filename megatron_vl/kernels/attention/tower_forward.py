"""The forward kernels of tower attention: packing with RoPE, and online softmax.

:mod:`megatron_vl.kernels.attention.tower_attention` says how they work.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.attention.tower_tiles import (
    KernelTile,
    accumulate_over_rows,
    dot_over_head_dim,
    find_segment,
    launch_kernel,
    load_rows,
    make_part_descriptors,
    store_rows,
    tile_indices,
    zero_parts,
)


@triton.jit(do_not_specialize=["patches"])
def _pack_kernel(
    qkv, packed_pointer, cos, sin, patches, HALF: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """Packs some patches of one head, [P, heads, 3, d] -> [3, heads, P, d].

    Query and key are rotated, and the members of a pair are put side by side.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row_index, column_index, half_mask = tile_indices(
        tl.program_id(0).to(tl.int64) * ROWS, patches, ROWS, 0, TILE, HALF
    )
    angle_offsets = row_index * HALF + column_index
    cos_tile, sin_tile = (
        tl.load(cos + angle_offsets, mask=half_mask, other=0.0),
        tl.load(sin + angle_offsets, mask=half_mask, other=0.0),
    )
    qkv_pointer = qkv + row_index * (heads * 6 * HALF) + head * 6 * HALF
    full_column = tl.arange(0, 2 * TILE)[None, :]
    full_mask = (row_index < patches) & (full_column < 2 * HALF)
    packed_pointers = packed_pointer + (head.to(tl.int64) * patches + row_index) * (2 * HALF) + full_column
    plane_stride = heads.to(tl.int64) * patches * (2 * HALF)

    for qkv_index in tl.static_range(2):
        half_pointers = qkv_pointer + qkv_index * 2 * HALF + column_index
        first_half = tl.load(half_pointers, mask=half_mask, other=0.0).to(tl.float32)
        second_half = tl.load(half_pointers + HALF, mask=half_mask, other=0.0).to(tl.float32)
        rotated_pairs = tl.interleave(
            first_half * cos_tile - second_half * sin_tile, second_half * cos_tile + first_half * sin_tile
        )
        tl.store(packed_pointers + qkv_index * plane_stride, rotated_pairs, mask=full_mask)

    tl.store(
        packed_pointers + 2 * plane_stride,
        tl.load(qkv_pointer + 4 * HALF + full_column, mask=full_mask, other=0.0),
        mask=full_mask,
    )


@triton.jit(do_not_specialize=["segments", "width"])
def _forward_kernel(
    own_part1, own_part2, walked_part1, walked_part2, output_pointer, lse, cu_seqlens, segments, log2_scale,
    width,
    OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Attends from OWN queries of one head to all keys of their segment.

    The ``own`` and ``walked`` parts are descriptors of the same packed tensor, in tiles of OWN and STEP rows.
    """
    segment_start, segment_end, first_row = find_segment(cu_seqlens, segments, OWN)
    if first_row >= segment_end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query_parts = load_rows((own_part1, own_part2), head, first_row, OWN, D1, D2)
    running_max = tl.full([OWN], float("-inf"), tl.float32)
    running_sum = tl.zeros([OWN], tl.float32)
    weighted_values = zero_parts(OWN, D1, D2)

    for row_index in tl.range(segment_start, segment_end, STEP):
        key_parts = load_rows((walked_part1, walked_part2), heads + head, row_index, STEP, D1, D2)
        value_parts = load_rows((walked_part1, walked_part2), 2 * heads + head, row_index, STEP, D1, D2)
        scores = dot_over_head_dim(query_parts, key_parts, D2)
        if row_index + STEP > segment_end:
            scores = tl.where((row_index + tl.arange(0, STEP) < segment_end)[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * log2_scale)
        probabilities = tl.exp2(scores * log2_scale - new_max[:, None])
        rescale_factor = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale_factor + tl.sum(probabilities, 1)
        weighted_values = accumulate_over_rows(
            probabilities.to(value_parts[0].dtype),
            value_parts,
            (weighted_values[0] * rescale_factor[:, None], weighted_values[1] * rescale_factor[:, None]),
            D2,
        )
        running_max = new_max

    inverse_sum = (1.0 / running_sum)[:, None]
    segment_pointer = output_pointer + segment_start.to(tl.int64) * heads * D + head * D
    store_rows(
        segment_pointer,
        heads * D,
        first_row - segment_start,
        segment_end - segment_start,
        (weighted_values[0] * inverse_sum, weighted_values[1] * inverse_sum),
        D,
        D1,
        D2,
    )
    row_index = first_row + tl.arange(0, OWN)
    tl.store(
        lse + head.to(tl.int64) * width + row_index,
        running_max + tl.log2(running_sum),
        mask=row_index < segment_end,
    )


def attention_forward(packed_qkv: Tensor, cu_seqlens: Tensor, tile: KernelTile) -> tuple[Tensor, Tensor]:
    """[3, h, P, d] -> [P, h, d] and the base-2 log-sum-exp, fp32 [h, P rounded up to a multiple of 4]."""
    _, num_heads, patches, head_dim = packed_qkv.shape
    attention_output = packed_qkv.new_empty(patches, num_heads, head_dim)
    # The size of a descriptor's rows must be a multiple of 16 bytes.
    lse = packed_qkv.new_empty(num_heads, triton.cdiv(patches, 4) * 4, dtype=torch.float32)
    planes = packed_qkv.flatten(0, 1)
    descriptors = (
        *make_part_descriptors(planes, tile.own_rows),
        *make_part_descriptors(planes, tile.step_rows),
    )
    launch_kernel(
        _forward_kernel, tile, packed_qkv, descriptors, (attention_output, lse, cu_seqlens), lse.shape[1]
    )
    return attention_output, lse


def pack_with_rope(qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    """Applies RoPE to query and key: [P, h * 3 * d] -> [3, h, P, d]."""
    patches = qkv.shape[0]
    num_heads = qkv.shape[1] // (3 * head_dim)
    half_dim = head_dim // 2
    packed_qkv = qkv.new_empty(3, num_heads, patches, head_dim)
    _pack_kernel[(triton.cdiv(patches, 32), num_heads)](
        qkv,
        packed_qkv,
        cos,
        sin,
        patches,
        HALF=half_dim,
        TILE=triton.next_power_of_2(half_dim),
        ROWS=32,
        num_warps=4,
    )
    return packed_qkv
