"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), its convolution and its norm over packed rows.

The state of a head is a matrix S [key, value]. Each token decays it and replaces the value that it stores for
the token's key:

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

State and convolution start again at each sequence of a row. If context-parallel ranks share the row, they
pass on the state and the last inputs of a sequence that crosses an edge
(:mod:`megatron_vl.kernels.linear_attention.shard_exchange`). The host reads nothing from the device, and
shapes depend only on the length of the row. The reference is ``torch_chunk_gated_delta_rule`` of
transformers, called for each sequence alone, because it does not support packed rows.

Triton kernels run on a GPU and in Triton's interpreter, torch code elsewhere. Float64 inputs always use the
torch code. On a GPU, float32 inputs of the rule use it too, because the rule's kernels multiply in half
precision.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange
from megatron_vl.kernels.sizes import DELTA_CHUNK as CHUNK_TOKENS
from megatron_vl.kernels.where_kernels_run import runs_on_kernels


def make_segment_ids(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The sequence number of each token of a row, int32 [num_tokens]."""
    tokens = torch.arange(num_tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True, out_int32=True)


def causal_conv(
    x: Tensor, weight: Tensor, segment_ids: Tensor, *, exchange: ShardExchange | None = None
) -> Tensor:
    """Depthwise causal convolution and SiLU.

    Args:
        x: [S, C].
        weight: [C, W]; the last column belongs to the token itself.
        segment_ids: sequence number of each token, [S]. A token does not see other sequences.
        exchange: the exchange with the ranks that hold the other shards of the row. With it, the call and its
            backward pass are collective.

    Returns:
        [S, C].
    """
    if _uses_kernels(x):
        from megatron_vl.kernels.linear_attention import causal_conv_triton

        if causal_conv_triton.is_supported(x, weight):
            return causal_conv_triton.causal_conv(x, weight, segment_ids, exchange)
    if exchange is not None:
        return _ShardConvolution.apply(x, weight, segment_ids, exchange)
    return _torch_conv(x, weight, segment_ids)


def _torch_conv(x: Tensor, weight: Tensor, segment_ids: Tensor) -> Tensor:
    conv_width = weight.shape[1]
    convolved = x * weight[:, -1]
    for distance in range(1, min(conv_width, x.shape[0])):
        in_same_segment = (segment_ids[distance:] == segment_ids[:-distance])[:, None]
        earlier_x = torch.where(in_same_segment, x[:-distance], 0.0)
        convolved = convolved + F.pad(earlier_x * weight[:, conv_width - 1 - distance], (0, 0, distance, 0))
    return F.silu(convolved)


def _conv_after_halo(x: Tensor, weight: Tensor, halo: Tensor, segment_ids: Tensor) -> Tensor:
    """The convolution of x [S, C], whose first sequence continues the inputs ``halo`` [W - 1, C]."""
    halo_length = len(halo)
    extended_ids = torch.cat((segment_ids[:1].expand(halo_length), segment_ids))
    return _torch_conv(torch.cat((halo, x)), weight, extended_ids)[halo_length:]


class _ShardConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, segment_ids: Tensor, exchange: ShardExchange) -> Tensor:
        halo = exchange.halo(x, weight.shape[1] - 1)
        ctx.save_for_backward(x, weight, halo, segment_ids)
        ctx.exchange = exchange
        return _conv_after_halo(x, weight, halo, segment_ids)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        *inputs, segment_ids = ctx.saved_tensors

        def convolution(x: Tensor, weight: Tensor, halo: Tensor) -> Tensor:
            return _conv_after_halo(x, weight, halo, segment_ids)

        convolved, leaves = _with_graph(convolution, inputs)
        x_grad, weight_grad, halo_grad = torch.autograd.grad(convolved, leaves, output_grad)
        ctx.exchange.add_halo_gradients(halo_grad, x_grad)
        return x_grad, weight_grad, None, None


def _with_graph(function: Callable, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Computes ``function`` with a separate autograd graph. Returns the result and the graph's leaves."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        return function(*leaves), leaves


def _uses_kernels(x: Tensor) -> bool:
    return runs_on_kernels(x) and x.dtype != torch.float64


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head, times the SiLU of its gate: ``Qwen3_5RMSNormGated`` of transformers.

    Args:
        x, gate: [S, heads, V].
        weight: [V].

    Returns:
        [S, heads, V] in the type of ``x``.
    """
    if _uses_kernels(x):
        from megatron_vl.kernels.linear_attention import gated_norm_triton

        if gated_norm_triton.is_supported(x):
            return gated_norm_triton.gated_norm(x, gate, weight, eps)

    normalized_fp32 = x.float()
    normalized_fp32 = normalized_fp32 * torch.rsqrt(normalized_fp32.square().mean(-1, keepdim=True) + eps)
    return (weight * normalized_fp32.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def l2_normalized(x: Tensor) -> Tensor:
    """x / |x| along the last axis, as transformers computes it for queries and keys."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    *,
    exchange: ShardExchange | None = None,
) -> Tensor:
    """Applies the gated delta rule to a packed row.

    It computes in float32, or in float64 for float64 queries. Each key head serves ``Vh / Kh`` value heads.

    Args:
        query, key: [S, Kh, K], not normalised.
        value: [S, Vh, V].
        log_decay: logarithm of the decay, float32 [S, Vh].
        beta: [S, Vh].
        segment_ids: sequence number of each token, [S], ascending.
        exchange: the exchange with the ranks that hold the other shards of the row. It supplies the initial
            state and the gradient of the final one. With it, the call and its backward pass are collective.

    Returns:
        [S, Vh, V] in the values' type.
    """
    if _uses_kernels(query) and not (query.is_cuda and query.dtype == torch.float32):
        from megatron_vl.kernels.linear_attention import gated_delta_rule_triton

        if gated_delta_rule_triton.is_supported(query, key, value):
            return gated_delta_rule_triton.gated_delta_rule(
                query, key, value, log_decay, beta, segment_ids, exchange
            )
    if exchange is not None:
        return _ShardRule.apply(query, key, value, log_decay, beta, segment_ids, exchange)
    return _torch_rule(query, key, value, log_decay, beta, segment_ids)[0]


def _torch_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs, and the state after the last token [Vh, K, V]."""
    num_tokens = query.shape[0]
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    value_heads_per_key_head = value.shape[1] // key.shape[1]
    scaled_queries = l2_normalized(query.to(compute_dtype)) * query.shape[-1] ** -0.5
    normalized_keys = l2_normalized(key.to(compute_dtype))

    # The last chunk is padded with tokens that change nothing: their key, beta and decay are zero.
    num_padding = -num_tokens % CHUNK_TOKENS
    padded_ids = torch.cat((segment_ids, segment_ids[-1:].expand(num_padding)))
    rule_inputs = (
        scaled_queries.repeat_interleave(value_heads_per_key_head, dim=1),
        normalized_keys.repeat_interleave(value_heads_per_key_head, dim=1),
        value,
        log_decay[..., None],
        beta[..., None],
    )
    q, k, v, g, b = (_split_into_chunks(tensor.to(compute_dtype), num_padding) for tensor in rule_inputs)
    chunk_outputs, state = _scan_chunks(q, k, v, g, b, padded_ids.view(-1, CHUNK_TOKENS), initial_state)
    return chunk_outputs.movedim(1, 2).flatten(0, 1)[:num_tokens].to(value.dtype), state


class _ShardRule(torch.autograd.Function):
    """The rule for one rank's shard in torch. It computes the shard's affine map first, and then the
    outputs."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        segment_ids: Tensor,
        exchange: ShardExchange,
    ) -> Tensor:
        inputs = (query, key, value, log_decay, beta)
        _, local_state = _torch_rule(*inputs, segment_ids)

        # The matrix of the map is what the shard makes of the unit matrix without values.
        transition = None
        if exchange.route.is_spanned:
            key_dim = key.shape[-1]
            unit_matrix = torch.eye(key_dim, dtype=local_state.dtype, device=local_state.device)
            unit_states = unit_matrix.expand(len(local_state), -1, -1)
            zero_values = value.new_zeros(*value.shape[:2], key_dim)
            _, transition = _torch_rule(query, key, zero_values, log_decay, beta, segment_ids, unit_states)

        initial_state = exchange.initial_state(local_state, transition)
        rule_output, _ = _torch_rule(*inputs, segment_ids, initial_state)
        ctx.save_for_backward(*inputs, segment_ids, transition, initial_state)
        ctx.exchange = exchange
        return rule_output

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        *inputs, segment_ids, transition, initial_state = ctx.saved_tensors
        continues = initial_state is not None

        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None):
            return _torch_rule(q, k, v, g, beta, segment_ids, initial)

        (rule_output, state), leaves = _with_graph(rule, [*inputs, initial_state] if continues else inputs)

        # The constant of the gradients' map: the gradient of the state before the shard from its own outputs.
        initial_grad = torch.zeros_like(state)
        if continues:
            (initial_grad,) = torch.autograd.grad(rule_output, leaves[-1], output_grad, retain_graph=True)
        state_grad = ctx.exchange.final_gradient(initial_grad, transition)

        results = (rule_output,) if state_grad is None else (rule_output, state)
        result_grads = (output_grad,) if state_grad is None else (output_grad, state_grad)
        return (*torch.autograd.grad(results, leaves[:5], result_grads), None, None)


def _split_into_chunks(x: Tensor, num_padding: int) -> Tensor:
    """[S, heads, d] -> [chunks, heads, CHUNK, d], where S + num_padding = chunks * CHUNK"""
    return F.pad(x, (0, 0, 0, 0, 0, num_padding)).unflatten(0, (-1, CHUNK_TOKENS)).movedim(2, 1)


def _scan_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Applies the rule chunk by chunk. Returns the outputs in the same shape, and the final state.

    Args:
        q, k, v, log_decay, beta: [chunks, heads, CHUNK, d], with d = 1 for log_decay and beta.
        segment_ids: [chunks, CHUNK].
        initial_state: [heads, K, V], the state that the first sequence continues; None: it begins here.
    """
    pair_decay, read_decay, write_decay = _chunk_decays(log_decay, segment_ids, initial_state is not None)

    # d_i = beta_i (v_i - read_i k_i S - sum over earlier j of pairs_ij (k_i k_j) d_j) is a triangular system
    # for all d of a chunk.
    system_matrix = beta * (k @ k.transpose(-1, -2)) * pair_decay
    right_hand_side = torch.cat((beta * v, beta * read_decay * k), dim=-1)
    system_solution = torch.linalg.solve_triangular(
        system_matrix, right_hand_side, upper=False, unitriangular=True
    )
    chunk_values, chunk_keys = system_solution.split((v.shape[-1], k.shape[-1]), dim=-1)
    attention_scores = (q @ k.transpose(-1, -2)) * pair_decay
    chunk_queries = q * read_decay
    transposed_write_keys = (k * write_decay).transpose(-1, -2)

    # Only this recurrence is sequential.
    state = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    chunk_outputs = []
    for i in range(q.shape[0]):
        delta_values = chunk_values[i] - chunk_keys[i] @ state
        chunk_outputs.append(chunk_queries[i] @ state + attention_scores[i] @ delta_values)
        state = read_decay[i, :, -1:] * state + transposed_write_keys[i] @ delta_values
    return torch.stack(chunk_outputs), state


def _chunk_decays(
    log_decay: Tensor, segment_ids: Tensor, continues_state: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The decays within chunks.

    Args:
        log_decay: [chunks, heads, CHUNK, 1].
        continues_state: whether the first sequence continues a state from before the row.

    Returns:
        From each token to each later one of its sequence, [chunks, heads, CHUNK, CHUNK]; from the state
        before the chunk to each token; and from each token to the state after the chunk. The last two are
        [chunks, heads, CHUNK, 1].
    """
    # Each token's decay since the beginning of its sequence, or of the chunk if that is later. It is summed
    # within the sequence, so that other sequences do not change its rounding.
    in_same_segment = segment_ids[:, :, None] == segment_ids[:, None, :]
    causal_mask = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=log_decay.device).tril()
    visible_pairs = (in_same_segment & causal_mask)[:, None]
    cumulative_decay = visible_pairs.to(log_decay.dtype) @ log_decay

    # Masked before exp, so that neither values nor gradients of other pairs overflow.
    decay_between = cumulative_decay - cumulative_decay.transpose(-1, -2)
    pair_decay = decay_between.masked_fill(~visible_pairs, -torch.inf).exp()

    # The state before a chunk is read by the tokens of its sequence, and the state after it is written by
    # those of the chunk's last sequence.
    previous_segment = F.pad(segment_ids[:-1, -1], (1, 0), value=-1)  # no sequence begins before the row
    if continues_state:
        previous_segment = torch.cat((segment_ids[:1, 0], segment_ids[:-1, -1]))
    continues_previous = (segment_ids == previous_segment[:, None])[:, None, :, None]
    read_decay = cumulative_decay.exp() * continues_previous
    in_last_segment = (segment_ids == segment_ids[:, -1:])[:, None, :, None]
    decay_to_end = cumulative_decay[:, :, -1:] - cumulative_decay
    write_decay = decay_to_end.masked_fill(~in_last_segment, -torch.inf).exp()
    return pair_decay, read_decay, write_decay
