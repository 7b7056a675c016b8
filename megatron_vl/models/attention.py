"""Packed attention: one interface with several backends.

A packed row holds several sequences one after another; ``cu_seqlens`` gives their bounds. Megatron-core's own
packed path (``thd``) restarts the rotary frequencies at each sequence, so it does not work with M-RoPE. Here
core gets ``sbhd`` with a batch of one, applies RoPE from the given position ids, and calls
:class:`PackedAttention`.

The backends are ``sdpa`` (on any device), ``te`` (Transformer Engine / cuDNN), ``torch_varlen``
(FlashAttention-2 in torch), ``flash_attn`` (the package) and ``triton``
(:mod:`megatron_vl.kernels.tower_attention`, for towers).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.config import RunConfigError
from megatron_vl.kernels.sizes import TE_HEADS
from megatron_vl.kernels.tower_heads import has_kernels, kernels_are_fastest
from megatron_vl.models.batch import RowShard, Segments
from megatron_vl.models.context_parallel import heads_for_tokens, tokens_for_heads
from megatron_vl.models.kv_cache import CacheUse

BACKENDS = ("sdpa", "torch_varlen", "flash_attn", "te", "triton")

Backend = Callable[[Tensor, Tensor, Tensor, "Segments", bool], Tensor]
"""(query [S, h, d], key [S, g, d], value [S, g, d], segments, causal) -> [S, h, d]"""


@dataclass
class PackedRow(PackedSeqParams):
    """The description of a packed row that core passes to every layer."""

    full: Segments | None = None
    """The segments of full attention."""
    window: Segments | None = None
    """The segments of window attention, in a tower with windows."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """fp32 [P, d / 2] each, for layers whose kernels apply RoPE themselves."""
    cache: CacheUse | None = None
    """The stored keys and values during generation; otherwise None."""
    shard: RowShard | None = None
    """This rank's part of the row under context parallelism; otherwise None."""


def packed_row(
    full: Segments,
    window: Segments | None = None,
    cos_sin: tuple[Tensor, Tensor] | None = None,
    cache: CacheUse | None = None,
    shard: RowShard | None = None,
) -> PackedRow:
    """A :class:`PackedRow` in the format ``sbhd``.

    With this format, core neither squeezes the batch axis nor applies its own packed RoPE.
    """
    return PackedRow(
        qkv_format="sbhd",
        full=full,
        window=window,
        cos_sin=cos_sin,
        cache=cache,
        shard=shard,
    )


class PackedAttention(nn.Module):
    """The ``core_attention`` of a Megatron-core layer, for packed rows.

    Under context parallelism (``pg_collection.cp``), ranks exchange heads around it.

    Args:
        backend: one of :data:`BACKENDS`.
        causal: whether to use a causal mask, as in the language model; the vision tower has none.
        windowed: says whether a zero-based layer attends within windows.

    Raises:
        ValueError: core asks for another ``softmax_scale`` than the default.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        *,
        backend: str,
        causal: bool,
        windowed: Callable[[int], bool] = lambda layer: False,
    ) -> None:
        super().__init__()
        if softmax_scale is not None:
            raise ValueError("softmax_scale is not supported; attention scales by head_dim ** -0.5")
        self.backend = backend
        self.windowed = windowed(layer_number - 1)
        self.causal = causal
        self.attend = make_backend(backend)
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """query [S, 1, h, d], key and value [S, 1, g, d] -> [S, 1, h * d]; S are this rank's tokens."""
        assert packed_seq_params is not None
        segments = packed_seq_params.window if self.windowed else packed_seq_params.full
        assert segments is not None

        q = query.squeeze(1)
        k = key.squeeze(1)
        v = value.squeeze(1)
        use = packed_seq_params.cache
        if self.cp_group.size() > 1:
            assert use is None, "answers are not generated under context parallelism"
            q, k, v = heads_for_tokens(q, k, v, self.cp_group)
            out = tokens_for_heads(self.attend(q, k, v, segments, self.causal), self.cp_group)
        elif use is None:
            out = self.attend(q, k, v, segments, self.causal)
        else:
            out = use.attend(self, q, k, v, lambda: self.attend(q, k, v, segments, self.causal))
        return out.reshape(out.shape[0], 1, -1)


