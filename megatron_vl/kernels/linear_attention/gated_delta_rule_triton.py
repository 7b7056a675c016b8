"""The Triton kernels of :mod:`megatron_vl.kernels.linear_attention.gated_delta_rule`, forward and backward.

The kernels stand in ``delta_rule_forward``, ``delta_rule_backward`` and, where a state goes from chunk to
chunk, ``delta_rule_scans``; ``delta_rule_chunks`` has what they share.

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
from torch import Tensor

from megatron_vl.kernels.linear_attention.delta_rule_backward import run_backward
from megatron_vl.kernels.linear_attention.delta_rule_forward import Saved, run_forward
from megatron_vl.kernels.linear_attention.gated_norm_triton import contiguous_heads
from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange


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
        ctx.save_for_backward(q, k, v, log_decay, beta, segment_ids, *saved)
        ctx.exchange = exchange
        return rule_output

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        q, k, v, log_decay, beta, segments, *tensors = ctx.saved_tensors
        gradients = run_backward(
            q, k, v, log_decay, beta, segments, Saved(*tensors), output_grad.contiguous(), ctx.exchange
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
