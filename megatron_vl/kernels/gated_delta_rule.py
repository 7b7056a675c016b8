"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464), its convolution and its norm over packed rows.

The state of a head is a matrix S [key, value]. Each token decays it and replaces the value that it stores for
the token's key:

    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q

State and convolution start afresh at each sequence of a row. If context-parallel ranks share the row, those
of a sequence that crosses an edge are carried on (:mod:`megatron_vl.kernels.shard_exchange`). The host reads
nothing from the device, and shapes depend only on the length of the row. Reference:
``torch_chunk_gated_delta_rule`` of transformers. It does not support packed rows: run on each sequence alone,
it gives the same results.

Triton kernels run on a GPU and in Triton's interpreter, torch code elsewhere. Float64 inputs always use the
torch code. On a GPU, float32 inputs of the rule use it too, because the rule's kernels multiply in half
precision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_vl.kernels.shard_exchange import ShardExchange
from megatron_vl.kernels.sizes import DELTA_CHUNK

CHUNK = DELTA_CHUNK
"""Number of tokens that are computed together."""


def segment_numbers(cu_seqlens: Tensor, length: int, first_token: int = 0) -> Tensor:
    """The sequence number of each token, int32 [length], from ``cu_seqlens``, int32 [sequences + 1].

    The tokens are those of the row from ``first_token`` on.
    """
    tokens = torch.arange(first_token, first_token + length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True, out_int32=True)


def causal_conv(
    x: Tensor, weight: Tensor, segments: Tensor, *, exchange: ShardExchange | None = None
) -> Tensor:
    """Depthwise causal convolution and SiLU.

    Args:
        x: [S, C].
        weight: [C, W]; the last column belongs to the token itself.
        segments: sequence number of each token, [S]. A token does not see other sequences.
        exchange: with the ranks that hold the other shards of the row. The call is then collective, its
            backward pass too.

    Returns:
        [S, C].
    """
    if _has_kernels(x):
        from megatron_vl.kernels import causal_conv_triton

        if causal_conv_triton.fits(x, weight):
            return causal_conv_triton.causal_conv(x, weight, segments, exchange)
    if exchange is not None:
        return _ShardConvolution.apply(x, weight, segments, exchange)
    return _torch_conv(x, weight, segments)


def _torch_conv(x: Tensor, weight: Tensor, segments: Tensor) -> Tensor:
    width = weight.shape[1]
    out = x * weight[:, -1]
    for back in range(1, min(width, x.shape[0])):
        same = (segments[back:] == segments[:-back])[:, None]
        earlier = torch.where(same, x[:-back], 0.0) * weight[:, width - 1 - back]
        out = out + F.pad(earlier, (0, 0, back, 0))
    return F.silu(out)


def _conv_after_halo(x: Tensor, weight: Tensor, halo: Tensor, segments: Tensor) -> Tensor:
    """The convolution of x [S, C], whose first sequence continues the inputs ``halo`` [W - 1, C]."""
    reach = len(halo)
    extended = torch.cat((segments[:1].expand(reach), segments))
    return _torch_conv(torch.cat((halo, x)), weight, extended)[reach:]


class _ShardConvolution(torch.autograd.Function):
    """The convolution of one rank's shard in torch."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, segments: Tensor, exchange: ShardExchange) -> Tensor:
        halo = exchange.halo(x, weight.shape[1] - 1)
        ctx.save_for_backward(x, weight, halo, segments)
        ctx.exchange = exchange
        return _conv_after_halo(x, weight, halo, segments)

    @staticmethod
    def backward(ctx, dout: Tensor):
        *inputs, segments = ctx.saved_tensors

        def convolution(x: Tensor, weight: Tensor, halo: Tensor) -> Tensor:
            return _conv_after_halo(x, weight, halo, segments)

        out, leaves = _with_graph(convolution, inputs)
        dx, dweight, dhalo = torch.autograd.grad(out, leaves, dout)
        ctx.exchange.add_halo_gradients(dhalo, dx)
        return dx, dweight, None, None


def _with_graph(function: Callable, inputs: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """Computes ``function`` with an autograd graph of its own; returns the result and the graph's leaves."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    with torch.enable_grad():
        return function(*leaves), leaves


