"""Estimates the GPU memory of each pipeline stage of a run before anything is allocated.

Parameters (:mod:`.parameters`) are counted from the tensor table, so weights, gradients and optimizer state
are exact. Activations (:mod:`.activations`) follow from the widths of a layer, and the number of
micro-batches in flight from Megatron-core's schedule (1F1B or interleaved). The loss holds the logits twice,
because Transformer Engine's cross entropy copies them. They are not counted beside a layer that is recomputed
later. Experts are assumed to be evenly loaded. FP8 and overlapped collectives are not modelled; with either,
the linears include the norms. The CUDA context, NCCL's buffers and memory that the allocator cannot use are
not counted; :func:`reserve_gib` leaves room for them. ``benchmarks/log/memory.md`` compares the formula with
measurements.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.activations import ActivationBytes, ActivationEstimator
from megatron_vl.estimate.flops import RowSizes
from megatron_vl.estimate.parameters import (
    ParameterCounts,
    offloaded_fraction,
    optimizer_state_bytes,
    stage_parameters,
)
from megatron_vl.kernels.sizes import STATE_CHUNK_BYTES, STATE_CHUNKS_ON_GPU
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.lora import freeze_parts_without_lora

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
        return (self.host_bytes + self.host_input_bytes) / GIB

    def as_json(self) -> dict[str, float | int]:
        return {
            "stage": self.pipeline_stage,
            "in_flight": self.micro_batches_in_flight,
            **{part: round(getattr(self, part) / GIB, 2) for part in GPU_MEMORY_PARTS},
            "total": round(self.total_bytes / GIB, 2),
            "host": round(self.host_gib, 2),
        }


GPU_MEMORY_PARTS = tuple("weights gradients optimizer activations vision logits rows workspace".split())


def stage_memories(
    config: TrainConfig, spec: ModelSpec, layout: Layout, dp: int, fullest_row: RowSizes | None = None
) -> Iterator[StageMemory]:
    """The peak memory of each pipeline stage, first stage first, computed when it is asked for.

    Args:
        layout: it need not be the one that ``config`` asks for.
        fullest_row: what the fullest row holds; None: as many patches as a row can hold
            (``data.max_patches``, or a merged feature for every token), and a loss of every token.
    """
    seq_len = config.data.seq_len
    most_patches = seq_len * spec.vision.merge_unit
    patch_count, loss_tokens = min(most_patches, config.data.max_patches or most_patches), seq_len
    if fullest_row is not None:
        patch_count, loss_tokens = math.ceil(fullest_row.patches), math.ceil(fullest_row.loss_tokens)
    micro_batches = config.global_batch_size // dp
    frozen_config = freeze_parts_without_lora(config, spec)
    estimator = ActivationEstimator(frozen_config, spec, layout, patch_count, loss_tokens, micro_batches)
    for stage, counts in enumerate(stage_parameters(frozen_config, spec, layout, dp)):
        yield _stage_memory(estimator, stage, counts)


def peak_stage_gib(stages: Iterable[StageMemory]) -> float:
    return max(stage.total_bytes for stage in stages) / GIB


def _stage_memory(
    estimator: ActivationEstimator, pipeline_stage: int, parameter_counts: ParameterCounts
) -> StageMemory:
    config, layout, micro_batches = estimator.config, estimator.layout, estimator.micro_batches
    owned_count, offload_fraction = parameter_counts.owned_count, offloaded_fraction(config)
    gpu_state_bytes, host_state_bytes = optimizer_state_bytes(config)
    offloaded_bytes = host_state_bytes * owned_count * offload_fraction
    optimizer_bytes = gpu_state_bytes * owned_count * (1 - offload_fraction)

    chunks = [estimator.chunk_bytes(pipeline_stage, chunk_index) for chunk_index in range(layout.vpp)]
    tower = ActivationBytes()
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
        vision_bytes, vision_host_bytes = estimator.replicated_tower.decoupled_tower_bytes(
            activation_bytes + logits_bytes, micro_batches * (pipeline_stage == 0), estimator.patch_count
        )
        rows_bytes += estimator.replicated_tower.row_bytes(includes_pixels=True)
    else:
        # A frozen tower runs before the decoder layers of its micro-batch, which then take its memory.
        reused_bytes = largest_transient + kept_by_chunk[0] * config.model.freeze_vision
        vision_bytes = in_flight[0] * tower.kept_bytes + max(0.0, tower.transient_bytes - reused_bytes)
        vision_host_bytes = in_flight[0] * tower.host_bytes

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
        host_input_bytes=vision_host_bytes + math.sumprod(in_flight, [chunk.host_bytes for chunk in chunks]),
    )


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
    warmup_passes = (pp - pipeline_stage - 1) * (2 if vpp > 1 else 1) + (vpp - 1) * pp
    warmup_passes = min(warmup_passes, pass_count - 1)
    counts, states = [0] * vpp, []
    for forward_pass in range(pass_count):
        counts[forward_pass // pp % vpp] += 1
        if (backward_pass := forward_pass - warmup_passes) >= 0:
            states.append(tuple(counts))
            counts[vpp - 1 - backward_pass // pp % vpp] -= 1
    return tuple(dict.fromkeys(states))
