"""Counts the parameters on each GPU, and the bytes of their optimizer state, from the tensor table."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

from megatron_vl.config import LoraConfig, ModelConfig, TrainConfig
from megatron_vl.estimate.layer_kinds import LayerKind, layer_kinds
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.lora import trained_table, trained_tensors
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, Sharding, TensorInfo, tensor_table


class ParameterCounts(NamedTuple):
    """Numbers of parameters on one GPU."""

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


def stage_parameters(
    config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int
) -> list[ParameterCounts]:
    """The parameters of one GPU of each pipeline stage."""
    counts_by_section, layers_before = _run_counts(config, spec, layout, data_parallel_size)
    parts: list[list[ParameterCounts]] = [[] for _ in range(layout.pp)]
    for stage, stage_parts in enumerate(parts):
        if layout.decoupled or stage == 0:
            stage_parts.append(counts_by_section["vision"])
        for chunk_index in range(layout.vpp):
            layers = layout.chunk_layers(stage, chunk_index)
            ends = zip(layers_before[layers.start], layers_before[layers.stop], strict=True)
            stage_parts.append(ParameterCounts(*(after - before for before, after in ends)))
    parts[0].append(counts_by_section["embedding"])
    parts[-1].append(counts_by_section["head"])
    if layout.pp > 1 and spec.language.tied_embeddings:
        parts[-1].append(counts_by_section["tied"])
    return [_sum_counts(*stage_parts) for stage_parts in parts]


def replica_bytes(config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int) -> float:
    """Bytes of weights, gradients and optimizer state on the GPU, summed over one GPU of each stage."""
    sections, layers_before = _run_counts(config, spec, layout, data_parallel_size)
    ends = (sections[name] for name in ("vision", "embedding", "head"))
    counts = _sum_counts(layers_before[-1], *ends)
    state_bytes = optimizer_state_bytes(config)[0] * (1 - offloaded_fraction(config))
    weight_bytes = bytes_per_element(config) * counts.parameter_count
    return weight_bytes + 4 * counts.trained_count + state_bytes * counts.owned_count


def _run_counts(
    config: TrainConfig, spec: ModelSpec, layout: Layout, data_parallel_size: int
) -> tuple[dict[str, ParameterCounts], list[ParameterCounts]]:
    """:func:`_counts_by_section` for a run."""
    ranks = layout.tp * layout.cp * data_parallel_size, layout.replica_ranks * data_parallel_size
    is_distributed = config.parallel.distributed_optimizer
    return _counts_by_section(spec, layout.sharding, ranks, is_distributed, config.lora, config.model)


def _sum_counts(*counts: ParameterCounts) -> ParameterCounts:
    return ParameterCounts(*map(sum, zip(ParameterCounts(0, 0, 0), *counts, strict=True)))


@functools.cache
def _counts_by_section(
    spec: ModelSpec,
    sharding: Sharding,
    replica_ranks: tuple[int, int],
    distributed_optimizer: bool,
    lora: LoraConfig,
    model_config: ModelConfig,
) -> tuple[dict[str, ParameterCounts], list[ParameterCounts]]:
    """The parameters on one GPU: those of each section of the model, and of the decoder layers before each
    layer and the end. Adapters are in the sections of their matrices.

    Args:
        replica_ranks: (number of ranks of a stage, number of all ranks).
    """
    trained_names = trained_tensors(spec, lora, model_config)

    def count(tensor_info: TensorInfo) -> ParameterCounts:
        # Experts have their own data-parallel group: the ranks of a stage that hold the same experts.
        optimizer_shards = replica_ranks[0] // (
            sharding.num_shards(tensor_info) if tensor_info.num_experts else sharding.tp
        )
        if sharding.is_on_every_rank(tensor_info):
            optimizer_shards = replica_ranks[1]
        shard_size = math.prod(tensor_info.shard_shape(sharding))
        trained_size = shard_size if tensor_info.name in trained_names else 0
        owned_size = trained_size / (optimizer_shards if distributed_optimizer else 1)
        return ParameterCounts(shard_size, trained_size, owned_size)

    counts = {
        section: _sum_counts(*map(count, infos)) for section, infos in _tensors_by_section(spec, lora).items()
    }
    layer_counts = (counts[kind] for kind in layer_kinds(spec, lora))
    layers_before = list(itertools.accumulate(layer_counts, _sum_counts, initial=ParameterCounts(0, 0, 0)))
    return {name: count for name, count in counts.items() if isinstance(name, str)}, layers_before


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
    """Bytes of an element of the model's weights and activations."""
    return 2 if config.dtype != "float32" else 4


def offloaded_fraction(config: TrainConfig) -> float:
    """Share of the optimizer's state in host memory; ``auto`` counts as none until it is resolved."""
    offload_fraction = config.optimizer.offload_fraction
    return offload_fraction if isinstance(offload_fraction, int | float) else 0.0


def mean_ranks_per_token(expert_count: int, top_k: int, expert_parallel_size: int) -> float:
    """Mean number of expert-parallel ranks that hold experts of a token. All experts are equally likely."""
    missed_probability = 1.0
    for i in range(top_k):
        other_experts = expert_count - expert_count // expert_parallel_size
        missed_probability *= max(0, other_experts - i) / (expert_count - i)
    return expert_parallel_size * (1 - missed_probability)
