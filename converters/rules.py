"""Maps each Megatron tensor to its parts of Hugging Face tensors, once for both directions.

A :class:`ConversionRule` lists the rectangles (:class:`~megatron_vl.weights.matrix_blocks.MatrixBlock`) that
a canonical tensor has in common with its HF tensors. Conversion reads the list forwards and export backwards,
so each is the inverse of the other. Elements that no rectangle covers are padding, and zero. The functions
below build the lists for all structures that occur.

The families' tables (``qwen*.py``) list names as :class:`NameEntry`, one line for each. What follows the
number of a layer stands whole in a line, so that a text search for it finds the line.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import TensorInfo, tensor_table
from megatron_vl.weights.matrix_blocks import MatrixBlock
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape

HF_OUTPUT = "lm_head.weight"

ExpertStyle = Literal["input_first", "output_first", "apart"]
"""How a folder stores a layer's experts:

* ``input_first``: stacks of transposed matrices, ``gate_up_proj [E, h, 2 * f]`` and
  ``down_proj [E, f, h]``, as in the released Qwen3-VL-MoE and as saved by transformers 4.57.
* ``output_first``: stacks as in Megatron and in transformers 5's memory, ``[E, 2 * f, h]`` and
  ``[E, h, f]``, as in the released Qwen3.5-MoE and as saved by transformers 5.
* ``apart``: three separate matrices for each expert, ``experts.N.gate_proj.weight`` and so on, as in the text
  models (Qwen3-MoE).
"""
RELEASED_EXPERT_STYLE: dict[str, ExpertStyle] = {"qwen3_vl_moe": "input_first", "qwen3_5_moe": "output_first"}
GATE_UP_STACK, DOWN_STACK = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""HF's names of the stacks within a layer."""


@dataclass(frozen=True)
class ConversionRule:
    """One canonical tensor, and the HF tensors that it consists of, under their released names."""

    name: str
    hf_shapes: dict[str, tuple[int, ...]]
    blocks: tuple[MatrixBlock, ...]
    padding: tuple[MatrixRegion, ...] = ()
    """Regions of the canonical tensor that HF does not have; they are zero."""


HfNames = tuple[str, ...]
PADDING = ""
"""Stands for the name of a HF tensor where the canonical tensor has rows of zeros."""


# --- Rules of all structures that occur


