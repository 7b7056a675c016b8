"""Estimates the GPU memory of each pipeline stage of a run before anything is allocated.

Parameters are counted from the tensor table, so weights, gradients and optimizer state are exact. Activations
are the tensors that modules keep for their backward pass: for a token (or patch) of a layer of width ``h``
and FFN width ``f``, the inputs and outputs of both norms (4 h), attention (its input after RoPE, and its
output), and linear and activation of the MLP (3 f with a gate, 2 f without one; ``top_k`` times that for
experts).

The number of micro-batches in flight is that of Megatron-core's schedule (1F1B or interleaved). The loss
holds the logits twice, because Transformer Engine's cross entropy copies them. They are not counted beside a
layer that is recomputed later. Experts are assumed to be evenly loaded. FP8 and overlapped collectives are
not modelled; with either, the linears include the norms. The CUDA context, NCCL's buffers and memory that the
allocator cannot use are not counted; :func:`reserve_gib` leaves room for them. ``docs/log/memory.md``
compares the formula with measurements.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vl.config import CALLS_WITHOUT_ACTIVATIONS, LoraConfig, ModelConfig, TrainConfig
from megatron_vl.estimate.flops import RowSizes
from megatron_vl.estimate.layer_kinds import (
    BlockKind,
    LayerKind,
    MatrixAdapter,
    block_kinds,
    layer_kinds,
    merger_adapters,
)
from megatron_vl.kernels.attention.tower_heads import has_kernels
from megatron_vl.kernels.sizes import (
    DELTA_CHUNK,
    LOSS_CHUNK_TOKENS,
    STATE_CHUNK_BYTES,
    STATE_CHUNKS_ON_GPU,
)
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, key_value_copies
from megatron_vl.spec.lora import (
    freeze_unadapted_parts,
    saved_modules,
    trained_table,
    trained_tensors,
    trains_own_matrices,
)
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, Sharding, TensorInfo, tensor_table

GIB = 2**30
WORKSPACE_GIB = 0.5
"""Memory of workspaces (cuBLAS, Transformer Engine) and small tensors: the excess over the formula that was
measured on one GPU."""


@dataclass(frozen=True)
class StageMemory:
    """Peak memory of each GPU of one pipeline stage, in bytes by part."""

    pipeline_stage: int
    weights: float = 0.0
    gradients: float = 0.0
    """Main gradients in float32."""
    optimizer: float = 0.0
    """float32 master weights and two moments (``optimizer.moments_dtype``) that are not offloaded.
    ``distributed_optimizer`` divides them over data-parallel ranks."""
    activations: float = 0.0
    """Activations of the decoder layers and the embedding, for all micro-batches in flight."""
    vision: float = 0.0
    """Activations of the vision tower, for all micro-batches in flight."""
    logits: float = 0.0
    """What the logits add to a layer that is recomputed after they are gone."""
    rows: float = 0.0
    """Rows of a whole step in the form that the loader delivers."""
    workspace: float = WORKSPACE_GIB * GIB
    micro_batches_in_flight: int = 0
    """Largest number of micro-batches whose activations are kept at once, summed over the stage's chunks."""
    host_bytes: float = 0.0
    """Host memory for this rank's offloaded optimizer state; not part of the total."""
    host_input_bytes: float = 0.0
    """Host memory for the inputs of layers (``recompute.offload_inputs``); not part of the total."""

    @property
    def total_bytes(self) -> float:
        return sum(getattr(self, part) for part in GPU_MEMORY_PARTS)

    @property
    def host_gib(self) -> float:
        """Host memory for this rank, GiB."""
        return (self.host_bytes + self.host_input_bytes) / GIB

    def as_json(self) -> dict[str, float | int]:
        """GiB by part."""
        gib_by_part = {part: round(getattr(self, part) / GIB, 2) for part in GPU_MEMORY_PARTS}
        return {
            "stage": self.pipeline_stage,
            "in_flight": self.micro_batches_in_flight,
            **gib_by_part,
            "total": round(self.total_bytes / GIB, 2),
            "host": round(self.host_gib, 2),
        }


