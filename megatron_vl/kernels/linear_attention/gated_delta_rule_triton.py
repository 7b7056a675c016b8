"""The Triton kernels of :mod:`megatron_vl.kernels.linear_attention.gated_delta_rule`, forward and backward.

The kernels of the forward pass, and what both passes share, stand in ``delta_rule_forward``.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.linear_attention.delta_rule_forward import (
    CHUNK_TOKENS,
    Saved,
    backward_scan_kernel,
    both_scans_kernel,
    choose_scan_options,
    compute_border_factors,
    find_visible_pairs,
    find_visible_pairs_transposed,
    load_beta,
    load_factors,
    load_segment_ids,
    load_tile,
    read_kernel_sizes,
    run_forward,
)
from megatron_vl.kernels.linear_attention.gated_norm_triton import contiguous_heads
from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange
from megatron_vl.kernels.sizes import cdiv


@triton.jit(do_not_specialize=["length"])
def _prepare_backward_kernel(
    q, k, v, decay_sums, query_scales, key_scales, beta, segments, output_grad_pointer, inverse_pointer, w,
    u, w_back, z, write_scale, read_scale, beta_scale, state_decay, length, q_stride, k_stride, v_stride,
    SCALE: tl.constexpr,
    heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores the inputs of both scans: w and u again, T^T (write k), T^T M^T dout, and factors of tokens."""
    head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    cumulative_decay = load_factors(decay_sums, chunk, head, heads, C)
    read_decay, write_decay, chunk_decay = compute_border_factors(
        cumulative_decay, decay_sums, segment_ids, previous_segment, segments, chunk, head, length, heads, C
    )
    beta_tile = load_beta(beta, chunk, head, length, heads, C)
    query_tile = load_tile(q, chunk, q_stride, head // repeats, length, C, K)
    key_tile = load_tile(k, chunk, k_stride, head // repeats, length, C, K)
    query_scale = load_factors(query_scales, chunk, head // repeats, heads // repeats, C) * SCALE
    key_scale = load_factors(key_scales, chunk, head // repeats, heads // repeats, C)

    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    chunk_offset = (chunk * heads + head) * C
    system_inverse = tl.load(inverse_pointer + (chunk_offset + i[:, None]) * C + i[None, :]).to(tl.float32)
    product = tl.dot(
        (system_inverse * (beta_tile * read_decay * key_scale)[None, :]).to(input_dtype),
        key_tile,
        input_precision=PRECISION,
    )
    tl.store(w + (chunk_offset + i[:, None]) * K + j[None, :], product.to(input_dtype))
    value_tile = load_tile(v, chunk, v_stride, head, length, C, V)
    product = tl.dot(
        (system_inverse * beta_tile[None, :]).to(input_dtype), value_tile, input_precision=PRECISION
    )
    tl.store(u + (chunk_offset + i[:, None]) * V + n[None, :], product.to(input_dtype))

    transposed_inverse = tl.load(inverse_pointer + (chunk_offset + i[None, :]) * C + i[:, None])
    scaled_inverse = (transposed_inverse.to(tl.float32) * (write_decay * key_scale)[None, :]).to(input_dtype)
    product = tl.dot(scaled_inverse, key_tile, input_precision=PRECISION)
    tl.store(w_back + (chunk_offset + i[:, None]) * K + j[None, :], product.to(input_dtype))
    visible_transposed = find_visible_pairs_transposed(segment_ids, C)
    pair_decay = tl.exp(
        tl.where(visible_transposed, cumulative_decay[None, :] - cumulative_decay[:, None], float("-inf"))
    )
    attention_scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
    attention_scores = attention_scores * key_scale[:, None] * query_scale[None, :] * pair_decay
    inverse_times_scores = tl.dot(
        transposed_inverse, attention_scores.to(input_dtype), input_precision=PRECISION
    )
    output_grad = load_tile(output_grad_pointer, chunk, heads * V, head, length, C, V)
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


@triton.jit(do_not_specialize=["length"])
def _query_gradients_kernel(
    q, k, decay_sums, query_scales, key_scales, segments, output_grad_pointer, delta_pointer, state_pointer,
    query_grad_pointer, decay_grad_pointer, length, q_stride, k_stride, dq_stride, heads, repeats,
    SCALE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
    INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores dq of a chunk and key head, summed over its value heads, and c's gradient through queries."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = q.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = chunk * C + i
    visible_pairs = find_visible_pairs(segment_ids, C)
    query_tile = load_tile(q, chunk, q_stride, key_head, length, C, K)
    key_tile = load_tile(k, chunk, k_stride, key_head, length, C, K)
    query_scale = load_factors(query_scales, chunk, key_head, tl.num_programs(0), C)
    key_scale = load_factors(key_scales, chunk, key_head, tl.num_programs(0), C)

    query_grads = tl.zeros((C, K), tl.float32)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        chunk_offset = chunk * heads + head
        cumulative_decay = load_factors(decay_sums, chunk, head, heads, C)
        read_decay = tl.where(segment_ids == previous_segment, tl.exp(cumulative_decay), 0.0)
        output_grad = load_tile(output_grad_pointer, chunk, heads * V, head, length, C, V)
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
        query_tile_again = load_tile(q, chunk, q_stride, key_head, length, C, K).to(tl.float32)
        decay_grad += tl.sum(state_product * query_tile_again, 1) * query_scale * SCALE
        tl.store(decay_grad_pointer + chunk_offset * C + i, decay_grad)

    query_tile_again = load_tile(q, chunk, q_stride, key_head, length, C, K)
    x = _gradient_through_normalization(query_tile_again, query_grads, query_scale, SCALE)
    offsets = token[:, None] * dq_stride + key_head * K + j[None, :]
    tl.store(query_grad_pointer + offsets, x.to(input_dtype), mask=(token < length)[:, None])


@triton.jit(do_not_specialize=["length"])
def _pair_gradients_kernel(
    q, k, decay_sums, query_scales, key_scales, beta, segments, output_grad_pointer, delta_pointer,
    delta_grad_pointer, query_decay_grads, decay_grad_pointer, beta_grad_pointer, partial_key_grads, length,
    q_stride, k_stride, heads, repeats,
    SCALE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores the gradients that reach keys, beta and c through pairs of tokens, in float32.

    :func:`_key_gradients_kernel` adds the others.
    """
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, _ = load_segment_ids(segments, chunk, length, C, False)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    visible_pairs, visible_transposed = (
        find_visible_pairs(segment_ids, C),
        find_visible_pairs_transposed(segment_ids, C),
    )
    query_tile = load_tile(q, chunk, q_stride, key_head, length, C, K)
    key_tile = load_tile(k, chunk, k_stride, key_head, length, C, K)
    query_scale = load_factors(query_scales, chunk, key_head, tl.num_programs(0), C) * SCALE
    key_scale = load_factors(key_scales, chunk, key_head, tl.num_programs(0), C)

    # Without the assumption, ptxas serializes all products of the kernel (its warning C7515).
    tl.assume(repeats > 0)
    key_grads = tl.zeros((C, K), tl.float32)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        chunk_offset = chunk * heads + head
        cumulative_decay = load_factors(decay_sums, chunk, head, heads, C)
        beta_tile = load_beta(beta, chunk, head, length, heads, C)
        output_grad = load_tile(output_grad_pointer, chunk, heads * V, head, length, C, V)
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
    k, v, decay_sums, key_scales, beta, segments, delta_pointer, delta_grad_pointer, state_pointer,
    state_grad_pointer, decay_grad_pointer, beta_grad_pointer, partial_key_grads, key_grad_pointer,
    value_grad_pointer, log_decay_grad_pointer, final_beta_grad_pointer, length, k_stride, v_stride,
    dk_stride, dv_stride, heads, repeats,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """Stores the other gradients of a chunk and key head, summed over its value heads."""
    key_head, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64)
    input_dtype: tl.constexpr = k.dtype.element_ty
    segment_ids, previous_segment = load_segment_ids(segments, chunk, length, C, INITIAL)
    i, j, n = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    token = chunk * C + i
    is_inside = token < length
    visible_pairs = find_visible_pairs(segment_ids, C)
    key_scale = load_factors(key_scales, chunk, key_head, tl.num_programs(0), C)

    offsets = ((chunk * tl.num_programs(0) + key_head) * C + i[:, None]) * K + j[None, :]
    key_grads = tl.load(partial_key_grads + offsets)
    for repeat in tl.range(0, repeats, num_stages=1):
        head = key_head * repeats + repeat
        chunk_offset = chunk * heads + head
        cumulative_decay = load_factors(decay_sums, chunk, head, heads, C)
        read_decay, write_decay, chunk_decay = compute_border_factors(
            cumulative_decay, decay_sums, segment_ids, previous_segment, segments, chunk, head, length, heads,
            C,
        )  # fmt: skip
        beta_tile = load_beta(beta, chunk, head, length, heads, C)
        decay_grad, beta_grad = (
            tl.load(decay_grad_pointer + chunk_offset * C + i),
            tl.load(beta_grad_pointer + chunk_offset * C + i),
        )

        # Through the state before the chunk, which the triangular system reads, and the state after it.
        read_product, write_product = tl.zeros((C, K), tl.float32), tl.zeros((C, K), tl.float32)
        state_decay_grad = tl.zeros((V // 2,), tl.float32)
        for half_index in tl.range(0, 2, num_stages=1):  # in two halves to save registers
            m = half_index * (V // 2) + tl.arange(0, V // 2)
            state_offsets = (chunk_offset * V + m[:, None]) * K + j[None, :]
            state = tl.load(state_pointer + state_offsets)
            state_grad = tl.load(state_grad_pointer + state_offsets)
            state_decay_grad += tl.sum(state.to(tl.float32) * state_grad.to(tl.float32), 1)
            half_offsets = (chunk_offset * C + i[:, None]) * V + m[None, :]
            delta_grad_half = tl.load(delta_grad_pointer + half_offsets)
            read_product = tl.dot(delta_grad_half, state, acc=read_product, input_precision=PRECISION)
            delta_half = tl.load(delta_pointer + half_offsets)
            write_product = tl.dot(delta_half, state_grad, acc=write_product, input_precision=PRECISION)
        key_grads -= read_product * (beta_tile * read_decay)[:, None]
        tile_again = load_tile(k, chunk, k_stride, key_head, length, C, K).to(tl.float32)
        read_grad = -tl.sum(read_product * tile_again, 1) * key_scale * read_decay
        beta_grad += read_grad
        decay_grad += read_grad * beta_tile
        write_product *= write_decay[:, None]
        key_grads += write_product
        write_grad = tl.sum(write_product * tile_again, 1) * key_scale
        state_decay_grad = tl.sum(state_decay_grad, 0) * chunk_decay
        decay_grad += tl.where(i == C - 1, tl.sum(write_grad, 0) + state_decay_grad, 0.0) - write_grad

        value_tile = load_tile(v, chunk, v_stride, head, length, C, V).to(tl.float32)
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
        tl.store(log_decay_grad_pointer + token * heads + head, log_decay_grad, mask=is_inside)
        tl.store(final_beta_grad_pointer + token * heads + head, beta_grad, mask=is_inside)

    tile_again = load_tile(k, chunk, k_stride, key_head, length, C, K)
    x = _gradient_through_normalization(tile_again, key_grads, key_scale, 1.0)
    offsets = token[:, None] * dk_stride + key_head * K + j[None, :]
    tl.store(key_grad_pointer + offsets, x.to(input_dtype), mask=is_inside[:, None])


def run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    saved: Saved,
    output_grad: Tensor,
    exchange: ShardExchange | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, log_decay and beta.

    Args:
        saved: the second result of :func:`run_forward`.
        output_grad: the gradient of the outputs, [S, Vh, V], contiguous.
        exchange: supplies the gradient of the final state, from the gradients of all shards of the row.
    """
    query_grad, key_grad, value_grad = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)
    )
    num_tokens, num_value_heads, value_width = v.shape
    num_chunks, kernel_sizes = cdiv(num_tokens, CHUNK_TOKENS), read_kernel_sizes(q, v)
    tile_shape = (num_chunks, num_value_heads, CHUNK_TOKENS)
    w, w_back = (v.new_empty(*tile_shape, q.shape[2]) for _ in range(2))
    u, z, delta_values, delta_grads = (v.new_empty(*tile_shape, value_width) for _ in range(4))
    chunk_states, state_grads = (
        v.new_empty(num_chunks, num_value_heads, value_width, q.shape[2]) for _ in range(2)
    )
    write_scale, read_scale, beta_scale = (torch.empty_like(saved.decay_sums) for _ in range(3))
    state_decay = saved.decay_sums.new_empty(tile_shape[:2])
    final_state = saved.decay_sums.new_empty(num_value_heads, q.shape[2], value_width)
    log_decay_grad, beta_grad = torch.empty_like(beta, dtype=torch.float32), torch.empty_like(beta)
    dinitial = None if saved.initial is None else torch.empty_like(saved.initial)

    query_scale = q.shape[2] ** -0.5
    factors = saved.decay_sums, saved.query_scales, saved.key_scales
    token_strides = (q.stride(0), k.stride(0), v.stride(0))
    continues = saved.initial is not None
    _prepare_backward_kernel[num_value_heads, num_chunks](
        q, k, v, *factors, beta, segment_ids, output_grad, saved.inverse, w, u, w_back, z,
        write_scale, read_scale, beta_scale, state_decay, num_tokens, *token_strides,
        SCALE=query_scale, num_warps=4,
        **kernel_sizes, INITIAL=continues,
    )  # fmt: skip

    scan_options = choose_scan_options(v)
    scans = cdiv(value_width, scan_options["COLUMNS"]), num_value_heads
    final_state_grad = None
    goes_on = exchange is not None and exchange.route.tokens_after > 0
    if exchange is not None and goes_on:
        gradient = torch.zeros_like(final_state)
        if saved.initial is not None:
            # From the outputs of the first sequence's chunks; what a scan stores of each is not needed.
            backward_scan_kernel[scans](
                q, k, w_back, z, output_grad, read_scale, beta_scale, state_decay, None, None, gradient, None,
                num_tokens, cdiv(exchange.route.first_end, CHUNK_TOKENS), *token_strides[:2],
                **kernel_sizes, **scan_options, OF_FINAL=False, INITIAL=True, STORE=False,
            )  # fmt: skip
        final_state_grad = exchange.final_gradient(gradient, saved.transition)

    both_scans_kernel[(*scans, 2)](
        q, k, w, u, w_back, z, output_grad, write_scale, read_scale, beta_scale, state_decay,
        chunk_states, state_grads, delta_values, delta_grads, saved.initial, final_state, dinitial,
        final_state_grad, num_tokens, num_chunks, *token_strides[:2],
        OF_FINAL=final_state_grad is not None,
        **kernel_sizes, **scan_options, INITIAL=continues,
    )  # fmt: skip
    if exchange is not None and not goes_on:
        exchange.final_gradient(torch.zeros_like(final_state) if dinitial is None else dinitial, None)

    key_heads = q.shape[1]
    _query_gradients_kernel[key_heads, num_chunks](
        q, k, *factors, segment_ids, output_grad, delta_values, chunk_states, query_grad, write_scale,
        num_tokens, *token_strides[:2], query_grad.stride(0), SCALE=query_scale,
        num_warps=4, **kernel_sizes, INITIAL=continues,
    )  # fmt: skip
    partial_key_grads = saved.decay_sums.new_empty(num_chunks, key_heads, CHUNK_TOKENS, q.shape[2])
    _pair_gradients_kernel[key_heads, num_chunks](
        q, k, *factors, beta, segment_ids, output_grad, delta_values, delta_grads, write_scale, read_scale,
        beta_scale, partial_key_grads, num_tokens, *token_strides[:2],
        SCALE=query_scale, num_warps=4, **kernel_sizes,
    )  # fmt: skip
    _key_gradients_kernel[key_heads, num_chunks](
        k, v, saved.decay_sums, saved.key_scales, beta, segment_ids, delta_values, delta_grads, chunk_states,
        state_grads, read_scale, beta_scale, partial_key_grads, key_grad, value_grad, log_decay_grad,
        beta_grad, num_tokens, *token_strides[1:], key_grad.stride(0), value_grad.stride(0),
        num_warps=8, **kernel_sizes, INITIAL=continues,
    )  # fmt: skip
    return query_grad, key_grad, value_grad, log_decay_grad, beta_grad


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
        exchange: ShardExchange | None,
    ) -> Tensor:
        rule_output, saved = run_forward(q, k, v, log_decay, beta, segment_ids, exchange)
        ctx.save_for_backward(q, k, v, beta, segment_ids, *saved)
        ctx.exchange = exchange
        return rule_output

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        q, k, v, beta, segments, *tensors = ctx.saved_tensors
        gradients = run_backward(
            q, k, v, beta, segments, Saved(*tensors), output_grad.contiguous(), ctx.exchange
        )
        return *gradients, None, None


def is_supported(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels support these heads: one type, and widths that are powers of two up to 128.

    On a GPU, widths start at 64: the forward pass was seen to give wrong values for values of 32 a head.
    """
    min_width = 64 if q.is_cuda else 16
    widths_are_supported = all(min_width <= n <= 128 and n & (n - 1) == 0 for n in (q.shape[2], v.shape[2]))
    return widths_are_supported and q.dtype == k.dtype == v.dtype and len(q) > 0


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    exchange: ShardExchange | None = None,
) -> Tensor:
    """As :func:`megatron_vl.kernels.linear_attention.gated_delta_rule.gated_delta_rule`."""
    q, k, v = contiguous_heads(q), contiguous_heads(k), contiguous_heads(v)
    return _GatedDeltaRule.apply(
        q, k, v, log_decay.contiguous(), beta.contiguous(), segment_ids.contiguous(), exchange
    )
