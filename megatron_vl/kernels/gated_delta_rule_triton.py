"""The Triton kernels of :mod:`megatron_vl.kernels.gated_delta_rule`, forward and backward.

A row is cut into chunks of 64 tokens, regardless of where its sequences begin. Masks keep the sequences
apart, so shapes depend only on the length of the row, and the host reads nothing from the device. Each chunk
and value head has these quantities:

* c: the logarithm of the decay up to each token, from the beginning of its sequence or of the chunk;
* P_ij = exp(c_i - c_j) for pairs i >= j of one sequence, else 0;
* read = exp(c) for tokens that continue the last sequence of the previous chunk, else 0;
* write = exp(c_last - c) for tokens of the chunk's last sequence, else 0;
* S: the state [K, V] before the chunk.

A row may begin with a state, which its first sequence continues (INITIAL).

The forward pass computes

    T = (1 + strictly lower part of beta_i (k_i k_j) P_ij)^-1
    d = T (beta v) - T (beta read k) S
    out = read q S + ((q_i q_j) P) d
    S <- read_last S + (write k)^T d

The backward pass computes, with the gradient R of the state after the chunk, M = (q_i k_j) P, and
e = T^T (gradient of d),

    e = T^T M^T dout + T^T (write k) R
    R <- read_last R + (read q)^T dout - (beta read k)^T e

If context-parallel ranks share the row, each scans its shard twice. The first scan gives the shard's map: the
last state from a zero state and, if one sequence enters and leaves the shard, the matrix that multiplies the
state before it. After the exchange, the second scan begins with the right state. The backward scan is done
twice in the same way. A rank whose initial state (backward: final gradient) is zero needs only one scan.

All other gradients follow from S, R, d and e, chunk by chunk. The gradient of the triangular system is
-e d^T. Products take queries and keys before normalisation, and the inverse lengths of these scale the
products in float32. There are no atomic operations and no autotuning: results have the same bits in each run
and on each rank.

On Hopper, Triton 3.4 to 3.7.0 computes a wrong product if its left operand is the transpose of another
product's result. So results of products are never transposed here; their transposes are computed as separate
products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.shard_exchange import ShardExchange

CHUNK_TOKENS = 64
_BASE_BLOCK = 16
"""Size of the diagonal blocks that are inverted row by row."""


@dataclass(frozen=True)
class DeltaRuleConfig:
    """How the kernels divide their work. It is fixed, so that all ranks compute the same bits.

    ``solve_warps`` to ``key_warps`` are the numbers of warps of the kernels.
    """

    solve_warps: int = 4
    scan_warps: int = 4
    output_warps: int = 4
    prepare_warps: int = 4
    query_warps: int = 8
    pair_warps: int = 4
    key_warps: int = 8
    scan_columns: int = 64
    """Number of the state's V columns that one program of a scan keeps."""
    scan_stages: int = 3
    """Stages of a scan's software pipeline."""
    solve_precision: str = "tf32"
    """Input precision of products of float32 operands: those that invert the triangular system."""


DELTA_RULE_CONFIG = DeltaRuleConfig()


@triton.jit
def _load_tile(base_pointer, chunk, token_stride, head, length, C: tl.constexpr, D: tl.constexpr):
    """Loads [C, D] of a tensor [S, heads, D] whose tokens are ``token_stride`` apart; zero after the row."""
    token = chunk * C + tl.arange(0, C)
    pointers = base_pointer + token[:, None] * token_stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(pointers, mask=(token < length)[:, None], other=0.0)


@triton.jit
def _inverse_length(x):
    x_fp32 = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x_fp32 * x_fp32, 1) + 1e-6)


@triton.jit
def _segment_ids(segments, chunk, length, C: tl.constexpr, INITIAL: tl.constexpr):
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
def _visible_pairs(segment_ids, C: tl.constexpr):
    """Whether token i (row) sees token j (column)."""
    i = tl.arange(0, C)
    return (segment_ids[:, None] == segment_ids[None, :]) & (i[:, None] >= i[None, :])


@triton.jit
def _visible_pairs_transposed(segment_ids, C: tl.constexpr):
    """Whether token j (row) is seen by token i (column)."""
    i = tl.arange(0, C)
    return (segment_ids[:, None] == segment_ids[None, :]) & (i[:, None] <= i[None, :])


@triton.jit
def _cumulative_decay(log_decay, visible_pairs, chunk, head, length, heads, C: tl.constexpr):
    """c [C]. It is summed within each sequence, so that other sequences do not change its rounding."""
    token = chunk * C + tl.arange(0, C)
    token_decay = tl.load(log_decay + token * heads + head, mask=token < length, other=0.0).to(tl.float32)
    return tl.sum(tl.where(visible_pairs, token_decay[None, :], 0.0), 1)


@triton.jit
def _border_factors(cumulative_decay, segment_ids, previous_segment, C: tl.constexpr):
    """read [C], write [C], and the factor by which the chunk multiplies the state."""
    i = tl.arange(0, C)
    last_segment = tl.sum(tl.where(i == C - 1, segment_ids, 0), 0)
    end = tl.sum(tl.where(i == C - 1, cumulative_decay, 0.0), 0)
    read_decay = tl.where(segment_ids == previous_segment, tl.exp(cumulative_decay), 0.0)
    write_decay = tl.exp(tl.where(segment_ids == last_segment, end - cumulative_decay, float("-inf")))
    return read_decay, write_decay, tl.where(last_segment == previous_segment, tl.exp(end), 0.0)


