"""The kernels of the gated delta rule that carry a state from chunk to chunk, forward and backward.

:mod:`megatron_vl.kernels.linear_attention.gated_delta_rule_triton` defines the quantities.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_vl.kernels.linear_attention.delta_rule_chunks import load_tile


@triton.jit
def _scan_forward(
    k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer, head,
    column_block, length, chunks, k_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
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
        key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
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
    q, k, w, z, output_grad_pointer, read_scale, beta_scale, state_decay, state_grad_pointer,
    delta_grad_pointer, dinitial, final_state_grad, head, column_block, length, chunks, q_stride, k_stride,
    heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, OF_FINAL: tl.constexpr, INITIAL: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
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
def scan_kernel(
    k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer, length, chunks,
    k_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Runs :func:`_scan_forward` for one value head and COLUMNS columns of its state."""
    column_block, head = tl.program_id(0), tl.program_id(1)
    _scan_forward(
        k, w, u, write_scale, state_decay, state_pointer, delta_pointer, initial, final_pointer,
        head, column_block, length, chunks, k_stride, heads, repeats,
        K, V, C, COLUMNS, STAGES, PRECISION, INITIAL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "chunks"])
def both_scans_kernel(
    q, k, w, u, w_back, z, output_grad_pointer, write_scale, read_scale, beta_scale, state_decay,
    state_pointer, state_grad_pointer, delta_pointer, delta_grad_pointer, initial, final_pointer, dinitial,
    final_state_grad, length, chunks, q_stride, k_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, OF_FINAL: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
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
def shard_map_kernel(
    k, w, u, write_scale, survives, local_state, transition, length, first_chunk, chunks, k_stride, heads,
    repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
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
        keys = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
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
def initial_gradient_kernel(
    q, k, w_back, z, dout, read_scale, beta_scale, survives, dinitial, length, chunks, q_stride, k_stride,
    heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of the state before the row from the outputs of the first ``chunks`` chunks."""
    part, head = tl.program_id(0), tl.program_id(1)
    _scan_backward(
        q, k, w_back, z, dout, read_scale, beta_scale, survives, dinitial, dinitial, dinitial, dinitial, head,
        part, length, chunks, q_stride, k_stride, heads, repeats, K, V, C, COLUMNS, STAGES, PRECISION, False,
        True, False,
    )  # fmt: skip
