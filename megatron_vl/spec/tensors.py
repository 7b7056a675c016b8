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

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_vl.errors import UserError
from megatron_vl.spec.families import LanguageSpec, ModelSpec

Split = Literal["replicated", "column", "row", "gated", "sections"]
"""How a matrix is cut: not at all, along dim 0, along dim 1, along dim 0 of each of two stacked halves (gate,
up), or along dim 0 of each of several stacked :attr:`TensorInfo.sections`. In a stack of experts, each
expert's matrix is cut in this way."""

EMBEDDING = "language_model.embedding.word_embeddings.weight"
OUTPUT = "language_model.output_layer.weight"


class LayoutError(UserError, ValueError):
    """A parallel layout does not fit the model. The message says which number, and what would be valid."""


class Cut(NamedTuple):
    """The numbers of parts into which the tensors of a stage are cut.

    Dense tensors are cut into ``tp`` parts, experts' tensors into ``ep * etp``.

    Tensor and expert parallelism number the same ranks of a stage in two independent ways (Megatron-core's
    dense and expert grids), so each tensor is cut by only one of the two.
    """

    tp: int = 1
    """Tensor parallel size."""
    ep: int = 1
    """Expert parallel size: it divides the experts into contiguous runs of whole experts."""
    etp: int = 1
    """Expert tensor parallel size: it cuts each expert's matrices."""
    whole_vision: bool = False
    """Whether every rank holds the whole vision tower, so that tensor parallelism does not cut it."""

    def ways(self, info: TensorInfo) -> int:
        """The number of parts into which tensor parallelism cuts a dense tensor."""
        return 1 if self.on_every_rank(info) else self.tp

    def on_every_rank(self, info: TensorInfo) -> bool:
        """Whether every rank of the run holds the whole tensor."""
        return self.whole_vision and info.section == "vision"

    def parts(self, info: TensorInfo) -> int:
        """The number of parts of a tensor. The parts of a replicated tensor are all equal."""
        return self.ep * self.etp if info.experts else self.ways(info)

    def part(self, info: TensorInfo, *, tp_rank: int = 0, ep_rank: int = 0, etp_rank: int = 0) -> int:
        """The part that a rank holds: ``tp_rank``, or ``ep_rank * etp + etp_rank`` for an expert tensor."""
        if info.experts:
            return ep_rank * self.etp + etp_rank
        return 0 if self.on_every_rank(info) else tp_rank


