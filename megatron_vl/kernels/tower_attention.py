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
The packing kernel also applies RoPE (:func:`tower_attention`) in fp32 and rounds once, as in
``apply_rotary_pos_emb_vision`` of transformers. It puts the two members of each rotated pair next to each
other. Scores do not depend on the order, and the backward kernels have both members in one thread when they
rotate the gradients back.
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

from megatron_vl.kernels.tower_heads import has_kernels

SEARCH_BLOCK = tl.constexpr(128)
"""Number of segment bounds that a program compares at a time to find its own segment."""


@dataclass(frozen=True)
class KernelTile:
    """How a kernel divides its work."""

    own_rows: int
    """Number of rows that a program computes."""
    step_rows: int
    """Number of rows of the other operand that a program processes at a time."""
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class AttentionTiles:
    """The tiles of the three kernels. The defaults are the fastest measured on H100 and H200 for heads of 72
    (docs/log/speed.md)."""

    forward_tile: KernelTile = KernelTile(128, 64, 8, 3)
    query_tile: KernelTile = KernelTile(64, 32, 4, 3)
    """For dQ."""
    key_tile: KernelTile = KernelTile(64, 32, 4, 3)
    """For dK and dV."""


DEFAULT_TILES = AttentionTiles()


@triton.jit
def _find_segment(cu_seqlens, segments, OWN: tl.constexpr):
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
def _load_rows(
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
def _dot_over_head_dim(left_parts, right_parts, D2: tl.constexpr):
    """The product a @ b^T over the head dimension, [A, B]."""
    scores = tl.dot(left_parts[0], tl.trans(right_parts[0]))
    if D2 > 0:
        scores = tl.dot(left_parts[1], tl.trans(right_parts[1]), scores)
    return scores


@triton.jit
def _accumulate_over_rows(weights, row_parts, part_sums, D2: tl.constexpr):
    """Adds ``p @ x``, [A, d], to ``part_sums``, its two parts."""
    first_sum = tl.dot(weights, row_parts[0], part_sums[0])
    second_sum = part_sums[1]
    if D2 > 0:
        second_sum = tl.dot(weights, row_parts[1], second_sum)
    return first_sum, second_sum


@triton.jit
def _zero_parts(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    return tl.zeros([ROWS, D1], tl.float32), tl.zeros([ROWS, D2 if D2 > 0 else 16], tl.float32)


@triton.jit
def _tile_indices(
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
    row, column_index, store_mask = _tile_indices(
        first_row, end_row, part_values.shape[0], LOW, part_values.shape[1], D
    )
    tl.store(
        base_pointer + row * row_stride + column_index,
        part_values.to(base_pointer.dtype.element_ty),
        mask=store_mask,
    )


@triton.jit
def _store_rows(
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


@triton.jit
def _store_unrotated(
    base_pointer, row_stride, cos, sin, first_row, end_row, pair_values, LOW: tl.constexpr, D: tl.constexpr
):
    """Applies the inverse rotation to the pairs of one part and stores their members where RoPE read them."""
    first_member, second_member = tl.split(
        tl.reshape(pair_values, [pair_values.shape[0], pair_values.shape[1] // 2, 2])
    )
    row, pair_index, store_mask = _tile_indices(
        first_row, end_row, pair_values.shape[0], LOW // 2, pair_values.shape[1] // 2, D // 2
    )
    angle_offsets = row * (D // 2) + pair_index
    cos_tile, sin_tile = (
        tl.load(cos + angle_offsets, mask=store_mask, other=0.0),
        tl.load(sin + angle_offsets, mask=store_mask, other=0.0),
    )
    tl.store(
        base_pointer + row * row_stride + pair_index,
        (first_member * cos_tile + second_member * sin_tile).to(base_pointer.dtype.element_ty),
        mask=store_mask,
    )
    tl.store(
        base_pointer + row * row_stride + D // 2 + pair_index,
        (second_member * cos_tile - first_member * sin_tile).to(base_pointer.dtype.element_ty),
        mask=store_mask,
    )


@triton.jit
def _store_gradient(
    dqkv,
    qkv_index: tl.constexpr,
    cos,
    sin,
    segment_start,
    first_row,
    end_row,
    grad_parts,
    ROTATED: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Stores a gradient into [P, heads, 3, d]; ``first_row`` and ``end_row`` are counted from
    ``segment_start``."""
    head = tl.program_id(1)
    row_stride = tl.num_programs(1) * 3 * D
    base_pointer = dqkv + segment_start.to(tl.int64) * row_stride + head * 3 * D + qkv_index * D
    if ROTATED:
        angle_shift = segment_start.to(tl.int64) * (D // 2)
        _store_unrotated(
            base_pointer,
            row_stride,
            cos + angle_shift,
            sin + angle_shift,
            first_row,
            end_row,
            grad_parts[0],
            0,
            D,
        )
        if D2 > 0:
            _store_unrotated(
                base_pointer,
                row_stride,
                cos + angle_shift,
                sin + angle_shift,
                first_row,
                end_row,
                grad_parts[1],
                D1,
                D,
            )
    else:
        _store_rows(base_pointer, row_stride, first_row, end_row, grad_parts, D, D1, D2)


@triton.jit(do_not_specialize=["patches"])
def _pack_kernel(
    qkv, packed_pointer, cos, sin, patches, HALF: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr
):
    """Packs some patches of one head, [P, heads, 3, d] -> [3, heads, P, d].

    Query and key are rotated, and the members of a pair are put side by side.
    """
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row_index, column_index, half_mask = _tile_indices(
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
        tl.store(
            packed_pointers + qkv_index * plane_stride,
            rotated_pairs.to(packed_pointer.dtype.element_ty),
            mask=full_mask,
        )

    tl.store(
        packed_pointers + 2 * plane_stride,
        tl.load(qkv_pointer + 4 * HALF + full_column, mask=full_mask, other=0.0),
        mask=full_mask,
    )


@triton.jit(do_not_specialize=["segments", "width"])
def _forward_kernel(
    own_part1,
    own_part2,
    walked_part1,
    walked_part2,
    output_pointer,
    lse,
    cu_seqlens,
    segments,
    log2_scale,
    width,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Attends from OWN queries of one head to all keys of their segment.

    The ``own`` and ``walked`` parts are descriptors of the same packed tensor, in tiles of OWN and STEP rows.
    """
    segment_start, segment_end, first_row = _find_segment(cu_seqlens, segments, OWN)
    if first_row >= segment_end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    query_parts = _load_rows((own_part1, own_part2), head, first_row, OWN, D1, D2)
    running_max = tl.full([OWN], float("-inf"), tl.float32)
    running_sum = tl.zeros([OWN], tl.float32)
    weighted_values = _zero_parts(OWN, D1, D2)

    for row_index in tl.range(segment_start, segment_end, STEP):
        key_parts = _load_rows((walked_part1, walked_part2), heads + head, row_index, STEP, D1, D2)
        value_parts = _load_rows((walked_part1, walked_part2), 2 * heads + head, row_index, STEP, D1, D2)
        scores = _dot_over_head_dim(query_parts, key_parts, D2)
        if row_index + STEP > segment_end:
            scores = tl.where((row_index + tl.arange(0, STEP) < segment_end)[None, :], scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * log2_scale)
        probabilities = tl.exp2(scores * log2_scale - new_max[:, None])
        rescale_factor = tl.exp2(running_max - new_max)
        running_sum = running_sum * rescale_factor + tl.sum(probabilities, 1)
        weighted_values = _accumulate_over_rows(
            probabilities.to(value_parts[0].dtype),
            value_parts,
            (weighted_values[0] * rescale_factor[:, None], weighted_values[1] * rescale_factor[:, None]),
            D2,
        )
        running_max = new_max

    inverse_sum = (1.0 / running_sum)[:, None]
    segment_pointer = output_pointer + segment_start.to(tl.int64) * heads * D + head * D
    _store_rows(
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


@triton.jit
def _load_grad_and_delta(
    output_pointer,
    output_grad_pointer,
    segment_start,
    first_row,
    end_row,
    OWN: tl.constexpr,
    LOW: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
):
    """(a part of dout [OWN, WIDTH], sum(out * dout) over it)"""
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    row, column_index, load_mask = _tile_indices(
        first_row - segment_start, end_row - segment_start, OWN, LOW, WIDTH, D
    )
    offsets = segment_start.to(tl.int64) * heads * D + head * D + row * (heads * D) + column_index
    output_part, output_grad = (
        tl.load(output_pointer + offsets, mask=load_mask, other=0.0),
        tl.load(output_grad_pointer + offsets, mask=load_mask, other=0.0),
    )
    return output_grad, tl.sum(output_part.to(tl.float32) * output_grad.to(tl.float32), 1)


@triton.jit(do_not_specialize=["segments", "width"])
def _query_grad_kernel(
    own_part1,
    own_part2,
    walked_part1,
    walked_part2,
    output_pointer,
    output_grad_pointer,
    lse,
    delta,
    dqkv,
    cos,
    sin,
    cu_seqlens,
    segments,
    log2_scale,
    width,
    score_scale,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Computes dQ of OWN queries of one head. Stores delta = sum(out * dout) for the other kernel."""
    segment_start, segment_end, first_row = _find_segment(cu_seqlens, segments, OWN)
    if first_row >= segment_end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    output_grad_part1, delta_rows = _load_grad_and_delta(
        output_pointer, output_grad_pointer, segment_start, first_row, segment_end, OWN, 0, D1, D
    )
    output_grad_parts = output_grad_part1, output_grad_part1
    if D2 > 0:
        output_grad_part2, delta_part2 = _load_grad_and_delta(
            output_pointer, output_grad_pointer, segment_start, first_row, segment_end, OWN, D1, D2, D
        )
        output_grad_parts = output_grad_part1, output_grad_part2
        delta_rows += delta_part2

    row_index = first_row + tl.arange(0, OWN)
    statistic_offsets = head.to(tl.int64) * width + row_index
    tl.store(delta + statistic_offsets, delta_rows, mask=row_index < segment_end)
    log_sum_exp = tl.load(lse + statistic_offsets, mask=row_index < segment_end, other=float("inf"))
    query_parts = _load_rows((own_part1, own_part2), head, first_row, OWN, D1, D2)
    query_grad_parts = _zero_parts(OWN, D1, D2)

    for row_index in tl.range(segment_start, segment_end, STEP):
        key_parts = _load_rows((walked_part1, walked_part2), heads + head, row_index, STEP, D1, D2)
        value_parts = _load_rows((walked_part1, walked_part2), 2 * heads + head, row_index, STEP, D1, D2)
        scores = _dot_over_head_dim(query_parts, key_parts, D2)
        if row_index + STEP > segment_end:
            scores = tl.where((row_index + tl.arange(0, STEP) < segment_end)[None, :], scores, float("-inf"))
        probabilities = tl.exp2(scores * log2_scale - log_sum_exp[:, None])
        score_grads = probabilities * (
            _dot_over_head_dim(output_grad_parts, value_parts, D2) - delta_rows[:, None]
        )
        query_grad_parts = _accumulate_over_rows(
            score_grads.to(key_parts[0].dtype), key_parts, query_grad_parts, D2
        )

    query_grad_parts = query_grad_parts[0] * score_scale, query_grad_parts[1] * score_scale
    _store_gradient(
        dqkv,
        0,
        cos,
        sin,
        segment_start,
        first_row - segment_start,
        segment_end - segment_start,
        query_grad_parts,
        ROTATED,
        D,
        D1,
        D2,
    )


@triton.jit(do_not_specialize=["segments"])
def _key_grad_kernel(
    own_part1,
    own_part2,
    walked_part1,
    walked_part2,
    output_grad_part1,
    output_grad_part2,
    lse,
    delta,
    dqkv,
    cos,
    sin,
    cu_seqlens,
    segments,
    log2_scale,
    score_scale,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
):
    """Computes dK and dV of OWN keys of one head from all queries of their segment.

    Scores are transposed, [OWN, STEP]. The parts of the output's gradient, ``lse`` and ``delta`` are
    descriptors.
    """
    segment_start, segment_end, first_row = _find_segment(cu_seqlens, segments, OWN)
    if first_row >= segment_end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    key_parts = _load_rows((own_part1, own_part2), heads + head, first_row, OWN, D1, D2)
    value_parts = _load_rows((own_part1, own_part2), 2 * heads + head, first_row, OWN, D1, D2)
    key_grad_parts, value_grad_parts = _zero_parts(OWN, D1, D2), _zero_parts(OWN, D1, D2)

    # Loads of statistics start at multiples of 16 bytes, so the first step may include queries of the
    # previous segment, as the last may include queries of the next. An infinite log-sum-exp gives these no
    # weight. Without the assumption, the compiler adds a path around the loop, and ptxas serializes all
    # products of the kernel (its warning C7515).
    first_step = segment_start // 4 * 4
    tl.assume(first_step < segment_end)
    for row_index in tl.range(first_step, segment_end, STEP):
        query_parts = _load_rows((walked_part1, walked_part2), head, row_index, STEP, D1, D2)
        output_grad_parts = _load_rows((output_grad_part1, output_grad_part2), head, row_index, STEP, D1, D2)
        log_sum_exp = lse.load([head, row_index]).reshape(STEP)
        delta_rows = delta.load([head, row_index]).reshape(STEP)
        if (row_index < segment_start) | (row_index + STEP > segment_end):
            query_index = row_index + tl.arange(0, STEP)
            in_own_segment = (query_index >= segment_start) & (query_index < segment_end)
            log_sum_exp = tl.where(in_own_segment, log_sum_exp, float("inf"))

        probabilities = tl.exp2(
            _dot_over_head_dim(key_parts, query_parts, D2) * log2_scale - log_sum_exp[None, :]
        )
        value_grad_parts = _accumulate_over_rows(
            probabilities.to(output_grad_parts[0].dtype), output_grad_parts, value_grad_parts, D2
        )
        score_grads = probabilities * (
            _dot_over_head_dim(value_parts, output_grad_parts, D2) - delta_rows[None, :]
        )
        key_grad_parts = _accumulate_over_rows(
            score_grads.to(query_parts[0].dtype), query_parts, key_grad_parts, D2
        )

    key_grad_parts = key_grad_parts[0] * score_scale, key_grad_parts[1] * score_scale
    _store_gradient(
        dqkv,
        1,
        cos,
        sin,
        segment_start,
        first_row - segment_start,
        segment_end - segment_start,
        key_grad_parts,
        ROTATED,
        D,
        D1,
        D2,
    )
    _store_gradient(
        dqkv,
        2,
        cos,
        sin,
        segment_start,
        first_row - segment_start,
        segment_end - segment_start,
        value_grad_parts,
        False,
        D,
        D1,
        D2,
    )


def _part_widths(head_dim: int) -> tuple[int, int]:
    """The widths of both parts of a head; the second may be 0."""
    first_width = 1 << (head_dim.bit_length() - 1)
    return first_width, max(
        16, triton.next_power_of_2(head_dim - first_width)
    ) if head_dim > first_width else 0


def _part_descriptors(planes: Tensor, tile_rows: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Descriptors of [planes, P, d] for both parts, in tiles of ``tile_rows`` rows."""
    shape, plane_strides = list(planes.shape), list(planes.stride())
    first_descriptor, second_descriptor = (
        TensorDescriptor(planes, shape, plane_strides, [1, tile_rows, width or 16])
        for width in _part_widths(planes.shape[2])
    )
    return first_descriptor, second_descriptor


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


def _launch_kernel(
    kernel: Any,
    tile: KernelTile,
    packed_qkv: Tensor,
    descriptors: tuple[TensorDescriptor, ...],
    tensors: tuple[Tensor, ...],
    *extra_scalars: float,
    **extra_constants: Any,
) -> None:
    """Launches a kernel. The last of ``tensors`` is cu_seqlens."""
    _, num_heads, num_patches, head_dim = packed_qkv.shape
    _make_context_current(packed_qkv.device)
    num_segments = tensors[-1].numel() - 1
    first_width, second_width = _part_widths(head_dim)

    kernel[(num_patches // tile.own_rows + num_segments, num_heads)](
        *descriptors,
        *tensors,
        num_segments,
        head_dim**-0.5 * math.log2(math.e),
        *extra_scalars,
        OWN=tile.own_rows,
        STEP=tile.step_rows,
        D=head_dim,
        D1=first_width,
        D2=second_width,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **extra_constants,
    )


def _attention_forward(packed_qkv: Tensor, cu_seqlens: Tensor, tile: KernelTile) -> tuple[Tensor, Tensor]:
    """[3, h, P, d] -> [P, h, d] and the base-2 log-sum-exp, fp32 [h, P rounded up to a multiple of 4]."""
    _, num_heads, patches, head_dim = packed_qkv.shape
    attention_output = packed_qkv.new_empty(patches, num_heads, head_dim)
    # The size of a descriptor's rows must be a multiple of 16 bytes.
    lse = packed_qkv.new_empty(num_heads, triton.cdiv(patches, 4) * 4, dtype=torch.float32)
    planes = packed_qkv.flatten(0, 1)
    descriptors = *_part_descriptors(planes, tile.own_rows), *_part_descriptors(planes, tile.step_rows)
    _launch_kernel(
        _forward_kernel, tile, packed_qkv, descriptors, (attention_output, lse, cu_seqlens), lse.shape[1]
    )
    return attention_output, lse


RotationAngles = tuple[Tensor, Tensor] | None
"""cos and sin of the rotation whose inverse is applied to gradients; None: there was no rotation."""


def _launch_query_grad(
    packed_qkv: Tensor,
    attention_output: Tensor,
    output_grad: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    angles: RotationAngles,
    tile: KernelTile,
    delta: Tensor,
    dqkv: Tensor,
) -> None:
    """Fills delta, which has the shape of lse, and the query's third of dqkv [P, h, 3, d]."""
    planes = packed_qkv.flatten(0, 1)
    descriptors = *_part_descriptors(planes, tile.own_rows), *_part_descriptors(planes, tile.step_rows)
    kernel_tensors = attention_output, output_grad, lse, delta, dqkv, *(angles or (lse, lse)), cu_seqlens
    extra_scalars = lse.shape[1], packed_qkv.shape[3] ** -0.5
    _launch_kernel(
        _query_grad_kernel,
        tile,
        packed_qkv,
        descriptors,
        kernel_tensors,
        *extra_scalars,
        ROTATED=angles is not None,
    )


def _launch_key_grad(
    packed_qkv: Tensor,
    output_grad: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    angles: RotationAngles,
    tile: KernelTile,
    delta: Tensor,
    dqkv: Tensor,
) -> None:
    """Fills the key's and value's thirds of dqkv [P, h, 3, d]."""
    planes = packed_qkv.flatten(0, 1)
    descriptors = (
        *_part_descriptors(planes, tile.own_rows),
        *_part_descriptors(planes, tile.step_rows),
        *_part_descriptors(output_grad.transpose(0, 1), tile.step_rows),
    )
    # Descriptors end at the last patch: what follows was never written, and 0 * NaN would be NaN.
    statistic_shape = [lse.shape[0], packed_qkv.shape[2]]
    statistic_descriptors = (
        TensorDescriptor(statistic, statistic_shape, list(statistic.stride()), [1, tile.step_rows])
        for statistic in (lse, delta)
    )
    kernel_tensors = dqkv, *(angles or (lse, lse)), cu_seqlens

    _launch_kernel(
        _key_grad_kernel,
        tile,
        packed_qkv,
        (*descriptors, *statistic_descriptors),
        kernel_tensors,
        packed_qkv.shape[3] ** -0.5,
        ROTATED=angles is not None,
    )


def _attention_backward(
    packed_qkv: Tensor,
    attention_output: Tensor,
    output_grad: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    angles: RotationAngles,
    tiles: AttentionTiles,
) -> Tensor:
    """The gradient of query, key and value, [P, h, 3, d]."""
    _, num_heads, patches, head_dim = packed_qkv.shape
    dqkv = packed_qkv.new_empty(patches, num_heads, 3, head_dim)
    delta = torch.empty_like(lse)
    output_grad = output_grad.contiguous().view_as(attention_output)
    _launch_query_grad(
        packed_qkv, attention_output, output_grad, lse, cu_seqlens, angles, tiles.query_tile, delta, dqkv
    )
    _launch_key_grad(packed_qkv, output_grad, lse, cu_seqlens, angles, tiles.key_tile, delta, dqkv)
    return dqkv


def _pack_with_rope(qkv: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> Tensor:
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


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, tiles: AttentionTiles
    ) -> Tensor:
        packed_qkv = torch.stack(
            (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))
        ).contiguous()
        attention_output, lse = _attention_forward(packed_qkv, cu_seqlens, tiles.forward_tile)
        ctx.save_for_backward(packed_qkv, attention_output, lse, cu_seqlens)
        ctx.tiles = tiles
        return attention_output

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        packed_qkv, attention_output, lse, cu_seqlens = ctx.saved_tensors
        dqkv = _attention_backward(
            packed_qkv, attention_output, output_grad, lse, cu_seqlens, None, ctx.tiles
        )
        return *dqkv.unbind(2), None, None


class _RotatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, qkv: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, head_dim: int, tiles: AttentionTiles
    ) -> Tensor:
        packed_qkv = _pack_with_rope(qkv, cos, sin, head_dim)
        attention_output, lse = _attention_forward(packed_qkv, cu_seqlens, tiles.forward_tile)
        ctx.save_for_backward(packed_qkv, cos, sin, attention_output, lse, cu_seqlens)
        ctx.tiles = tiles
        return attention_output.flatten(1)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        packed_qkv, cos, sin, attention_output, lse, cu_seqlens = ctx.saved_tensors
        dqkv = _attention_backward(
            packed_qkv, attention_output, output_grad, lse, cu_seqlens, (cos, sin), ctx.tiles
        )
        return dqkv.flatten(1), None, None, None, None, None


def segment_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, tiles: AttentionTiles = DEFAULT_TILES
) -> Tensor:
    """Softmax attention within segments, from every query to every key.

    Args:
        query, key, value: [P, heads, head_dim]; head_dim is a multiple of 8 from 16 to 128.
        cu_seqlens: int32 [segments + 1], covering all P patches; segments may be empty.

    Returns:
        [P, heads, head_dim].

    Raises:
        ValueError: the kernels do not support ``head_dim``.
    """
    _check_head_dim(query.shape[2])
    return _SegmentAttention.apply(query, key, value, cu_seqlens, tiles)


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

    Returns:
        [P, heads * head_dim].

    Raises:
        ValueError: the kernels do not support ``head_dim``.
    """
    _check_head_dim(head_dim)
    return _RotatedAttention.apply(qkv.contiguous(), cos, sin, cu_seqlens, head_dim, tiles)


def _check_head_dim(head_dim: int) -> None:
    if not has_kernels(head_dim):
        raise ValueError(f"head_dim {head_dim} is not supported; valid: multiples of 8 from 16 to 128")
