"""Predicts a run: memory and time of each stage, the time of a step, MFU and tokens per second.

The time of a step is the sum of four: the pipeline's timeline (:mod:`.pipeline_timeline`) from the times of
layers and messages (:mod:`.cost`), the part of reducing gradients and gathering weights that no pass hides,
the optimizer's update, and a measured constant. Memory comes from :mod:`.memory`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import TrainConfig, validate_config
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.cost import Network, PassTime, StepCosts, run_costs
from megatron_vl.planning.flops import row_flops
from megatron_vl.planning.memory import (
    GIB,
    RESERVE_GIB,
    StageMemory,
    stage_memories,
    stage_parameters,
)
from megatron_vl.planning.pipeline_timeline import PipelineTimeline, pipeline_seconds, simulate_pipeline
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

DEFAULT_BUCKET_SIZE = 40_000_000
"""Parameters of a gradient bucket; Megatron-core's default."""
MAX_TIMELINE_PASSES = 20_000
"""If a step has more passes, its timeline shows only its first micro-batches."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage."""

    layers_per_chunk: tuple[int, ...]
    """Number of decoder layers of each chunk."""
    parameter_count: float
    """Parameters on one GPU."""
    stage_memory: StageMemory
    times_by_chunk: tuple[PassTime, ...]
    """Seconds of each chunk for one micro-batch."""
    exposed_collective_seconds: float
    """Seconds of reducing gradients and gathering weights that no pass hides."""
    optimizer_seconds: float
    """Seconds of the update of the weights."""

    @property
    def seconds_per_row(self) -> float:
        """Seconds of both passes of all chunks for one micro-batch."""
        return sum(chunk.total_seconds for chunk in self.times_by_chunk)


@dataclass(frozen=True)
class RunPrediction:
    """The time and memory that the cost model predicts for a run."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    data_parallel_size: int
    micro_batches: int
    row_statistics: RowStatistics
    calibration: Calibration
    network: Network
    stage_plans: tuple[StagePlan, ...]
    message_seconds: float
    """Seconds of a message between stages."""
    decoupled_tower_seconds: float
    """Seconds before and after the pipeline in which all ranks run the tower (decoupled placement)."""
    timeline_seconds: float
    """Seconds of the pipeline's timeline."""
    step_seconds: float
    """Seconds of a step."""

    @property
    def world_size(self) -> int:
        return self.layout.replica_ranks * self.data_parallel_size

    @property
    def peak_gib(self) -> float:
        return max(stage.stage_memory.total_bytes for stage in self.stage_plans) / GIB

    @property
    def host_gib(self) -> float:
        """Host memory for each GPU, as the start of a run counts it."""
        state_bytes = input_bytes = 0.0
        for stage in self.stage_plans:
            state_bytes = max(state_bytes, stage.stage_memory.host_bytes)
            input_bytes = max(input_bytes, stage.stage_memory.host_input_bytes)
        return (state_bytes + input_bytes) / GIB

    @property
    def fits_memory(self) -> bool:
        """Whether the fullest stage leaves :data:`RESERVE_GIB` free."""
        return self.peak_gib + RESERVE_GIB <= self.calibration.memory_gib

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of the whole run in a second."""
        return self.config.global_batch_size * self.row_statistics.mean_tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """FLOPs that training needs, as a share of the peak, counted as the trainer and ``bench`` do."""
        model_flops = self.config.global_batch_size * statistics.mean(
            row_flops(
                self.spec,
                self.config.model,
                list(row.document_lengths),
                list(row.frame_lengths),
                list(row.window_lengths),
                row.loss_tokens,
                self.config.lora,
            ).total
            for row in self.row_statistics.row_shapes
        )
        return model_flops / (self.step_seconds * self.world_size * self.calibration.peak_tflops * 1e12)

    @property
    def bubble_share(self) -> float:
        """Share of the pipeline's time in which its stages wait."""
        if not self.timeline_seconds:
            return 0.0
        busy_seconds = self.micro_batches * sum(stage.seconds_per_row for stage in self.stage_plans)
        return max(0.0, 1 - busy_seconds / (self.layout.pp * self.timeline_seconds))

    @property
    def hours_per_billion_tokens(self) -> float:
        return 1e9 / self.tokens_per_second / 3600

    def timeline(self) -> PipelineTimeline:
        """The pipeline's passes; of very long steps, those of the first micro-batches."""
        layout = self.layout
        max_micro_batches = max(
            layout.pp, MAX_TIMELINE_PASSES // (2 * layout.pp * layout.vpp) // layout.pp * layout.pp
        )
        times_by_stage = [stage.times_by_chunk for stage in self.stage_plans]
        return simulate_pipeline(
            times_by_stage, min(self.micro_batches, max_micro_batches), self.message_seconds
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "layout": {**self.layout.as_dict(), "dp": self.data_parallel_size},
            "step_s": round(self.step_seconds, 4),
            "pipeline_s": round(self.timeline_seconds, 4),
            "bubble": round(self.bubble_share, 4),
            "mfu": round(self.mfu, 4),
            "tokens_per_second": round(self.tokens_per_second),
            "hours_per_billion_tokens": round(self.hours_per_billion_tokens, 2),
            "peak_gib": round(self.peak_gib, 1),
            "host_gib": round(self.host_gib, 1),
            "fits": self.fits_memory,
            "gpu": self.calibration.gpu,
            "stages": [
                {
                    "layers": list(stage.layers_per_chunk),
                    "parameters": round(stage.parameter_count),
                    "memory_gib": stage.stage_memory.as_json(),
                    "forward_s": [round(chunk.forward, 5) for chunk in stage.times_by_chunk],
                    "backward_s": [round(chunk.backward, 5) for chunk in stage.times_by_chunk],
                    "exposed_s": round(stage.exposed_collective_seconds, 4),
                    "update_s": round(stage.optimizer_seconds, 4),
                }
                for stage in self.stage_plans
            ],
        }


