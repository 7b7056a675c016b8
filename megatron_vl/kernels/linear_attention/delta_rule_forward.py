"""The forward pass of the gated delta rule: triangular systems, states, outputs.

:mod:`megatron_vl.kernels.linear_attention.gated_delta_rule_triton` defines the quantities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.linear_attention.delta_rule_chunks import (
    BASE_BLOCK,
    CHUNK_TOKENS,
    choose_scan_options,
    compute_border_factors,
    compute_inverse_length,
    find_visible_pairs,
    invert_unit_lower,
    load_beta,
    load_segment_ids,
    load_tile,
    read_kernel_sizes,
    sum_log_decay,
)
from megatron_vl.kernels.linear_attention.delta_rule_scans import scan_kernel
from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange


@triton.jit(do_not_specialize=["length"])
def _solve_kernel(
    k, v, g, beta, segments, inverse_pointer, w, u, write_scale, state_decay, length, k_stride, v_stride,
    heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores T, w = T (beta read k), u = T (beta v) and the scan's factors of one chunk and value head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    visible_pairs = find_visible_pairs(segment_ids, C)
    cumulative_decay = sum_log_decay(g, visible_pairs, chunk, head, length, heads, C)
    read_decay, write_decay, chunk_decay = compute_border_factors(
        cumulative_decay, segment_ids, previous_segment, C
    )
    beta_tile = load_beta(beta, chunk, head, length, heads, C)
    key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    key_scale = compute_inverse_length(key_tile)

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    strictly_lower = visible_pairs & (i[:, None] > i[None, :])
    pair_decay = tl.exp(
        tl.where(strictly_lower, cumulative_decay[:, None] - cumulative_decay[None, :], float("-inf"))
    )
    system_matrix = (
        tl.dot(key_tile, tl.trans(key_tile), input_precision=PRECISION)
        * key_scale[None, :]
        * (beta_tile * key_scale)[:, None]
        * pair_decay
    )
    system_inverse = invert_unit_lower(system_matrix, C, BASE, PRECISION)

    chunk_offset = (chunk * heads + head) * C
    tl.store(inverse_pointer + (chunk_offset + i[:, None]) * C + i[None, :], system_inverse.to(input_dtype))
    scaled_inverse = (system_inverse * (beta_tile * read_decay * key_scale)[None, :]).to(input_dtype)
    product = tl.dot(scaled_inverse, key_tile, input_precision=PRECISION)
    tl.store(w + (chunk_offset + i[:, None]) * K + j[None, :], product.to(input_dtype))
    value_tile = load_tile(v, chunk, v_stride, head, length, C, V)
    product = tl.dot(
        (system_inverse * beta_tile[None, :]).to(input_dtype), value_tile, input_precision=PRECISION
    )
    tl.store(u + (chunk_offset + i[:, None]) * V + n[None, :], product.to(input_dtype))
    tl.store(write_scale + chunk_offset + i, write_decay * key_scale)
    tl.store(state_decay + chunk * heads + head, chunk_decay)


@triton.jit(do_not_specialize=["length"])
def _output_kernel(
    q, k, log_decay, segments, state_pointer, delta_pointer, output_pointer, length, q_stride, k_stride,
    SCALE: tl.constexpr,
    heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores read q S + M d of one chunk and value head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = q.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    visible_pairs = find_visible_pairs(segment_ids, C)
    cumulative_decay = sum_log_decay(log_decay, visible_pairs, chunk, head, length, heads, C)
    query_tile = load_tile(q, chunk, q_stride, head // repeats, length, C, K)
    key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    query_scale = compute_inverse_length(query_tile) * SCALE
    key_scale = compute_inverse_length(key_tile)

    pair_decay = tl.exp(
        tl.where(visible_pairs, cumulative_decay[:, None] - cumulative_decay[None, :], float("-inf"))
    )
    attention_scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
    attention_scores = attention_scores * query_scale[:, None] * key_scale[None, :] * pair_decay

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    chunk_offset = chunk * heads + head
    state = tl.load(state_pointer + (chunk_offset * V + n[:, None]) * K + j[None, :])
    delta_values = tl.load(delta_pointer + (chunk_offset * C + i[:, None]) * V + n[None, :])
    read_decay = tl.where(segment_ids == previous_segment, tl.exp(cumulative_decay), 0.0) * query_scale
    output_tile = tl.dot(query_tile, tl.trans(state), input_precision=PRECISION) * read_decay[:, None]
    output_tile = tl.dot(
        attention_scores.to(input_dtype), delta_values, acc=output_tile, input_precision=PRECISION
    )
    token = chunk * C + i
    output_offsets = (token[:, None] * heads + head) * V + n[None, :]
    tl.store(output_pointer + output_offsets, output_tile.to(input_dtype), mask=(token < length)[:, None])


class Saved(NamedTuple):
    """The tensors that :func:`run_forward` keeps for :func:`run_backward`."""

    inverse: Tensor
    """[chunks, Vh, CHUNK, CHUNK], the inverses of the triangular systems."""
    initial: Tensor | None
    """float32 [Vh, K, V], the state before the row; None: the first sequence begins there."""
    transition: Tensor | None
    """float32 [Vh, K, K], the matrix of a shard that one sequence enters and leaves."""


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    exchange: ShardExchange | None,
) -> tuple[Tensor, Saved]:
    """Runs the forward kernels.

    Args:
        q, k: [S, Kh, K]. These and v may have any stride between tokens. The heads of a token are contiguous.
        v: [S, Vh, V].
        log_decay, beta: [S, Vh].
        segment_ids: [S].
        exchange: supplies the state before the row, from the maps of all shards of the row.

    Returns:
        The outputs [S, Vh, V], and what :func:`run_backward` needs.
    """
    num_tokens, num_value_heads, value_width = v.shape
    num_chunks, kernel_sizes = triton.cdiv(num_tokens, CHUNK_TOKENS), read_kernel_sizes(q, v)
    tile_shape = (num_chunks, num_value_heads, CHUNK_TOKENS)
    system_inverse, w, u, delta_values = (
        v.new_empty(*tile_shape, n) for n in (CHUNK_TOKENS, q.shape[2], value_width, value_width)
    )
    chunk_states = v.new_empty(num_chunks, num_value_heads, value_width, q.shape[2])
    write_scale, state_decay = (
        log_decay.new_empty(shape, dtype=torch.float32) for shape in (tile_shape, tile_shape[:2])
    )
    final_state = log_decay.new_empty(num_value_heads, q.shape[2], value_width, dtype=torch.float32)
    rule_output = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    # The three kernels: the triangular systems, the states chunk by chunk, and the outputs.
    token_strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = exchange is not None and exchange.route.tokens_before > 0
    _solve_kernel[num_value_heads, num_chunks](
        k, v, log_decay, beta, segment_ids, system_inverse, w, u, write_scale, state_decay,
        num_tokens, *token_strides[1:],
        BASE=BASE_BLOCK, num_warps=4, **kernel_sizes, INITIAL=continues,
    )  # fmt: skip

    scan_options = choose_scan_options(v)
    initial = transition = None
    if exchange is not None and continues:
        # The map of the shard comes before its states, so that later ranks do not wait for these.
        local_state = torch.zeros_like(final_state)
        if exchange.route.tokens_after:
            columns = value_width
            if exchange.route.is_spanned:
                transition = log_decay.new_empty(num_value_heads, q.shape[2], q.shape[2], dtype=torch.float32)
                columns += q.shape[2]
            scan_kernel[triton.cdiv(columns, scan_options["COLUMNS"]), num_value_heads](
                k, w, u, write_scale, state_decay, None, None, None, local_state, transition,
                num_tokens, exchange.route.last_start // CHUNK_TOKENS, num_chunks, token_strides[1],
                **kernel_sizes, **scan_options, INITIAL=False, MAP=True,
            )  # fmt: skip
        initial = exchange.initial_state(local_state, transition)

    scan_kernel[triton.cdiv(value_width, scan_options["COLUMNS"]), num_value_heads](
        k, w, u, write_scale, state_decay, chunk_states, delta_values, initial, final_state, None,
        num_tokens, 0, num_chunks, token_strides[1],
        **kernel_sizes, **scan_options, INITIAL=continues, MAP=False,
    )  # fmt: skip
    if exchange is not None and not continues:
        exchange.initial_state(final_state, None)
    _output_kernel[num_value_heads, num_chunks](
        q, k, log_decay, segment_ids, chunk_states, delta_values, rule_output, num_tokens, *token_strides[:2],
        SCALE=q.shape[2] ** -0.5, num_warps=4,
        **kernel_sizes, INITIAL=continues,
    )  # fmt: skip
    return rule_output, Saved(system_inverse, initial, transition)
