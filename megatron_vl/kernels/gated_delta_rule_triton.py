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

CHUNK = 64
_BASE = 16
"""Size of the diagonal blocks that are inverted row by row."""


@dataclass(frozen=True)
class Config:
    """How the kernels divide their work. It is fixed, so that all ranks compute the same bits.

    ``solve`` to ``keys`` are the numbers of warps of the kernels.
    """

    solve: int = 4
    scan: int = 4
    out: int = 4
    prepare: int = 4
    queries: int = 8
    pairs: int = 8
    keys: int = 8
    columns: int = 64
    """Number of the state's V columns that one program of a scan keeps."""
    stages: int = 3
    """Stages of a scan's software pipeline."""
    precision: str = "tf32"
    """Input precision of products of float32 operands: those that invert the triangular system."""


CONFIG = Config()


@triton.jit
def _tile(base, chunk, stride, head, length, C: tl.constexpr, D: tl.constexpr):
    """Loads [C, D] of a tensor [S, heads, D] whose tokens are ``stride`` apart; zero after the row."""
    token = chunk * C + tl.arange(0, C)
    at = base + token[:, None] * stride + head * D + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(token < length)[:, None], other=0.0)


@triton.jit
def _inverse_length(x):
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + 1e-6)


@triton.jit
def _sequences(segments, chunk, length, C: tl.constexpr, INITIAL: tl.constexpr):
    """The sequence numbers of a chunk's tokens [C], and of the token before the chunk (-1: there is none).

    With INITIAL, the token before the row belongs to the row's first sequence.

    Tokens after the row belong to its last sequence.
    """
    token = chunk * C + tl.arange(0, C)
    segment = tl.load(segments + tl.minimum(token, length - 1))
    before = tl.load(segments + tl.maximum(chunk * C - 1, 0))
    if INITIAL:
        return segment, before
    return segment, tl.where(chunk > 0, before, -1)


@triton.jit
def _pairs(segment, C: tl.constexpr):
    """Whether token i (row) sees token j (column)."""
    i = tl.arange(0, C)
    return (segment[:, None] == segment[None, :]) & (i[:, None] >= i[None, :])


@triton.jit
def _pairs_transposed(segment, C: tl.constexpr):
    """Whether token j (row) is seen by token i (column)."""
    i = tl.arange(0, C)
    return (segment[:, None] == segment[None, :]) & (i[:, None] <= i[None, :])


@triton.jit
def _decay(g, keep, chunk, head, length, heads, C: tl.constexpr):
    """c [C]. It is summed within each sequence, so that other sequences do not change its rounding."""
    token = chunk * C + tl.arange(0, C)
    own = tl.load(g + token * heads + head, mask=token < length, other=0.0).to(tl.float32)
    return tl.sum(tl.where(keep, own[None, :], 0.0), 1)


@triton.jit
def _borders(c, segment, before, C: tl.constexpr):
    """read [C], write [C], and the factor by which the chunk multiplies the state."""
    i = tl.arange(0, C)
    final = tl.sum(tl.where(i == C - 1, segment, 0), 0)
    end = tl.sum(tl.where(i == C - 1, c, 0.0), 0)
    read = tl.where(segment == before, tl.exp(c), 0.0)
    write = tl.exp(tl.where(segment == final, end - c, float("-inf")))
    return read, write, tl.where(final == before, tl.exp(end), 0.0)


@triton.jit
def _beta(beta, chunk, head, length, heads, C: tl.constexpr):
    token = chunk * C + tl.arange(0, C)
    return tl.load(beta + token * heads + head, mask=token < length, other=0.0).to(tl.float32)


@triton.jit
def _join(x, a, C: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr):
    """The inverses of diagonal blocks of size 2 WIDTH, from those of size WIDTH."""
    i = tl.arange(0, C)
    pair, half = i // (2 * WIDTH), i // WIDTH
    off = (pair[:, None] == pair[None, :]) & (half[:, None] != half[None, :])
    left = tl.dot(x, tl.where(off, a, 0.0), input_precision=PRECISION)
    return x - tl.dot(left, x, input_precision=PRECISION)