GPU_MEMORY_PARTS = tuple("weights gradients optimizer activations vision logits rows workspace".split())


def stage_memories(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    data_parallel_size: int,
    fullest_row: RowSizes | None = None,
    stage_count: int | None = None,
) -> list[StageMemory]:
    """The peak memory of each pipeline stage, first stage first.

    Args:
        layout: it need not be the one that ``config`` asks for.
        fullest_row: what the fullest row holds; None: as many patches as a row can hold
            (``data.max_patches``, or a merged feature for every token), and a loss of every token.
        stage_count: number of stages to estimate; None: all.
    """
    seq_len = config.data.seq_len
    most_patches = seq_len * spec.vision.merge_unit
    patch_count, loss_tokens = min(most_patches, config.data.max_patches or most_patches), seq_len
    if fullest_row is not None:
        patch_count, loss_tokens = math.ceil(fullest_row.patches), math.ceil(fullest_row.loss_tokens)
    micro_batches = config.global_batch_size // data_parallel_size
    frozen_config = freeze_unadapted_parts(config, spec)
    estimator = _ActivationEstimator(frozen_config, spec, layout, patch_count, loss_tokens, micro_batches)
    counts_by_stage = stage_parameters(frozen_config, spec, layout, data_parallel_size)
    return [
        _stage_memory(estimator, stage, counts) for stage, counts in enumerate(counts_by_stage[:stage_count])
    ]


def peak_stage_gib(stage_memories_list: list[StageMemory]) -> float:
    """The estimate for the fullest stage in GiB."""
    return max(stage.total_bytes for stage in stage_memories_list) / GIB


