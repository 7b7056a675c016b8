"""The canonical table of a model's tensors: their names, shapes, cuts, and sections.

Names are Megatron-core's sharded names in the Transformer Engine style, with global layer numbers. They do
not depend on the modules that hold the tensors at run time. Checkpoints, converters and the trainer all read
this table. No other code defines a shape.

The full (TP 1) tensors follow these conventions:

* For each of the ``g`` key/value heads, ``linear_qkv`` holds its query heads, its key head and its value
  head: ``[g * (q/g + 2) * d, h]``. With an output gate, it holds the queries, the gates of these queries, the
  key and the value: ``[g * (2 * q/g + 2) * d, h]``.
* A gated ``linear_fc1`` holds gate, then up: ``[2 * f, h]``. In the vision tower, ``f`` is padded to a
  multiple of 128.
* Linear attention's ``in_proj`` is a stack of sections: the queries, keys, values, output gates (z), beta and
  decay (alpha) of all heads. Its ``conv1d`` has sections for the channels of queries, keys and values.
  Tensor parallelism cuts each section separately.
* Experts are stacked along dim 0: fc1 is ``[E, 2 * f, h]`` (gate, then up in each), fc2 is ``[E, h, f]``.
* The patch embedding is a matrix ``[hidden, channels * time * row * column]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from megatron_vl.spec.families import LanguageSpec, ModelSpec
from megatron_vl.system.errors import UserError

ParallelStyle = Literal["replicated", "column", "row", "gated", "sections"]
"""How a matrix is cut: not at all, along dim 0, along dim 1, along dim 0 of each of two stacked halves (gate,
up), or along dim 0 of each of several stacked sections (:attr:`TensorInfo.section_rows`). In a stack of
experts, each expert's matrix is cut in this way."""

EMBEDDING_TENSOR = "language_model.embedding.word_embeddings.weight"
OUTPUT_TENSOR = "language_model.output_layer.weight"
MTP_PREFIX = "mtp."
"""Begins the names of the tensors of multi-token prediction."""


class LayoutError(UserError, ValueError):
    """A parallel layout does not fit the model. The message says which number, and what would be valid."""


class Sharding(NamedTuple):
    """The numbers of parts into which the tensors of a stage are cut.

    Dense tensors are cut into ``tp`` parts, experts' tensors into ``ep * etp``.

    Tensor and expert parallelism number the same ranks of a stage in two independent ways (Megatron-core's
    dense and expert grids), so each tensor is cut by only one of the two.
    """

    tp: int = 1
    ep: int = 1
    """Expert parallel size: it divides the experts into contiguous runs of whole experts."""
    etp: int = 1
    """Expert tensor parallel size: it cuts each expert's matrices."""
    is_tower_replicated: bool = False
    """Whether every rank holds the whole vision tower, so that tensor parallelism does not cut it."""

    def tensor_parallel_ways(self, tensor_info: TensorInfo) -> int:
        """The number of parts into which tensor parallelism cuts a dense tensor."""
        return 1 if self.is_on_every_rank(tensor_info) else self.tp

    def is_on_every_rank(self, tensor_info: TensorInfo) -> bool:
        """Whether every rank of the run holds the whole tensor."""
        return self.is_tower_replicated and tensor_info.model_section == "vision"

    def num_shards(self, tensor_info: TensorInfo) -> int:
        """The number of parts of a tensor. The parts of a replicated tensor are all equal."""
        return self.ep * self.etp if tensor_info.num_experts else self.tensor_parallel_ways(tensor_info)

    def shard_index(
        self, tensor_info: TensorInfo, *, tp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0
    ) -> int:
        """The part that a rank holds: ``tp_rank``, or ``ep_rank * etp + etp_rank`` for an expert tensor."""
        if tensor_info.num_experts:
            return ep_rank * self.etp + etp_rank
        return 0 if self.is_on_every_rank(tensor_info) else tp_rank


