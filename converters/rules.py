"""Maps each Megatron tensor to its parts of Hugging Face tensors, once for both directions.

A :class:`ConversionRule` lists the rectangles (:class:`~megatron_vl.weights.matrix_blocks.MatrixBlock`) that
a canonical tensor has in common with its HF tensors. Conversion reads the list forwards and export backwards,
so each is the inverse of the other. Elements that no rectangle covers are padding, and zero. The functions
below build the lists for all structures that occur.

The families' tables (``qwen*.py``) list names as :class:`NameEntry`. They contain complete names, with ``*``
for numbers, so that a text search for a tensor's name finds them.
"""

from __future__ import annotations

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
RELEASED_EXPERT_STYLE: dict[str, ExpertStyle] = {"qwen3_vl_moe": "input_first", "qwen3_5_moe": "output_first"}
"""How the released folders of a family store their experts."""
GATE_UP_STACK, DOWN_STACK = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""HF's names of the stacks within a layer."""


HfNames = tuple[str, ...]
"""Released names of the HF tensors that a canonical tensor consists of."""


@dataclass(frozen=True)
class ConversionRule:
    """One canonical tensor, and the HF tensors that it consists of, under their released names."""

    name: str
    hf_shapes: dict[str, tuple[int, ...]]
    """HF name -> shape."""
    blocks: tuple[MatrixBlock, ...]
    padding: tuple[MatrixRegion, ...] = ()
    """Regions of the canonical tensor that HF does not have; they are zero."""


def _rule_of_rows(
    tensor_info: TensorInfo, row_pieces: Iterable[tuple[str, int, int]], *, padding_rows: int = 0
) -> ConversionRule:
    """Makes a rule whose HF tensors have the canonical tensor's columns.

    Args:
        row_pieces: (HF tensor, number of rows, first row in the HF tensor) of each piece of the canonical
            tensor, from top to bottom. Together they hold every row of the HF tensors once.
        padding_rows: number of zero rows after each piece.
    """
    col_count = matrix_shape(tensor_info.shape)[1]
    row_counts: Counter[str] = Counter()
    blocks = []
    padding_regions = []
    first_row = 0
    for hf_name, row_count, part_row in row_pieces:
        blocks.append(
            MatrixBlock(
                hf_name,
                row_count,
                col_count,
                row=first_row,
                part_row=part_row,
            )
        )
        row_counts[hf_name] += row_count
        first_row += row_count
        if padding_rows:
            padding_regions.append(MatrixRegion(first_row, first_row + padding_rows, 0, col_count))
            first_row += padding_rows

    hf_shapes = {hf_name: (rows, *tensor_info.shape[1:]) for hf_name, rows in row_counts.items()}
    return ConversionRule(tensor_info.name, hf_shapes, tuple(blocks), tuple(padding_regions))


# --- Tables of names


class NameEntry(NamedTuple):
    """The tensors of one kind. In their names, ``*`` stands for the number of a layer, merger or expert."""

    name: str
    """The canonical name. Its number is the first ``*`` of the HF names."""
    hf_names: HfNames
    make_rule: Callable[[ModelSpec, TensorInfo, HfNames], ConversionRule]
    """The function that makes the rule."""


def rules_from_entries(spec: ModelSpec, entries: Sequence[NameEntry]) -> list[ConversionRule]:
    """Makes one rule for each tensor of the model, in model order. Entries for other tensors are not used.

    Raises:
        ValueError: the table has no entry for a tensor, or two entries.
    """
    entry_by_name = {name_entry.name: name_entry for name_entry in entries}
    if len(entry_by_name) < len(entries):
        raise ValueError(f"{spec.family}: two entries for one name")

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


_NUMBER_PATTERN = re.compile(r"\.(\d+)\.")


# --- The functions that make the rules of entries. Each gets the HF names of one canonical tensor.


def unchanged_tensor(
    spec: ModelSpec,
    tensor_info: TensorInfo,
    hf_names: HfNames,
    hf_shape: tuple[int, ...] | None = None,
) -> ConversionRule:
    """The tensor equals one HF tensor of the same shape, or of ``hf_shape``, which has more dimensions."""
    return ConversionRule(
        tensor_info.name,
        {hf_names[0]: hf_shape or tensor_info.shape},
        (MatrixBlock(hf_names[0], *matrix_shape(tensor_info.shape)),),
    )