def predict_layout(
    config: TrainConfig,
    spec: ModelSpec,
    world_size: int,
    layout: Layout,
    *,
    row_statistics: RowStatistics | None = None,
    calibration: Calibration | None = None,
    network: Network | None = None,
    patch_count: int | None = None,
) -> RunPrediction:
    """Predicts a run under a layout.

    Args:
        row_statistics: what the rows hold; None:
            :func:`~megatron_vl.planning.row_statistics.make_assumed_rows`.
        calibration: the GPU's measured rates; None: those of an H200.
        network: None: the default :class:`~megatron_vl.planning.cost.Network`.
        patch_count: patches of the fullest row, for memory; None: as many as a row can hold.

    Raises:
        RunConfigError: the run is impossible.
    """
    data_parallel_size = validate_config(config, world_size)
    step_costs = run_costs(config, spec, layout, data_parallel_size, row_statistics, calibration, network)
    return predict_from_costs(step_costs, patch_count)


def predict_from_costs(step_costs: StepCosts, patch_count: int | None = None) -> RunPrediction:
    """Adds up the time of a step: the pipeline, a decoupled tower, and what stages do after their passes."""
    stage_memory_list = stage_memories(
        step_costs.config, step_costs.spec, step_costs.layout, step_costs.data_parallel_size, patch_count
    )
    stage_plans = tuple(
        _plan_stage(step_costs, memory, stage) for stage, memory in enumerate(stage_memory_list)
    )
    message_seconds = step_costs.stage_message_seconds()
    timeline_seconds = pipeline_seconds(
        [stage.times_by_chunk for stage in stage_plans], step_costs.micro_batches, message_seconds
    )

    # Stages end the step on their own: the slowest one decides. A tower on every rank runs before and after
    # the pipeline, so its time adds to the timeline.
    decoupled_seconds = _decoupled_tower_seconds(step_costs)
    step_end_seconds = (
        max(stage.exposed_collective_seconds + stage.optimizer_seconds for stage in stage_plans)
        + step_costs.calibration.step_s
    )

    return RunPrediction(
        step_costs.config,
        step_costs.spec,
        step_costs.layout,
        step_costs.data_parallel_size,
        step_costs.micro_batches,
        step_costs.row_statistics,
        step_costs.calibration,
        step_costs.network,
        stage_plans,
        message_seconds,
        decoupled_seconds,
        timeline_seconds,
        timeline_seconds + decoupled_seconds + step_end_seconds,
    )


def chunk_times(step_costs: StepCosts, layout: Layout, pipeline_stage: int) -> tuple[PassTime, ...]:
    """The times of a stage's chunks for one micro-batch."""
    times_by_chunk = []
    pass_overhead = step_costs.calibration.pass_s if layout.pp > 1 else 0.0
    for chunk_index in range(layout.vpp):
        chunk_time = PassTime(pass_overhead, pass_overhead) + step_costs.decoder_layers_time(
            layout.chunk_layers(pipeline_stage, chunk_index)
        )
        if pipeline_stage + chunk_index == 0:
            chunk_time += step_costs.embedding_time()
            chunk_time += PassTime() if layout.decoupled else step_costs.vision_tower_time
        if pipeline_stage == layout.pp - 1 and chunk_index == layout.vpp - 1:
            chunk_time += step_costs.output_layer_time()
        times_by_chunk.append(chunk_time)
    return tuple(times_by_chunk)