@triton.jit
def _inverse(a, C: tl.constexpr, BASE: tl.constexpr, PRECISION: tl.constexpr):
    """(1 + a)^-1 for a strictly lower triangular a [C, C], where C is 4 BASE.

    Diagonal blocks are inverted row by row, and larger blocks are joined from them. The product (1 - a)
    (1 + a^2) (1 + a^4) ... would be shorter, but its terms cancel if keys are alike.
    """
    B: tl.constexpr = C // BASE
    block, row = tl.arange(0, B), tl.arange(0, BASE)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(a, (B, BASE, B, BASE)), 0.0), 2)
    x = tl.where(row[None, :, None] == row[None, None, :], 1.0, tl.zeros((B, BASE, BASE), tl.float32))
    for i in tl.static_range(1, BASE):
        of_row = tl.sum(tl.where(row[None, :, None] == i, blocks, 0.0), 1)
        change = tl.sum(of_row[:, :, None] * x, 1)
        x = tl.where(row[None, :, None] == i, x - change[:, None, :], x)

    x = tl.broadcast_to(x[:, :, None, :], (B, BASE, B, BASE))
    x = tl.reshape(tl.where(diagonal, x, 0.0), (C, C))
    x = _join(x, a, C, BASE, PRECISION)
    return _join(x, a, C, 2 * BASE, PRECISION)


