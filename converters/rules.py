"""Defines which parts of Hugging Face tensors a Megatron tensor consists of, once for both directions.

A :class:`Rule` lists the rectangles (:class:`~megatron_vl.weights.blocks.Block`) that a canonical tensor has
in common with its HF tensors. Conversion reads the list forwards and export backwards, so each is the inverse
of the other. Elements that no rectangle covers are padding, and zero. The functions below build the lists for
all structures that occur.

The families' tables (``qwen*.py``) list names as :class:`Entry`. They contain complete names, with ``*`` for
numbers, so that a text search for a tensor's name finds them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import TensorInfo, tensor_table
from megatron_vl.weights.blocks import Block
from megatron_vl.weights.tensor_files import Region, matrix_shape

HF_OUTPUT = "lm_head.weight"
"""HF's name of the output layer."""

ExpertStyle = Literal["input_first", "output_first", "apart"]
"""How a folder stores a layer's experts:

* ``input_first``: stacks of transposed matrices, ``gate_up_proj [E, h, 2 * f]`` and
  ``down_proj [E, f, h]``, as in the released Qwen3-VL-MoE and as saved by transformers 4.57.
* ``output_first``: stacks as in Megatron and in transformers 5's memory, ``[E, 2 * f, h]`` and
  ``[E, h, f]``, as in the released Qwen3.5-MoE and as saved by transformers 5.
* ``apart``: three separate matrices for each expert, ``experts.N.gate_proj.weight`` and so on, as in the text
  models (Qwen3-MoE).
"""
RELEASED: dict[str, ExpertStyle] = {"qwen3_vl_moe": "input_first", "qwen3_5_moe": "output_first"}
"""How the released folders of a family store their experts."""
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""HF's names of the stacks within a layer."""


@dataclass(frozen=True)
class Rule:
    """One canonical tensor, and the HF tensors that it consists of, under their released names."""

    name: str
    hf: dict[str, tuple[int, ...]]
    """HF name -> shape."""
    blocks: tuple[Block, ...]
    padding: tuple[Region, ...] = ()
    """Regions of the canonical tensor that HF does not have; they are zero."""


def same(info: TensorInfo, hf: str, shape: tuple[int, ...] | None = None) -> Rule:
    """The rule of a tensor that equals its HF tensor.

    Args:
        shape: HF's shape if it has more dimensions, as the patch embedding's Conv3d; None: the same shape.
    """
    return Rule(info.name, {hf: shape or info.shape}, (Block(hf, *matrix_shape(info.shape)),))


def split_qkv(info: TensorInfo, hf: tuple[str, str, str], heads: int, groups: int, dim: int) -> Rule:
    """The rule of a fused QKV tensor, for separate query, key and value tensors in HF.

    For each key/value head (``groups``), the canonical tensor has its query heads, its key and its value.
    """
    per_group = heads // groups
    cols = matrix_shape(info.shape)[1]
    sizes = dict(zip(hf, (per_group * dim, dim, dim), strict=True))
    return _runs(
        info, {name: groups * rows for name, rows in sizes.items()}, _interleaved(sizes, groups, cols)
    )


def split_gated_qkv(info: TensorInfo, hf: tuple[str, str, str], heads: int, groups: int, dim: int) -> Rule:
    """The same as :func:`split_qkv`, with output gates.

    For each head, HF's query tensor has the query and its gate. For each key/value head, the canonical tensor
    has all queries, all gates, the key and the value.
    """
    query, key, value = hf
    per_group = heads // groups
    cols = matrix_shape(info.shape)[1]
    blocks = []
    row = 0
    for group in range(groups):
        for gate in (0, 1):
            for head in range(group * per_group, (group + 1) * per_group):
                blocks.append(Block(query, dim, cols, row=row, part_row=(2 * head + gate) * dim))
                row += dim
        for name in (key, value):
            blocks.append(Block(name, dim, cols, row=row, part_row=group * dim))
            row += dim

    return _runs(info, {query: 2 * heads * dim, key: groups * dim, value: groups * dim}, blocks)