UNSHARDED = Sharding()
"""No cut: one part holds the whole tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its full shape, how it is cut, and the section of the model that it belongs to."""

    name: str
    shape: tuple[int, ...]
    parallel_style: ParallelStyle
    model_section: str
    """``vision``, ``embedding``, ``layer`` or ``head``."""
    layer_index: int = -1
    """Zero-based decoder layer if ``model_section`` is ``layer``."""
    num_experts: int = 0
    """Number of experts stacked along dim 0, which expert parallelism divides among ranks; 0: a dense tensor.
    In a stack, ``parallel_style`` says how expert tensor parallelism cuts each expert's matrix (dims 1 and
    2)."""
    section_rows: tuple[int, ...] = ()

    @property
    def single_expert(self) -> TensorInfo:
        """One expert's matrix of a stack, as a dense tensor that only expert tensor parallelism cuts."""
        return replace(self, shape=self.shape[1:], num_experts=0)

    def shard_shape(self, sharding: Sharding) -> tuple[int, ...]:
        if self.num_experts:
            return (self.num_experts // sharding.ep, *self.single_expert.shard_shape(Sharding(sharding.etp)))
        if self.parallel_style == "replicated":
            return self.shape
        shard_shape = list(self.shape)
        shard_shape[1 if self.parallel_style == "row" else 0] //= sharding.tensor_parallel_ways(self)
        return tuple(shard_shape)


def tensor_table(spec: ModelSpec) -> dict[str, TensorInfo]:
    """All tensors of the model by canonical name, in model order. A tied output layer has no entry."""
    return {info.name: info for info in [*_vision_tensors(spec), *_language_tensors(spec)]}


def _adder(
    tensor_infos: list[TensorInfo], prefix: str, section: str, layer_index: int = -1
) -> Callable[..., None]:
    """A function that appends a tensor of a section, whose name begins with ``prefix``."""

    def add_tensor(
        name: str, shape: tuple[int, ...], style: ParallelStyle = "replicated", **sizes: Any
    ) -> None:
        tensor_infos.append(TensorInfo(prefix + name, shape, style, section, layer_index, **sizes))

    return add_tensor


def _vision_tensors(spec: ModelSpec) -> list[TensorInfo]:
    vision_spec, hidden_size = spec.vision, spec.vision.hidden_size
    merged_width, ffn_width = vision_spec.merge_unit * hidden_size, vision_spec.padded_ffn_hidden_size
    tensor_infos: list[TensorInfo] = []
    add_tensor = _adder(tensor_infos, "vision_model.", "vision")

    def add_norm(prefix: str, norm_width: int) -> None:
        add_tensor(f"{prefix}weight", (norm_width,))
        if vision_spec.norm == "LayerNorm":
            add_tensor(f"{prefix}bias", (norm_width,))

    def add_linear(name: str, output_width: int, input_width: int, style: ParallelStyle) -> None:
        add_tensor(f"{name}.weight", (output_width, input_width), style)
        add_tensor(f"{name}.bias", (output_width,), "replicated" if style == "row" else style)

    def add_merger(name: str, norm_width: int) -> None:
        add_norm(f"{name}.norm.", norm_width)
        add_linear(f"{name}.linear_fc1", merged_width, merged_width, "column")
        add_linear(f"{name}.linear_fc2", vision_spec.out_hidden_size, merged_width, "row")

    add_tensor("patch_embed.proj.weight", (hidden_size, vision_spec.patch_dim))
    if vision_spec.patch_bias:
        add_tensor("patch_embed.proj.bias", (hidden_size,))
    if vision_spec.position_table_side:
        add_tensor("position_table.weight", (vision_spec.position_table_side**2, hidden_size))
    fc1_width = (2 if vision_spec.gated_mlp else 1) * ffn_width
    fc1_style: ParallelStyle = "gated" if vision_spec.gated_mlp else "column"
    for layer_index in range(vision_spec.num_layers):
        prefix = f"decoder.layers.{layer_index}."
        add_norm(f"{prefix}self_attention.linear_qkv.layer_norm_", hidden_size)
        add_linear(f"{prefix}self_attention.linear_qkv", 3 * hidden_size, hidden_size, "column")
        add_linear(f"{prefix}self_attention.linear_proj", hidden_size, hidden_size, "row")
        add_norm(f"{prefix}mlp.linear_fc1.layer_norm_", hidden_size)
        add_linear(f"{prefix}mlp.linear_fc1", fc1_width, hidden_size, fc1_style)
        add_linear(f"{prefix}mlp.linear_fc2", hidden_size, ffn_width, "row")
    add_merger("merger", hidden_size)
    for merger_index in range(len(vision_spec.deepstack_layers)):
        add_merger(f"deepstack_mergers.{merger_index}", merged_width)
    return tensor_infos


def _language_tensors(spec: ModelSpec) -> list[TensorInfo]:
    language_spec = spec.language
    embedding_shape = (language_spec.vocab_size, language_spec.hidden_size)
    tensor_infos = [TensorInfo(EMBEDDING_TENSOR, embedding_shape, "column", "embedding")]

    for layer_index in range(language_spec.num_layers):
        prefix = f"language_model.decoder.layers.{layer_index}."
        add_tensor = _adder(tensor_infos, prefix, "layer", layer_index)
        if language_spec.has_linear_attention(layer_index):
            _linear_attention_tensors(language_spec, add_tensor)
        else:
            _softmax_attention_tensors(language_spec, add_tensor)
        _feed_forward_tensors(language_spec, language_spec.has_experts(layer_index), add_tensor)

    norm_name = "language_model.decoder.final_layernorm.weight"
    tensor_infos.append(TensorInfo(norm_name, (language_spec.hidden_size,), "replicated", "head"))
    if not language_spec.tied_embeddings:
        tensor_infos.append(TensorInfo(OUTPUT_TENSOR, embedding_shape, "column", "head"))
    return [*tensor_infos, *(_mtp_tensors(language_spec) if language_spec.has_mtp else [])]


def _mtp_tensors(language_spec: LanguageSpec) -> list[TensorInfo]:
    """The layer of multi-token prediction, which stands on the last stage with the output layer."""
    hidden_size = language_spec.hidden_size
    tensor_infos: list[TensorInfo] = []
    add_tensor = _adder(tensor_infos, MTP_PREFIX, "head")
    add_layer_tensor = _adder(tensor_infos, f"{MTP_PREFIX}decoder.layers.0.", "head")
    add_tensor("embedding_norm.weight", (hidden_size,))
    add_tensor("hidden_norm.weight", (hidden_size,))
    add_tensor("fc.weight", (hidden_size, 2 * hidden_size))
    _softmax_attention_tensors(language_spec, add_layer_tensor)
    _feed_forward_tensors(language_spec, language_spec.moe is not None, add_layer_tensor)
    add_tensor("decoder.final_layernorm.weight", (hidden_size,))
    return tensor_infos


def _feed_forward_tensors(
    language_spec: LanguageSpec, has_experts: bool, add_tensor: Callable[..., None]
) -> None:
    if has_experts:
        _expert_tensors(language_spec, add_tensor)
    else:
        hidden_size, ffn_hidden_size = language_spec.hidden_size, language_spec.ffn_hidden_size
        add_tensor("mlp.linear_fc1.layer_norm_weight", (hidden_size,))
        add_tensor("mlp.linear_fc1.weight", (2 * ffn_hidden_size, hidden_size), "gated")
        add_tensor("mlp.linear_fc2.weight", (hidden_size, ffn_hidden_size), "row")


def _softmax_attention_tensors(language_spec: LanguageSpec, add_tensor: Callable[..., None]) -> None:
    hidden_size = language_spec.hidden_size
    num_query_heads = language_spec.num_heads * (2 if language_spec.output_gate else 1)
    qkv_rows = (num_query_heads + 2 * language_spec.num_kv_heads) * language_spec.head_dim
    add_tensor("self_attention.linear_qkv.layer_norm_weight", (hidden_size,))
    add_tensor("self_attention.linear_qkv.weight", (qkv_rows, hidden_size), "column")
    if language_spec.qkv_bias:
        add_tensor("self_attention.linear_qkv.bias", (qkv_rows,), "column")
    if language_spec.qk_norm:
        add_tensor("self_attention.q_layernorm.weight", (language_spec.head_dim,))
        add_tensor("self_attention.k_layernorm.weight", (language_spec.head_dim,))
    query_width = language_spec.num_heads * language_spec.head_dim
    add_tensor("self_attention.linear_proj.weight", (hidden_size, query_width), "row")


def _expert_tensors(language_spec: LanguageSpec, add_tensor: Callable[..., None]) -> None:
    assert language_spec.moe is not None
    hidden_size = language_spec.hidden_size
    num_experts, expert_ffn_size = language_spec.moe.num_experts, language_spec.moe.ffn_hidden_size
    # The router also reads this norm's output, so Megatron-core does not fuse it.
    add_tensor("pre_mlp_layernorm.weight", (hidden_size,))
    add_tensor("mlp.router.weight", (num_experts, hidden_size))
    fc1_shape, fc2_shape = (2 * expert_ffn_size, hidden_size), (hidden_size, expert_ffn_size)
    for name, shape, style in (("linear_fc1", fc1_shape, "gated"), ("linear_fc2", fc2_shape, "row")):
        add_tensor(f"mlp.experts.{name}.weight", (num_experts, *shape), style, num_experts=num_experts)
    if shared_ffn_size := language_spec.moe.shared_ffn_hidden_size:
        add_tensor("mlp.shared_experts.linear_fc1.weight", (2 * shared_ffn_size, hidden_size), "gated")
        add_tensor("mlp.shared_experts.linear_fc2.weight", (hidden_size, shared_ffn_size), "row")
        add_tensor("mlp.shared_experts.gate_weight", (1, hidden_size))


def _linear_attention_tensors(language_spec: LanguageSpec, add_tensor: Callable[..., None]) -> None:
    linear_spec = language_spec.linear_attention
    assert linear_spec is not None
    hidden_size = language_spec.hidden_size
    key_width = linear_spec.key_heads * linear_spec.key_dim
    value_width = linear_spec.value_heads * linear_spec.value_dim
    conv_sections = (key_width, key_width, value_width)
    projection_sections = (*conv_sections, value_width, linear_spec.value_heads, linear_spec.value_heads)
    add_tensor("self_attention.in_proj.layer_norm_weight", (hidden_size,))
    for name, sections, columns in (
        ("in_proj", projection_sections, (hidden_size,)),
        ("conv1d", conv_sections, (1, linear_spec.conv_width)),
    ):
        shape = (sum(sections), *columns)
        add_tensor(f"self_attention.{name}.weight", shape, "sections", section_rows=sections)
    add_tensor("self_attention.A_log", (linear_spec.value_heads,), "column")
    add_tensor("self_attention.dt_bias", (linear_spec.value_heads,), "column")
    add_tensor("self_attention.out_norm.weight", (linear_spec.value_dim,))
    add_tensor("self_attention.out_proj.weight", (hidden_size, value_width), "row")


def check_sharding(spec: ModelSpec, sharding: Sharding) -> None:
    """Raises :class:`LayoutError` unless every tensor of the model can be cut in this way."""
    check_tensor_parallel(spec, sharding.tp)
    moe_spec = spec.language.moe
    if moe_spec is None:
        for size_name, parallel_size in (("ep", sharding.ep), ("etp", sharding.etp)):
            if parallel_size != 1:
                raise LayoutError(
                    f"{size_name}={parallel_size} is for models with experts; {spec.family} is dense: leave"
                    f" {size_name} at 1"
                )
        return

    num_experts = moe_spec.num_experts
    if num_experts % sharding.ep:
        valid_sizes = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
        raise LayoutError(f"ep={sharding.ep} does not divide {num_experts} experts; valid: {valid_sizes}")

    expert_ffn_size = moe_spec.ffn_hidden_size
    if expert_ffn_size % sharding.etp:
        valid_sizes = [size for size in (1, 2, 4, 8, 16) if expert_ffn_size % size == 0]
        raise LayoutError(
            f"etp={sharding.etp} does not divide the experts' FFN width {expert_ffn_size}; valid:"
            f" {valid_sizes}"
        )


def model_part(tensor_name: str) -> str:
    """``vision``, ``merger`` or ``language``: the part of the model that a canonical name belongs to.

    Each part can be frozen and can have its own learning rate.
    """
    if tensor_name.startswith(("vision_model.merger.", "vision_model.deepstack_mergers.")):
        return "merger"
    return "vision" if tensor_name.startswith("vision_model.") else "language"


def check_tensor_parallel(spec: ModelSpec, tp_size: int) -> None:
    """Raises :class:`LayoutError` unless every dense tensor can be cut into ``tp_size`` parts."""
    language_spec, vision_spec = spec.language, spec.vision
    has_dense = language_spec.moe is None or bool(language_spec.moe.dense_layers)
    shared_ffn_size = language_spec.moe.shared_ffn_hidden_size if language_spec.moe else 0
    merged_width = vision_spec.merge_unit * vision_spec.hidden_size
    # 0 is divisible by any number.
    linear_key_heads = language_spec.linear_attention.key_heads if language_spec.linear_attention else 0
    # With more ranks than key/value heads, core cuts a head's weight and gathers the projected head.
    kv_heads = language_spec.num_kv_heads if tp_size % language_spec.num_kv_heads else 0

    for size_text, cut_size in {
        f"{language_spec.num_heads} attention heads of the language model": language_spec.num_heads,
        f"{language_spec.num_kv_heads} key/value heads of the language model": kv_heads,
        f"{linear_key_heads} key heads of linear attention": linear_key_heads,
        f"{vision_spec.num_heads} attention heads of the vision tower": vision_spec.num_heads,
        f"the language model's FFN width {language_spec.ffn_hidden_size}": (
            language_spec.ffn_hidden_size if has_dense else 0
        ),
        f"the shared expert's FFN width {shared_ffn_size}": shared_ffn_size,
        f"the vocabulary of {language_spec.vocab_size} tokens": language_spec.vocab_size,
        f"the merger's width {merged_width}": merged_width,
    }.items():
        if cut_size % tp_size:
            common_divisor = math.gcd(language_spec.num_heads, vision_spec.num_heads, linear_key_heads)
            valid_sizes = [size for size in (1, 2, 4, 8, 16) if common_divisor % size == 0]
            padding = "; `megatron-vl convert --add-tokens` with an empty file writes a folder with more rows"
            raise LayoutError(
                f"tp={tp_size} does not divide {size_text}; the heads allow tp in {valid_sizes}"
                + padding * (size_text.startswith("the vocabulary") and tp_size in valid_sizes)
            )
