"""Packed attention: one interface with several backends.

A packed row holds several sequences one after another; ``cu_seqlens`` gives their bounds. Megatron-core's own
packed path (``thd``) restarts the rotary frequencies at each sequence, so it does not work with M-RoPE, or,
without its fused kernel, reads the lengths of sequences on the host in each layer. Here core gets ``sbhd``
with a batch of one, applies RoPE from the given position ids, and calls :class:`PackedAttention`.

The backends are ``sdpa`` (on any device), ``te`` (Transformer Engine / cuDNN), ``torch_varlen``
(FlashAttention-2 in torch), ``flash_attn`` (FlashAttention-4,
:mod:`megatron_vl.kernels.attention.flash_attention`, for language models) and ``triton``
(:mod:`megatron_vl.kernels.attention.tower_attention`, for towers).
"""

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.kernels.attention.flash_attention import (
    has_flash_attention,
    largest_gradient_error,
    packed_causal_attention,
)
from megatron_vl.kernels.sizes import FLASH_ATTENTION_HEAD_DIMS, TE_HEAD_DIMS, TOWER_HEAD_DIMS
from megatron_vl.models.batch import RowShard, Segments
from megatron_vl.models.context_parallel import gather_keys, heads_for_tokens, tokens_for_heads

LARGEST_GRADIENT_ERROR = 0.02

Backend = Callable[[Tensor, Tensor, Tensor, "Segments", bool], Tensor]
"""(query [S, h, d], key [K, g, d], value [K, g, d], segments, causal) -> [S, h, d]

K is S, or more if ranks gather keys. Then a sequence's queries are the last of its tokens."""


@dataclass
class PackedRow(PackedSeqParams):
    """The description of a packed row that core passes to every layer. Give its fields by name.

    In the format ``sbhd``, core neither squeezes the batch axis nor applies its own packed RoPE.
    """

    qkv_format: str = "sbhd"
    full_segments: Segments | None = None
    window_segments: Segments | None = None
    """The segments of window attention, in a tower with windows."""
    cos_sin: tuple[Tensor, Tensor] | None = None
    """fp32 [P, d / 2] each, for layers whose kernels apply RoPE themselves."""
    shard: RowShard | None = None
    """This rank's part of the row under context parallelism; otherwise None."""
    kept_outputs: dict[nn.Module, dict[Any, Any]] = field(default_factory=dict)
    """What layers under full recompute keep (:func:`keep_layer_outputs`)."""