@triton.jit(do_not_specialize=["length"])
def _solve(
    k,
    v,
    g,
    beta,
    segments,
    inverse,
    w,
    u,
    write_scale,
    survives,
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
    kind: tl.constexpr = k.dtype.element_ty
    segment, before = _sequences(segments, chunk, length, C, INITIAL)
    keep = _pairs(segment, C)
    c = _decay(g, keep, chunk, head, length, heads, C)
    read, write, alive = _borders(c, segment, before, C)
    b = _beta(beta, chunk, head, length, heads, C)
    keys = _tile(k, chunk, k_stride, head // repeats, length, C, K)
    scale = _inverse_length(keys)

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    strict = keep & (i[:, None] > i[None, :])
    pairs = tl.exp(tl.where(strict, c[:, None] - c[None, :], float("-inf")))
    a = (
        tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
        * scale[None, :]
        * (b * scale)[:, None]
        * pairs
    )
    t = _inverse(a, C, BASE, PRECISION)

    here = (chunk * heads + head) * C
    tl.store(inverse + (here + i[:, None]) * C + i[None, :], t.to(kind))
    by_key = (t * (b * read * scale)[None, :]).to(kind)
    wide = tl.dot(by_key, keys, input_precision=PRECISION)
    tl.store(w + (here + i[:, None]) * K + j[None, :], wide.to(kind))
    values = _tile(v, chunk, v_stride, head, length, C, V)
    wide = tl.dot((t * b[None, :]).to(kind), values, input_precision=PRECISION)
    tl.store(u + (here + i[:, None]) * V + n[None, :], wide.to(kind))
    tl.store(write_scale + here + i, write * scale)
    tl.store(survives + chunk * heads + head, alive)


@triton.jit
def _scan_forward(
    k,
    w,
    u,
    write_scale,
    survives,
    states,
    d,
    initial,
    final,
    head,
    part,
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
    kind: tl.constexpr = w.dtype.element_ty
    i, j, n = tl.arange(0, C), tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.zeros((COLUMNS, K), tl.float32)
    if INITIAL:
        state += tl.load(initial + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None])
    for chunk_id in tl.range(0, chunks, num_stages=STAGES):
        chunk = tl.cast(chunk_id, tl.int64)
        here = (chunk * heads + head) * C
        keys = _tile(k, chunk, k_stride, head // repeats, length, C, K)
        of_keys = tl.load(w + (here + i[:, None]) * K + j[None, :])
        of_values = tl.load(u + (here + i[None, :]) * V + n[:, None])
        scale = tl.load(write_scale + here + i)
        alive = tl.load(survives + chunk * heads + head)

        rounded = state.to(kind)
        tl.store(states + ((chunk * heads + head) * V + n[:, None]) * K + j[None, :], rounded)
        new = of_values.to(tl.float32) - tl.dot(rounded, tl.trans(of_keys), input_precision=PRECISION)
        tl.store(d + (here + i[None, :]) * V + n[:, None], new.to(kind))
        state = state * alive
        state = tl.dot((new * scale[None, :]).to(kind), keys, acc=state, input_precision=PRECISION)
    tl.store(final + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None], state)


@triton.jit
def _scan_backward(
    q,
    k,
    w,
    z,
    dout,
    read_scale,
    beta_scale,
    survives,
    states,
    e,
    dinitial,
    dfinal,
    head,
    part,
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
    kind: tl.constexpr = w.dtype.element_ty
    i, j, n = tl.arange(0, C), tl.arange(0, K), part * COLUMNS + tl.arange(0, COLUMNS)
    state = tl.zeros((COLUMNS, K), tl.float32)
    if OF_FINAL:
        state += tl.load(dfinal + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None]).to(tl.float32)
    for step in tl.range(0, chunks, num_stages=STAGES):
        chunk = tl.cast(chunks - 1 - step, tl.int64)
        here = (chunk * heads + head) * C
        token = chunk * C + i
        queries = _tile(q, chunk, q_stride, head // repeats, length, C, K)
        keys = _tile(k, chunk, k_stride, head // repeats, length, C, K)
        of_keys = tl.load(w + (here + i[:, None]) * K + j[None, :])
        of_out = tl.load(z + (here + i[None, :]) * V + n[:, None])
        at = (token[None, :] * heads + head) * V + n[:, None]
        grad = tl.load(dout + at, mask=(token < length)[None, :], other=0.0)
        by_query = tl.load(read_scale + here + i)
        by_key = tl.load(beta_scale + here + i)
        alive = tl.load(survives + chunk * heads + head)

        rounded = state.to(kind)
        if STORE:
            tl.store(states + ((chunk * heads + head) * V + n[:, None]) * K + j[None, :], rounded)
        new = of_out.to(tl.float32) + tl.dot(rounded, tl.trans(of_keys), input_precision=PRECISION)
        if STORE:
            tl.store(e + (here + i[None, :]) * V + n[:, None], new.to(kind))
        state = state * alive
        scaled = (grad.to(tl.float32) * by_query[None, :]).to(kind)
        state = tl.dot(scaled, queries, acc=state, input_precision=PRECISION)
        state = tl.dot((new * -by_key[None, :]).to(kind), keys, acc=state, input_precision=PRECISION)
    if INITIAL:
        tl.store(dinitial + (head.to(tl.int64) * K + j[None, :]) * V + n[:, None], state)


@triton.jit(do_not_specialize=["length", "chunks"])
def _scan(
    k,
    w,
    u,
    write_scale,
    survives,
    states,
    d,
    initial,
    final,
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
    part, head = tl.program_id(0), tl.program_id(1)
    _scan_forward(
        k, w, u, write_scale, survives, states, d, initial, final, head, part, length, chunks, k_stride,
        heads, repeats, K, V, C, COLUMNS, STAGES, PRECISION, INITIAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "chunks"])
def _both_scans(
    q,
    k,
    w,
    u,
    w_back,
    z,
    dout,
    write_scale,
    read_scale,
    beta_scale,
    survives,
    states,
    grads,
    d,
    e,
    initial,
    final,
    dinitial,
    dfinal,
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
    part, head = tl.program_id(0), tl.program_id(1)
    if tl.program_id(2) == 0:
        _scan_forward(
            k, w, u, write_scale, survives, states, d, initial, final, head, part, length, chunks, k_stride,
            heads, repeats, K, V, C, COLUMNS, STAGES, PRECISION, INITIAL,
        )  # fmt: skip
    else:
        _scan_backward(
            q, k, w_back, z, dout, read_scale, beta_scale, survives, grads, e, dinitial, dfinal, head, part,
            length, chunks, q_stride, k_stride, heads, repeats, K, V, C, COLUMNS, STAGES, PRECISION, OF_FINAL,
            INITIAL, True,
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
        keys = _tile(k, chunk, k_stride, head // repeats, length, C, K)
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
def _out(
    q,
    k,
    g,
    segments,
    states,
    d,
    out,
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
    kind: tl.constexpr = q.dtype.element_ty
    segment, before = _sequences(segments, chunk, length, C, INITIAL)
    keep = _pairs(segment, C)
    c = _decay(g, keep, chunk, head, length, heads, C)
    queries = _tile(q, chunk, q_stride, head // repeats, length, C, K)
    keys = _tile(k, chunk, k_stride, head // repeats, length, C, K)
    of_query = _inverse_length(queries) * SCALE
    of_key = _inverse_length(keys)

    pairs = tl.exp(tl.where(keep, c[:, None] - c[None, :], float("-inf")))
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    scores = scores * of_query[:, None] * of_key[None, :] * pairs

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    here = chunk * heads + head
    state = tl.load(states + (here * V + n[:, None]) * K + j[None, :])
    new = tl.load(d + (here * C + i[:, None]) * V + n[None, :])
    read = tl.where(segment == before, tl.exp(c), 0.0) * of_query
    y = tl.dot(queries, tl.trans(state), input_precision=PRECISION) * read[:, None]
    y = tl.dot(scores.to(kind), new, acc=y, input_precision=PRECISION)
    token = chunk * C + i
    at = (token[:, None] * heads + head) * V + n[None, :]
    tl.store(out + at, y.to(kind), mask=(token < length)[:, None])


@triton.jit(do_not_specialize=["length"])
def _prepare(
    q,
    k,
    v,
    g,
    beta,
    segments,
    dout,
    inverse,
    w,
    u,
    w_back,
    z,
    write_scale,
    read_scale,
    beta_scale,
    survives,
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
    kind: tl.constexpr = k.dtype.element_ty
    segment, before = _sequences(segments, chunk, length, C, INITIAL)
    c = _decay(g, _pairs(segment, C), chunk, head, length, heads, C)
    read, write, alive = _borders(c, segment, before, C)
    b = _beta(beta, chunk, head, length, heads, C)
    queries = _tile(q, chunk, q_stride, head // repeats, length, C, K)
    keys = _tile(k, chunk, k_stride, head // repeats, length, C, K)
    of_query = _inverse_length(queries) * SCALE
    of_key = _inverse_length(keys)

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    here = (chunk * heads + head) * C
    t = tl.load(inverse + (here + i[:, None]) * C + i[None, :]).to(tl.float32)
    wide = tl.dot((t * (b * read * of_key)[None, :]).to(kind), keys, input_precision=PRECISION)
    tl.store(w + (here + i[:, None]) * K + j[None, :], wide.to(kind))
    values = _tile(v, chunk, v_stride, head, length, C, V)
    wide = tl.dot((t * b[None, :]).to(kind), values, input_precision=PRECISION)
    tl.store(u + (here + i[:, None]) * V + n[None, :], wide.to(kind))

    flipped = tl.load(inverse + (here + i[None, :]) * C + i[:, None])
    scaled = (flipped.to(tl.float32) * (write * of_key)[None, :]).to(kind)
    wide = tl.dot(scaled, keys, input_precision=PRECISION)
    tl.store(w_back + (here + i[:, None]) * K + j[None, :], wide.to(kind))
    seen = _pairs_transposed(segment, C)
    pairs = tl.exp(tl.where(seen, c[None, :] - c[:, None], float("-inf")))
    scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
    scores = scores * of_key[:, None] * of_query[None, :] * pairs
    both = tl.dot(flipped, scores.to(kind), input_precision=PRECISION)
    grad = _tile(dout, chunk, heads * V, head, length, C, V)
    wide = tl.dot(both.to(kind), grad, input_precision=PRECISION)
    tl.store(z + (here + i[:, None]) * V + n[None, :], wide.to(kind))

    tl.store(write_scale + here + i, write * of_key)
    tl.store(read_scale + here + i, read * of_query)
    tl.store(beta_scale + here + i, b * read * of_key)
    tl.store(survives + chunk * heads + head, alive)


@triton.jit
def _through_length(x, grad, scale, factor):
    """The gradient of x, from ``grad``, that of factor * x * scale. ``scale`` is 1 / |x|."""
    unit = x.to(tl.float32) * scale[:, None]
    along = tl.sum(unit * grad, 1)
    return (grad - unit * along[:, None]) * (scale * factor)[:, None]


@triton.jit
def _with_state(x, states, here, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr):
    """The product of x [C, V] and a state [V, K], computed in two halves to save registers."""
    i, j = tl.arange(0, C), tl.arange(0, K)
    y = tl.zeros((C, K), tl.float32)
    for part in tl.range(0, 2, num_stages=1):
        m = part * (V // 2) + tl.arange(0, V // 2)
        half = tl.load(x + (here * C + i[:, None]) * V + m[None, :])
        state = tl.load(states + (here * V + m[:, None]) * K + j[None, :])
        y = tl.dot(half, state, acc=y, input_precision=PRECISION)
    return y


@triton.jit(do_not_specialize=["length"])
def _query_gradients(
    q,
    k,
    g,
    segments,
    dout,
    d,
    states,
    dq,
    decays,
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
    kind: tl.constexpr = q.dtype.element_ty
    segment, before = _sequences(segments, chunk, length, C, INITIAL)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = chunk * C + i
    keep = _pairs(segment, C)
    queries = _tile(q, chunk, q_stride, key_head, length, C, K)
    keys = _tile(k, chunk, k_stride, key_head, length, C, K)
    of_query, of_key = _inverse_length(queries), _inverse_length(keys)

    grads = tl.zeros((C, K), tl.float32)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        here = chunk * heads + head
        c = _decay(g, keep, chunk, head, length, heads, C)
        read = tl.where(segment == before, tl.exp(c), 0.0)
        grad = _tile(dout, chunk, heads * V, head, length, C, V)
        new = tl.load(d + (here * C + i[:, None]) * V + n[None, :])

        pairs = tl.exp(tl.where(keep, c[:, None] - c[None, :], float("-inf")))
        scores = tl.dot(grad, tl.trans(new), input_precision=PRECISION) * pairs * of_key[None, :]
        grads = tl.dot(scores.to(kind), keys, acc=grads, input_precision=PRECISION)
        change = scores * tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        change *= (of_query * SCALE)[:, None]
        of_c = tl.sum(change, 1) - tl.sum(change, 0)

        wide = tl.zeros((C, K), tl.float32)
        for part in tl.range(0, 2, num_stages=1):
            m = part * (V // 2) + tl.arange(0, V // 2)
            at = (token[:, None] * heads + head) * V + m[None, :]
            half = tl.load(dout + at, mask=(token < length)[:, None], other=0.0)
            state = tl.load(states + (here * V + m[:, None]) * K + j[None, :])
            wide = tl.dot(half, state, acc=wide, input_precision=PRECISION)
        wide *= read[:, None]
        grads += wide
        again = _tile(q, chunk, q_stride, key_head, length, C, K).to(tl.float32)
        of_c += tl.sum(wide * again, 1) * of_query * SCALE
        tl.store(decays + here * C + i, of_c)

    again = _tile(q, chunk, q_stride, key_head, length, C, K)
    x = _through_length(again, grads, of_query, SCALE)
    at = token[:, None] * dq_stride + key_head * K + j[None, :]
    tl.store(dq + at, x.to(kind), mask=(token < length)[:, None])


@triton.jit(do_not_specialize=["length"])
def _pair_gradients(
    q,
    k,
    g,
    beta,
    segments,
    dout,
    d,
    e,
    decays,
    of_decays,
    of_betas,
    partial,
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

    :func:`_key_gradients` adds the others.
    """
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = k.dtype.element_ty
    segment, _ = _sequences(segments, chunk, length, C, False)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    keep, seen = _pairs(segment, C), _pairs_transposed(segment, C)
    queries = _tile(q, chunk, q_stride, key_head, length, C, K)
    keys = _tile(k, chunk, k_stride, key_head, length, C, K)
    of_query, of_key = _inverse_length(queries) * SCALE, _inverse_length(keys)

    of_keys = tl.zeros((C, K), tl.float32)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        here = chunk * heads + head
        c = _decay(g, keep, chunk, head, length, heads, C)
        b = _beta(beta, chunk, head, length, heads, C)
        grad = _tile(dout, chunk, heads * V, head, length, C, V)
        at = (here * C + i[:, None]) * V + n[None, :]
        new, back = tl.load(d + at), tl.load(e + at)

        # Through the triangular system, whose gradient is -e d^T.
        strict = keep & (i[:, None] > i[None, :])
        pairs = tl.exp(tl.where(strict, c[:, None] - c[None, :], float("-inf")))
        system = tl.dot(back, tl.trans(new), input_precision=PRECISION) * -pairs * of_key[None, :]
        scaled = (system * b[:, None]).to(kind)
        of_keys = tl.dot(scaled, keys, acc=of_keys, input_precision=PRECISION)
        change = system * tl.dot(keys, tl.trans(keys), input_precision=PRECISION) * of_key[:, None]
        of_beta = tl.sum(change, 1)
        of_c = tl.load(decays + here * C + i) + b * of_beta - tl.sum(change * b[:, None], 0)

        # Through the other token of each of these pairs, and to the keys from the queries that saw them.
        pairs = tl.exp(tl.where(seen, c[None, :] - c[:, None], float("-inf")))
        scores = tl.dot(new, tl.trans(grad), input_precision=PRECISION) * pairs * of_query[None, :]
        of_keys = tl.dot(scores.to(kind), queries, acc=of_keys, input_precision=PRECISION)
        system = tl.dot(new, tl.trans(back), input_precision=PRECISION) * -pairs * (b * of_key)[None, :]
        system = tl.where(i[:, None] < i[None, :], system, 0.0)
        of_keys = tl.dot(system.to(kind), keys, acc=of_keys, input_precision=PRECISION)
        tl.store(of_decays + here * C + i, of_c)
        tl.store(of_betas + here * C + i, of_beta)

    at = ((chunk * tl.num_programs(0) + key_head) * C + i[:, None]) * K + j[None, :]
    tl.store(partial + at, of_keys)


@triton.jit(do_not_specialize=["length"])
def _key_gradients(
    k,
    v,
    g,
    beta,
    segments,
    d,
    e,
    states,
    grads,
    decays,
    of_betas,
    partial,
    dk,
    dv,
    dg,
    dbeta,
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
    kind: tl.constexpr = k.dtype.element_ty
    segment, before = _sequences(segments, chunk, length, C, INITIAL)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = chunk * C + i
    inside = token < length
    keep = _pairs(segment, C)
    of_key = _inverse_length(_tile(k, chunk, k_stride, key_head, length, C, K))

    at = ((chunk * tl.num_programs(0) + key_head) * C + i[:, None]) * K + j[None, :]
    of_keys = tl.load(partial + at)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        here = chunk * heads + head
        c = _decay(g, keep, chunk, head, length, heads, C)
        read, write, alive = _borders(c, segment, before, C)
        b = _beta(beta, chunk, head, length, heads, C)
        of_c, of_beta = tl.load(decays + here * C + i), tl.load(of_betas + here * C + i)

        # Through the state before the chunk, which the triangular system reads, and the state after it.
        wide = _with_state(e, states, here, K, V, C, PRECISION)
        of_keys -= wide * (b * read)[:, None]
        again = _tile(k, chunk, k_stride, key_head, length, C, K).to(tl.float32)
        along = -tl.sum(wide * again, 1) * of_key * read
        of_beta += along
        of_c += along * b
        wide = _with_state(d, grads, here, K, V, C, PRECISION) * write[:, None]
        of_keys += wide
        again = _tile(k, chunk, k_stride, key_head, length, C, K).to(tl.float32)
        of_write = tl.sum(wide * again, 1) * of_key
        kept = tl.zeros((16, K), tl.float32)
        for part in tl.range(0, V // 16, num_stages=1):
            some = (here * V + part * 16 + tl.arange(0, 16)[:, None]) * K + j[None, :]
            kept += tl.load(states + some).to(tl.float32) * tl.load(grads + some).to(tl.float32)
        kept = tl.sum(tl.sum(kept, 1), 0) * alive
        of_c += tl.where(i == C - 1, tl.sum(of_write, 0) + kept, 0.0) - of_write

        values = _tile(v, chunk, v_stride, head, length, C, V).to(tl.float32)
        again = tl.load(e + (here * C + i[:, None]) * V + n[None, :]).to(tl.float32)
        of_beta += tl.sum(values * again, 1)
        value_offsets = token[:, None] * dv_stride + head * V + n[None, :]
        tl.store(dv + value_offsets, (again * b[:, None]).to(kind), mask=inside[:, None])
        of_g = tl.sum(tl.where(keep, of_c[:, None], 0.0), 0)
        tl.store(dg + token * heads + head, of_g.to(dg.dtype.element_ty), mask=inside)
        tl.store(dbeta + token * heads + head, of_beta.to(dbeta.dtype.element_ty), mask=inside)

    again = _tile(k, chunk, k_stride, key_head, length, C, K)
    x = _through_length(again, of_keys, of_key, 1.0)
    at = token[:, None] * dk_stride + key_head * K + j[None, :]
    tl.store(dk + at, x.to(kind), mask=inside[:, None])


def _sizes(q: Tensor, v: Tensor) -> dict[str, int]:
    heads = v.shape[1]
    return {"heads": heads, "repeats": heads // q.shape[1], "K": q.shape[2], "V": v.shape[2], "C": CHUNK}


def _scan_options(config: Config, v: Tensor) -> dict[str, int]:
    # With more heads, two programs share a multiprocessor, and a third stage would leave too little memory.
    stages = config.stages if v.shape[1] <= 32 else min(config.stages, 2)
    return {"COLUMNS": min(config.columns, v.shape[2]), "STAGES": stages, "num_warps": config.scan}


class Saved(NamedTuple):
    """What :func:`forward` keeps for :func:`backward`."""

    inverse: Tensor
    """[chunks, Vh, CHUNK, CHUNK], the inverses of the triangular systems."""
    initial: Tensor | None
    """float32 [Vh, K, V], the state before the row; None: the first sequence begins there."""
    transition: Tensor | None
    """float32 [Vh, K, K], the matrix of a shard that one sequence enters and leaves."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor,
    config: Config = CONFIG,
    *,
    initial: Tensor | None = None,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor, Saved]:
    """Runs the forward kernels on q, k [S, Kh, K], v [S, Vh, V], g, beta [S, Vh] and segments [S].

    q, k and v may have any stride between tokens. The heads of a token are contiguous.

    Args:
        initial: the state before the row, float32 [Vh, K, V], contiguous.
        exchange: supplies ``initial``, from the maps of all shards of the row.

    Returns:
        The outputs [S, Vh, V], the final state (float32 [Vh, K, V]), and what :func:`backward` needs.
    """
    length, heads, width = v.shape
    chunks, sizes = triton.cdiv(length, CHUNK), _sizes(q, v)
    tile = (chunks, heads, CHUNK)
    inverse, w, u, d = (v.new_empty(*tile, n) for n in (CHUNK, q.shape[2], width, width))
    states = v.new_empty(chunks, heads, width, q.shape[2])
    write_scale, survives = (g.new_empty(shape, dtype=torch.float32) for shape in (tile, tile[:2]))
    final = g.new_empty(heads, q.shape[2], width, dtype=torch.float32)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)

    # The three kernels: the triangular systems, the states chunk by chunk, and the outputs.
    precision = {"PRECISION": config.precision}
    strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = initial is not None or (exchange is not None and exchange.route.tokens_before > 0)
    _solve[heads, chunks](
        k, v, g, beta, segments, inverse, w, u, write_scale, survives, length, *strides[1:],
        BASE=_BASE, num_warps=config.solve, **sizes, **precision, INITIAL=continues,
    )  # fmt: skip

    options = _scan_options(config, v)
    transition = None
    if exchange is not None and continues:
        # The map of the shard comes before its states, so that later ranks do not wait for these.
        local_state = torch.zeros_like(final)
        if exchange.route.tokens_after:
            columns = width
            if exchange.route.is_between:
                transition = g.new_empty(heads, q.shape[2], q.shape[2], dtype=torch.float32)
                columns += q.shape[2]
            _shard_map[triton.cdiv(columns, options["COLUMNS"]), heads](
                k, w, u, write_scale, survives, local_state, transition, length,
                exchange.route.last_start // CHUNK, chunks, strides[1], **sizes, **options, **precision,
            )  # fmt: skip
        initial = exchange.initial_state(local_state, transition)

    _scan[triton.cdiv(width, options["COLUMNS"]), heads](
        k, w, u, write_scale, survives, states, d, initial, final, length, chunks, strides[1],
        **sizes, **options, **precision, INITIAL=continues,
    )  # fmt: skip
    if exchange is not None and not continues:
        exchange.initial_state(final, None)
    _out[heads, chunks](
        q, k, g, segments, states, d, out, length, *strides[:2],
        SCALE=q.shape[2] ** -0.5, num_warps=config.out, **sizes, **precision, INITIAL=continues,
    )  # fmt: skip
    return out, final, Saved(inverse, initial, transition)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor,
    saved: Saved,
    dout: Tensor,
    dfinal: Tensor | None,
    grads: tuple[Tensor, Tensor, Tensor],
    config: Config = CONFIG,
    *,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Writes the gradients of q, k and v to ``grads`` and returns those of g, beta and the initial state.

    Args:
        saved: the third result of :func:`forward`.
        dout: the gradient of the outputs, [S, Vh, V], contiguous.
        dfinal: the gradient of the final state, float32 [Vh, K, V], contiguous; None: zero.
        exchange: supplies ``dfinal``, from the gradients of all shards of the row.
    """
    length, heads, width = v.shape
    chunks, sizes = triton.cdiv(length, CHUNK), _sizes(q, v)
    tile = (chunks, heads, CHUNK)
    w, w_back = (v.new_empty(*tile, q.shape[2]) for _ in range(2))
    u, z, d, e = (v.new_empty(*tile, width) for _ in range(4))
    states, after = (v.new_empty(chunks, heads, width, q.shape[2]) for _ in range(2))
    write_scale, read_scale, beta_scale = (g.new_empty(tile, dtype=torch.float32) for _ in range(3))
    survives = g.new_empty(tile[:2], dtype=torch.float32)
    final = g.new_empty(heads, q.shape[2], width, dtype=torch.float32)
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    dinitial = None if saved.initial is None else torch.empty_like(saved.initial)

    precision, scale = {"PRECISION": config.precision}, q.shape[2] ** -0.5
    strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = saved.initial is not None
    _prepare[heads, chunks](
        q, k, v, g, beta, segments, dout, saved.inverse, w, u, w_back, z,
        write_scale, read_scale, beta_scale, survives, length, *strides,
        SCALE=scale, num_warps=config.prepare, **sizes, **precision, INITIAL=continues,
    )  # fmt: skip

    options = _scan_options(config, v)
    scans = triton.cdiv(width, options["COLUMNS"]), heads
    goes_on = exchange is not None and exchange.route.tokens_after > 0
    if exchange is not None and goes_on:
        gradient = torch.zeros_like(final)
        if saved.initial is not None:
            _initial_gradient[scans](
                q, k, w_back, z, dout, read_scale, beta_scale, survives, gradient,
                length, triton.cdiv(exchange.route.first_end, CHUNK), *strides[:2],
                **sizes, **options, **precision,
            )  # fmt: skip
        dfinal = exchange.final_gradient(gradient, saved.transition)

    _both_scans[(*scans, 2)](
        q, k, w, u, w_back, z, dout, write_scale, read_scale, beta_scale, survives,
        states, after, d, e, saved.initial, final, dinitial, dfinal, length, chunks, *strides[:2],
        OF_FINAL=dfinal is not None, **sizes, **options, **precision, INITIAL=continues,
    )  # fmt: skip
    if exchange is not None and not goes_on:
        exchange.final_gradient(torch.zeros_like(final) if dinitial is None else dinitial, None)

    key_heads, (dq, dk, dv) = q.shape[1], grads
    _query_gradients[key_heads, chunks](
        q, k, g, segments, dout, d, states, dq, write_scale, length, *strides[:2], dq.stride(0),
        SCALE=scale, num_warps=config.queries, **sizes, **precision, INITIAL=continues,
    )  # fmt: skip
    partial = g.new_empty(chunks, key_heads, CHUNK, q.shape[2], dtype=torch.float32)
    _pair_gradients[key_heads, chunks](
        q, k, g, beta, segments, dout, d, e, write_scale, read_scale, beta_scale, partial,
        length, *strides[:2], SCALE=scale, num_warps=config.pairs, **sizes, **precision,
    )  # fmt: skip
    _key_gradients[key_heads, chunks](
        k, v, g, beta, segments, d, e, states, after, read_scale, beta_scale, partial, dk, dv, dg, dbeta,
        length, *strides[1:], dk.stride(0), dv.stride(0), num_warps=config.keys,
        **sizes, **precision, INITIAL=continues,
    )  # fmt: skip
    return dg, dbeta, dinitial


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        segments: Tensor,
        initial: Tensor | None,
        exchange: ShardExchange | None,
    ) -> tuple[Tensor, Tensor]:
        out, state, saved = forward(q, k, v, g, beta, segments, initial=initial, exchange=exchange)
        ctx.save_for_backward(q, k, v, g, beta, segments, *saved)
        ctx.exchange = exchange
        ctx.set_materialize_grads(False)
        if exchange is not None:
            ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx, dout: Tensor | None, dstate: Tensor | None):
        q, k, v, g, beta, segments, *tensors = ctx.saved_tensors
        dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        dout = torch.zeros_like(dv) if dout is None else dout.contiguous()
        dstate = None if dstate is None else dstate.contiguous()
        saved, grads = Saved(*tensors), (dq, dk, dv)
        dg, dbeta, dinitial = backward(
            q, k, v, g, beta, segments, saved, dout, dstate, grads, exchange=ctx.exchange
        )
        return dq, dk, dv, dg, dbeta, None, dinitial if ctx.exchange is None else None, None


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support these heads: one type, and widths that are powers of two from 16 to 128."""
    widths = all(16 <= n <= 128 and n & (n - 1) == 0 for n in (q.shape[2], v.shape[2]))
    return widths and q.dtype == k.dtype == v.dtype and len(q) > 0


def _contiguous_heads(t: Tensor) -> Tensor:
    """``t`` [S, heads, d] with contiguous heads. A view of one projection has them and is not copied."""
    return t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous()


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor,
    initial: Tensor | None = None,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`megatron_vl.kernels.gated_delta_rule.gated_delta_rule`."""
    q, k, v = _contiguous_heads(q), _contiguous_heads(k), _contiguous_heads(v)
    initial = None if initial is None else initial.float().contiguous()
    return _Rule.apply(q, k, v, g.contiguous(), beta.contiguous(), segments.contiguous(), initial, exchange)
