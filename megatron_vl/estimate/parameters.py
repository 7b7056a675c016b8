"""The kinds of layers, the parameters on each GPU, and the bytes of their optimizer state.

Everything is counted from the tensor table. Layers of one kind have equal tensors, FLOPs and memory.
"""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vl.config import LoraConfig, ModelConfig, TrainConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.lora import (
    FusedLora,
    fused_lora,
    initial_bound,
    row_runs,
    trained_table,
    trained_tensors,
)
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, Sharding, TensorInfo, tensor_table

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
    has_experts: bool
    has_linear_attention: bool
    adapters: tuple[MatrixAdapter, ...] = ()


@functools.cache
def layer_kinds(spec: ModelSpec, lora: LoraConfig) -> tuple[LayerKind, ...]:
    language, adapters = spec.language, _adapters_by_module(spec, lora)
    return tuple(
        LayerKind(
            language.has_experts(layer),
            language.has_linear_attention(layer),
            adapters.get(f"language_model.decoder.layers.{layer}", ()),
        )
        for layer in range(language.num_layers)
    )


class BlockKind(NamedTuple):
    has_full_attention: bool
    adapters: tuple[MatrixAdapter, ...]


@functools.cache
def block_kinds(spec: ModelSpec, lora: LoraConfig) -> tuple[BlockKind, ...]:
    vision, adapters = spec.vision, _adapters_by_module(spec, lora)
    return tuple(
        BlockKind(vision.is_full_attention(layer), adapters.get(f"vision_model.decoder.layers.{layer}", ()))
        for layer in range(vision.num_layers)
    )


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
    return MatrixAdapter(matrix_name, columns, rank_sum, elements, base.parallel_style == "row", is_expert)


# --- Parameters ---------------------------------------------------------------------------------------------


class ParameterCounts(NamedTuple):
    parameter_count: float
    trained_count: float
    owned_count: float
    """Number of trained parameters whose optimizer state this GPU owns."""


def count_parameters(config: TrainConfig, spec: ModelSpec) -> tuple[int, int]:
    """The parameters of a whole model and its adapters: (all of them, those that are trained)."""
    all_tensors = tensor_table(spec) | trained_table(spec, config.lora)
    trained_names = trained_tensors(spec, config.lora, config.model)
    element_counts = {name: math.prod(info.shape) for name, info in all_tensors.items()}
    return sum(element_counts.values()), sum(element_counts[name] for name in trained_names)


def stage_parameters(config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int) -> list[ParameterCounts]:
    return _stage_parameters(
        spec, layout, dp, config.parallel.distributed_optimizer, config.lora, config.model
    )


@functools.lru_cache(maxsize=4096)
def _stage_parameters(
    spec: ModelSpec, layout: Layout, dp: int, is_distributed: bool, lora: LoraConfig, model: ModelConfig
) -> list[ParameterCounts]:
    ranks = layout.tp * layout.cp * dp, layout.replica_ranks * dp
    sections, layer_counts = _counts_by_section(spec, layout.sharding, ranks, is_distributed, lora, model)
    parts = [[ParameterCounts(*counts)] for counts in zip(*map(layout.stage_sums, layer_counts), strict=True)]
    for stage_parts in parts if layout.decoupled else parts[:1]:
        stage_parts.append(sections["vision"])
    parts[0].append(sections["embedding"])
    parts[-1].append(sections["head"])
    if layout.pp > 1 and spec.language.tied_embeddings:
        parts[-1].append(sections["tied"])
    return [*map(_sum_counts, parts)]


def _sum_counts(counts: Iterable[ParameterCounts]) -> ParameterCounts:
    return ParameterCounts(*map(sum, zip(*counts, strict=True)))