class PackedAttention(nn.Module):
    """The ``core_attention`` of a Megatron-core layer, for packed rows.

    Under context parallelism (``pg_collection.cp``), ranks exchange heads around it. Where these do not
    divide among all ranks (``pg_collection.hcp``), ranks also gather keys and values.

    Args:
        windowed: says whether a zero-based layer attends within windows.
        rope_scale: (number of a query's first elements, their factor). It is YaRN's attention factor of both
            query and key, because fused rotary kernels take only angles, and logits are all that either
            decides. None: no factor.
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
        rope_scale: tuple[int, float] | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self.windowed = windowed(layer_number - 1)
        self.causal = causal
        self.rope_scale = rope_scale
        if backend != "triton":  # TowerSelfAttention calls those kernels itself
            self.backend_function = make_backend(backend)
        self.cp_group = pg_collection.cp
        nested_groups = getattr(pg_collection, "hcp", None)
        self.head_group, self.key_group = nested_groups or (self.cp_group, self.cp_group)

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
        """query [S, 1, h, d], key and value [S, 1, g, d] -> [S, 1, h * d], for the S tokens of this rank."""
        # Core passes no mask: the bounds of the sequences come with the row.
        assert packed_seq_params is not None
        segments = packed_seq_params.window_segments if self.windowed else packed_seq_params.full_segments
        assert segments is not None

        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if self.causal:
            # The value is a view of the fused QKV output, all of which the backward pass would keep.
            value = value.contiguous()

        # Each rank gets all tokens of some heads, so that the backends need not know that the row is split.
        is_shared = self.cp_group.size() > 1
        if is_shared:
            query, key, value = heads_for_tokens(query, key, value, self.head_group)
            if segments.gathered_keys is not None:
                key, value = gather_keys(key, value, segments.gathered_keys.row_tokens, self.key_group)
        if self.rope_scale is not None:
            query = scale_elements(query, *self.rope_scale)
        output = self.backend_function(query, key, value, segments, self.causal)
        if is_shared:
            output = tokens_for_heads(output, self.head_group)
        return output.reshape(output.shape[0], 1, -1)


def scale_elements(x: Tensor, num_elements: int, factor: float) -> Tensor:
    """Multiplies the first elements of each head: [S, h, d] -> [S, h, d]. Recompute needs ``x`` unchanged."""
    if num_elements == x.shape[-1]:
        return x * factor
    return torch.cat((x[..., :num_elements] * factor, x[..., num_elements:]), dim=-1)


def choose_backend(
    attention: str,
    *,
    platform: str,
    head_dim: int,
    causal: bool,
    dtype: torch.dtype = torch.bfloat16,
    gathers_keys: bool = False,
    tries_flash_attention: bool = True,
) -> str:
    """The backend of ``model.attention``: for ``auto``, the fastest one measured.

    On Hopper, our kernels are the fastest for the vision tower, and FlashAttention-4 for the language model's
    causal segments (benchmarks/log/speed.md). Without it, the language model uses cuDNN through Transformer
    Engine, but FlashAttention-2 for heads wider than 128 (Qwen3.5), because cuDNN computes wrong gradients
    for them in packed rows, and for more keys than queries (``gathers_keys``, under context parallelism).
    """
    if attention == "reference" or platform == "cpu" or head_dim % 8:
        return "sdpa"  # no fused kernel supports other heads
    if not causal:
        return "triton" if dtype == torch.bfloat16 and head_dim in TOWER_HEAD_DIMS else "torch_varlen"
    takes_flash_attention = dtype == torch.bfloat16 and head_dim in FLASH_ATTENTION_HEAD_DIMS
    if tries_flash_attention and takes_flash_attention and has_flash_attention():
        return "flash_attn"
    return "te" if head_dim in TE_HEAD_DIMS and not gathers_keys else "torch_varlen"


def flash_attention_is_right(heads_per_group: int, head_dim: int, gathers_keys: bool) -> bool:
    """Compares FlashAttention-4's gradients with float32 on this GPU, which takes seconds to compile.

    The kernels that it compiles are those of the run.
    """
    # A comparison with NaN is false too.
    return largest_gradient_error(heads_per_group, head_dim, gathers_keys) <= LARGEST_GRADIENT_ERROR


def make_backend(backend_name: str) -> Backend:
    """Makes the function of a backend. Each layer needs its own."""
    if backend_name == "te":
        return _TransformerEngineBackend()
    return {
        "sdpa": _attend_with_sdpa,
        "torch_varlen": _attend_with_torch_varlen,
        "flash_attn": _attend_with_flash_attn,
    }[backend_name]


def _attend_with_sdpa(query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
    """Torch's SDPA, called once for each run of equally long segments.

    It reads ``cu_seqlens`` on the host, so it is meant for CPU and for checks.
    """
    query_lengths = segments.cu_seqlens.diff().tolist()
    key_lengths = segments.keys.cu_seqlens.diff().tolist()

    output_parts = []
    first_query = first_key = 0
    for (num_queries, num_keys), run in itertools.groupby(zip(query_lengths, key_lengths, strict=True)):
        n = len(list(run))
        queries = slice(first_query, first_query + n * num_queries)
        keys = slice(first_key, first_key + n * num_keys)
        first_query, first_key = queries.stop, keys.stop
        if not num_queries:
            continue
        q, k, v = (
            packed.unflatten(0, (n, -1)).transpose(1, 2)
            for packed in (query[queries], key[keys], value[keys])
        )
        # SDPA's own causal mask aligns the first query with the first key, and not the last ones.
        causal_mask, is_causal = None, causal and num_keys == num_queries
        if causal and not is_causal:
            causal_mask = query.new_ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        output = F.scaled_dot_product_attention(
            q, k, v, causal_mask, 0.0, is_causal, enable_gqa=query.shape[1] != key.shape[1]
        )
        output_parts.append(output.transpose(1, 2).flatten(0, 1))
    return torch.cat(output_parts)


def _attend_with_torch_varlen(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    window_size = (-1, 0) if causal else (-1, -1)
    attention_output = varlen_attn(query, key, value, *segments.varlen_arguments, window_size=window_size)
    assert isinstance(attention_output, Tensor)  # it is a tuple only if the log-sum-exp is requested
    return attention_output


def _attend_with_flash_attn(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool
) -> Tensor:
    assert causal, "for language models only"
    known = known_output("attention")
    result = packed_causal_attention(query, key, value, *segments.varlen_arguments, known_result=known)
    keep_output("attention", "attention", result)
    return result[0]


class _TransformerEngineBackend:
    """Transformer Engine's DotProductAttention in ``thd``.

    The module is built at the first call, when the number of local heads is known.
    """

    dot_product_attention: nn.Module | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, causal: bool) -> Tensor:
        if self.dot_product_attention is None:
            from transformer_engine.pytorch import DotProductAttention

            self.dot_product_attention = DotProductAttention(
                num_attention_heads=query.shape[1],
                kv_channels=query.shape[2],
                num_gqa_groups=key.shape[1],
                attention_dropout=0.0,
                qkv_format="thd",
                attn_mask_type="padding_causal" if causal else "padding",
            )

        attention_output = self.dot_product_attention(
            query,
            key,
            value,
            cu_seqlens_q=segments.cu_seqlens,
            cu_seqlens_kv=segments.cu_seqlens,
            max_seqlen_q=segments.max_seqlen,
            max_seqlen_kv=segments.max_seqlen,
        )

        return attention_output.view_as(query)


# --- Kept outputs -------------------------------------------------------------------------------------------
#
# Outputs that decoder layers under full recompute keep (``recompute.keep``). Megatron-core runs such a layer
# twice: without autograd, and again with it right before the layer's backward pass. An operator that asks
# here whether its output is known does not compute it again. Numbers stay the same.
#
# Outputs are kept with the micro-batch's PackedRow, which core passes to both runs. So they find each other
# in any pipeline schedule.

_kinds: Collection[str] = ()  # what the layer that runs now keeps
_outputs: dict[Any, Any] = {}


def is_recomputing() -> bool:
    """Whether a module runs for the second time, so that nothing reads what it returns.

    In FP8, core recomputes by Transformer Engine's function, and this is False.
    """
    return is_checkpointing() and torch.is_grad_enabled()


def known_output(key: Any) -> Any:
    """The output that was kept under ``key``, in the second run of a layer; otherwise None."""
    return _outputs.pop(key, None) if is_recomputing() else None


def keep_output(kind: str, key: Any, output: Any) -> None:
    """Keeps an output of the first run of a layer, if the run asks for this kind."""
    if kind in _kinds and is_checkpointing() and not torch.is_grad_enabled():
        _outputs[key] = output


def keep_layer_outputs(layers: Iterable[nn.Module], kinds: Collection[str]) -> None:
    """Makes layers keep outputs of these kinds: ``attention`` or ``experts``."""

    def begin(layer: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        global _kinds, _outputs
        _kinds, _outputs = kinds, keywords["packed_seq_params"].kept_outputs.setdefault(layer, {})

    def end(*_: Any) -> None:
        global _kinds, _outputs
        _kinds, _outputs = (), {}

    for layer in layers:
        layer.register_forward_pre_hook(begin, with_kwargs=True)
        layer.register_forward_hook(end, always_call=True)
