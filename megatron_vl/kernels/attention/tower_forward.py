"""The forward kernels of tower attention: packing with RoPE, and online softmax; and what both passes share.

:mod:`megatron_vl.kernels.attention.tower_attention` says how they work.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_vl.kernels.sizes import cdiv, next_power_of_2

SEARCH_BLOCK = tl.constexpr(128)
"""Number of segment bounds that a program compares at a time to find its own segment."""


@dataclass(frozen=True)
class KernelTile:
    """How a kernel divides its work."""

    own_rows: int
    step_rows: int
    """Number of rows of the other operand that a program processes at a time."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionTiles:
    """The tiles of the three kernels. The defaults are the fastest measured on H100 and H200 for heads of 72
    (benchmarks/log/speed.md)."""

    forward_tile: KernelTile = KernelTile(128, 64, 8, 3)
    query_tile: KernelTile = KernelTile(64, 32, 4, 3)
    key_tile: KernelTile = KernelTile(64, 32, 4, 3)


DEFAULT_TILES = AttentionTiles()


@triton.jit
def find_segment(cu_seqlens, segments, OWN: tl.constexpr):
    """(start and end of this program's segment, the program's first row). The row may lie after the end."""
    tile_index = tl.program_id(0)
    segments_before = 0
    for search_start in range(0, segments, SEARCH_BLOCK):
        bound_index = search_start + tl.arange(0, SEARCH_BLOCK)
        first_tile = (
            tl.load(cu_seqlens + bound_index, mask=bound_index < segments, other=0x7FFF0000) // OWN
            + bound_index
        )
        segments_before += tl.sum((first_tile <= tile_index).to(tl.int32))
    segment = segments_before - 1
    start, end = tl.load(cu_seqlens + segment), tl.load(cu_seqlens + segments_before)
    return start, end, start + (tile_index - start // OWN - segment) * OWN


@triton.jit
def load_rows(
    part_descriptors, plane_index, first_row, ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr
):
    """Loads both parts of ROWS rows of a plane. Columns beyond the head size are zero.

    If a head has only one part, the second result equals the first.
    """
    first_part = part_descriptors[0].load([plane_index, first_row, 0]).reshape(ROWS, D1)
    second_part = first_part
    if D2 > 0:
        second_part = part_descriptors[1].load([plane_index, first_row, D1]).reshape(ROWS, D2)
    return first_part, second_part


@triton.jit
def dot_over_head_dim(left_parts, right_parts, D2: tl.constexpr):
    """The product a @ b^T over the head dimension, [A, B]."""
    scores = tl.dot(left_parts[0], tl.trans(right_parts[0]))
    if D2 > 0:
        scores = tl.dot(left_parts[1], tl.trans(right_parts[1]), scores)
    return scores


@triton.jit
def accumulate_over_rows(weights, row_parts, part_sums, D2: tl.constexpr):
    """Adds ``p @ x``, [A, d], to ``part_sums``, its two parts."""
    first_sum = tl.dot(weights, row_parts[0], part_sums[0])
    second_sum = part_sums[1]
    if D2 > 0:
        second_sum = tl.dot(weights, row_parts[1], second_sum)
    return first_sum, second_sum


@triton.jit
def zero_parts(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    return tl.zeros([ROWS, D1], tl.float32), tl.zeros([ROWS, D2 if D2 > 0 else 16], tl.float32)


@triton.jit
def tile_indices(
    first_row, end_row, ROWS: tl.constexpr, LOW: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr
):
    """(rows [ROWS, 1] from ``first_row``, columns [1, WIDTH] from LOW, mask of those before ``end_row`` and
    D)"""
    row = (first_row + tl.arange(0, ROWS))[:, None]
    column_index = (LOW + tl.arange(0, WIDTH))[None, :]
    return row, column_index, (row < end_row) & (column_index < D)


@triton.jit
def _store_part(
    base_pointer, row_stride, first_row, end_row, part_values, LOW: tl.constexpr, D: tl.constexpr
):
    row, column_index, store_mask = tile_indices(
        first_row, end_row, part_values.shape[0], LOW, part_values.shape[1], D
    )
    tl.store(base_pointer + row * row_stride + column_index, part_values, mask=store_mask)


@triton.jit
def store_rows(
    base_pointer,
    row_stride,
    first_row,
    end_row,
    value_parts,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    _store_part(base_pointer, row_stride, first_row, end_row, value_parts[0], 0, D)
    if D2 > 0:
        _store_part(base_pointer, row_stride, first_row, end_row, value_parts[1], D1, D)


def _part_widths(head_dim: int) -> tuple[int, int]:
    """The widths of both parts of a head; the second may be 0."""
    first_width = 1 << (head_dim.bit_length() - 1)
    return first_width, max(16, next_power_of_2(head_dim - first_width)) if head_dim > first_width else 0


def make_part_descriptors(planes: Tensor, tile_rows: int) -> tuple[TensorDescriptor, ...]:
    """Descriptors of [planes, P, d] for both parts, in tiles of ``tile_rows`` rows."""
    shape, plane_strides = list(planes.shape), list(planes.stride())
    return tuple(
        TensorDescriptor(planes, shape, plane_strides, [1, tile_rows, width or 16])
        for width in _part_widths(planes.shape[2])
    )


_THREAD_STATE = threading.local()


def _make_context_current(device: torch.device) -> None:
    """Makes CUDA's context current in this thread, as the first torch kernel does.

    Triton 3.6 makes descriptors on the host before it looks for a context. In a thread that has not used CUDA
    yet, it finds none (``invalid device context``) if another thread has loaded the kernel. Autograd's
    threads on device 0 start in this state.
    """
    if not getattr(_THREAD_STATE, "current", False):
        torch.zeros(1, device=device)
        _THREAD_STATE.current = True


def launch_kernel(
    kernel: Any, tile: KernelTile, packed_qkv: Tensor, tensors: tuple[Any, ...], *extra_scalars: float
) -> None:
    """Launches a kernel, whose first arguments describe ``packed_qkv``. The last of ``tensors`` (or
    descriptors) is cu_seqlens."""
    _, num_heads, num_patches, head_dim = packed_qkv.shape
    planes = packed_qkv.flatten(0, 1)
    _make_context_current(packed_qkv.device)
    num_segments = tensors[-1].numel() - 1
    first_width, second_width = _part_widths(head_dim)

    kernel[(num_patches // tile.own_rows + num_segments, num_heads)](
        *make_part_descriptors(planes, tile.own_rows), *make_part_descriptors(planes, tile.step_rows),
        *tensors, num_segments, head_dim**-0.5 * math.log2(math.e), *extra_scalars,
        OWN=tile.own_rows, STEP=tile.step_rows, D=head_dim, D1=first_width, D2=second_width,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


# --- The forward pass ---------------------------------------------------------------------------------------


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
    lse = packed_qkv.new_empty(num_heads, cdiv(patches, 4) * 4, dtype=torch.float32)
    launch_kernel(_forward_kernel, tile, packed_qkv, (attention_output, lse, cu_seqlens), lse.shape[1])
    return attention_output, lse


def pack_with_rope(qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
    """Applies RoPE to query and key: [P, h * 3 * d] -> [3, h, P, d]."""
    patches = qkv.shape[0]
    num_heads = qkv.shape[1] // (3 * head_dim)
    half_dim = head_dim // 2
    packed_qkv = qkv.new_empty(3, num_heads, patches, head_dim)
    _pack_kernel[(cdiv(patches, 32), num_heads)](
        qkv, packed_qkv, cos, sin, patches,
        HALF=half_dim, TILE=next_power_of_2(half_dim), ROWS=32, num_warps=4,
    )  # fmt: skip
    return packed_qkv