def stacked_rows(info: TensorInfo, hf: Sequence[str], rows: Sequence[int]) -> Rule:
    """The rule of a tensor that consists of HF tensors with ``rows`` rows, one below the other."""
    cols = matrix_shape(info.shape)[1]
    starts = [sum(rows[:i]) for i in range(len(rows))]
    blocks = [Block(name, n, cols, row=start) for name, n, start in zip(hf, rows, starts, strict=True)]
    return _runs(info, dict(zip(hf, rows, strict=True)), blocks)


def fused_qkv(info: TensorInfo, hf: str, heads: int, dim: int) -> Rule:
    """The rule of a fused QKV tensor, for one HF tensor with all queries, all keys and all values.

    For each head, the canonical tensor has its query, key and value.
    """
    cols = matrix_shape(info.shape)[1]
    blocks = [
        Block(hf, dim, cols, row=(3 * head + which) * dim, part_row=(which * heads + head) * dim)
        for head in range(heads)
        for which in range(3)
    ]
    return _runs(info, {hf: 3 * heads * dim}, blocks)


def gated(info: TensorInfo, gate: str, up: str, width: int) -> Rule:
    """The rule of a gated ``linear_fc1``: gate, then up, each padded with zero rows after ``width`` rows."""
    rows, cols = matrix_shape(info.shape)
    half = rows // 2
    blocks = [Block(hf, width, cols, row=i * half) for i, hf in enumerate((gate, up))]
    padding = [Region(i * half + width, (i + 1) * half, 0, cols) for i in (0, 1) if half > width]
    return _runs(info, {gate: width, up: width}, blocks, padding)


def padded_rows(info: TensorInfo, hf: str, width: int) -> Rule:
    """The rule of a tensor that is padded with zero rows after ``width`` rows."""
    rows, cols = matrix_shape(info.shape)
    padding = [Region(width, rows, 0, cols)] if rows > width else []
    return _runs(info, {hf: width}, [Block(hf, width, cols)], padding)


def padded_columns(info: TensorInfo, hf: str, width: int) -> Rule:
    """The rule of a tensor that is padded with zero columns after ``width`` columns."""
    rows, cols = matrix_shape(info.shape)
    padding = (Region(0, rows, width, cols),) if cols > width else ()
    return Rule(info.name, {hf: (rows, width)}, (Block(hf, rows, width),), padding)


def stacked(info: TensorInfo, hf: str) -> Rule:
    """The rule of a stack of experts, for one HF stack of transposed matrices."""
    count, rows, cols = info.shape
    blocks = (Block(hf, rows, cols, row=i * rows, part_row=i * cols, transposed=True) for i in range(count))
    return Rule(info.name, {hf: (count, cols, rows)}, tuple(blocks))


def expert_by_expert(info: TensorInfo, hf: Sequence[str]) -> Rule:
    """The rule of a stack of experts, for separate HF matrices of each expert.

    Args:
        hf: the names of one expert's matrices, which are below each other in the canonical tensor. ``*``
            stands for the expert's number.
    """
    count, rows, cols = info.shape
    height = rows // len(hf)
    tensors = [name.replace("*", str(expert)) for expert in range(count) for name in hf]
    blocks = tuple(Block(name, height, cols, row=i * height) for i, name in enumerate(tensors))
    return Rule(info.name, dict.fromkeys(tensors, (height, cols)), blocks)


def _interleaved(sizes: dict[str, int], groups: int, cols: int) -> list[Block]:
    blocks = []
    row = 0
    for group in range(groups):
        for hf, rows in sizes.items():
            blocks.append(Block(hf, rows, cols, row=row, part_row=group * rows))
            row += rows
    return blocks


def _runs(
    info: TensorInfo, rows: dict[str, int], blocks: Sequence[Block], padding: Sequence[Region] = ()
) -> Rule:
    """Makes a rule whose HF tensors have the canonical tensor's columns."""
    return Rule(
        info.name, {hf: (n, *info.shape[1:]) for hf, n in rows.items()}, tuple(blocks), tuple(padding)
    )


# --- Tables of names