def _has_kernels(x: Tensor) -> bool:
    runs = x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return runs and x.dtype != torch.float64


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head, times the SiLU of its gate: ``Qwen3_5RMSNormGated`` of transformers.

    Args:
        x, gate: [S, heads, V].
        weight: [V].

    Returns:
        [S, heads, V] in the type of ``x``.
    """
    if _has_kernels(x):
        from megatron_vl.kernels import gated_norm_triton

        if gated_norm_triton.fits(x):
            return gated_norm_triton.gated_norm(x, gate, weight, eps)

    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * wide.to(x.dtype) * F.silu(gate.float())).to(x.dtype)


def normalized(x: Tensor) -> Tensor:
    """x / |x| along the last axis, as transformers computes it for queries and keys."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor,
    *,
    initial_state: Tensor | None = None,
    exchange: ShardExchange | None = None,
) -> tuple[Tensor, Tensor]:
    """Applies the gated delta rule to a packed row.

    It computes in float32, or in float64 for float64 queries. Each key head serves ``Vh / Kh`` value heads.

    Args:
        query, key: [S, Kh, K], not normalised.
        value: [S, Vh, V].
        g: logarithm of the decay, float32 [S, Vh].
        beta: [S, Vh].
        segments: sequence number of each token, [S], ascending.
        initial_state: the state before the first token, [Vh, K, V] in the type of the computation, if the
            first sequence began before the row; None: it begins with the row.
        exchange: with the ranks that hold the other shards of the row. It supplies the initial state and the
            gradient of the final one; the call is then collective, its backward pass too.

    Returns:
        The outputs [S, Vh, V] in the values' type, and the state [Vh, K, V] after the last token. With
        ``exchange``, autograd does not follow the state.
    """
    assert initial_state is None or exchange is None, "the exchange supplies the initial state"
    if _has_kernels(query) and not (query.is_cuda and query.dtype == torch.float32):
        from megatron_vl.kernels import gated_delta_rule_triton

        if gated_delta_rule_triton.fits(query, key, value):
            return gated_delta_rule_triton.gated_delta_rule(
                query, key, value, g, beta, segments, initial_state, exchange
            )
    if exchange is not None:
        return _ShardRule.apply(query, key, value, g, beta, segments, exchange)
    return _torch_rule(query, key, value, g, beta, segments, initial_state)


def _torch_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    length, kind = query.shape[0], value.dtype
    wide = torch.promote_types(query.dtype, torch.float32)
    repeats = value.shape[1] // key.shape[1]
    q = normalized(query.to(wide)) * query.shape[-1] ** -0.5
    k = normalized(key.to(wide))
    q, k = (t.repeat_interleave(repeats, dim=1) for t in (q, k))

    # The last chunk is padded with tokens that change nothing: their key, beta and decay are zero.
    padding = -length % CHUNK
    segments = torch.cat((segments, segments[-1:].expand(padding)))
    q, k, v, g, beta = (_chunks(t.to(wide), padding) for t in (q, k, value, g[..., None], beta[..., None]))
    out, state = _over_chunks(q, k, v, g, beta, segments.view(-1, CHUNK), initial_state)
    out = out.movedim(1, 2).flatten(0, 1)[:length]
    return out.to(kind), state