@functools.cache
def _counts_by_section(
    spec: ModelSpec,
    sharding: Sharding,
    replica_ranks: tuple[int, int],
    distributed_optimizer: bool,
    lora: LoraConfig,
    model_config: ModelConfig,
) -> tuple[dict[str | LayerKind, ParameterCounts], list[tuple[float, ...]]]:
    """The parameters on one GPU: those of each section of the model, and of the decoder layers (a tuple for
    each number of :class:`ParameterCounts`). Adapters are in the sections of their matrices."""
    trained_names = trained_tensors(spec, lora, model_config)

    def count(tensor_info: TensorInfo) -> ParameterCounts:
        # Experts have their own data-parallel group: the ranks of a stage that hold the same experts.
        weight_shards = sharding.num_shards(tensor_info) if tensor_info.num_experts else sharding.tp
        on_every_rank = sharding.is_on_every_rank(tensor_info)
        optimizer_shards = replica_ranks[1] if on_every_rank else replica_ranks[0] // weight_shards
        shard_size = math.prod(tensor_info.shard_shape(sharding))
        trained_size = shard_size if tensor_info.name in trained_names else 0
        owned_size = trained_size / (optimizer_shards if distributed_optimizer else 1)
        return ParameterCounts(shard_size, trained_size, owned_size)

    tensors = _tensors_by_section(spec, lora)
    counts = {section: _sum_counts(map(count, infos)) for section, infos in tensors.items()}
    return counts, [*zip(*(counts[kind] for kind in layer_kinds(spec, lora)), strict=True)]


@functools.cache
def _tensors_by_section(spec: ModelSpec, lora: LoraConfig) -> dict[str | LayerKind, list[TensorInfo]]:
    """The tensors of each section, and of one decoder layer of each kind."""
    kinds = layer_kinds(spec, lora)
    tensors: dict[str | LayerKind, list[TensorInfo]] = {}
    for tensor_info in (tensor_table(spec) | trained_table(spec, lora)).values():
        if tensor_info.model_section != "layer":
            tensors.setdefault(tensor_info.model_section, []).append(tensor_info)
        elif kinds.index(kind := kinds[tensor_info.layer_index]) == tensor_info.layer_index:
            tensors.setdefault(kind, []).append(tensor_info)
        if tensor_info.name == EMBEDDING_TENSOR:
            tensors["tied"] = [tensor_info]
    return tensors


def optimizer_state_bytes(config: TrainConfig) -> tuple[int, int]:
    """Bytes of optimizer state of one parameter: (on the GPU, in host memory).

    float32 weights are their own master weights. For a bf16 model, state in chunks holds only the lower half
    of a master weight, because the model's weight is the upper one. State is in chunks in host memory, and
    everywhere if moments are bf16.
    """
    half_weight_bytes = 2 if config.dtype != "float32" else 0
    if config.optimizer.moments_dtype == "bfloat16":
        return 4 + half_weight_bytes, 4 + half_weight_bytes
    return 8 + 2 * half_weight_bytes, 8 + half_weight_bytes


def checkpoint_bytes(config: TrainConfig, spec: ModelSpec) -> int:
    """Bytes of a run's checkpoint: its weights, and the optimizer state of what is trained."""
    saved_count = sum(math.prod(info.shape) for info in trained_table(spec, config.lora).values())
    # The master weight, and two moments.
    state_bytes = 4 + 2 * (2 if config.optimizer.moments_dtype == "bfloat16" else 4)
    return saved_count * bytes_per_element(config) + count_parameters(config, spec)[1] * state_bytes


def bytes_per_element(config: TrainConfig) -> int:
    return 2 if config.dtype != "float32" else 4


def offloaded_fraction(config: TrainConfig) -> float:
    """Share of the optimizer's state in host memory; ``auto`` counts as none until it is resolved."""
    offload_fraction = config.optimizer.offload_fraction
    return offload_fraction if isinstance(offload_fraction, int | float) else 0.0


@functools.cache
def mean_ranks_per_token(expert_count: int, top_k: int, expert_parallel_size: int) -> float:
    """Mean number of expert-parallel ranks that hold experts of a token. All experts are equally likely."""
    other_experts = expert_count - expert_count // expert_parallel_size
    missed_probability = math.comb(other_experts, top_k) / math.comb(expert_count, top_k)
    return expert_parallel_size * (1 - missed_probability)