def seconds_outside_pipeline(
    step_costs: StepCosts, layout: Layout, times_by_stage: list[tuple[PassTime, ...]]
) -> float:
    """Seconds of a step outside the passes of its pipeline.

    Args:
        times_by_stage: the times of each stage's chunks for one micro-batch.
    """
    longest_seconds = 0.0
    for stage, chunks in enumerate(times_by_stage):
        parameter_counts = stage_parameters(
            step_costs.config, step_costs.spec, layout, stage, step_costs.data_parallel_size
        )
        longest_seconds = max(
            longest_seconds,
            _exposed_collective_seconds(step_costs, parameter_counts.trained_count, chunks)
            + step_costs.optimizer_seconds(parameter_counts, sum(chunks, PassTime())),
        )
    return longest_seconds + tower_and_step_overhead(step_costs)


def tower_and_step_overhead(step_costs: StepCosts) -> float:
    """Seconds of a step outside the pipeline's passes, the reduction of gradients and the update."""
    return _decoupled_tower_seconds(step_costs) + step_costs.calibration.step_s


def _plan_stage(step_costs: StepCosts, stage_memory: StageMemory, pipeline_stage: int) -> StagePlan:
    layout = step_costs.layout
    chunks = chunk_times(step_costs, layout, pipeline_stage)
    parameter_counts = stage_parameters(
        step_costs.config, step_costs.spec, layout, pipeline_stage, step_costs.data_parallel_size
    )
    layers = tuple(len(layout.chunk_layers(pipeline_stage, chunk_index)) for chunk_index in range(layout.vpp))
    return StagePlan(
        layers,
        parameter_counts.parameter_count,
        stage_memory,
        chunks,
        _exposed_collective_seconds(step_costs, parameter_counts.trained_count, chunks),
        step_costs.optimizer_seconds(parameter_counts, sum(chunks, PassTime())),
    )


def _exposed_collective_seconds(
    step_costs: StepCosts, trained_count: float, times_by_chunk: tuple[PassTime, ...]
) -> float:
    """Seconds of reducing gradients and gathering weights that no pass hides.

    Gradients are reduced bucket by bucket during the last backward pass, and the last bucket after it.
    Weights are gathered during the first forward pass, and the first bucket before it.
    """
    bucket_size = min(
        trained_count,
        max(DEFAULT_BUCKET_SIZE, 1_000_000 * step_costs.gradient_ranks),
    )
    exposed_seconds = 0.0
    for collective_seconds, bucket_seconds, concurrent_seconds, is_overlapped in (
        (
            step_costs.grad_reduce_seconds(4 * trained_count),
            step_costs.grad_reduce_seconds(4 * bucket_size),
            times_by_chunk[0].backward,
            True,
        ),
        (
            step_costs.param_gather_seconds(step_costs.bytes_per_element * trained_count),
            step_costs.param_gather_seconds(step_costs.bytes_per_element * bucket_size),
            times_by_chunk[0].forward,
            step_costs.config.parallel.distributed_optimizer,
        ),
    ):
        hidden_seconds = (
            step_costs.calibration.hidden_reduction * min(collective_seconds, concurrent_seconds)
            if is_overlapped
            else 0.0
        )
        exposed_seconds += max(bucket_seconds, collective_seconds - hidden_seconds)

    return exposed_seconds


def _decoupled_tower_seconds(step_costs: StepCosts) -> float:
    """Seconds of a tower on all ranks: its passes before the pipeline, and its second ones after it."""
    if not step_costs.layout.decoupled:
        return 0.0
    ranks, micro_batches = step_costs.layout.replica_ranks, step_costs.micro_batches
    tower_time = step_costs.tower_time_at(1)
    is_trained = not (step_costs.model_config.freeze_vision and step_costs.model_config.freeze_merger)
    patches_per_rank = step_costs.row_statistics.mean_patches * micro_batches / ranks
    second_pass_seconds = (tower_time.forward + tower_time.backward) * is_trained * bool(patches_per_rank)
    return (tower_time.forward + second_pass_seconds) * micro_batches / ranks
