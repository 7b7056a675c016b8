"""Predicts a run: memory and time of each stage, the time of a step, MFU and tokens per second.

The step is the pipeline's timeline (:mod:`.simulate`) of the pieces' times (:mod:`.cost`), what of the
reduction and gathering does not hide beside passes, the update, and what a step takes besides. Memory comes
from :mod:`.memory`.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from megatron_vl.config import TrainConfig, validate
from megatron_vl.planning.calibration import Calibration, shipped
from megatron_vl.planning.cost import Costs, Network, PassTime
from megatron_vl.planning.flops import row_flops
from megatron_vl.planning.memory import (
    GIB,
    RESERVE_GIB,
    StageMemory,
    stage_memories,
    stage_parameters,
)
from megatron_vl.planning.rows import RowStatistics, stated_rows
from megatron_vl.planning.simulate import Timeline, pipeline_seconds, simulate
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout

BUCKET = 40_000_000
"""Parameters of a gradient bucket, if ``parallel.bucket_size`` does not say; Megatron-core's default."""
DRAWN_PASSES = 20_000
"""From more passes in a step on, its timeline is that of a part of its micro-batches."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage."""

    layers: tuple[int, ...]
    """Number of decoder layers of each chunk."""
    parameters: float
    """Parameters on one GPU."""
    memory: StageMemory
    chunks: tuple[PassTime, ...]
    """Seconds of each chunk for one micro-batch."""
    exposed: float
    """Seconds of reducing gradients and gathering weights that no pass hides."""
    update: float
    """Seconds of the update of the weights."""

    @property
    def per_row(self) -> float:
        """Seconds of both passes of all chunks for one micro-batch."""
        return sum(chunk.both for chunk in self.chunks)