class _ShardRule(torch.autograd.Function):
    """The rule for one rank's shard in torch. It computes the shard's map first, and then the outputs."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        segments: Tensor,
        exchange: ShardExchange,
    ) -> tuple[Tensor, Tensor]:
        inputs = (query, key, value, g, beta)
        _, local_state = _torch_rule(*inputs, segments)
        transition = None
        if exchange.route.is_between:
            width = key.shape[-1]
            unit = torch.eye(width, dtype=local_state.dtype, device=local_state.device)
            units, no_values = unit.expand(len(local_state), -1, -1), value.new_zeros(*value.shape[:2], width)
            _, transition = _torch_rule(query, key, no_values, g, beta, segments, units)

        initial_state = exchange.initial_state(local_state, transition)
        out, state = _torch_rule(*inputs, segments, initial_state)
        ctx.save_for_backward(*inputs, segments, transition, initial_state)
        ctx.exchange = exchange
        ctx.mark_non_differentiable(state)
        return out, state

    @staticmethod
    def backward(ctx, dout: Tensor, _: Tensor):
        *inputs, segments, transition, initial_state = ctx.saved_tensors
        continues = initial_state is not None

        def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None = None):
            return _torch_rule(q, k, v, g, beta, segments, initial)

        (out, state), leaves = _with_graph(rule, [*inputs, initial_state] if continues else inputs)

        # The map of gradients: what this shard's outputs give to the state before it.
        gradient = torch.zeros_like(state)
        if continues:
            (gradient,) = torch.autograd.grad(out, leaves[-1], dout, retain_graph=True)
        dstate = ctx.exchange.final_gradient(gradient, transition)

        results = (out,) if dstate is None else (out, state)
        gradients = (dout,) if dstate is None else (dout, dstate)
        return (*torch.autograd.grad(results, leaves[:5], gradients), None, None)


def _chunks(x: Tensor, padding: int) -> Tensor:
    """[S, heads, d] -> [chunks, heads, CHUNK, d], where S + padding = chunks * CHUNK"""
    return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(0, (-1, CHUNK)).movedim(2, 1)


def _over_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Tensor, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Applies the rule chunk by chunk. Returns the outputs in the same shape, and the final state.

    Args:
        q, k, v, g, beta: [chunks, heads, CHUNK, d], with d = 1 for g and beta.
        segments: [chunks, CHUNK].
        initial_state: [heads, K, V], the state that the first sequence continues; None: it begins here.
    """
    # Each token's decay since the beginning of its sequence, or of the chunk if that is later. It is summed
    # within the sequence, so that other sequences do not change its rounding.
    same = segments[:, :, None] == segments[:, None, :]
    earlier = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    keep = (same & earlier)[:, None]
    decay = keep.to(g.dtype) @ g

    # Masked before exp, so that neither values nor gradients of other pairs overflow.
    pairs = (decay - decay.transpose(-1, -2)).masked_fill(~keep, -torch.inf).exp()
    before = F.pad(segments[:-1, -1], (1, 0), value=-1)  # no sequence begins before the row
    if initial_state is not None:
        before = torch.cat((segments[:1, 0], segments[:-1, -1]))
    carried = (segments == before[:, None])[:, None, :, None]
    read = decay.exp() * carried
    last = (segments == segments[:, -1:])[:, None, :, None]
    write = (decay[:, :, -1:] - decay).masked_fill(~last, -torch.inf).exp()
    survives = read[:, :, -1:]

    # d_i = beta_i (v_i - read_i k_i S - sum over earlier j of pairs_ij (k_i k_j) d_j) is a triangular system
    # for all d of a chunk.
    mixing = beta * (k @ k.transpose(-1, -2)) * pairs
    right = torch.cat((beta * v, beta * read * k), dim=-1)
    solved = torch.linalg.solve_triangular(mixing, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    scores = (q @ k.transpose(-1, -2)) * pairs
    queries, written = q * read, (k * write).transpose(-1, -2)

    state = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    out = []
    for i in range(q.shape[0]):
        d = values[i] - keys[i] @ state
        out.append(queries[i] @ state + scores[i] @ d)
        state = survives[i] * state + written[i] @ d
    return torch.stack(out), state


def one_token(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Applies the rule to the next token of each of N sequences.

    Args:
        query, key: [N, Kh, K], not normalised.
        value: [N, Vh, V].
        g, beta: [N, Vh].
        state: float32 [N, Vh, K, V].

    Returns:
        The outputs [N, Vh, V] in the values' type, and the new states.
    """
    wide = state.dtype
    repeats = value.shape[1] // key.shape[1]
    q = (normalized(query.to(wide)) * query.shape[-1] ** -0.5).repeat_interleave(repeats, dim=1)
    k = normalized(key.to(wide)).repeat_interleave(repeats, dim=1)

    state = state * g.to(wide).exp()[..., None, None]
    held = (state * k[..., None]).sum(-2)
    d = beta.to(wide)[..., None] * (value.to(wide) - held)
    state = state + k[..., None] * d[..., None, :]
    return (state * q[..., None]).sum(-2).to(value.dtype), state