def unchanged_tensor(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor equals one HF tensor of the same shape."""
    return _identical_rule(tensor_info, hf_names[0], tensor_info.shape)


def conv3d_patch_embedding(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor is the patch embedding, which is a Conv3d in HF."""
    vision = spec.vision
    kernel_size = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    return _identical_rule(tensor_info, hf_names[0], (vision.hidden_size, vision.in_channels, *kernel_size))


def language_qkv(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of the query, key and value of a decoder layer.

    For each key/value head, the canonical tensor has its query heads, its key and its value.
    """
    language = spec.language
    head_dim = language.head_dim
    rows_per_group = (language.num_heads // language.num_kv_heads * head_dim, head_dim, head_dim)

    return _rule_of_rows(
        tensor_info,
        [
            (hf_name, group * rows, rows)
            for group in range(language.num_kv_heads)
            for hf_name, rows in zip(hf_names, rows_per_group, strict=True)
        ],
    )


def language_gated_qkv(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of the query with output gate, the key and the value of a decoder layer.

    For each head, HF's query tensor has the query and its gate. For each key/value head, the canonical tensor
    has all queries, all gates, the key and the value.
    """
    query_name, key_name, value_name = hf_names
    head_dim = spec.language.head_dim
    heads_per_group = spec.language.num_heads // spec.language.num_kv_heads

    row_runs = []
    for group in range(spec.language.num_kv_heads):
        heads = range(group * heads_per_group, (group + 1) * heads_per_group)
        for is_gate in (0, 1):
            # HF alternates between the query and the gate of each head.
            row_runs += [(query_name, (2 * head + is_gate) * head_dim, head_dim) for head in heads]
        row_runs += [(name, group * head_dim, head_dim) for name in (key_name, value_name)]
    return _rule_of_rows(tensor_info, row_runs)


def linear_attention_input(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of linear attention's projections: q, k, v; gate (z); beta (b); decay (a)."""
    linear_attention = spec.language.linear_attention
    assert linear_attention is not None
    heads = linear_attention.value_heads
    row_counts = (linear_attention.conv_channels, heads * linear_attention.value_dim, heads, heads)
    return _rule_of_rows(tensor_info, [(n, 0, rows) for n, rows in zip(hf_names, row_counts, strict=True)])


def gated(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of a gate and an up projection; those of the tower are padded with zero rows."""
    gate_name, up_name = hf_names
    rows = tensor_info.shape[0] // 2
    real_rows = spec.vision.ffn_hidden_size if tensor_info.model_section == "vision" else rows
    padding = (PADDING, 0, rows - real_rows)
    return _rule_of_rows(tensor_info, [(gate_name, 0, real_rows), padding, (up_name, 0, real_rows), padding])


def vision_qkv(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor equals one HF tensor with all queries, keys and values of a vision layer, in another order.

    For each head, the canonical tensor has its query, key and value.
    """
    (hf_name,) = hf_names
    num_heads, head_dim = spec.vision.num_heads, spec.vision.head_dim

    hf_heads = [qkv * num_heads + head for head in range(num_heads) for qkv in range(3)]
    return _rule_of_rows(tensor_info, [(hf_name, head * head_dim, head_dim) for head in hf_heads])


def vision_rows(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor is the first linear layer of a vision MLP without a gate, padded with zero rows."""
    (hf_name,) = hf_names
    real_rows = spec.vision.ffn_hidden_size
    return _rule_of_rows(
        tensor_info, [(hf_name, 0, real_rows), (PADDING, 0, tensor_info.shape[0] - real_rows)]
    )


def vision_columns(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor is the last linear layer of a vision MLP, padded with zero columns."""
    (hf_name,) = hf_names
    real_columns = spec.vision.ffn_hidden_size
    rows, num_cols = matrix_shape(tensor_info.shape)
    padding = (MatrixRegion(0, rows, real_columns, num_cols),) if num_cols > real_columns else ()
    block = MatrixBlock(hf_name, rows, real_columns)
    return ConversionRule(tensor_info.name, {hf_name: (rows, real_columns)}, (block,), padding)


def stack_input_first(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor equals one HF stack of transposed matrices."""
    (hf_name,) = hf_names
    expert_count, rows, num_cols = tensor_info.shape
    blocks = tuple(
        MatrixBlock(hf_name, rows, num_cols, row=i * rows, part_row=i * num_cols, is_transposed=True)
        for i in range(expert_count)
    )
    return ConversionRule(tensor_info.name, {hf_name: (expert_count, num_cols, rows)}, blocks)


def each_expert(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor stacks the experts' HF matrices; the remaining ``*`` is the number of the expert.

    The matrices of one expert are below each other.
    """
    expert_count, rows, num_cols = tensor_info.shape
    matrix_rows = rows // len(hf_names)
    names = [pattern.replace("*", str(expert)) for expert in range(expert_count) for pattern in hf_names]
    blocks = [MatrixBlock(name, matrix_rows, num_cols, row=i * matrix_rows) for i, name in enumerate(names)]
    return ConversionRule(tensor_info.name, dict.fromkeys(names, (matrix_rows, num_cols)), tuple(blocks))


def _identical_rule(tensor_info: TensorInfo, hf_name: str, hf_shape: tuple[int, ...]) -> ConversionRule:
    """The rule of a tensor that equals its HF tensor, which may have more dimensions."""
    block = MatrixBlock(hf_name, *matrix_shape(tensor_info.shape))
    return ConversionRule(tensor_info.name, {hf_name: hf_shape}, (block,))


def _rule_of_rows(tensor_info: TensorInfo, row_runs: Iterable[tuple[str, int, int]]) -> ConversionRule:
    """The rule of a tensor that consists of rows of HF tensors, which have its columns. A run of rows is (HF
    name or :data:`PADDING`, first row in the HF tensor, number of rows)."""
    num_cols = matrix_shape(tensor_info.shape)[1]
    blocks, padding = [], []
    hf_rows: Counter[str] = Counter()
    row = 0
    for hf_name, hf_row, rows in row_runs:
        if hf_name != PADDING:
            blocks.append(MatrixBlock(hf_name, rows, num_cols, row=row, part_row=hf_row))
            hf_rows[hf_name] += rows
        elif rows:
            padding.append(MatrixRegion(row, row + rows, 0, num_cols))
        row += rows

    hf_shapes = {hf_name: (rows, *tensor_info.shape[1:]) for hf_name, rows in hf_rows.items()}
    return ConversionRule(tensor_info.name, hf_shapes, tuple(blocks), tuple(padding))


# --- Tables of names


RuleMaker = Callable[[ModelSpec, TensorInfo, HfNames], ConversionRule]
_NUMBER_PATTERN = re.compile(r"\.(\d+)\.")


class NameEntry(NamedTuple):
    """The tensors of one kind. In their names, ``*`` stands for the number of a layer, merger or expert."""

    name: str
    """The canonical name. Its number is the first ``*`` of the HF names."""
    hf_names: HfNames
    make_rule: RuleMaker


def name_entries(
    prefix: str, hf_prefix: str, table_lines: Sequence[tuple[str, str, RuleMaker]]
) -> tuple[NameEntry, ...]:
    """The entries of a table whose names have these prefixes.

    Args:
        table_lines: (canonical name, HF names separated by spaces, function that makes the rule).
    """
    return tuple(
        NameEntry(prefix + name, tuple(hf_prefix + hf_name for hf_name in hf_names.split()), make_rule)
        for name, hf_names, make_rule in table_lines
    )


def rules_from_entries(spec: ModelSpec, entries: Sequence[NameEntry]) -> list[ConversionRule]:
    """Makes one rule for each tensor of the model, in model order. Entries for other tensors are not used.

    Raises:
        ValueError: the table has no entry for a tensor.
    """
    entry_by_name = {name_entry.name: name_entry for name_entry in entries}

    rules = []
    for tensor_info in tensor_table(spec).values():
        # One entry stands for the tensors of all layers: "layers.7.mlp" is looked up as "layers.*.mlp".
        number_match = _NUMBER_PATTERN.search(tensor_info.name)
        name_entry = entry_by_name.get(_NUMBER_PATTERN.sub(".*.", tensor_info.name, count=1))
        if name_entry is None:
            raise ValueError(f"{spec.family}: no rule for tensor {tensor_info.name!r}")

        hf_names = name_entry.hf_names
        if number_match:
            # Only the first "*" is the layer. A second one is an expert, whose number the rule fills in.
            hf_names = tuple(name.replace("*", number_match[1], 1) for name in hf_names)
        rules.append(name_entry.make_rule(spec, tensor_info, hf_names))
    return rules
