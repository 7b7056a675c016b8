"""FlashAttention-4 (the package ``flash-attn-4``) for packed rows of language models, from Hopper on.

Its backward pass is wrong for some sizes of heads: in 4.0.0b36, dQ of heads of 72 and 80 has a relative error
of 1.3, without a message. So :func:`largest_gradient_error` compares it with float32 before a run uses it.
"""

import functools
import importlib.metadata

import torch
import torch.nn.functional as F
from torch import Tensor

CHECKED_LENGTHS = (129, 1, 300, 82)
"""Lengths of the sequences on which gradients are compared: below, above and at the edges of tiles."""


@functools.cache
def has_flash_attention() -> bool:
    """Whether the package is installed and this process has a GPU that it supports."""
    try:
        importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def packed_causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    known_result: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """query [S, h, d], key and value [K, g, d] -> [S, h, d], in bfloat16, and its log-sum-exp, fp32 [h, S].

    Gradients are equal in every run if ``torch.use_deterministic_algorithms`` is on.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 [number of sequences + 1], on the device. If a sequence has more
            keys than queries, its queries are the last of its tokens.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or more.
        known_result: the result for the same arguments, which is not computed again.
    """
    from flash_attn.cute.interface import flash_attn_varlen_func

    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    if known_result is not None:
        return _KnownAttention.apply(query, key, value, *known_result, *lengths), known_result[1]
    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=True,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        return_lse=True,
    )


class _KnownAttention(torch.autograd.Function):
    """Attention whose result is known, with FlashAttention-4's backward pass."""

    @staticmethod
    def forward(ctx, query, key, value, output, log_sum_exp, cu_seqlens_q, cu_seqlens_k, *max_lengths):
        ctx.save_for_backward(query, key, value, output, log_sum_exp, cu_seqlens_q, cu_seqlens_k)
        ctx.max_lengths = max_lengths
        return output.view_as(output)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        from flash_attn.cute.interface import _flash_attn_bwd

        query, key, value, output, log_sum_exp, cu_seqlens_q, cu_seqlens_k = ctx.saved_tensors
        gradients = _flash_attn_bwd(
            query,
            key,
            value,
            output,
            output_grad,
            log_sum_exp,
            causal=True,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=ctx.max_lengths[0],
            max_seqlen_k=ctx.max_lengths[1],
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return *gradients, *[None] * 6


@functools.cache
def largest_gradient_error(heads_per_group: int, head_dim: int, gathers_keys: bool = False) -> float:
    """The largest relative L2 error of the output and the gradients, against SDPA in float32.

    Right kernels in bfloat16 have 0.003 to 0.005.

    Args:
        gathers_keys: whether only the second half of each sequence's tokens are queries.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    key_lengths = torch.tensor(CHECKED_LENGTHS, device="cuda")
    query_lengths = (key_lengths + 1) // 2 if gathers_keys else key_lengths
    cu_seqlens_q = F.pad(query_lengths.cumsum(0), (1, 0)).int()
    cu_seqlens_k = F.pad(key_lengths.cumsum(0), (1, 0)).int()

    def random_heads(num_tokens: int, num_heads: int) -> Tensor:
        heads = torch.randn(num_tokens, num_heads, head_dim, device="cuda", generator=generator)
        return heads.bfloat16().requires_grad_()

    query = random_heads(int(query_lengths.sum()), 2 * heads_per_group)
    key, value = random_heads(sum(CHECKED_LENGTHS), 2), random_heads(sum(CHECKED_LENGTHS), 2)
    attention_output, _ = packed_causal_attention(
        query, key, value, cu_seqlens_q, cu_seqlens_k, int(query_lengths.max()), max(CHECKED_LENGTHS)
    )
    output_grad = torch.randn_like(attention_output)
    gradients = torch.autograd.grad(attention_output, (query, key, value), output_grad)

    # The reference computes all scores, and masks other sequences and later tokens.
    mask = packed_causal_mask(query_lengths, key_lengths)
    float_heads = [heads.detach().float().transpose(0, 1).requires_grad_() for heads in (query, key, value)]
    expected_output = F.scaled_dot_product_attention(
        float_heads[0], float_heads[1], float_heads[2], mask, enable_gqa=True
    )
    expected_gradients = torch.autograd.grad(
        expected_output, float_heads, output_grad.float().transpose(0, 1)
    )

    references = (expected_output, *expected_gradients)
    relative_errors = [
        (result.float().transpose(0, 1) - reference).norm() / reference.norm()
        for result, reference in zip((attention_output, *gradients), references, strict=True)
    ]
    # Not Python's max, which passes over NaN.
    return float(torch.stack(relative_errors).detach().max())


def packed_causal_mask(query_lengths: Tensor, key_lengths: Tensor) -> Tensor:
    """Which keys each query of packed sequences sees, bool [queries, keys].

    Args:
        query_lengths, key_lengths: int64 [sequences]. The queries of a sequence are the last of its tokens.
    """
    segment_ids = torch.repeat_interleave(key_lengths)
    tokens = torch.arange(len(segment_ids), device=segment_ids.device)
    mask = (segment_ids[:, None] == segment_ids) & (tokens[:, None] >= tokens)
    first_queries = (key_lengths.cumsum(0) - query_lengths)[segment_ids]
    return mask[tokens >= first_queries]
