"""The forward pass of the gated delta rule: triangular systems, states, outputs; and what both passes share.

:mod:`megatron_vl.kernels.linear_attention.gated_delta_rule_triton` defines the quantities.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange
from megatron_vl.kernels.sizes import DELTA_CHUNK as CHUNK_TOKENS
from megatron_vl.kernels.sizes import cdiv
from megatron_vl.kernels.where_kernels_run import has_large_shared_memory

SCAN_COLUMNS = 64
"""Number of the state's V columns that one program of a scan keeps."""


@triton.jit
def load_tile(base_pointer, chunk, token_stride, head, length, C: tl.constexpr, D: tl.constexpr):
    """Loads [C, D] of a tensor [S, heads, D] whose tokens are ``token_stride`` apart; zero after the row."""
    token = chunk * C + tl.arange(0, C)
    pointers = base_pointer + token[:, None] * token_stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(token < length)[:, None], other=0.0)


@triton.jit
def load_factors(base_pointer, chunk, head, heads, C: tl.constexpr):
    """Loads [C] of a tensor [chunks, heads, C]."""
    return tl.load(base_pointer + (chunk * heads + head) * C + tl.arange(0, C))


@triton.jit
def load_segment_ids(segments, chunk, length, C: tl.constexpr, INITIAL: tl.constexpr):
    """The sequence numbers of a chunk's tokens [C], and of the token before the chunk (-1: there is none).

    With INITIAL, the token before the row belongs to the row's first sequence.

    Tokens after the row belong to its last sequence.
    """
    token = chunk * C + tl.arange(0, C)
    segment = tl.load(segments + tl.minimum(token, length - 1))
    previous_segment = tl.load(segments + tl.maximum(chunk * C - 1, 0))
    if INITIAL:
        return segment, previous_segment
    return segment, tl.where(chunk > 0, previous_segment, -1)


@triton.jit
def find_visible_pairs(segment_ids, C: tl.constexpr):
    """Whether token i (row) sees token j (column)."""
    i = tl.arange(0, C)
    return (segment_ids[:, None] == segment_ids[None, :]) & (i[:, None] >= i[None, :])


@triton.jit
def find_visible_pairs_transposed(segment_ids, C: tl.constexpr):
    """Whether token j (row) is seen by token i (column)."""
    i = tl.arange(0, C)
    return (segment_ids[:, None] == segment_ids[None, :]) & (i[:, None] <= i[None, :])


@triton.jit
def compute_border_factors(
    cumulative_decay, decay_sums, segment_ids, previous_segment, segments, chunk, head, length, heads,
    C: tl.constexpr,
):  # fmt: skip
    """read [C], write [C], and the factor by which the chunk multiplies the state."""
    last_segment = tl.load(segments + tl.minimum(chunk * C + C, length) - 1)
    end = tl.load(decay_sums + (chunk * heads + head) * C + C - 1)
    read_decay = tl.where(segment_ids == previous_segment, tl.exp(cumulative_decay), 0.0)
    write_decay = tl.exp(tl.where(segment_ids == last_segment, end - cumulative_decay, float("-inf")))
    return read_decay, write_decay, tl.where(last_segment == previous_segment, tl.exp(end), 0.0)