@dataclass(frozen=True)
class Prediction:
    """What a run will do, by the model."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    dp: int
    micro_batches: int
    rows: RowStatistics
    calibration: Calibration
    network: Network
    stages: tuple[StagePlan, ...]
    message: float
    """Seconds of a message between stages."""
    ahead: float
    """Seconds before and after the pipeline in which all ranks run the tower (decoupled placement)."""
    pipeline: float
    """Seconds of the pipeline's timeline."""
    step: float
    """Seconds of a step."""

    @property
    def world(self) -> int:
        return self.layout.replica_ranks * self.dp

    @property
    def peak_gib(self) -> float:
        return max(stage.memory.total for stage in self.stages) / GIB

    @property
    def fits(self) -> bool:
        """Whether the fullest stage leaves :data:`RESERVE_GIB` free."""
        return self.peak_gib + RESERVE_GIB <= self.calibration.memory_gib

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of the whole run in a second."""
        return self.config.global_batch_size * self.rows.tokens / self.step

    @property
    def mfu(self) -> float:
        """FLOPs that training needs, as a share of the peak."""
        needed = self.config.global_batch_size * needed_flops(self.config, self.spec, self.rows)
        return needed / (self.step * self.world * self.calibration.peak_tflops * 1e12)

    @property
    def bubble(self) -> float:
        """Share of the pipeline's time in which its stages wait."""
        busy = self.micro_batches * sum(stage.per_row for stage in self.stages)
        return max(0.0, 1 - busy / (self.layout.pp * self.pipeline)) if self.pipeline else 0.0

    @property
    def hours_per_billion_tokens(self) -> float:
        return 1e9 / self.tokens_per_second / 3600

    def timeline(self) -> Timeline:
        """The pipeline's passes; of very long steps, those of the first micro-batches."""
        p = self.layout
        most = max(p.pp, DRAWN_PASSES // (2 * p.pp * p.vpp) // p.pp * p.pp)
        times = [stage.chunks for stage in self.stages]
        return simulate(times, min(self.micro_batches, most), self.message)

    def as_json(self) -> dict[str, Any]:
        c = self.calibration
        return {
            "layout": {**self.layout.as_dict(), "dp": self.dp},
            "step_s": round(self.step, 4),
            "pipeline_s": round(self.pipeline, 4),
            "bubble": round(self.bubble, 4),
            "mfu": round(self.mfu, 4),
            "tokens_per_second": round(self.tokens_per_second),
            "hours_per_billion_tokens": round(self.hours_per_billion_tokens, 2),
            "peak_gib": round(self.peak_gib, 1),
            "fits": self.fits,
            "gpu": c.gpu,
            "stages": [
                {
                    "layers": list(stage.layers),
                    "parameters": round(stage.parameters),
                    "memory_gib": stage.memory.as_json(),
                    "forward_s": [round(chunk.forward, 5) for chunk in stage.chunks],
                    "backward_s": [round(chunk.backward, 5) for chunk in stage.chunks],
                    "exposed_s": round(stage.exposed, 4),
                    "update_s": round(stage.update, 4),
                }
                for stage in self.stages
            ],
        }


def predict(
    config: TrainConfig,
    spec: ModelSpec,
    world: int,
    layout: Layout,
    *,
    rows: RowStatistics | None = None,
    calibration: Calibration | None = None,
    network: Network | None = None,
    patches: int | None = None,
) -> Prediction:
    """Predicts a run under a layout.

    Args:
        rows: what the rows hold; None: :func:`~megatron_vl.planning.rows.stated_rows`.
        calibration: None: that of H200.
        patches: patches of the fullest row, for memory; None: as many as a row can hold.

    Raises:
        RunConfigError: the run is impossible.
    """
    dp = validate(config, world)
    micro_batches = config.global_batch_size // dp
    rows = rows or stated_rows(spec, config.data.seq_len, config.data.max_patches)
    calibration = calibration or shipped()
    costs = Costs(config, spec, layout, dp, rows, calibration, network or Network())

    memories = stage_memories(config, spec, layout, dp, patches)
    stages = tuple(_stage(costs, memory, stage) for stage, memory in enumerate(memories))
    message = costs.message()
    pipeline = pipeline_seconds([stage.chunks for stage in stages], micro_batches, message)
    ahead = _tower_ahead(costs, micro_batches)
    end = max(stage.exposed + stage.update for stage in stages) + calibration.step_s
    return Prediction(
        config,
        spec,
        layout,
        dp,
        micro_batches,
        rows,
        calibration,
        costs.network,
        stages,
        message,
        ahead,
        pipeline,
        pipeline + ahead + end,
    )


def needed_flops(config: TrainConfig, spec: ModelSpec, rows: RowStatistics) -> float:
    """FLOPs that training needs for a row, as ``mfu`` of the trainer and of ``bench`` counts them."""
    return statistics.mean(
        row_flops(
            spec, config.model, list(row.lengths), list(row.frames), list(row.windows), row.loss_tokens
        ).total
        for row in rows.rows
    )


def chunk_times(costs: Costs, layout: Layout, stage: int) -> tuple[PassTime, ...]:
    """The times of a stage's chunks for one micro-batch."""
    times = []
    wait = costs.calibration.pass_s if layout.pp > 1 else 0.0
    for v in range(layout.vpp):
        time = PassTime(wait, wait) + costs.decoder_layers(layout.chunk_layers(stage, v))
        if stage + v == 0:
            time += costs.embedding()
            time += PassTime() if layout.decoupled else costs.tower()
        if stage == layout.pp - 1 and v == layout.vpp - 1:
            time += costs.head()
        times.append(time)
    return tuple(times)


def step_ends(costs: Costs, layout: Layout, times: list[tuple[PassTime, ...]]) -> float:
    """What a step takes beside the passes of its pipeline; ``times`` are those of its stages' chunks."""
    longest = 0.0
    for stage, chunks in enumerate(times):
        held = stage_parameters(costs.config, costs.spec, layout, stage, costs.dp)
        longest = max(longest, _exposed(costs, held.trained, chunks) + costs.update(held))
    micro_batches = costs.config.global_batch_size // costs.dp
    return longest + besides(costs, micro_batches)


def besides(costs: Costs, micro_batches: int) -> float:
    """What a step takes beside the pipeline's passes, the reduction of gradients and the update."""
    return _tower_ahead(costs, micro_batches) + costs.calibration.step_s


def _stage(costs: Costs, memory: StageMemory, stage: int) -> StagePlan:
    layout = costs.layout
    chunks = chunk_times(costs, layout, stage)
    held = stage_parameters(costs.config, costs.spec, layout, stage, costs.dp)
    layers = tuple(len(layout.chunk_layers(stage, v)) for v in range(layout.vpp))
    return StagePlan(
        layers,
        held.held,
        memory,
        chunks,
        _exposed(costs, held.trained, chunks),
        costs.update(held),
    )


def _exposed(costs: Costs, trained: float, chunks: tuple[PassTime, ...]) -> float:
    """Reduction and gathering that no pass hides.

    Gradients are reduced bucket by bucket beside the last backward pass, and the last bucket after it;
    weights are gathered beside the first forward pass, the first bucket before it.
    """
    p = costs.config.parallel
    bucket = min(trained, p.bucket_size or max(BUCKET, 1_000_000 * costs.gradient_ranks))
    exposed = 0.0
    backward, forward = chunks[0].backward, chunks[0].forward

    for seconds, part, beside, overlap in (
        (costs.reduction(4 * trained), costs.reduction(4 * bucket), backward, p.overlap_grad_reduce),
        (
            costs.gathering(costs.element * trained),
            costs.gathering(costs.element * bucket),
            forward,
            p.overlap_param_gather,
        ),
    ):
        hidden = costs.calibration.hidden_reduction * min(seconds, beside) if overlap else 0.0
        exposed += max(part, seconds - hidden)

    return exposed


def _tower_ahead(costs: Costs, micro_batches: int) -> float:
    """Seconds of the tower on all ranks, ahead of the pipeline and, computed again, after it."""
    if not costs.layout.decoupled:
        return 0.0
    ranks = costs.layout.replica_ranks
    tower = costs.tower_alone(1)
    trained = not (costs.config.model.freeze_vision and costs.config.model.freeze_merger)
    own = costs.rows.patches * micro_batches / ranks
    # What is kept is not computed a second time.
    kept = min(1.0, costs.config.vision.keep_patches / own) if own else 1.0
    after = ((1 - kept) * tower.forward + tower.backward) * trained
    return (tower.forward + after) * micro_batches / ranks