def _stage_memory(
    estimator: _ActivationEstimator, pipeline_stage: int, parameter_counts: ParameterCounts
) -> StageMemory:
    config, layout, micro_batches = estimator.config, estimator.layout, estimator.micro_batches
    owned_count, offload_fraction = parameter_counts.owned_count, offloaded_fraction(config)
    gpu_state_bytes, host_state_bytes = optimizer_state_bytes(config)
    offloaded_bytes = host_state_bytes * owned_count * offload_fraction
    optimizer_bytes = gpu_state_bytes * owned_count * (1 - offload_fraction)

    chunks = [estimator.chunk_bytes(pipeline_stage, chunk_index) for chunk_index in range(layout.vpp)]
    tower = _ActivationBytes()
    if pipeline_stage == 0 and not layout.decoupled:
        # Context-parallel ranks divide the images of a row.
        patches_per_rank = -(-estimator.patch_count // layout.cp)
        tower = dataclasses.replace(estimator, patch_count=patches_per_rank).vision_tower_bytes()
    # Chunk 0 of stage 0 also holds the tower's activations, so the peak is that of both together. After the
    # warm-up, the number of micro-batches in flight does not grow any more.
    kept_by_chunk = [chunk.kept_bytes for chunk in chunks]
    with_tower = [kept_by_chunk[0] + tower.kept_bytes, *kept_by_chunk[1:]]
    states = in_flight_states(layout.pp, layout.vpp, pipeline_stage, min(micro_batches, 4 * layout.pp))
    in_flight = max(states, key=lambda counts: math.sumprod(counts, with_tower))

    # A recomputed decoder layer, the logits and a recomputed vision layer never exist at the same time: the
    # logits are gone before the first layer is recomputed. Each part states what it adds to those before it.
    recomputed_bytes = max(chunk.transient_bytes for chunk in chunks)
    largest_transient = max(recomputed_bytes, estimator.logits_bytes(pipeline_stage))
    activation_bytes = math.sumprod(in_flight, kept_by_chunk) + recomputed_bytes
    logits_bytes = largest_transient - recomputed_bytes
    rows_bytes = micro_batches * estimator.row_bytes(pipeline_stage == 0)

    if layout.decoupled:
        vision_bytes = estimator.replicated_tower.decoupled_tower_bytes(
            activation_bytes + logits_bytes, micro_batches * estimator.patch_count * (pipeline_stage == 0)
        )
        rows_bytes += estimator.replicated_tower.row_bytes(includes_pixels=True)
    else:
        # A frozen tower runs before the decoder layers of its micro-batch, which then take its memory.
        reused_bytes = largest_transient + kept_by_chunk[0] * config.model.freeze_vision
        transient_bytes = max(0.0, tower.transient_bytes - reused_bytes)
        vision_bytes = in_flight[0] * tower.kept_bytes + transient_bytes

    # Offloaded state passes through the GPU where activations were before.
    state_bytes = min(STATE_CHUNKS_ON_GPU * STATE_CHUNK_BYTES, offloaded_bytes)
    streamed_state_bytes = max(0.0, state_bytes - (activation_bytes + vision_bytes + logits_bytes))
    return StageMemory(
        pipeline_stage,
        weights=estimator.bytes_per_element * parameter_counts.parameter_count,
        gradients=4 * parameter_counts.trained_count,
        optimizer=optimizer_bytes + streamed_state_bytes,
        activations=activation_bytes,
        vision=vision_bytes,
        logits=logits_bytes,
        rows=rows_bytes,
        micro_batches_in_flight=sum(in_flight),
        host_bytes=offloaded_bytes,
        host_input_bytes=in_flight[0] * tower.host_bytes
        + math.sumprod(in_flight, [chunk.host_bytes for chunk in chunks]),
    )


# --- Parameters ---------------------------------------------------------------------------------------------


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
    half_weight_bytes = 2 if config.dtype == "bfloat16" else 0
    if config.optimizer.moments_dtype == "bfloat16":
        return 4 + half_weight_bytes, 4 + half_weight_bytes
    return 8 + 2 * half_weight_bytes, 8 + half_weight_bytes


def bytes_per_element(config: TrainConfig) -> int:
    """Bytes of an element of the model's weights and activations."""
    return 2 if config.dtype == "bfloat16" else 4


def offloaded_fraction(config: TrainConfig) -> float:
    """Share of the optimizer's state in host memory; ``auto`` counts as none until it is resolved."""
    offload_fraction = config.optimizer.offload_fraction
    return offload_fraction if isinstance(offload_fraction, int | float) else 0.0


# --- Activations --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _ActivationBytes:
    """Bytes of the activations of one micro-batch."""

    kept_bytes: float = 0.0
    """Bytes that are kept until the backward pass of the micro-batch."""
    transient_bytes: float = 0.0
    """Bytes that are needed while a layer is recomputed, or while a delta rule runs backward."""
    host_bytes: float = 0.0
    """Bytes in host memory until the backward pass of the micro-batch."""


@dataclass(frozen=True)
class _ActivationEstimator:
    """Computes the bytes of the activations of one micro-batch on one rank."""

    config: TrainConfig
    """In a run with LoRA, the parts without adapters are frozen."""
    spec: ModelSpec
    layout: Layout
    patch_count: int
    """Patches of a row."""
    loss_tokens: int = 0
    micro_batches: int = 1

    @functools.cached_property
    def seq_len(self) -> int:
        """Tokens of a row on one rank."""
        return self.config.data.seq_len // self.layout.cp

    @functools.cached_property
    def bytes_per_element(self) -> int:
        return bytes_per_element(self.config)

    @functools.cached_property
    def replicated_tower(self) -> _ActivationEstimator:
        """The estimator of a tower on every rank, which encodes an even share of the images of a step."""
        patches_per_rank = -(-self.micro_batches * self.patch_count // self.layout.replica_ranks)
        layout = dataclasses.replace(self.layout, tp=1)
        return dataclasses.replace(self, layout=layout, patch_count=patches_per_rank)

    def logits_bytes(self, pipeline_stage: int) -> float:
        """Bytes of the logits that a stage computes at once, held twice; only the last stage has any."""
        if pipeline_stage < self.layout.pp - 1:
            return 0.0
        logits_tokens = min(-(-self.loss_tokens // self.layout.cp), LOSS_CHUNK_TOKENS)
        return 2.0 * self.bytes_per_element * logits_tokens * self.spec.language.vocab_size / self.layout.tp

    @property
    def _sequence_parallel_size(self) -> int:
        """Number of ranks that share the tokens between the linears of a decoder layer."""
        return self.layout.tp if self.config.parallel.sequence_parallel else 1

    def chunk_bytes(self, pipeline_stage: int, chunk_index: int) -> _ActivationBytes:
        """The activations of one chunk of the language model for one micro-batch."""
        layout, language_spec = self.layout, self.spec.language
        is_first_chunk = pipeline_stage + chunk_index == 0
        is_last_chunk = pipeline_stage == layout.pp - 1 and chunk_index == layout.vpp - 1
        bytes_per_feature = self.bytes_per_element * self.seq_len
        hidden_bytes = bytes_per_feature * language_spec.hidden_size / self._sequence_parallel_size
        chunk_layers = layout.chunk_layers(pipeline_stage, chunk_index)
        kinds_of_layers = layer_kinds(self.spec, self.config.lora)[chunk_layers.start : chunk_layers.stop]

        # The input: the stage's input with room for levels of DeepStack, or the embedding and its copy
        # with features.
        deepstack_levels = len(self.spec.vision.deepstack_layers)
        boundary_bytes = (
            hidden_bytes * (1 + deepstack_levels)
            + (hidden_bytes * self._sequence_parallel_size if is_first_chunk else 0.0)
            + (2 * hidden_bytes if is_last_chunk else 0.0)
        )
        has_linear_attention = any(kind.has_linear_attention for kind in kinds_of_layers)
        delta_rule_bytes = self._delta_rule_bytes() if has_linear_attention else 0.0

        layer_bytes = [bytes_per_feature * self._elements_by_layer_kind[kind] for kind in kinds_of_layers]
        if self.config.recompute.language != "full":
            return _ActivationBytes(sum(layer_bytes) + boundary_bytes, delta_rule_bytes)

        # The backward pass of the MLP frees its activations before that of the delta rule begins.
        for layer_index, kind in enumerate(kinds_of_layers):
            if kind.has_linear_attention:
                bytes_of_mlp = bytes_per_feature * self._mlp_elements(kind)
                layer_bytes[layer_index] += max(0.0, delta_rule_bytes - bytes_of_mlp)
        return self._recomputed_layers(layer_bytes, hidden_bytes, boundary_bytes)

    def _recomputed_layers(
        self, layer_bytes: list[float], input_bytes: float, other_bytes: float
    ) -> _ActivationBytes:
        """Layers that keep their inputs, and need ``layer_bytes`` while one is recomputed.

        If inputs are in host memory, those of the recomputed layer and of the next one are on the device.
        """
        all_inputs, largest_layer = len(layer_bytes) * input_bytes, max(layer_bytes, default=0.0)
        if not self.config.recompute.offload_inputs:
            return _ActivationBytes(all_inputs + other_bytes, largest_layer)
        return _ActivationBytes(
            other_bytes, largest_layer + min(2, len(layer_bytes)) * input_bytes, all_inputs
        )

    @functools.cached_property
    def _elements_by_layer_kind(self) -> dict[LayerKind, float]:
        """Elements of one token in a decoder layer of each kind."""
        kinds = set(layer_kinds(self.spec, self.config.lora))
        return {kind: self._decoder_layer_elements(kind) for kind in kinds}

    def _decoder_layer_elements(self, kind: LayerKind) -> float:
        """Elements of one token; log-sum-exp and router values are converted to the elements' size."""
        language_spec = self.spec.language
        recomputed_modules = self.config.recompute.selected_modules
        attention_elements = (
            self._linear_attention_elements(kind)
            if kind.has_linear_attention
            else self._attention_elements(kind)
        )
        attention_elements += self._adapter_elements(kind.adapters, "self_attention.")
        norm_tensors = 2 if "layernorm" in recomputed_modules else 4
        norm_elements = norm_tensors * language_spec.hidden_size / self._sequence_parallel_size
        if "mlp" in recomputed_modules:
            return norm_elements + attention_elements

        mlp_elements = self._mlp_elements(kind) + self._adapter_elements(kind.adapters, "mlp.")
        return norm_elements + attention_elements + mlp_elements

    def _mlp_elements(self, kind: LayerKind) -> float:
        """Elements of one token that an MLP or the experts keep."""
        if kind.has_experts:
            return self._expert_elements(kind)
        kept_widths = 2 + self._keeps_activation(kind.adapters, "mlp.linear_fc2")
        return kept_widths * self.spec.language.ffn_hidden_size / self.layout.tp

    def _trains(self, part: str) -> bool:
        """Whether the own matrices of a part of the model are trained."""
        return trains_own_matrices(self.config.model, self.config.lora, part)

    def _keeps_input(self, adapters: tuple[MatrixAdapter, ...], matrix_name: str, is_trained: bool) -> bool:
        """Whether autograd keeps the input of a matrix, for the gradient of the matrix or of its adapter.

        With dropout, the adapter keeps a copy instead (:meth:`_adapter_elements`).
        """
        return is_trained or (
            not self.config.lora.dropout and any(adapter.matrix_name == matrix_name for adapter in adapters)
        )

    def _keeps_activation(self, adapters: tuple[MatrixAdapter, ...], matrix_name: str) -> bool:
        """Whether a decoder layer keeps the output of an MLP's activation, the input of ``matrix_name``."""
        keeps_input = self._keeps_input(adapters, matrix_name, self._trains("language"))
        return keeps_input and "activation" not in self.config.recompute.selected_modules

    def _adapter_elements(
        self, adapters: tuple[MatrixAdapter, ...], prefix: str = "", *, is_language: bool = True
    ) -> float:
        """Elements of one token that the adapters of matrices with this prefix keep.

        They are the input of B, and what dropout leaves and its mask. Ranks that cut a matrix by rows have
        the input of B for all tokens of the row.
        """
        sequence_ranks = self._sequence_parallel_size if is_language else 1
        dropout_widths = (1 + 1 / self.bytes_per_element) * bool(self.config.lora.dropout)
        elements = 0.0
        for adapter in adapters:
            if not adapter.matrix_name.startswith(prefix):
                continue
            if adapter.is_expert and (moe_spec := self.spec.language.moe) is not None:
                elements += moe_spec.top_k * self.layout.etp * adapter.rank_sum / sequence_ranks
                continue
            input_ranks = self.layout.tp if adapter.is_row_parallel else sequence_ranks
            elements += adapter.rank_sum / (sequence_ranks if adapter.is_row_parallel else 1)
            elements += dropout_widths * adapter.columns / input_ranks
        return elements

    def _attention_elements(self, kind: LayerKind) -> float:
        language_spec, tensor_parallel_size = self.spec.language, self.layout.tp
        # A rank holds whole key/value heads; with more ranks than heads, the heads are copied.
        query_width = language_spec.num_heads * language_spec.head_dim / tensor_parallel_size
        key_value_width = max(language_spec.num_kv_heads / tensor_parallel_size, 1.0) * language_spec.head_dim
        exchanged = gate_elements = 0.0
        # The norms of queries and keys keep the fused output.
        norm_inputs = (query_width + 2 * key_value_width) * language_spec.qk_norm
        if self.layout.cp > 1:
            key_value_heads = max(1, language_spec.num_kv_heads // tensor_parallel_size)
            key_value_width *= key_value_copies(key_value_heads, self.layout.head_ranks)
            key_value_width *= self.layout.key_ranks
            exchanged = query_width  # the output of attention is kept before and after the exchange
        if language_spec.output_gate:
            is_trained = self._trains("language")
            keeps_output = self._keeps_input(kind.adapters, "self_attention.linear_proj", is_trained)
            gate_elements = query_width * (1 + keeps_output + 4 / self.bytes_per_element)
        log_sum_exp = language_spec.num_heads * 4 / self.bytes_per_element / tensor_parallel_size
        projected = 2 * query_width + 2 * key_value_width
        return projected + norm_inputs + exchanged + log_sum_exp + gate_elements

    def _linear_attention_elements(self, kind: LayerKind) -> float:
        linear_attention = self.spec.language.linear_attention
        if linear_attention is None:
            return 0.0
        values = linear_attention.value_heads * linear_attention.value_dim
        projected_elements = linear_attention.conv_channels + values + 2 * linear_attention.value_heads
        core_elements = (
            linear_attention.conv_channels
            + values
            + linear_attention.value_heads * (1 + 4 / self.bytes_per_element + DELTA_CHUNK)
        )
        if self.layout.cp > 1:  # a state and a matrix of each value head
            state_bytes = 4 * linear_attention.state_exchange_size
            core_elements += state_bytes / (self.bytes_per_element * self.seq_len)
        keeps_output = self._keeps_input(kind.adapters, "self_attention.out_proj", self._trains("language"))
        return (
            projected_elements
            + values * keeps_output
            + core_elements * ("core_attn" not in self.config.recompute.selected_modules)
        ) / self.layout.tp

    def _delta_rule_bytes(self) -> float:
        """Bytes that exist only during the backward pass of a delta rule.

        They are the states of all chunks in both directions, products that are computed again, and the states
        and matrices that a rank receives from all ranks that share its rows.
        """
        linear_attention = self.spec.language.linear_attention
        assert linear_attention is not None
        chunk_state_elements = 2 * linear_attention.key_dim * linear_attention.value_dim / DELTA_CHUNK
        token_elements = linear_attention.value_heads * (
            chunk_state_elements + 2 * linear_attention.key_dim + 4 * linear_attention.value_dim
        )
        rank_count = self.layout.cp if self.layout.cp > 1 else 0
        received_bytes = 4 * rank_count * linear_attention.state_exchange_size
        return (self.bytes_per_element * self.seq_len * token_elements + received_bytes) / self.layout.tp

    def _expert_elements(self, kind: LayerKind) -> float:
        """Elements of one token in a layer of experts.

        They are the router's logits, probabilities and map in float32, and the inputs of the experts, their
        linear and their activation. A token becomes ``top_k`` rows. With an even load, a rank's experts
        process the rows of its own tokens, times the number of ranks that share the experts' matrices.
        """
        hidden_size, moe_spec = self.spec.language.hidden_size, self.spec.language.moe
        assert moe_spec is not None
        keeps_input = self._keeps_input(kind.adapters, "mlp.experts.linear_fc1", self._trains("language"))
        kept_widths = 2 + self._keeps_activation(kind.adapters, "mlp.experts.linear_fc2")
        expert_elements = moe_spec.top_k * (
            keeps_input * self.layout.etp * hidden_size + kept_widths * moe_spec.ffn_hidden_size
        )
        shared_expert_elements = 0.0
        if moe_spec.shared_ffn_hidden_size:
            kept_widths = 2 + self._keeps_activation(kind.adapters, "mlp.shared_experts.linear_fc2")
            shared_expert_elements = kept_widths * moe_spec.shared_ffn_hidden_size + hidden_size
        return (
            expert_elements + shared_expert_elements + 3 * moe_spec.num_experts * 4 / self.bytes_per_element
        ) / self._sequence_parallel_size

    def vision_tower_bytes(self) -> _ActivationBytes:
        """The activations of the tower for one row's patches. The tower has no sequence parallelism."""
        vision_spec, model_config = self.spec.vision, self.config.model
        bytes_per_feature = self.bytes_per_element * self.patch_count
        kinds = block_kinds(self.spec, self.config.lora)
        bytes_by_kind = {kind: bytes_per_feature * self._vision_layer_elements(kind) for kind in set(kinds)}
        layer_bytes = [bytes_by_kind[kind] for kind in kinds]

        # Pixels are kept as float32 and twice as patches, for the gradient of the patch embedding.
        pixel_bytes = self.patch_count * vision_spec.patch_dim * (2 + 2 * self.bytes_per_element)
        merger_bytes = bytes_per_feature * self._merger_elements()
        if model_config.freeze_vision:
            return _ActivationBytes(
                0.0 if model_config.freeze_merger else merger_bytes, max(layer_bytes) + pixel_bytes
            )
        trains_patch_embed = self._trains("vision") or "model.visual.patch_embed" in self._whole_modules
        kept_bytes = merger_bytes + pixel_bytes * trains_patch_embed
        if self.config.recompute.vision == "full":
            return self._recomputed_layers(
                layer_bytes, bytes_per_feature * vision_spec.hidden_size, kept_bytes
            )
        return _ActivationBytes(sum(layer_bytes) + kept_bytes)

    @property
    def _whole_modules(self) -> set[str]:
        """The released names of the modules that are trained whole beside adapters."""
        return set(saved_modules(self.spec, self.config.lora).values())

    def _merger_elements(self) -> float:
        """Elements of one patch in all mergers: the outputs of their norm, linear and activation."""
        vision_spec = self.spec.vision
        trains_merger = not self.config.lora.rank or "model.visual.merger" in self._whole_modules
        keeps_norm_input = trains_merger or not self.config.model.freeze_vision
        elements = 0.0
        for adapters in merger_adapters(self.spec, self.config.lora):
            keeps_activation = self._keeps_input(adapters, "linear_fc2", trains_merger)
            widths = 1 + keeps_norm_input + (1 + keeps_activation) / self.layout.tp
            elements += vision_spec.hidden_size * widths
            adapter_elements = self._adapter_elements(adapters, is_language=False)
            elements += (vision_spec.out_hidden_size + adapter_elements) / vision_spec.merge_unit
        return elements

    def decoupled_tower_bytes(self, pipeline_bytes: float, placed_patches: int) -> float:
        """Bytes of a tower that every rank holds, for the rank's own share of a step's patches.

        The tower runs while the activations of the pipeline do not exist, and may use their memory.

        Args:
            pipeline_bytes: bytes of the pipeline's activations.
            placed_patches: number of patches whose features and gradients this stage holds.
        """
        kept_bytes, encode_bytes, backward_bytes = self._decoupled_parts
        vision_spec, model_config = self.spec.vision, self.config.model
        is_frozen = model_config.freeze_vision and model_config.freeze_merger
        levels = 1 + len(vision_spec.deepstack_layers)
        patch_bytes = self.bytes_per_element * levels * vision_spec.out_hidden_size / vision_spec.merge_unit
        local_feature_bytes = patch_bytes * self.patch_count
        # Kept activations exist during the pipeline's passes and the first pass of other images. Their own
        # backward pass comes first and frees them.
        return patch_bytes * placed_patches * (1 if is_frozen else 2) + max(
            kept_bytes,
            local_feature_bytes + backward_bytes - pipeline_bytes,
            kept_bytes + local_feature_bytes + encode_bytes - pipeline_bytes,
        )

    @functools.cached_property
    def _decoupled_parts(self) -> tuple[float, float, float]:
        """Bytes of a decoupled tower that are kept, and at the peaks of its first and its second passes."""
        model_config, patches_a_call = self.config.model, self.config.vision.patches_a_call
        frozen_model = dataclasses.replace(model_config, freeze_vision=True, freeze_merger=True)
        frozen_config = dataclasses.replace(self.config, model=frozen_model)

        def peak(patch_count: int, config: TrainConfig) -> float:
            patch_count = min(self.patch_count, patch_count)
            tower = dataclasses.replace(self, config=config, patch_count=patch_count).vision_tower_bytes()
            return tower.kept_bytes + tower.transient_bytes

        encode_bytes = peak(CALLS_WITHOUT_ACTIVATIONS * patches_a_call, frozen_config)
        if model_config.freeze_vision and model_config.freeze_merger:
            return 0.0, encode_bytes, 0.0
        # Mergers above frozen blocks keep the activations of all patches.
        kept_patches = self.patch_count if model_config.freeze_vision else 0
        kept_bytes = dataclasses.replace(self, patch_count=kept_patches).vision_tower_bytes().kept_bytes
        return kept_bytes, encode_bytes, peak(patches_a_call, self.config)

    def _vision_layer_elements(self, kind: BlockKind) -> float:
        """Elements of one patch in a layer of the tower."""
        vision_spec = self.spec.vision
        # As megatron_vl.models.attention.choose_backend says for GPUs. That module takes seconds to import.
        is_auto = self.config.model.attention == "auto"
        takes_kernels = is_auto and self.bytes_per_element == 2 and has_kernels(vision_spec.head_dim)
        if is_auto and not kind.has_full_attention:
            # One kernel from the fused QKV output to the attention's output.
            attention_elements = 4.0 * vision_spec.hidden_size
        else:
            # Our kernels keep rotated copies and the output. Others keep v, or all of the fused output, too.
            kept_widths = 4.0 if takes_kernels else 6.0
            log_sum_exp = vision_spec.num_heads * 4 / self.bytes_per_element
            attention_elements = kept_widths * vision_spec.hidden_size + log_sum_exp
        keeps_activation = self.config.recompute.vision != "activation" and self._keeps_input(
            kind.adapters, "mlp.linear_fc2", self._trains("vision")
        )
        mlp_matrices = (2 if vision_spec.gated_mlp else 1) + keeps_activation
        return (
            4 * vision_spec.hidden_size
            + (attention_elements + mlp_matrices * vision_spec.padded_ffn_hidden_size) / self.layout.tp
            + self._adapter_elements(kind.adapters, is_language=False)
        )

    def row_bytes(self, includes_pixels: bool) -> float:
        """Bytes of one row on the device.

        A token takes 24 bytes in int32 buffers of the whole row, and 44 in int64 copies of this rank's
        tokens. Each patch has uint8 planes.
        """
        patch_bytes = self.spec.vision.patch_dim / self.spec.vision.temporal_patch_size + 32
        token_bytes = (24.0 * self.layout.cp + 44.0) * self.seq_len
        return token_bytes + self.patch_count * patch_bytes * includes_pixels


@functools.lru_cache(maxsize=4096)
def in_flight_states(
    pp: int, vpp: int, pipeline_stage: int, micro_batches: int
) -> tuple[tuple[int, ...], ...]:
    """The numbers of micro-batches in flight in the chunks of a stage, after forward passes of a step.

    The order is Megatron-core's: warm-up forward passes, then forward and backward passes in turn. With
    interleaving, the chunks take turns of ``pp`` micro-batches each, backward ones from the last chunk on.
    During the warm-up the numbers only grow, so only its end counts.
    """
    pass_count = micro_batches * vpp
    warmup_passes = pp - pipeline_stage - 1
    if vpp > 1:
        warmup_passes = 2 * warmup_passes + (vpp - 1) * pp
    warmup_passes = min(warmup_passes, pass_count - 1)
    counts, states = [0] * vpp, []
    for forward_pass in range(pass_count):
        counts[forward_pass // pp % vpp] += 1
        if (backward_pass := forward_pass - warmup_passes) >= 0:
            states.append(tuple(counts))
            counts[vpp - 1 - backward_pass // pp % vpp] -= 1
    return tuple(dict.fromkeys(states))