@triton.jit
def load_beta(beta, chunk, head, length, heads, C: tl.constexpr):
    token = chunk * C + tl.arange(0, C)
    return tl.load(beta + token * heads + head, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def invert_unit_lower(a, C: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular a [C, C], where C is 64.

    The inverses of diagonal blocks are joined into those of blocks twice as large. The product (1 - a)
    (1 + a^2) (1 + a^4) ... would be shorter, but its terms cancel if keys are alike.
    """
    i = tl.arange(0, C)
    # The highest bit of two indices' difference is that of the smallest block that holds both.
    difference = i[:, None] ^ i[None, :]
    x = tl.where(difference == 0, 1.0, 0.0) - tl.where(difference == 1, a, 0.0)
    for level in tl.static_range(1, 6):
        is_joined = difference // 2**level == 1
        left_product = tl.where(is_joined, tl.dot(x, a, input_precision=PRECISION), 0.0)
        x -= tl.dot(left_product, x, input_precision=PRECISION)
    return x


def read_kernel_sizes(q: Tensor, v: Tensor) -> dict[str, int | str]:
    """The sizes of a launch. All ranks have the same, so that they compute the same bits."""
    heads = v.shape[1]
    return {
        "heads": heads,
        "repeats": heads // q.shape[1],
        "K": q.shape[2],
        "V": v.shape[2],
        "C": CHUNK_TOKENS,
        # Of products of float32 operands: those that invert the triangular system.
        "PRECISION": "tf32",
    }


def choose_scan_options(v: Tensor) -> dict[str, int]:
    # With more heads, two programs share a multiprocessor, and a third stage would leave too little memory.
    # It takes 105 KiB of shared memory.
    has_room = v.shape[1] <= 32 and has_large_shared_memory(v.device)
    return {"COLUMNS": min(SCAN_COLUMNS, v.shape[2]), "STAGES": 3 if has_room else 2, "num_warps": 4}


# --- States, from chunk to chunk ----------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length", "chunks", "map_start"])
def scan_kernel(
    k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer, transition,
    length, map_start, chunks, k_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Stores the state before each chunk, and d, for one value head and COLUMNS columns of its state.

    The state is kept as [V, K], so that products take it from registers.

    With MAP, it stores what the chunks from ``map_start`` on make of a zero state (``final_pointer``, V
    columns) and of the unit matrix (``transition``, K more columns, which have no values).
    """
    column_block, head = tl.program_id(0), tl.program_id(1)
    input_dtype: tl.constexpr = w.dtype.element_ty
    i, j, n = tl.arange(0, C), tl.arange(0, K), column_block * COLUMNS + tl.arange(0, COLUMNS)
    has_values = n < V
    state = tl.zeros((COLUMNS, K), tl.float32)
    first_chunk = 0
    if MAP:
        state = tl.where((n - V)[:, None] == j[None, :], 1.0, state)
        first_chunk = map_start
    if INITIAL:
        state += tl.load(initial + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None])
    for chunk_id in tl.range(first_chunk, chunks, num_stages=STAGES):
        chunk = tl.cast(chunk_id, tl.int64)
        chunk_offset = (chunk * heads + head) * C
        key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
        w_tile = tl.load(w + (chunk_offset + i[:, None]) * K + j[None, :])
        if MAP:
            u_tile = tl.load(u + (chunk_offset + i[None, :]) * V + n[:, None], has_values[:, None], 0.0)
        else:
            u_tile = tl.load(u + (chunk_offset + i[None, :]) * V + n[:, None])
        write_factor = tl.load(write_scale + chunk_offset + i)
        chunk_decay = tl.load(state_decay + chunk * heads + head)

        rounded_state = state.to(input_dtype)
        if not MAP:
            state_offsets = ((chunk * heads + head) * V + n[:, None]) * K + j[None, :]
            tl.store(state_pointer + state_offsets, rounded_state)
        delta_values = u_tile.to(tl.float32) - tl.dot(
            rounded_state, tl.trans(w_tile), input_precision=PRECISION
        )
        if not MAP:
            delta_offsets = (chunk_offset + i[None, :]) * V + n[:, None]
            tl.store(delta_pointer + delta_offsets, delta_values.to(input_dtype))
        state = state * chunk_decay
        state = tl.dot(
            (delta_values * write_factor[None, :]).to(input_dtype),
            key_tile,
            acc=state,
            input_precision=PRECISION,
        )
    row = head.to(tl.int64) * K + j[None, :]
    if MAP:
        tl.store(final_pointer + row * V + n[:, None], state, mask=has_values[:, None])
        if transition is not None:
            matrix_mask = ((n >= V) & (n < V + K))[:, None]
            tl.store(transition + row * K + (n - V)[:, None], state, mask=matrix_mask)
    else:
        tl.store(final_pointer + row * V + n[:, None], state)


@triton.jit(do_not_specialize=["length", "chunks"])
def backward_scan_kernel(
    q, k, w, z, output_grad_pointer, read_scale, beta_scale, state_decay, state_grad_pointer,
    delta_grad_pointer, dinitial, final_state_grad, length, chunks, q_stride, k_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, OF_FINAL: tl.constexpr, INITIAL: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the state after each chunk, and e.

    With INITIAL, it also stores the gradient of the state before the row; without STORE, only that.
    """
    column_block, head = tl.program_id(0), tl.program_id(1)
    input_dtype: tl.constexpr = w.dtype.element_ty
    i, j, n = tl.arange(0, C), tl.arange(0, K), column_block * COLUMNS + tl.arange(0, COLUMNS)
    state_grad = tl.zeros((COLUMNS, K), tl.float32)
    if OF_FINAL:
        state_grad += tl.load(final_state_grad + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None]).to(
            tl.float32
        )
    for chunks_done in tl.range(0, chunks, num_stages=STAGES):
        chunk = tl.cast(chunks - 1 - chunks_done, tl.int64)
        chunk_offset = (chunk * heads + head) * C
        token = chunk * C + i
        query_tile = load_tile(q, chunk, q_stride, head // repeats, length, C, K)
        key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
        w_tile = tl.load(w + (chunk_offset + i[:, None]) * K + j[None, :])
        z_tile = tl.load(z + (chunk_offset + i[None, :]) * V + n[:, None])
        output_offsets = (token[None, :] * heads + head) * V + n[:, None]
        output_grad = tl.load(output_grad_pointer + output_offsets, mask=(token < length)[None, :], other=0.0)
        read_factor = tl.load(read_scale + chunk_offset + i)
        beta_factor = tl.load(beta_scale + chunk_offset + i)
        chunk_decay = tl.load(state_decay + chunk * heads + head)

        rounded_grad = state_grad.to(input_dtype)
        if STORE:
            tl.store(
                state_grad_pointer + ((chunk * heads + head) * V + n[:, None]) * K + j[None, :], rounded_grad
            )
        delta_grad = z_tile.to(tl.float32) + tl.dot(rounded_grad, tl.trans(w_tile), input_precision=PRECISION)
        if STORE:
            tl.store(
                delta_grad_pointer + (chunk_offset + i[None, :]) * V + n[:, None], delta_grad.to(input_dtype)
            )
        state_grad = state_grad * chunk_decay
        scaled_output_grad = (output_grad.to(tl.float32) * read_factor[None, :]).to(input_dtype)
        state_grad = tl.dot(scaled_output_grad, query_tile, acc=state_grad, input_precision=PRECISION)
        state_grad = tl.dot(
            (delta_grad * -beta_factor[None, :]).to(input_dtype),
            key_tile,
            acc=state_grad,
            input_precision=PRECISION,
        )
    if INITIAL:
        tl.store(dinitial + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None], state_grad)


@triton.jit(do_not_specialize=["length", "chunks"])
def both_scans_kernel(
    q, k, w, u, w_back, z, output_grad_pointer, write_scale, read_scale, beta_scale, state_decay,
    state_pointer, state_grad_pointer, delta_pointer, delta_grad_pointer, initial, final_pointer, dinitial,
    final_state_grad, length, chunks, q_stride, k_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, OF_FINAL: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Runs the forward scan again, or the backward scan. Neither needs the other, so they run in parallel."""
    if tl.program_id(2) == 0:
        scan_kernel(
            k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer, None,
            length, 0, chunks, k_stride, heads, repeats,
            K, V, C, COLUMNS, STAGES, PRECISION, INITIAL, False,
        )  # fmt: skip
    else:
        backward_scan_kernel(
            q, k, w_back, z, output_grad_pointer, read_scale, beta_scale, state_decay, state_grad_pointer,
            delta_grad_pointer, dinitial, final_state_grad,
            length, chunks, q_stride, k_stride, heads, repeats,
            K, V, C, COLUMNS, STAGES, PRECISION, OF_FINAL, INITIAL, True,
        )  # fmt: skip


# --- The forward pass ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["length"])
def _factors_kernel(
    q, k, log_decay, segments, decay_sums, query_scales, key_scales, length, q_stride, k_stride, heads,
    repeats,
    K: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Stores c and the inverse lengths of queries and keys of one chunk and key head.

    All kernels but the scans read them. Computing them in each kernel took up to half of its instructions.
    """
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = chunk * C + tl.arange(0, C)
    scale_offsets = (chunk * tl.num_programs(0) + key_head) * C + tl.arange(0, C)
    query_tile = load_tile(q, chunk, q_stride, key_head, length, C, K).to(tl.float32)
    tl.store(query_scales + scale_offsets, tl.rsqrt(tl.sum(query_tile * query_tile, 1) + 1e-6))
    key_tile = load_tile(k, chunk, k_stride, key_head, length, C, K).to(tl.float32)
    tl.store(key_scales + scale_offsets, tl.rsqrt(tl.sum(key_tile * key_tile, 1) + 1e-6))

    # c is summed within each sequence, so that other sequences do not change its rounding.
    segment_ids, _ = load_segment_ids(segments, chunk, length, C, False)
    visible_pairs = find_visible_pairs(segment_ids, C)
    for repeat in tl.range(0, repeats):
        head = key_head * repeats + repeat
        token_decay = tl.load(log_decay + token * heads + head, mask=token < length, other=0.0)
        decay_sum = tl.sum(tl.where(visible_pairs, token_decay.to(tl.float32)[None, :], 0.0), 1)
        tl.store(decay_sums + (chunk * heads + head) * C + tl.arange(0, C), decay_sum)


@triton.jit(do_not_specialize=["length"])
def _solve_kernel(
    k, v, decay_sums, key_scales, beta, segments, inverse_pointer, w, u, write_scale, state_decay, length,
    k_stride, v_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores T, w = T (beta read k), u = T (beta v) and the scan's factors of one chunk and value head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    cumulative_decay = load_factors(decay_sums, chunk, head, heads, C)
    read_decay, write_decay, chunk_decay = compute_border_factors(
        cumulative_decay, decay_sums, segment_ids, previous_segment, segments, chunk, head, length, heads, C
    )
    beta_tile = load_beta(beta, chunk, head, length, heads, C)
    key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    key_scale = load_factors(key_scales, chunk, head // repeats, heads // repeats, C)

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    strictly_lower = find_visible_pairs(segment_ids, C) & (i[:, None] > i[None, :])
    pair_decay = tl.exp(
        tl.where(strictly_lower, cumulative_decay[:, None] - cumulative_decay[None, :], float("-inf"))
    )
    system_matrix = (
        tl.dot(key_tile, tl.trans(key_tile), input_precision=PRECISION)
        * key_scale[None, :]
        * (beta_tile * key_scale)[:, None]
        * pair_decay
    )
    system_inverse = invert_unit_lower(system_matrix, C, PRECISION)

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
    q, k, decay_sums, query_scales, key_scales, segments, state_pointer, delta_pointer, output_pointer,
    length, q_stride, k_stride,
    SCALE: tl.constexpr,
    heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores read q S + M d of one chunk and value head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = q.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    visible_pairs = find_visible_pairs(segment_ids, C)
    cumulative_decay = load_factors(decay_sums, chunk, head, heads, C)
    query_tile = load_tile(q, chunk, q_stride, head // repeats, length, C, K)
    key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    query_scale = load_factors(query_scales, chunk, head // repeats, heads // repeats, C) * SCALE
    key_scale = load_factors(key_scales, chunk, head // repeats, heads // repeats, C)

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

    decay_sums: Tensor
    """float32 [chunks, Vh, CHUNK], c."""
    query_scales: Tensor
    """float32 [chunks, Kh, CHUNK], the inverse lengths of queries."""
    key_scales: Tensor
    """float32 [chunks, Kh, CHUNK], the inverse lengths of keys."""
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
    num_chunks, kernel_sizes = cdiv(num_tokens, CHUNK_TOKENS), read_kernel_sizes(q, v)
    tile_shape = (num_chunks, num_value_heads, CHUNK_TOKENS)
    system_inverse, w, u, delta_values = (
        v.new_empty(*tile_shape, n) for n in (CHUNK_TOKENS, q.shape[2], value_width, value_width)
    )
    chunk_states = v.new_empty(num_chunks, num_value_heads, value_width, q.shape[2])
    decay_sums, write_scale = (log_decay.new_empty(tile_shape, dtype=torch.float32) for _ in range(2))
    state_decay = log_decay.new_empty(tile_shape[:2], dtype=torch.float32)
    query_scales, key_scales = (
        log_decay.new_empty(num_chunks, q.shape[1], CHUNK_TOKENS, dtype=torch.float32) for _ in range(2)
    )
    final_state = log_decay.new_empty(num_value_heads, q.shape[2], value_width, dtype=torch.float32)
    rule_output = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    # Four kernels: factors of tokens, the triangular systems, the states chunk by chunk, and the outputs.
    token_strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = exchange is not None and exchange.route.tokens_before > 0
    _factors_kernel[q.shape[1], num_chunks](
        q, k, log_decay, segment_ids, decay_sums, query_scales, key_scales, num_tokens, *token_strides[:2],
        num_value_heads, num_value_heads // q.shape[1], K=q.shape[2], C=CHUNK_TOKENS, num_warps=4,
    )  # fmt: skip
    _solve_kernel[num_value_heads, num_chunks](
        k, v, decay_sums, key_scales, beta, segment_ids, system_inverse, w, u, write_scale, state_decay,
        num_tokens, *token_strides[1:], num_warps=4, **kernel_sizes, INITIAL=continues,
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
            scan_kernel[cdiv(columns, scan_options["COLUMNS"]), num_value_heads](
                k, w, u, write_scale, state_decay, None, None, None, local_state, transition,
                num_tokens, exchange.route.last_start // CHUNK_TOKENS, num_chunks, token_strides[1],
                **kernel_sizes, **scan_options, INITIAL=False, MAP=True,
            )  # fmt: skip
        initial = exchange.initial_state(local_state, transition)

    scan_kernel[cdiv(value_width, scan_options["COLUMNS"]), num_value_heads](
        k, w, u, write_scale, state_decay, chunk_states, delta_values, initial, final_state, None,
        num_tokens, 0, num_chunks, token_strides[1],
        **kernel_sizes, **scan_options, INITIAL=continues, MAP=False,
    )  # fmt: skip
    if exchange is not None and not continues:
        exchange.initial_state(final_state, None)
    _output_kernel[num_value_heads, num_chunks](
        q, k, decay_sums, query_scales, key_scales, segment_ids, chunk_states, delta_values, rule_output,
        num_tokens, *token_strides[:2], SCALE=q.shape[2] ** -0.5, num_warps=4,
        **kernel_sizes, INITIAL=continues,
    )  # fmt: skip
    return rule_output, Saved(decay_sums, query_scales, key_scales, system_inverse, initial, transition)