@triton.jit
def _load_beta(beta, chunk, head, length, heads, C: tl.constexpr):
    token = chunk * C + tl.arange(0, C)
    return tl.load(beta + token * heads + head, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def _join_inverse_blocks(x, a, C: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of diagonal blocks of size 2 WIDTH, from those of size WIDTH."""
    i = tl.arange(0, C)
    pair_index, half_index = i // (2 * WIDTH), i // WIDTH
    is_off_diagonal = (pair_index[:, None] == pair_index[None, :]) & (
        half_index[:, None] != half_index[None, :]
    )
    left_product = tl.dot(x, tl.where(is_off_diagonal, a, 0.0), input_precision=PRECISION)
    return x - tl.dot(left_product, x, input_precision=PRECISION)


@triton.jit
def _unit_lower_inverse(a, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular a [C, C], where C is 4 BASE.

    Diagonal blocks are inverted row by row, and larger blocks are joined from them. The product (1 - a)
    (1 + a^2) (1 + a^4) ... would be shorter, but its terms cancel if keys are alike.
    """
    B: tl.constexpr = C // BASE
    block_index, row_index = tl.arange(0, B), tl.arange(0, BASE)
    is_diagonal = block_index[:, None, None, None] == block_index[None, None, :, None]
    diagonal_blocks = tl.sum(tl.where(is_diagonal, tl.reshape(a, (B, BASE, B, BASE)), 0.0), 2)
    x = tl.where(
        row_index[None, :, None] == row_index[None, None, :], 1.0, tl.zeros((B, BASE, BASE), tl.float32)
    )
    for i in tl.static_range(1, BASE):
        row_values = tl.sum(tl.where(row_index[None, :, None] == i, diagonal_blocks, 0.0), 1)
        row_update = tl.sum(row_values[:, :, None] * x, 1)
        x = tl.where(row_index[None, :, None] == i, x - row_update[:, None, :], x)

    x = tl.broadcast_to(x[:, :, None, :], (B, BASE, B, BASE))
    x = tl.reshape(tl.where(is_diagonal, x, 0.0), (C, C))
    x = _join_inverse_blocks(x, a, C, BASE, PRECISION)
    return _join_inverse_blocks(x, a, C, 2 * BASE, PRECISION)


@triton.jit(do_not_specialize=["length"])
def _solve_kernel(
    k,
    v,
    g,
    beta,
    segments,
    inverse_pointer,
    w,
    u,
    write_scale,
    state_decay,
    length,
    k_stride,
    v_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BASE: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Stores T, w = T (beta read k), u = T (beta v) and the scan's factors of one chunk and value head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = _segment_ids(segments, chunk, length, C, INITIAL)
    visible_pairs = _visible_pairs(segment_ids, C)
    cumulative_decay = _cumulative_decay(g, visible_pairs, chunk, head, length, heads, C)
    read_decay, write_decay, chunk_decay = _border_factors(cumulative_decay, segment_ids, previous_segment, C)
    beta_tile = _load_beta(beta, chunk, head, length, heads, C)
    key_tile = _load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    key_scale = _inverse_length(key_tile)

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
    system_inverse = _unit_lower_inverse(system_matrix, C, BASE, PRECISION)

    chunk_offset = (chunk * heads + head) * C
    tl.store(inverse_pointer + (chunk_offset + i[:, None]) * C + i[None, :], system_inverse.to(input_dtype))
    scaled_inverse = (system_inverse * (beta_tile * read_decay * key_scale)[None, :]).to(input_dtype)
    product = tl.dot(scaled_inverse, key_tile, input_precision=PRECISION)
    tl.store(w + (chunk_offset + i[:, None]) * K + j[None, :], product.to(input_dtype))
    value_tile = _load_tile(v, chunk, v_stride, head, length, C, V)
    product = tl.dot(
        (system_inverse * beta_tile[None, :]).to(input_dtype), value_tile, input_precision=PRECISION
    )
    tl.store(u + (chunk_offset + i[:, None]) * V + n[None, :], product.to(input_dtype))
    tl.store(write_scale + chunk_offset + i, write_decay * key_scale)
    tl.store(state_decay + chunk * heads + head, chunk_decay)


@triton.jit
def _scan_forward(
    k,
    w,
    u,
    write_scale,
    state_decay,
    state_pointer,
    delta_pointer,
    initial,
    final_pointer,
    head,
    column_block,
    length,
    chunks,
    k_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Stores the state before each chunk, and d.

    The state is kept as [V, K], so that products take it from registers.
    """
    input_dtype: tl.constexpr = w.dtype.element_ty
    i, j, n = tl.arange(0, C), tl.arange(0, K), column_block * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.zeros((COLUMNS, K), tl.float32)
    if INITIAL:
        state += tl.load(initial + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None])
    for chunk_id in tl.range(0, chunks, num_stages=STAGES):
        chunk = tl.cast(chunk_id, tl.int64)
        chunk_offset = (chunk * heads + head) * C
        key_tile = _load_tile(k, chunk, k_stride, head // repeats, length, C, K)
        w_tile = tl.load(w + (chunk_offset + i[:, None]) * K + j[None, :])
        u_tile = tl.load(u + (chunk_offset + i[None, :]) * V + n[:, None])
        write_factor = tl.load(write_scale + chunk_offset + i)
        chunk_decay = tl.load(state_decay + chunk * heads + head)

        rounded_state = state.to(input_dtype)
        tl.store(state_pointer + ((chunk * heads + head) * V + n[:, None]) * K + j[None, :], rounded_state)
        delta_values = u_tile.to(tl.float32) - tl.dot(
            rounded_state, tl.trans(w_tile), input_precision=PRECISION
        )
        tl.store(delta_pointer + (chunk_offset + i[None, :]) * V + n[:, None], delta_values.to(input_dtype))
        state = state * chunk_decay
        state = tl.dot(
            (delta_values * write_factor[None, :]).to(input_dtype),
            key_tile,
            acc=state,
            input_precision=PRECISION,
        )
    tl.store(final_pointer + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None], state)


@triton.jit
def _scan_backward(
    q,
    k,
    w,
    z,
    output_grad_pointer,
    read_scale,
    beta_scale,
    state_decay,
    state_grad_pointer,
    delta_grad_pointer,
    dinitial,
    final_state_grad,
    head,
    column_block,
    length,
    chunks,
    q_stride,
    k_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OF_FINAL: tl.constexpr,
    INITIAL: tl.constexpr,
    STORE: tl.constexpr,
):
    """Stores the gradient of the state after each chunk, and e.

    With INITIAL, it also stores the gradient of the state before the row; without STORE, only that.
    """
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
        query_tile = _load_tile(q, chunk, q_stride, head // repeats, length, C, K)
        key_tile = _load_tile(k, chunk, k_stride, head // repeats, length, C, K)
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
def _scan_kernel(
    k,
    w,
    u,
    write_scale,
    state_decay,
    state_pointer,
    delta_pointer,
    initial,
    final_pointer,
    length,
    chunks,
    k_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Runs :func:`_scan_forward` for one value head and COLUMNS columns of its state."""
    column_block, head = tl.program_id(0), tl.program_id(1)
    _scan_forward(
        k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer,
        head, column_block, length, chunks, k_stride, heads, repeats,
        K, V, C, COLUMNS, STAGES, PRECISION, INITIAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "chunks"])
def _both_scans_kernel(
    q,
    k,
    w,
    u,
    w_back,
    z,
    output_grad_pointer,
    write_scale,
    read_scale,
    beta_scale,
    state_decay,
    state_pointer,
    state_grad_pointer,
    delta_pointer,
    delta_grad_pointer,
    initial,
    final_pointer,
    dinitial,
    final_state_grad,
    length,
    chunks,
    q_stride,
    k_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    OF_FINAL: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Runs the forward scan again, or the backward scan. Neither needs the other, so they run in parallel."""
    column_block, head = tl.program_id(0), tl.program_id(1)
    if tl.program_id(2) == 0:
        _scan_forward(
            k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer,
            head, column_block, length, chunks, k_stride, heads, repeats,
            K, V, C, COLUMNS, STAGES, PRECISION, INITIAL,
        )  # fmt: skip
    else:
        _scan_backward(
            q, k, w_back, z, output_grad_pointer, read_scale, beta_scale, state_decay, state_grad_pointer,
            delta_grad_pointer, dinitial, final_state_grad,
            head, column_block, length, chunks, q_stride, k_stride, heads, repeats,
            K, V, C, COLUMNS, STAGES, PRECISION, OF_FINAL, INITIAL, True,
        )  # fmt: skip


@triton.jit(do_not_specialize=["length", "first_chunk", "chunks"])
def _shard_map(
    k,
    w,
    u,
    write_scale,
    survives,
    local_state,
    transition,
    length,
    first_chunk,
    chunks,
    k_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores what the chunks from ``first_chunk`` on make of a zero state, and of the unit matrix.

    The scan is that of :func:`_scan_forward` for COLUMNS columns of ``local_state`` (V columns) or of
    ``transition`` (K columns, which have no values).
    """
    part, head = tl.program_id(0), tl.program_id(1)
    kind: tl.constexpr = w.dtype.element_ty
    i, j, n = tl.arange(0, C), tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
    has_values = n < V
    state = tl.where((n - V)[:, None] == j[None, :], 1.0, tl.zeros((COLUMNS, K), tl.float32))
    for chunk_id in tl.range(first_chunk, chunks, num_stages=STAGES):
        chunk = tl.cast(chunk_id, tl.int64)
        here = (chunk * heads + head) * C
        keys = _load_tile(k, chunk, k_stride, head // repeats, length, C, K)
        of_keys = tl.load(w + (here + i[:, None]) * K + j[None, :])
        of_values = tl.load(u + (here + i[None, :]) * V + n[:, None], mask=has_values[:, None], other=0.0)
        scale = tl.load(write_scale + here + i)
        alive = tl.load(survives + chunk * heads + head)

        rounded = state.to(kind)
        new = of_values.to(tl.float32) - tl.dot(rounded, tl.trans(of_keys), input_precision=PRECISION)
        state = state * alive
        state = tl.dot((new * scale[None, :]).to(kind), keys, acc=state, input_precision=PRECISION)

    row = head.to(tl.int64) * K + j[None, :]
    tl.store(local_state + row * V + n[:, None], state, mask=has_values[:, None])
    if transition is not None:
        tl.store(transition + row * K + (n - V)[:, None], state, mask=((n >= V) & (n < V + K))[:, None])


@triton.jit(do_not_specialize=["length", "chunks"])
def _initial_gradient(
    q,
    k,
    w_back,
    z,
    dout,
    read_scale,
    beta_scale,
    survives,
    dinitial,
    length,
    chunks,
    q_stride,
    k_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores the gradient of the state before the row from the outputs of the first ``chunks`` chunks."""
    part, head = tl.program_id(0), tl.program_id(1)
    _scan_backward(
        q, k, w_back, z, dout, read_scale, beta_scale, survives, dinitial, dinitial, dinitial, dinitial, head,
        part, length, chunks, q_stride, k_stride, heads, repeats, K, V, C, COLUMNS, STAGES, PRECISION, False,
        True, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length"])
def _output_kernel(
    q,
    k,
    log_decay,
    segments,
    state_pointer,
    delta_pointer,
    output_pointer,
    length,
    q_stride,
    k_stride,
    SCALE: tl.constexpr,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Stores read q S + M d of one chunk and value head."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = q.dtype.element_ty
    segment_ids, previous_segment = _segment_ids(segments, chunk, length, C, INITIAL)
    visible_pairs = _visible_pairs(segment_ids, C)
    cumulative_decay = _cumulative_decay(log_decay, visible_pairs, chunk, head, length, heads, C)
    query_tile = _load_tile(q, chunk, q_stride, head // repeats, length, C, K)
    key_tile = _load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    query_scale = _inverse_length(query_tile) * SCALE
    key_scale = _inverse_length(key_tile)

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


@triton.jit(do_not_specialize=["length"])
def _prepare_backward_kernel(
    q,
    k,
    v,
    log_decay,
    beta,
    segments,
    output_grad_pointer,
    inverse_pointer,
    w,
    u,
    w_back,
    z,
    write_scale,
    read_scale,
    beta_scale,
    state_decay,
    length,
    q_stride,
    k_stride,
    v_stride,
    SCALE: tl.constexpr,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Stores the inputs of both scans: w and u again, T^T (write k), T^T M^T dout, and factors of tokens."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = _segment_ids(segments, chunk, length, C, INITIAL)
    cumulative_decay = _cumulative_decay(
        log_decay, _visible_pairs(segment_ids, C), chunk, head, length, heads, C
    )
    read_decay, write_decay, chunk_decay = _border_factors(cumulative_decay, segment_ids, previous_segment, C)
    beta_tile = _load_beta(beta, chunk, head, length, heads, C)
    query_tile = _load_tile(q, chunk, q_stride, head // repeats, length, C, K)
    key_tile = _load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    query_scale = _inverse_length(query_tile) * SCALE
    key_scale = _inverse_length(key_tile)

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    chunk_offset = (chunk * heads + head) * C
    system_inverse = tl.load(inverse_pointer + (chunk_offset + i[:, None]) * C + i[None, :]).to(tl.float32)
    product = tl.dot(
        (system_inverse * (beta_tile * read_decay * key_scale)[None, :]).to(input_dtype),
        key_tile,
        input_precision=PRECISION,
    )
    tl.store(w + (chunk_offset + i[:, None]) * K + j[None, :], product.to(input_dtype))
    value_tile = _load_tile(v, chunk, v_stride, head, length, C, V)
    product = tl.dot(
        (system_inverse * beta_tile[None, :]).to(input_dtype), value_tile, input_precision=PRECISION
    )
    tl.store(u + (chunk_offset + i[:, None]) * V + n[None, :], product.to(input_dtype))

    transposed_inverse = tl.load(inverse_pointer + (chunk_offset + i[None, :]) * C + i[:, None])
    scaled_inverse = (transposed_inverse.to(tl.float32) * (write_decay * key_scale)[None, :]).to(input_dtype)
    product = tl.dot(scaled_inverse, key_tile, input_precision=PRECISION)
    tl.store(w_back + (chunk_offset + i[:, None]) * K + j[None, :], product.to(input_dtype))
    visible_transposed = _visible_pairs_transposed(segment_ids, C)
    pair_decay = tl.exp(
        tl.where(visible_transposed, cumulative_decay[None, :] - cumulative_decay[:, None], float("-inf"))
    )
    attention_scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
    attention_scores = attention_scores * key_scale[:, None] * query_scale[None, :] * pair_decay
    inverse_times_scores = tl.dot(
        transposed_inverse, attention_scores.to(input_dtype), input_precision=PRECISION
    )
    output_grad = _load_tile(output_grad_pointer, chunk, heads * V, head, length, C, V)
    product = tl.dot(inverse_times_scores.to(input_dtype), output_grad, input_precision=PRECISION)
    tl.store(z + (chunk_offset + i[:, None]) * V + n[None, :], product.to(input_dtype))

    tl.store(write_scale + chunk_offset + i, write_decay * key_scale)
    tl.store(read_scale + chunk_offset + i, read_decay * query_scale)
    tl.store(beta_scale + chunk_offset + i, beta_tile * read_decay * key_scale)
    tl.store(state_decay + chunk * heads + head, chunk_decay)


@triton.jit
def _gradient_through_normalization(x, scaled_grad, inverse_length, factor):
    """The gradient of x, from ``scaled_grad``, that of factor * x * scale. ``inverse_length`` is 1 / |x|."""
    unit_vector = x.to(tl.float32) * inverse_length[:, None]
    radial_grad = tl.sum(unit_vector * scaled_grad, 1)
    return (scaled_grad - unit_vector * radial_grad[:, None]) * (inverse_length * factor)[:, None]


@triton.jit
def _multiply_by_state(
    x, state_pointer, chunk_index, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr
):
    """The product of x [C, V] and a state [V, K], computed in two halves to save registers."""
    i, j = tl.arange(0, C), tl.arange(0, K)
    product = tl.zeros((C, K), tl.float32)
    for half_index in tl.range(0, 2, num_stages=1):
        m = half_index * (V // 2) + tl.arange(0, V // 2)
        x_half = tl.load(x + (chunk_index * C + i[:, None]) * V + m[None, :])
        state = tl.load(state_pointer + (chunk_index * V + m[:, None]) * K + j[None, :])
        product = tl.dot(x_half, state, acc=product, input_precision=PRECISION)
    return product


@triton.jit(do_not_specialize=["length"])
def _query_gradients_kernel(
    q,
    k,
    log_decay,
    segments,
    output_grad_pointer,
    delta_pointer,
    state_pointer,
    query_grad_pointer,
    decay_grad_pointer,
    length,
    q_stride,
    k_stride,
    dq_stride,
    heads,
    repeats,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Stores dq of a chunk and key head, summed over its value heads, and c's gradient through queries."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = q.dtype.element_ty
    segment_ids, previous_segment = _segment_ids(segments, chunk, length, C, INITIAL)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = chunk * C + i
    visible_pairs = _visible_pairs(segment_ids, C)
    query_tile = _load_tile(q, chunk, q_stride, key_head, length, C, K)
    key_tile = _load_tile(k, chunk, k_stride, key_head, length, C, K)
    query_scale, key_scale = _inverse_length(query_tile), _inverse_length(key_tile)

    query_grads = tl.zeros((C, K), tl.float32)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        chunk_offset = chunk * heads + head
        cumulative_decay = _cumulative_decay(log_decay, visible_pairs, chunk, head, length, heads, C)
        read_decay = tl.where(segment_ids == previous_segment, tl.exp(cumulative_decay), 0.0)
        output_grad = _load_tile(output_grad_pointer, chunk, heads * V, head, length, C, V)
        delta_values = tl.load(delta_pointer + (chunk_offset * C + i[:, None]) * V + n[None, :])

        pair_decay = tl.exp(
            tl.where(visible_pairs, cumulative_decay[:, None] - cumulative_decay[None, :], float("-inf"))
        )
        score_grads = (
            tl.dot(output_grad, tl.trans(delta_values), input_precision=PRECISION)
            * pair_decay
            * key_scale[None, :]
        )
        query_grads = tl.dot(
            score_grads.to(input_dtype), key_tile, acc=query_grads, input_precision=PRECISION
        )
        pair_grads = score_grads * tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        pair_grads *= (query_scale * SCALE)[:, None]
        decay_grad = tl.sum(pair_grads, 1) - tl.sum(pair_grads, 0)

        state_product = tl.zeros((C, K), tl.float32)
        for half_index in tl.range(0, 2, num_stages=1):
            m = half_index * (V // 2) + tl.arange(0, V // 2)
            offsets = (token[:, None] * heads + head) * V + m[None, :]
            output_grad_half = tl.load(
                output_grad_pointer + offsets, mask=(token < length)[:, None], other=0.0
            )
            state_half = tl.load(state_pointer + (chunk_offset * V + m[:, None]) * K + j[None, :])
            state_product = tl.dot(output_grad_half, state_half, acc=state_product, input_precision=PRECISION)
        state_product *= read_decay[:, None]
        query_grads += state_product
        query_tile_again = _load_tile(q, chunk, q_stride, key_head, length, C, K).to(tl.float32)
        decay_grad += tl.sum(state_product * query_tile_again, 1) * query_scale * SCALE
        tl.store(decay_grad_pointer + chunk_offset * C + i, decay_grad)

    query_tile_again = _load_tile(q, chunk, q_stride, key_head, length, C, K)
    x = _gradient_through_normalization(query_tile_again, query_grads, query_scale, SCALE)
    offsets = token[:, None] * dq_stride + key_head * K + j[None, :]
    tl.store(query_grad_pointer + offsets, x.to(input_dtype), mask=(token < length)[:, None])


@triton.jit(do_not_specialize=["length"])
def _pair_gradients_kernel(
    q,
    k,
    log_decay,
    beta,
    segments,
    output_grad_pointer,
    delta_pointer,
    delta_grad_pointer,
    query_decay_grads,
    decay_grad_pointer,
    beta_grad_pointer,
    partial_key_grads,
    length,
    q_stride,
    k_stride,
    heads,
    repeats,
    SCALE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Stores the gradients that reach keys, beta and c through pairs of tokens, in float32.

    :func:`_key_gradients_kernel` adds the others.
    """
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, _ = _segment_ids(segments, chunk, length, C, False)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    visible_pairs, visible_transposed = (
        _visible_pairs(segment_ids, C),
        _visible_pairs_transposed(segment_ids, C),
    )
    query_tile = _load_tile(q, chunk, q_stride, key_head, length, C, K)
    key_tile = _load_tile(k, chunk, k_stride, key_head, length, C, K)
    query_scale, key_scale = _inverse_length(query_tile) * SCALE, _inverse_length(key_tile)

    # Without the assumption, ptxas serializes all products of the kernel (its warning C7515).
    tl.assume(repeats > 0)
    key_grads = tl.zeros((C, K), tl.float32)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        chunk_offset = chunk * heads + head
        cumulative_decay = _cumulative_decay(log_decay, visible_pairs, chunk, head, length, heads, C)
        beta_tile = _load_beta(beta, chunk, head, length, heads, C)
        output_grad = _load_tile(output_grad_pointer, chunk, heads * V, head, length, C, V)
        offsets = (chunk_offset * C + i[:, None]) * V + n[None, :]
        delta_values, delta_grads = tl.load(delta_pointer + offsets), tl.load(delta_grad_pointer + offsets)

        # Through the triangular system, whose gradient is -e d^T.
        strictly_lower = visible_pairs & (i[:, None] > i[None, :])
        pair_decay = tl.exp(
            tl.where(strictly_lower, cumulative_decay[:, None] - cumulative_decay[None, :], float("-inf"))
        )
        system_grads = (
            tl.dot(delta_grads, tl.trans(delta_values), input_precision=PRECISION)
            * -pair_decay
            * key_scale[None, :]
        )
        scaled_system_grads = (system_grads * beta_tile[:, None]).to(input_dtype)
        key_grads = tl.dot(scaled_system_grads, key_tile, acc=key_grads, input_precision=PRECISION)
        pair_grads = (
            system_grads
            * tl.dot(key_tile, tl.trans(key_tile), input_precision=PRECISION)
            * key_scale[:, None]
        )
        beta_grad = tl.sum(pair_grads, 1)
        decay_grad = (
            tl.load(query_decay_grads + chunk_offset * C + i)
            + beta_tile * beta_grad
            - tl.sum(pair_grads * beta_tile[:, None], 0)
        )

        # Through the other token of each of these pairs, and to the keys from the queries that saw them.
        pair_decay = tl.exp(
            tl.where(visible_transposed, cumulative_decay[None, :] - cumulative_decay[:, None], float("-inf"))
        )
        score_grads = (
            tl.dot(delta_values, tl.trans(output_grad), input_precision=PRECISION)
            * pair_decay
            * query_scale[None, :]
        )
        key_grads = tl.dot(score_grads.to(input_dtype), query_tile, acc=key_grads, input_precision=PRECISION)
        system_grads = (
            tl.dot(delta_values, tl.trans(delta_grads), input_precision=PRECISION)
            * -pair_decay
            * (beta_tile * key_scale)[None, :]
        )
        system_grads = tl.where(i[:, None] < i[None, :], system_grads, 0.0)
        key_grads = tl.dot(system_grads.to(input_dtype), key_tile, acc=key_grads, input_precision=PRECISION)
        tl.store(decay_grad_pointer + chunk_offset * C + i, decay_grad)
        tl.store(beta_grad_pointer + chunk_offset * C + i, beta_grad)

    offsets = ((chunk * tl.num_programs(0) + key_head) * C + i[:, None]) * K + j[None, :]
    tl.store(partial_key_grads + offsets, key_grads)


@triton.jit(do_not_specialize=["length"])
def _key_gradients_kernel(
    k,
    v,
    log_decay,
    beta,
    segments,
    delta_pointer,
    delta_grad_pointer,
    state_pointer,
    state_grad_pointer,
    decay_grad_pointer,
    beta_grad_pointer,
    partial_key_grads,
    key_grad_pointer,
    value_grad_pointer,
    log_decay_grad_pointer,
    final_beta_grad_pointer,
    length,
    k_stride,
    v_stride,
    dk_stride,
    dv_stride,
    heads,
    repeats,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):
    """Stores the other gradients of a chunk and key head, summed over its value heads."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = _segment_ids(segments, chunk, length, C, INITIAL)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = chunk * C + i
    is_inside = token < length
    visible_pairs = _visible_pairs(segment_ids, C)
    key_scale = _inverse_length(_load_tile(k, chunk, k_stride, key_head, length, C, K))

    offsets = ((chunk * tl.num_programs(0) + key_head) * C + i[:, None]) * K + j[None, :]
    key_grads = tl.load(partial_key_grads + offsets)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        chunk_offset = chunk * heads + head
        cumulative_decay = _cumulative_decay(log_decay, visible_pairs, chunk, head, length, heads, C)
        read_decay, write_decay, chunk_decay = _border_factors(
            cumulative_decay, segment_ids, previous_segment, C
        )
        beta_tile = _load_beta(beta, chunk, head, length, heads, C)
        decay_grad, beta_grad = (
            tl.load(decay_grad_pointer + chunk_offset * C + i),
            tl.load(beta_grad_pointer + chunk_offset * C + i),
        )

        # Through the state before the chunk, which the triangular system reads, and the state after it.
        state_product = _multiply_by_state(
            delta_grad_pointer, state_pointer, chunk_offset, K, V, C, PRECISION
        )
        key_grads -= state_product * (beta_tile * read_decay)[:, None]
        tile_again = _load_tile(k, chunk, k_stride, key_head, length, C, K).to(tl.float32)
        read_grad = -tl.sum(state_product * tile_again, 1) * key_scale * read_decay
        beta_grad += read_grad
        decay_grad += read_grad * beta_tile
        state_product = (
            _multiply_by_state(delta_pointer, state_grad_pointer, chunk_offset, K, V, C, PRECISION)
            * write_decay[:, None]
        )
        key_grads += state_product
        tile_again = _load_tile(k, chunk, k_stride, key_head, length, C, K).to(tl.float32)
        write_grad = tl.sum(state_product * tile_again, 1) * key_scale
        state_decay_grad = tl.zeros((16, K), tl.float32)
        for state_rows in tl.range(0, V // 16, num_stages=1):
            state_offsets = (chunk_offset * V + state_rows * 16 + tl.arange(0, 16)[:, None]) * K + j[None, :]
            state_decay_grad += tl.load(state_pointer + state_offsets).to(tl.float32) * tl.load(
                state_grad_pointer + state_offsets
            ).to(tl.float32)
        state_decay_grad = tl.sum(tl.sum(state_decay_grad, 1), 0) * chunk_decay
        decay_grad += tl.where(i == C - 1, tl.sum(write_grad, 0) + state_decay_grad, 0.0) - write_grad

        value_tile = _load_tile(v, chunk, v_stride, head, length, C, V).to(tl.float32)
        tile_again = tl.load(delta_grad_pointer + (chunk_offset * C + i[:, None]) * V + n[None, :]).to(
            tl.float32
        )
        beta_grad += tl.sum(value_tile * tile_again, 1)
        value_offsets = token[:, None] * dv_stride + head * V + n[None, :]
        tl.store(
            value_grad_pointer + value_offsets,
            (tile_again * beta_tile[:, None]).to(input_dtype),
            mask=is_inside[:, None],
        )
        log_decay_grad = tl.sum(tl.where(visible_pairs, decay_grad[:, None], 0.0), 0)
        tl.store(
            log_decay_grad_pointer + token * heads + head,
            log_decay_grad.to(log_decay_grad_pointer.dtype.element_ty),
            mask=is_inside,
        )
        tl.store(
            final_beta_grad_pointer + token * heads + head,
            beta_grad.to(final_beta_grad_pointer.dtype.element_ty),
            mask=is_inside,
        )

    tile_again = _load_tile(k, chunk, k_stride, key_head, length, C, K)
    x = _gradient_through_normalization(tile_again, key_grads, key_scale, 1.0)
    offsets = token[:, None] * dk_stride + key_head * K + j[None, :]
    tl.store(key_grad_pointer + offsets, x.to(input_dtype), mask=is_inside[:, None])


def _kernel_sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    heads = v.shape[1]
    return {
        "heads": heads,
        "repeats": heads // q.shape[1],
        "K": q.shape[2],
        "V": v.shape[2],
        "C": CHUNK_TOKENS,
    }


def _scan_options(config: DeltaRuleConfig, v: Tensor) -> dict[str, int]:
    # With more heads, two programs share a multiprocessor, and a third stage would leave too little memory.
    stages = config.scan_stages if v.shape[1] <= 32 else min(config.scan_stages, 2)
    return {"COLUMNS": min(config.scan_columns, v.shape[2]), "STAGES": stages, "num_warps": config.scan_warps}


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
    config: DeltaRuleConfig = DELTA_RULE_CONFIG,
    *,
    initial: Tensor | None = None,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor, Saved]:
    """Runs the forward kernels.

    Args:
        q, k: [S, Kh, K]. These and v may have any stride between tokens. The heads of a token are contiguous.
        v: [S, Vh, V].
        log_decay, beta: [S, Vh].
        segment_ids: [S].
        initial: the state before the row, float32 [Vh, K, V], contiguous.
        exchange: supplies ``initial``, from the maps of all shards of the row.

    Returns:
        The outputs [S, Vh, V], the final state (float32 [Vh, K, V]), and what :func:`run_backward` needs.
    """
    num_tokens, num_value_heads, value_width = v.shape
    num_chunks, kernel_sizes = triton.cdiv(num_tokens, CHUNK_TOKENS), _kernel_sizes(q, v)
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
    precision_option = {"PRECISION": config.solve_precision}
    token_strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = initial is not None or (exchange is not None and exchange.route.tokens_before > 0)
    _solve_kernel[num_value_heads, num_chunks](
        k, v, log_decay, beta, segment_ids, system_inverse, w, u, write_scale, state_decay,
        num_tokens, *token_strides[1:],
        BASE=_BASE_BLOCK, num_warps=config.solve_warps, **kernel_sizes, **precision_option, INITIAL=continues,
    )  # fmt: skip

    scan_options = _scan_options(config, v)
    transition = None
    if exchange is not None and continues:
        # The map of the shard comes before its states, so that later ranks do not wait for these.
        local_state = torch.zeros_like(final_state)
        if exchange.route.tokens_after:
            columns = value_width
            if exchange.route.is_between:
                transition = log_decay.new_empty(num_value_heads, q.shape[2], q.shape[2], dtype=torch.float32)
                columns += q.shape[2]
            _shard_map[triton.cdiv(columns, scan_options["COLUMNS"]), num_value_heads](
                k, w, u, write_scale, state_decay, local_state, transition, num_tokens,
                exchange.route.last_start // CHUNK_TOKENS, num_chunks, token_strides[1],
                **kernel_sizes, **scan_options, **precision_option,
            )  # fmt: skip
        initial = exchange.initial_state(local_state, transition)

    _scan_kernel[triton.cdiv(value_width, scan_options["COLUMNS"]), num_value_heads](
        k, w, u, write_scale, state_decay, chunk_states, delta_values, initial, final_state,
        num_tokens, num_chunks, token_strides[1],
        **kernel_sizes, **scan_options, **precision_option, INITIAL=continues,
    )  # fmt: skip
    if exchange is not None and not continues:
        exchange.initial_state(final_state, None)
    _output_kernel[num_value_heads, num_chunks](
        q, k, log_decay, segment_ids, chunk_states, delta_values, rule_output, num_tokens, *token_strides[:2],
        SCALE=q.shape[2] ** -0.5, num_warps=config.output_warps,
        **kernel_sizes, **precision_option, INITIAL=continues,
    )  # fmt: skip
    return rule_output, final_state, Saved(system_inverse, initial, transition)


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    saved: Saved,
    output_grad: Tensor,
    final_state_grad: Tensor | None,
    qkv_grads: tuple[Tensor, Tensor, Tensor],
    config: DeltaRuleConfig = DELTA_RULE_CONFIG,
    *,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Writes the gradients of q, k and v to ``qkv_grads``.

    Args:
        saved: the third result of :func:`run_forward`.
        output_grad: the gradient of the outputs, [S, Vh, V], contiguous.
        final_state_grad: the gradient of the final state, float32 [Vh, K, V], contiguous; None: zero.
        exchange: supplies ``final_state_grad``, from the gradients of all shards of the row.

    Returns:
        The gradients of log_decay, beta and the initial state (None if the row has none).
    """
    num_tokens, num_value_heads, value_width = v.shape
    num_chunks, kernel_sizes = triton.cdiv(num_tokens, CHUNK_TOKENS), _kernel_sizes(q, v)
    tile_shape = (num_chunks, num_value_heads, CHUNK_TOKENS)
    w, w_back = (v.new_empty(*tile_shape, q.shape[2]) for _ in range(2))
    u, z, delta_values, delta_grads = (v.new_empty(*tile_shape, value_width) for _ in range(4))
    chunk_states, state_grads = (
        v.new_empty(num_chunks, num_value_heads, value_width, q.shape[2]) for _ in range(2)
    )
    write_scale, read_scale, beta_scale = (
        log_decay.new_empty(tile_shape, dtype=torch.float32) for _ in range(3)
    )
    state_decay = log_decay.new_empty(tile_shape[:2], dtype=torch.float32)
    final_state = log_decay.new_empty(num_value_heads, q.shape[2], value_width, dtype=torch.float32)
    log_decay_grad, beta_grad = torch.empty_like(log_decay), torch.empty_like(beta)
    dinitial = None if saved.initial is None else torch.empty_like(saved.initial)

    precision_option, query_scale = {"PRECISION": config.solve_precision}, q.shape[2] ** -0.5
    token_strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = saved.initial is not None
    _prepare_backward_kernel[num_value_heads, num_chunks](
        q, k, v, log_decay, beta, segment_ids, output_grad, saved.inverse, w, u, w_back, z,
        write_scale, read_scale, beta_scale, state_decay, num_tokens, *token_strides,
        SCALE=query_scale, num_warps=config.prepare_warps,
        **kernel_sizes, **precision_option, INITIAL=continues,
    )  # fmt: skip

    scan_options = _scan_options(config, v)
    scans = triton.cdiv(value_width, scan_options["COLUMNS"]), num_value_heads
    goes_on = exchange is not None and exchange.route.tokens_after > 0
    if exchange is not None and goes_on:
        gradient = torch.zeros_like(final_state)
        if saved.initial is not None:
            _initial_gradient[scans](
                q, k, w_back, z, output_grad, read_scale, beta_scale, state_decay, gradient,
                num_tokens, triton.cdiv(exchange.route.first_end, CHUNK_TOKENS), *token_strides[:2],
                **kernel_sizes, **scan_options, **precision_option,
            )  # fmt: skip
        final_state_grad = exchange.final_gradient(gradient, saved.transition)

    _both_scans_kernel[(*scans, 2)](
        q, k, w, u, w_back, z, output_grad, write_scale, read_scale, beta_scale, state_decay,
        chunk_states, state_grads, delta_values, delta_grads, saved.initial, final_state, dinitial,
        final_state_grad, num_tokens, num_chunks, *token_strides[:2],
        OF_FINAL=final_state_grad is not None,
        **kernel_sizes, **scan_options, **precision_option, INITIAL=continues,
    )  # fmt: skip
    if exchange is not None and not goes_on:
        exchange.final_gradient(torch.zeros_like(final_state) if dinitial is None else dinitial, None)

    key_heads, (query_grad, key_grad, value_grad) = q.shape[1], qkv_grads
    _query_gradients_kernel[key_heads, num_chunks](
        q, k, log_decay, segment_ids, output_grad, delta_values, chunk_states, query_grad, write_scale,
        num_tokens, *token_strides[:2], query_grad.stride(0), SCALE=query_scale,
        num_warps=config.query_warps, **kernel_sizes, **precision_option, INITIAL=continues,
    )  # fmt: skip
    partial_key_grads = log_decay.new_empty(
        num_chunks, key_heads, CHUNK_TOKENS, q.shape[2], dtype=torch.float32
    )
    _pair_gradients_kernel[key_heads, num_chunks](
        q, k, log_decay, beta, segment_ids, output_grad, delta_values, delta_grads, write_scale, read_scale,
        beta_scale, partial_key_grads, num_tokens, *token_strides[:2],
        SCALE=query_scale, num_warps=config.pair_warps, **kernel_sizes, **precision_option,
    )  # fmt: skip
    _key_gradients_kernel[key_heads, num_chunks](
        k, v, log_decay, beta, segment_ids, delta_values, delta_grads, chunk_states, state_grads, read_scale,
        beta_scale, partial_key_grads, key_grad, value_grad, log_decay_grad, beta_grad,
        num_tokens, *token_strides[1:], key_grad.stride(0), value_grad.stride(0),
        num_warps=config.key_warps, **kernel_sizes, **precision_option, INITIAL=continues,
    )  # fmt: skip
    return log_decay_grad, beta_grad, dinitial


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        segment_ids: Tensor,
        initial: Tensor | None,
        exchange: ShardExchange | None,
    ) -> tuple[Tensor, Tensor]:
        rule_output, final_state, saved = run_forward(
            q, k, v, log_decay, beta, segment_ids, initial=initial, exchange=exchange
        )
        ctx.save_for_backward(q, k, v, log_decay, beta, segment_ids, *saved)
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        if exchange is not None:
            ctx.mark_non_differentiable(final_state)
        return rule_output, final_state

    @staticmethod
    def backward(ctx, output_grad: Tensor | None, state_grad: Tensor | None):
        q, k, v, log_decay, beta, segments, *tensors = ctx.saved_tensors
        query_grad, key_grad, value_grad = (
            torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
        )
        output_grad = torch.zeros_like(value_grad) if output_grad is None else output_grad.contiguous()
        state_grad = None if state_grad is None else state_grad.contiguous()
        saved, grads = Saved(*tensors), (query_grad, key_grad, value_grad)
        log_decay_grad, beta_grad, dinitial = run_backward(
            q, k, v, log_decay, beta, segments, saved, output_grad, state_grad, grads, exchange=ctx.exchange
        )
        return (
            query_grad,
            key_grad,
            value_grad,
            log_decay_grad,
            beta_grad,
            None,
            dinitial if ctx.exchange is None else None,
            None,
        )


def is_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support these heads: one type, and widths that are powers of two up to 128.

    On a GPU, widths start at 64: the forward pass was seen to give wrong values for values of 32 a head.
    """
    min_width = 64 if q.is_cuda else 16
    widths_are_supported = all(min_width <= n <= 128 and n & (n - 1) == 0 for n in (q.shape[2], v.shape[2]))
    return widths_are_supported and q.dtype == k.dtype == v.dtype and len(q) > 0


def _contiguous_heads(head_tensor: Tensor) -> Tensor:
    """``head_tensor`` [S, heads, d] with contiguous heads. It is copied only if they are not contiguous."""
    return (
        head_tensor
        if head_tensor.stride(2) == 1 and head_tensor.stride(1) == head_tensor.shape[2]
        else head_tensor.contiguous()
    )


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    initial: Tensor | None = None,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`megatron_vl.kernels.gated_delta_rule.gated_delta_rule`."""
    q, k, v = _contiguous_heads(q), _contiguous_heads(k), _contiguous_heads(v)
    initial = None if initial is None else initial.float().contiguous()
    return _GatedDeltaRule.apply(
        q, k, v, log_decay.contiguous(), beta.contiguous(), segment_ids.contiguous(), initial, exchange
    )