WHOLE = Cut()
"""No cut: one part holds the whole tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its full shape, how it is cut, and the section of the model that it belongs to."""

    name: str
    shape: tuple[int, ...]
    split: Split
    section: str
    """``vision``, ``embedding``, ``head`` or ``layer``."""
    layer: int = -1
    """Zero-based decoder layer if ``section`` is ``layer``."""
    experts: int = 0
    """Number of experts stacked along dim 0, which expert parallelism divides among ranks. ``split`` then
    says how expert tensor parallelism cuts each expert's matrix (dims 1 and 2). 0: a dense tensor."""
    sections: tuple[int, ...] = ()
    """Number of rows of each section if ``split`` is ``sections``."""

    def shard_shape(self, cut: Cut) -> tuple[int, ...]:
        """The shape of one part."""
        if self.experts:
            one = dataclasses.replace(self, shape=self.shape[1:], experts=0)
            return (self.experts // cut.ep, *one.shard_shape(Cut(cut.etp)))
        if self.split == "replicated":
            return self.shape
        axis = 1 if self.split == "row" else 0
        ways = cut.ways(self)
        return tuple(n // ways if i == axis else n for i, n in enumerate(self.shape))


def tensor_table(spec: ModelSpec) -> dict[str, TensorInfo]:
    """All tensors of the model by canonical name, in model order. A tied output layer has no entry."""
    infos = [*_vision(spec), *_language(spec)]
    return {info.name: info for info in infos}


def _vision(spec: ModelSpec) -> list[TensorInfo]:
    v = spec.vision
    h = v.hidden_size
    f = v.padded_ffn_hidden_size
    unit = v.merge_unit * v.hidden_size
    norm_bias = v.norm == "LayerNorm"
    out: list[TensorInfo] = []

    def add(name: str, shape: tuple[int, ...], split: Split = "replicated") -> None:
        out.append(TensorInfo(f"vision_model.{name}", shape, split, "vision"))

    def norm(prefix: str, joint: str = ".", width: int = h) -> None:
        add(f"{prefix}{joint}weight", (width,))
        if norm_bias:
            add(f"{prefix}{joint}bias", (width,))

    def merger(name: str, norm_width: int) -> None:
        norm(f"{name}.norm", width=norm_width)
        add(f"{name}.linear_fc1.weight", (unit, unit), "column")
        add(f"{name}.linear_fc1.bias", (unit,), "column")
        add(f"{name}.linear_fc2.weight", (v.out_hidden_size, unit), "row")
        add(f"{name}.linear_fc2.bias", (v.out_hidden_size,))

    add("patch_embed.proj.weight", (h, v.patch_dim))
    if v.patch_bias:
        add("patch_embed.proj.bias", (h,))
    if v.position_table_side:
        add("position_table.weight", (v.position_table_side**2, h))

    fc1: tuple[int, Split] = (2 * f, "gated") if v.gated_mlp else (f, "column")
    for i in range(v.num_layers):
        layer = f"decoder.layers.{i}."
        norm(f"{layer}self_attention.linear_qkv.layer_norm", "_")
        add(f"{layer}self_attention.linear_qkv.weight", (3 * h, h), "column")
        add(f"{layer}self_attention.linear_qkv.bias", (3 * h,), "column")
        add(f"{layer}self_attention.linear_proj.weight", (h, h), "row")
        add(f"{layer}self_attention.linear_proj.bias", (h,))
        norm(f"{layer}mlp.linear_fc1.layer_norm", "_")
        add(f"{layer}mlp.linear_fc1.weight", (fc1[0], h), fc1[1])
        add(f"{layer}mlp.linear_fc1.bias", (fc1[0],), fc1[1])
        add(f"{layer}mlp.linear_fc2.weight", (h, f), "row")
        add(f"{layer}mlp.linear_fc2.bias", (h,))

    merger("merger", h)
    for number in range(len(v.deepstack_layers)):
        merger(f"deepstack_mergers.{number}", unit)
    return out


def _language(spec: ModelSpec) -> list[TensorInfo]:
    m = spec.language
    h = m.hidden_size
    out = [TensorInfo(EMBEDDING, (m.vocab_size, h), "column", "embedding")]

    for i in range(m.num_layers):

        def add(
            name: str,
            shape: tuple[int, ...],
            split: Split = "replicated",
            experts: int = 0,
            sections: tuple[int, ...] = (),
            i: int = i,
        ) -> None:
            full = f"language_model.decoder.layers.{i}.{name}"
            out.append(TensorInfo(full, shape, split, "layer", i, experts, sections))

        (_linear_attention if m.is_linear(i) else _softmax_attention)(m, add)
        if m.has_experts(i):
            _experts(m, add)
        else:
            f = m.ffn_hidden_size
            add("mlp.linear_fc1.layer_norm_weight", (h,))
            add("mlp.linear_fc1.weight", (2 * f, h), "gated")
            add("mlp.linear_fc2.weight", (h, f), "row")

    out.append(TensorInfo("language_model.decoder.final_layernorm.weight", (h,), "replicated", "head"))
    if not m.tied_embeddings:
        out.append(TensorInfo(OUTPUT, (m.vocab_size, h), "column", "head"))
    return out


def _softmax_attention(m: LanguageSpec, add: Callable[..., None]) -> None:
    """Adds the tensors of one layer's softmax attention."""
    h = m.hidden_size
    queries = m.num_heads * (2 if m.output_gate else 1)
    qkv = (queries + 2 * m.num_kv_heads) * m.head_dim
    add("self_attention.linear_qkv.layer_norm_weight", (h,))
    add("self_attention.linear_qkv.weight", (qkv, h), "column")
    if m.qkv_bias:
        add("self_attention.linear_qkv.bias", (qkv,), "column")
    if m.qk_norm:
        add("self_attention.q_layernorm.weight", (m.head_dim,))
        add("self_attention.k_layernorm.weight", (m.head_dim,))
    add("self_attention.linear_proj.weight", (h, m.num_heads * m.head_dim), "row")


def _experts(m: LanguageSpec, add: Callable[..., None]) -> None:
    """Adds the tensors of one layer's mixture of experts."""
    assert m.moe is not None
    h = m.hidden_size
    count, width = m.moe.num_experts, m.moe.ffn_hidden_size
    # The router also reads this norm's output, so Megatron-core does not fuse it.
    add("pre_mlp_layernorm.weight", (h,))
    add("mlp.router.weight", (count, h))
    add("mlp.experts.linear_fc1.weight", (count, 2 * width, h), "gated", count)
    add("mlp.experts.linear_fc2.weight", (count, h, width), "row", count)
    if shared := m.moe.shared_ffn_hidden_size:
        add("mlp.shared_experts.linear_fc1.weight", (2 * shared, h), "gated")
        add("mlp.shared_experts.linear_fc2.weight", (h, shared), "row")
        add("mlp.shared_experts.gate_weight", (1, h))


def _linear_attention(m: LanguageSpec, add: Callable[..., None]) -> None:
    """Adds the tensors of one Gated DeltaNet layer, with the names of Megatron-core's module."""
    a = m.linear_attention
    assert a is not None
    h = m.hidden_size
    keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim
    channels = (keys, keys, values)
    sections = (*channels, values, a.value_heads, a.value_heads)
    add("self_attention.in_proj.layer_norm_weight", (h,))
    add("self_attention.in_proj.weight", (sum(sections), h), "sections", sections=sections)
    add("self_attention.conv1d.weight", (sum(channels), 1, a.conv_width), "sections", sections=channels)
    add("self_attention.A_log", (a.value_heads,), "column")
    add("self_attention.dt_bias", (a.value_heads,), "column")
    add("self_attention.out_norm.weight", (a.value_dim,))
    add("self_attention.out_proj.weight", (h, values), "row")


def check_cut(spec: ModelSpec, cut: Cut) -> None:
    """Raises :class:`LayoutError` unless every tensor of the model can be cut in this way."""
    check_tp(spec, cut.tp)
    moe = spec.language.moe
    if moe is None:
        for name, value in (("ep", cut.ep), ("etp", cut.etp)):
            if value != 1:
                raise LayoutError(
                    f"{name}={value} is for models with experts; {spec.family} is dense: leave {name} at 1"
                )
        return

    if moe.num_experts % cut.ep:
        valid = [n for n in range(1, moe.num_experts + 1) if moe.num_experts % n == 0]
        raise LayoutError(f"ep={cut.ep} does not divide {moe.num_experts} experts; valid: {valid}")

    if moe.ffn_hidden_size % cut.etp:
        valid = [n for n in (1, 2, 4, 8, 16) if moe.ffn_hidden_size % n == 0]
        raise LayoutError(
            f"etp={cut.etp} does not divide the experts' FFN width {moe.ffn_hidden_size}; valid: {valid}"
        )


def part_of(name: str) -> str:
    """``vision``, ``merger`` or ``language``: the part of the model that a canonical name belongs to.

    Each part can be frozen and can have its own learning rate.
    """
    if name.startswith(("vision_model.merger.", "vision_model.deepstack_mergers.")):
        return "merger"
    return "vision" if name.startswith("vision_model.") else "language"


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Raises :class:`LayoutError` unless tensor parallelism can cut every dense tensor into ``tp`` parts."""
    m, v = spec.language, spec.vision
    has_dense = any(not m.has_experts(i) for i in range(m.num_layers))
    a = m.linear_attention
    shared = m.moe.shared_ffn_hidden_size if m.moe else 0
    # With more ranks than key/value heads, core cuts a head's weight and gathers the projected head.
    kv_fits = m.num_kv_heads % tp == 0 or tp % m.num_kv_heads == 0

    checks = [
        (m.num_heads % tp == 0, f"{m.num_heads} attention heads of the language model"),
        (kv_fits, f"{m.num_kv_heads} key/value heads of the language model"),
        (a is None or a.key_heads % tp == 0, f"{a and a.key_heads} key heads of linear attention"),
        (v.num_heads % tp == 0, f"{v.num_heads} attention heads of the vision tower"),
        (m.ffn_hidden_size % tp == 0 or not has_dense, f"the language model's FFN width {m.ffn_hidden_size}"),
        (shared % tp == 0, f"the shared expert's FFN width {shared}"),
        (m.vocab_size % tp == 0, f"the vocabulary of {m.vocab_size} tokens"),
        (v.merge_unit * v.hidden_size % tp == 0, f"the merger's width {v.merge_unit * v.hidden_size}"),
    ]

    for fits, what in checks:
        if not fits:
            heads = (m.num_heads, v.num_heads, *((a.key_heads,) if a else ()))
            valid = [n for n in (1, 2, 4, 8, 16) if not any(count % n for count in heads)]
            raise LayoutError(f"tp={tp} does not divide {what}; the heads allow tp in {valid}")