def conv3d_patch_embedding(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor is the patch embedding, which is a Conv3d in HF."""
    vision_spec = spec.vision
    shape = (
        vision_spec.hidden_size,
        vision_spec.in_channels,
        vision_spec.temporal_patch_size,
        vision_spec.patch_size,
        vision_spec.patch_size,
    )
    return unchanged_tensor(spec, tensor_info, hf_names, shape)


def language_qkv(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of the query, key and value of a decoder layer.

    For each key/value head, it has its query heads, its key and its value.
    """
    query_name, key_name, value_name = hf_names
    head_dim = spec.language.head_dim
    group_rows = spec.language.num_heads // spec.language.num_kv_heads * head_dim
    row_pieces = []
    for group_index in range(spec.language.num_kv_heads):
        row_pieces += [
            (query_name, group_rows, group_index * group_rows),
            (key_name, head_dim, group_index * head_dim),
            (value_name, head_dim, group_index * head_dim),
        ]
    return _rule_of_rows(tensor_info, row_pieces)


def language_gated_qkv(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of the query with output gate, the key and the value of a decoder layer.

    For each head, HF's query tensor has the query and its gate. For each key/value head, the canonical tensor
    has all queries, all gates, the key and the value.
    """
    query_name, key_name, value_name = hf_names
    head_dim = spec.language.head_dim
    heads_per_group = spec.language.num_heads // spec.language.num_kv_heads
    row_pieces = []
    for group_index in range(spec.language.num_kv_heads):
        first_head = group_index * heads_per_group
        for is_gate in (0, 1):
            for head_index in range(first_head, first_head + heads_per_group):
                # HF alternates between the query and the gate of each head.
                row_pieces.append((query_name, head_dim, (2 * head_index + is_gate) * head_dim))
        row_pieces += [
            (key_name, head_dim, group_index * head_dim),
            (value_name, head_dim, group_index * head_dim),
        ]
    return _rule_of_rows(tensor_info, row_pieces)


def linear_attention_input(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of linear attention's projections: q, k, v; gate (z); beta (b); decay (a)."""
    linear_attention = spec.language.linear_attention
    assert linear_attention is not None
    row_counts = (
        linear_attention.conv_channels,
        linear_attention.value_heads * linear_attention.value_dim,
        linear_attention.value_heads,
        linear_attention.value_heads,
    )
    return _rule_of_rows(tensor_info, zip(hf_names, row_counts, (0, 0, 0, 0), strict=True))


def vision_qkv(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor equals one HF tensor with query, key and value of a vision layer, in another order.

    HF has all queries, all keys and all values. For each head, the canonical tensor has its query, key and
    value.
    """
    num_heads, head_dim = spec.vision.num_heads, spec.vision.head_dim
    row_pieces = []
    for head_index in range(num_heads):
        for qkv_index in range(3):
            hf_head = qkv_index * num_heads + head_index
            row_pieces.append((hf_names[0], head_dim, hf_head * head_dim))
    return _rule_of_rows(tensor_info, row_pieces)


def _padded_rows(tensor_info: TensorInfo, hf_names: HfNames, real_rows: int) -> ConversionRule:
    """The tensor has ``real_rows`` rows of each HF tensor, and zero rows after them."""
    rows_per_name = matrix_shape(tensor_info.shape)[0] // len(hf_names)
    row_pieces = [(hf_name, real_rows, 0) for hf_name in hf_names]
    return _rule_of_rows(tensor_info, row_pieces, padding_rows=rows_per_name - real_rows)


def language_gated(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of a decoder layer's gate and up projections."""
    return _padded_rows(tensor_info, hf_names, spec.language.ffn_hidden_size)


def shared_gated(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of the shared expert's gate and up projections."""
    assert spec.language.moe is not None
    return _padded_rows(tensor_info, hf_names, spec.language.moe.shared_ffn_hidden_size)


def vision_rows(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor consists of the first linear layers of a vision MLP, each padded with zero rows.

    They are the gate and up projections, or one layer if the MLP has no gate.
    """
    return _padded_rows(tensor_info, hf_names, spec.vision.ffn_hidden_size)


def vision_columns(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor is the last linear layer of a vision MLP, padded with zero columns."""
    rows, col_count = matrix_shape(tensor_info.shape)
    real_columns = spec.vision.ffn_hidden_size
    padding_regions = (MatrixRegion(0, rows, real_columns, col_count),)
    return ConversionRule(
        tensor_info.name,
        {hf_names[0]: (rows, real_columns)},
        (MatrixBlock(hf_names[0], rows, real_columns),),
        padding_regions if col_count > real_columns else (),
    )


def stack_input_first(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor equals one HF stack of transposed matrices."""
    expert_count, rows, col_count = tensor_info.shape
    blocks = []
    for expert_index in range(expert_count):
        blocks.append(
            MatrixBlock(
                hf_names[0],
                rows,
                col_count,
                row=expert_index * rows,
                part_row=expert_index * col_count,
                is_transposed=True,
            )
        )
    hf_shapes: dict[str, tuple[int, ...]] = {hf_names[0]: (expert_count, col_count, rows)}
    return ConversionRule(tensor_info.name, hf_shapes, tuple(blocks))


def each_expert(spec: ModelSpec, tensor_info: TensorInfo, hf_names: HfNames) -> ConversionRule:
    """The tensor stacks the experts' HF matrices; the remaining ``*`` is the number of the expert.

    The matrices of one expert are below each other.
    """
    expert_count, rows, col_count = tensor_info.shape
    matrix_rows = rows // len(hf_names)
    hf_shapes: dict[str, tuple[int, ...]] = {}
    blocks: list[MatrixBlock] = []
    for expert_index in range(expert_count):
        for name_pattern in hf_names:
            hf_name = name_pattern.replace("*", str(expert_index))
            first_row = len(blocks) * matrix_rows
            blocks.append(MatrixBlock(hf_name, matrix_rows, col_count, row=first_row))
            hf_shapes[hf_name] = (matrix_rows, col_count)
    return ConversionRule(tensor_info.name, hf_shapes, tuple(blocks))
