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
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_vl.kernels.attention.tower_forward import (
    DEFAULT_TILES,
    AttentionTiles,
    KernelTile,
    accumulate_over_rows,
    attention_forward,
    dot_over_head_dim,
    find_segment,
    launch_kernel,
    load_rows,
    make_part_descriptors,
    pack_with_rope,
    store_rows,
    tile_indices,
    zero_parts,
)


@triton.jit
def _store_unrotated(
    base_pointer, row_stride, cos, sin, first_row, end_row, pair_values, LOW: tl.constexpr, D: tl.constexpr
):
    """Applies the inverse rotation to the pairs of one part and stores their members where RoPE read them."""
    first_member, second_member = tl.split(
        tl.reshape(pair_values, [pair_values.shape[0], pair_values.shape[1] // 2, 2])
    )
    row, pair_index, store_mask = tile_indices(
        first_row, end_row, pair_values.shape[0], LOW // 2, pair_values.shape[1] // 2, D // 2
    )
    angle_offsets = row * (D // 2) + pair_index
    cos_tile, sin_tile = (
        tl.load(cos + angle_offsets, mask=store_mask, other=0.0),
        tl.load(sin + angle_offsets, mask=store_mask, other=0.0),
    )
    pair_pointers = base_pointer + row * row_stride + pair_index
    tl.store(pair_pointers, first_member * cos_tile + second_member * sin_tile, mask=store_mask)
    tl.store(pair_pointers + D // 2, second_member * cos_tile - first_member * sin_tile, mask=store_mask)


@triton.jit
def _store_gradient(
    dqkv,
    qkv_index: tl.constexpr,
    cos, sin, segment_start, first_row, end_row, grad_parts,
    ROTATED: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
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
        store_rows(base_pointer, row_stride, first_row, end_row, grad_parts, D, D1, D2)


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
    row, column_index, load_mask = tile_indices(
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
    own_part1, own_part2, walked_part1, walked_part2, output_pointer, output_grad_pointer, lse, delta, dqkv,
    cos, sin, cu_seqlens, segments, log2_scale, width, score_scale,
    OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Computes dQ of OWN queries of one head. Stores delta = sum(out * dout) for the other kernel."""
    segment_start, segment_end, first_row = find_segment(cu_seqlens, segments, OWN)
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
    query_parts = load_rows((own_part1, own_part2), head, first_row, OWN, D1, D2)
    query_grad_parts = zero_parts(OWN, D1, D2)

    for row_index in tl.range(segment_start, segment_end, STEP):
        key_parts = load_rows((walked_part1, walked_part2), heads + head, row_index, STEP, D1, D2)
        value_parts = load_rows((walked_part1, walked_part2), 2 * heads + head, row_index, STEP, D1, D2)
        scores = dot_over_head_dim(query_parts, key_parts, D2)
        if row_index + STEP > segment_end:
            scores = tl.where((row_index + tl.arange(0, STEP) < segment_end)[None, :], scores, float("-inf"))
        probabilities = tl.exp2(scores * log2_scale - log_sum_exp[:, None])
        score_grads = probabilities * (
            dot_over_head_dim(output_grad_parts, value_parts, D2) - delta_rows[:, None]
        )
        query_grad_parts = accumulate_over_rows(
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
        True,
        D,
        D1,
        D2,
    )


@triton.jit(do_not_specialize=["segments"])
def _key_grad_kernel(
    own_part1, own_part2, walked_part1, walked_part2, output_grad_part1, output_grad_part2, lse, delta, dqkv,
    cos, sin, cu_seqlens, segments, log2_scale, score_scale,
    OWN: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
):  # fmt: skip
    """Computes dK and dV of OWN keys of one head from all queries of their segment.

    Scores are transposed, [OWN, STEP]. The parts of the output's gradient, ``lse`` and ``delta`` are
    descriptors.
    """
    segment_start, segment_end, first_row = find_segment(cu_seqlens, segments, OWN)
    if first_row >= segment_end:
        return
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    key_parts = load_rows((own_part1, own_part2), heads + head, first_row, OWN, D1, D2)
    value_parts = load_rows((own_part1, own_part2), 2 * heads + head, first_row, OWN, D1, D2)
    key_grad_parts, value_grad_parts = zero_parts(OWN, D1, D2), zero_parts(OWN, D1, D2)

    # Loads of statistics start at multiples of 16 bytes, so the first step may include queries of the
    # previous segment, as the last may include queries of the next. An infinite log-sum-exp gives these no
    # weight. Without the assumption, the compiler adds a path around the loop, and ptxas serializes all
    # products of the kernel (its warning C7515).
    first_step = segment_start // 4 * 4
    tl.assume(first_step < segment_end)
    for row_index in tl.range(first_step, segment_end, STEP):
        query_parts = load_rows((walked_part1, walked_part2), head, row_index, STEP, D1, D2)
        output_grad_parts = load_rows((output_grad_part1, output_grad_part2), head, row_index, STEP, D1, D2)
        log_sum_exp = lse.load([head, row_index]).reshape(STEP)
        delta_rows = delta.load([head, row_index]).reshape(STEP)
        if (row_index < segment_start) | (row_index + STEP > segment_end):
            query_index = row_index + tl.arange(0, STEP)
            in_own_segment = (query_index >= segment_start) & (query_index < segment_end)
            log_sum_exp = tl.where(in_own_segment, log_sum_exp, float("inf"))

        probabilities = tl.exp2(
            dot_over_head_dim(key_parts, query_parts, D2) * log2_scale - log_sum_exp[None, :]
        )
        value_grad_parts = accumulate_over_rows(
            probabilities.to(output_grad_parts[0].dtype), output_grad_parts, value_grad_parts, D2
        )
        score_grads = probabilities * (
            dot_over_head_dim(value_parts, output_grad_parts, D2) - delta_rows[None, :]
        )
        key_grad_parts = accumulate_over_rows(
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
        True,
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


def launch_query_grad(
    packed_qkv: Tensor,
    attention_output: Tensor,
    output_grad: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    angles: tuple[Tensor, Tensor],
    tile: KernelTile,
    delta: Tensor,
    dqkv: Tensor,
) -> None:
    """Fills delta, which has the shape of lse, and the query's third of dqkv [P, h, 3, d]."""
    kernel_tensors = attention_output, output_grad, lse, delta, dqkv, *angles, cu_seqlens
    extra_scalars = lse.shape[1], packed_qkv.shape[3] ** -0.5
    launch_kernel(_query_grad_kernel, tile, packed_qkv, kernel_tensors, *extra_scalars)


def launch_key_grad(
    packed_qkv: Tensor,
    output_grad: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    angles: tuple[Tensor, Tensor],
    tile: KernelTile,
    delta: Tensor,
    dqkv: Tensor,
) -> None:
    """Fills the key's and value's thirds of dqkv [P, h, 3, d]."""
    gradient_descriptors = make_part_descriptors(output_grad.transpose(0, 1), tile.step_rows)
    # Descriptors end at the last patch: what follows was never written, and 0 * NaN would be NaN.
    statistic_shape = [lse.shape[0], packed_qkv.shape[2]]
    statistic_descriptors = (
        TensorDescriptor(statistic, statistic_shape, list(statistic.stride()), [1, tile.step_rows])
        for statistic in (lse, delta)
    )
    launch_kernel(
        _key_grad_kernel,
        tile,
        packed_qkv,
        (*gradient_descriptors, *statistic_descriptors, dqkv, *angles, cu_seqlens),
        packed_qkv.shape[3] ** -0.5,
    )


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
        _, num_heads, patches, head_dim = packed_qkv.shape
        # Before the rotation: [P, h, 3, d].
        dqkv = packed_qkv.new_empty(patches, num_heads, 3, head_dim)
        output_grad = output_grad.contiguous().view_as(attention_output)
        shared = lse, cu_seqlens, (cos, sin)
        delta = torch.empty_like(lse)
        launch_query_grad(
            packed_qkv, attention_output, output_grad, *shared, ctx.tiles.query_tile, delta, dqkv
        )
        launch_key_grad(packed_qkv, output_grad, *shared, ctx.tiles.key_tile, delta, dqkv)
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