def choose_backend(
    name: str, *, platform: str, head_dim: int, causal: bool, dtype: torch.dtype = torch.bfloat16
) -> str:
    """Chooses the fastest measured backend if ``name`` is ``auto``. Otherwise, checks and returns ``name``.

    On H200 (docs/log/speed.md), our kernels are the fastest for the vision tower's heads of 72 and 80,
    FlashAttention-2 for its short segments with other heads, and cuDNN through Transformer Engine for the
    language model's long causal segments. Heads wider than 128 (Qwen3.5) use FlashAttention-2, because cuDNN
    computes wrong gradients for them in packed rows.

    Raises:
        RunConfigError: the name is unknown, or the backend cannot run on this platform or this attention.
    """
    towers = not causal and dtype == torch.bfloat16
    if name == "auto":
        if platform == "cpu":
            return "sdpa"
        if head_dim % 8:
            return "sdpa"  # no fused kernel supports such heads
        if towers and kernels_are_fastest(head_dim):
            return "triton"
        return "te" if causal and head_dim in TE_HEADS else "torch_varlen"

    if name not in BACKENDS:
        raise RunConfigError(f"attention backend {name!r} is unknown; valid: auto, {', '.join(BACKENDS)}")
    if platform == "cpu" and name != "sdpa":
        raise RunConfigError(f"attention backend {name!r} has no CPU kernel; use sdpa or auto")
    if name == "triton" and not (towers and has_kernels(head_dim)):
        raise RunConfigError(
            "attention backend triton is for vision towers in bfloat16 with heads of 16, 24, ... 128; use"
            " auto"
        )

    if name == "te" and causal and head_dim > max(TE_HEADS):
        raise RunConfigError(
            f"attention backend te: cuDNN computes wrong gradients for packed rows with heads of {head_dim};"
            " use auto or torch_varlen"
        )

    if name == "flash_attn" and importlib.util.find_spec("flash_attn") is None:
        raise RunConfigError(
            "attention backend flash_attn: the package is not installed (pip install -e .[gpu])"
        )

    return name


def make_backend(name: str) -> Backend:
    """Makes the function of a backend. Each layer needs its own."""
    if name == "te":
        return _TransformerEngine()
    functions: dict[str, Backend] = {
        "sdpa": _sdpa,
        "torch_varlen": _torch_varlen,
        "flash_attn": _flash_attn,
        "triton": _triton,
    }
    return functions[name]


def _sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Torch's SDPA, called once for each run of equally long segments.

    It reads ``cu_seqlens`` on the host, so it is meant for CPU and for checks.
    """
    bounds = segments.cu_seqlens.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    grouped = query.shape[1] != key.shape[1]

    out = []
    i = 0
    start = 0
    while i < len(lengths):
        n = 1
        while i + n < len(lengths) and lengths[i + n] == lengths[i]:
            n += 1

        length = lengths[i]
        end = start + n * lengths[i]
        if length:
            q, k, v = (t[start:end].unflatten(0, (n, length)).transpose(1, 2) for t in (query, key, value))
            o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
            out.append(o.transpose(1, 2).flatten(0, 1))
        i += n
        start = end

    return torch.cat(out)


def _torch_varlen(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    cu, longest = segments.cu_seqlens, segments.max_seqlen
    out = varlen_attn(
        query, key, value, cu, cu, longest, longest, window_size=(-1, 0) if causal else (-1, -1)
    )
    assert isinstance(out, Tensor)  # it is a tuple only if the log-sum-exp is requested
    return out


def _flash_attn(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    cu, longest = segments.cu_seqlens, segments.max_seqlen
    return flash_attn_varlen_func(query, key, value, cu, cu, longest, longest, causal=causal)


def _triton(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    from megatron_vl.kernels.tower_attention import attention

    assert not causal, "for towers only"
    return attention(query, key, value, segments.cu_seqlens)


class _TransformerEngine:
    """Transformer Engine's DotProductAttention in ``thd``.

    The module is built at the first call, when the number of local heads is known.
    """

    def __init__(self) -> None:
        self.module: nn.Module | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
        if self.module is None:
            from transformer_engine.pytorch import DotProductAttention

            self.module = DotProductAttention(
                num_attention_heads=query.shape[1],
                kv_channels=query.shape[2],
                num_gqa_groups=key.shape[1],
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal" if causal else "padding",
            )

        out = self.module(
            query,
            key,
            value,
            qkv_format="thd",
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_kv=segments.cu_seqlens,
            max_seqlen_q=segments.max_seqlen,
            max_seqlen_kv=segments.max_seqlen,
            attn_mask_type="padding_causal" if causal else "padding",
        )

        return out.view(out.shape[0], query.shape[1], query.shape[2])
