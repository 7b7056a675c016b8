"""The kinds of decoder layers. Layers of one kind have equal tensors, FLOPs and memory."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.lora import FusedLora, fused_lora, initial_bound, row_runs

_MODULE_NAME = re.compile(r"(.*?\.(?:layers\.\d+|merger|deepstack_mergers\.\d+))\.(.*)\.weight")


@dataclass(frozen=True)
class MatrixAdapter:
    """The adapter of a matrix, or of each expert's one, without the number of its layer."""

    matrix_name: str
    """Canonical name of the matrix within its layer, such as ``mlp.linear_fc1``."""
    columns: int
    """Those of the released matrix, without padding."""
    rank_sum: int
    factor_elements: tuple[int, int]
    """Elements of A and of B that multiply a token, in all of its experts. In B, each released matrix uses
    the columns of its own rank; the others are always zero."""
    is_row_parallel: bool
    is_expert: bool


class LayerKind(NamedTuple):
    """What tells the decoder layers of one kind from others."""

    has_experts: bool
    has_linear_attention: bool
    adapters: tuple[MatrixAdapter, ...] = ()


@functools.cache
def layer_kinds(spec: ModelSpec, lora: LoraConfig) -> tuple[LayerKind, ...]:
    """The kind of each decoder layer."""
    language, adapters_by_module, kinds = spec.language, _adapters_by_module(spec, lora), []
    for layer in range(language.num_layers):
        adapters = adapters_by_module.get(f"language_model.decoder.layers.{layer}", ())
        kinds.append(LayerKind(language.has_experts(layer), language.has_linear_attention(layer), adapters))
    return tuple(kinds)


class BlockKind(NamedTuple):
    """What tells the layers of the vision tower of one kind from others."""

    has_full_attention: bool
    adapters: tuple[MatrixAdapter, ...]


@functools.cache
def block_kinds(spec: ModelSpec, lora: LoraConfig) -> tuple[BlockKind, ...]:
    """The kind of each layer of the vision tower."""
    adapters_by_module, kinds = _adapters_by_module(spec, lora), []
    for layer in range(spec.vision.num_layers):
        adapters = adapters_by_module.get(f"vision_model.decoder.layers.{layer}", ())
        kinds.append(BlockKind(spec.vision.is_full_attention(layer), adapters))
    return tuple(kinds)


@functools.cache
def merger_adapters(spec: ModelSpec, lora: LoraConfig) -> tuple[tuple[MatrixAdapter, ...], ...]:
    """The adapters of the merger and of each merger of DeepStack."""
    names = ["merger", *(f"deepstack_mergers.{level}" for level in range(len(spec.vision.deepstack_layers)))]
    return tuple(_adapters_by_module(spec, lora).get(f"vision_model.{name}", ()) for name in names)


@functools.cache
def _adapters_by_module(spec: ModelSpec, lora: LoraConfig) -> dict[str, tuple[MatrixAdapter, ...]]:
    adapters: dict[str, tuple[MatrixAdapter, ...]] = {}
    for base_name, adapter in fused_lora(spec, lora).items():
        name_match = _MODULE_NAME.fullmatch(base_name)
        assert name_match is not None, base_name
        module_name, matrix_name = name_match.groups()
        matrix_adapter = _describe_adapter(spec, adapter, matrix_name)
        adapters[module_name] = (*adapters.get(module_name, ()), matrix_adapter)
    return adapters


def _describe_adapter(spec: ModelSpec, adapter: FusedLora, matrix_name: str) -> MatrixAdapter:
    base = adapter.base
    used_elements = sum(num_rows * adapter.ranks[part] for part, num_rows in row_runs(spec, base))
    if base.name.startswith("vision_model.decoder.") and matrix_name == "mlp.linear_fc1":
        # Like the columns of the second matrix, these rows are counted without padding.
        used_elements = used_elements * spec.vision.ffn_hidden_size // spec.vision.padded_ffn_hidden_size
    columns, rank_sum, is_expert = initial_bound(spec, base)[1], sum(adapter.ranks), base.num_experts > 0
    experts = spec.language.moe.top_k if is_expert and spec.language.moe is not None else 1
    elements = experts * rank_sum * columns, experts * used_elements
    is_row_parallel = base.parallel_style == "row"
    return MatrixAdapter(matrix_name, columns, rank_sum, elements, is_row_parallel, is_expert)
