"""The kernels of the gated delta rule that carry a state from chunk to chunk, forward and backward.

:mod:`megatron_vl.kernels.linear_attention.gated_delta_rule_triton` defines the quantities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_vl.kernels.linear_attention.delta_rule_chunks import load_tile


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