class Entry(NamedTuple):
    """The tensors of one kind. In their names, ``*`` stands for the number of a layer, merger or expert."""

    name: str
    """The canonical name. Its number is the first ``*`` of the HF names."""
    hf: tuple[str, ...]
    """The released names of the HF tensors that it consists of."""
    kind: Callable[[ModelSpec, TensorInfo, tuple[str, ...]], Rule]
    """The function that makes the rule."""


def rules_of(spec: ModelSpec, entries: Sequence[Entry]) -> list[Rule]:
    """Makes one rule for each tensor of the model, in model order. Entries for other tensors are not used.

    Raises:
        ValueError: the table has no entry for a tensor, or two entries.
    """
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError(f"{spec.family}: two entries for one name")

    rules = []
    for info in tensor_table(spec).values():
        number = _NUMBER.search(info.name)
        entry = by_name.get(_NUMBER.sub(".*.", info.name, count=1))
        if entry is None:
            raise ValueError(f"{spec.family}: no rule for tensor {info.name!r}")
        names = tuple(name.replace("*", number[1], 1) if number else name for name in entry.hf)
        rules.append(entry.kind(spec, info, names))
    return rules


_NUMBER = re.compile(r"\.(\d+)\.")


def as_it_is(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor equals one HF tensor of the same shape."""
    return same(info, hf[0])


def conv3d(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor is the patch embedding, which is a Conv3d in HF."""
    v = spec.vision
    shape = (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    return same(info, hf[0], shape)


def language_qkv(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor consists of the query, key and value of a decoder layer."""
    query, key, value = hf
    m = spec.language
    return split_qkv(info, (query, key, value), m.num_heads, m.num_kv_heads, m.head_dim)


def language_gated_qkv(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor consists of the query with output gate, the key and the value of a decoder layer."""
    query, key, value = hf
    m = spec.language
    return split_gated_qkv(info, (query, key, value), m.num_heads, m.num_kv_heads, m.head_dim)


def linear_attention_input(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor consists of linear attention's projections: q, k, v; gate (z); beta (b); decay (a)."""
    a = spec.language.linear_attention
    assert a is not None
    return stacked_rows(
        info, hf, (a.conv_channels, a.value_heads * a.value_dim, a.value_heads, a.value_heads)
    )


def shared_gated(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor consists of the shared expert's gate and up projections."""
    gate, up = hf
    assert spec.language.moe is not None
    return gated(info, gate, up, spec.language.moe.shared_ffn_hidden_size)


def vision_qkv(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor equals one HF tensor with query, key and value of a vision layer, in another order."""
    return fused_qkv(info, hf[0], spec.vision.num_heads, spec.vision.head_dim)


def language_gated(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor consists of a decoder layer's gate and up projections."""
    gate, up = hf
    return gated(info, gate, up, spec.language.ffn_hidden_size)


def vision_gated(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor consists of a vision layer's gate and up projections, each padded with zero rows."""
    gate, up = hf
    return gated(info, gate, up, spec.vision.ffn_hidden_size)


def vision_rows(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor is the first linear layer of a vision MLP without a gate, padded with zero rows."""
    return padded_rows(info, hf[0], spec.vision.ffn_hidden_size)


def vision_columns(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor is the last linear layer of a vision MLP, padded with zero columns."""
    return padded_columns(info, hf[0], spec.vision.ffn_hidden_size)


def stack_input_first(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor equals one HF stack of transposed matrices."""
    return stacked(info, hf[0])


def each_expert(spec: ModelSpec, info: TensorInfo, hf: tuple[str, ...]) -> Rule:
    """The tensor is a stack of HF matrices of each expert, whose number is the remaining ``*``."""
    return expert_by_expert(info, hf)


def check_cover(spec: ModelSpec, rules: Sequence[Rule]) -> None:
    """Raises :class:`ValueError` unless every tensor of the model has exactly one rule."""
    table = tensor_table(spec)
    names = [rule.name for rule in rules]
    wrong = sorted(set(table) ^ set(names)) or sorted(name for name in set(names) if names.count(name) > 1)
    if wrong:
        raise ValueError(f"{spec.family}: no rule, or more than one, for tensor {wrong[0]!r}")
