"""The timeline of a step's pipeline: the start and end of each pass on each stage.

The order of passes on a stage is Megatron-core's. :func:`stage_passes` lists it, and
:func:`megatron_vl.planning.memory.in_flight_by_pass` counts the micro-batches in flight. A pass begins when
the stage's previous pass has ended and its own input has arrived. A forward pass waits for the same
micro-batch of the previous chunk, and a backward pass for that of the next chunk.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vl.planning.cost import PassTime
from megatron_vl.planning.memory import warmup_forward_passes


@dataclass(frozen=True, slots=True)
class PipelinePass:
    """One pass in the order of a stage."""

    forward: bool
    chunk_index: int
    """Virtual chunk of the stage."""
    micro_batch: int


@dataclass(frozen=True, slots=True)
class PassSpan:
    """One pass with its times in seconds."""

    pipeline_stage: int
    pipeline_pass: PipelinePass
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class PipelineTimeline:
    """All passes of a pipeline in one step."""

    pass_spans: tuple[PassSpan, ...]
    stage_count: int

    @property
    def total_seconds(self) -> float:
        """Seconds from the start of the first pass to the end of the last."""
        return max(span.end_seconds for span in self.pass_spans)

    def busy_seconds(self, pipeline_stage: int) -> float:
        """Seconds in which a stage computes, and does not wait."""
        return sum(
            span.end_seconds - span.start_seconds
            for span in self.pass_spans
            if span.pipeline_stage == pipeline_stage
        )

    @property
    def bubble_share(self) -> float:
        """Share of the stages' time in which they wait."""
        available_seconds = self.stage_count * self.total_seconds
        return (
            1 - sum(self.busy_seconds(stage) for stage in range(self.stage_count)) / available_seconds
            if available_seconds
            else 0.0
        )


@functools.lru_cache(maxsize=512)
def stage_passes(
    pipeline_parallel_size: int, virtual_pipeline_size: int, pipeline_stage: int, micro_batches: int
) -> tuple[PipelinePass, ...]:
    """The passes of a stage in the order in which Megatron-core runs them."""
    pass_count = micro_batches * virtual_pipeline_size

    def nth(i: int, is_forward: bool) -> PipelinePass:
        """The i-th forward or backward pass of the stage."""
        if virtual_pipeline_size == 1:
            return PipelinePass(is_forward, 0, i)
        chunk = (i // pipeline_parallel_size) % virtual_pipeline_size
        micro_batch = (
            i // (pipeline_parallel_size * virtual_pipeline_size) * pipeline_parallel_size
            + i % pipeline_parallel_size
        )
        return PipelinePass(
            is_forward, chunk if is_forward else virtual_pipeline_size - 1 - chunk, micro_batch
        )

    warmup_passes = warmup_forward_passes(
        pipeline_parallel_size, virtual_pipeline_size, pipeline_stage, micro_batches
    )
    pass_order = [nth(i, True) for i in range(warmup_passes)]
    for i in range(pass_count - warmup_passes):
        pass_order += [nth(warmup_passes + i, True), nth(i, False)]
    return (*pass_order, *[nth(i, False) for i in range(pass_count - warmup_passes, pass_count)])


def simulate_pipeline(
    times_by_stage: Sequence[Sequence[PassTime]], micro_batches: int, message_seconds: float = 0.0
) -> PipelineTimeline:
    """The timeline of one step.

    Args:
        times_by_stage: the times of each stage's chunks for one micro-batch.
        message_seconds: seconds of a message from one stage to another.
    """
    stage_count = len(times_by_stage)
    simulation = _PipelineSimulation(
        times_by_stage, micro_batches, message_seconds if stage_count > 1 else 0.0
    )
    # Stages whose next pass may be able to run. A stage that waits is tried again after its neighbours.
    ready_stages = list(range(stage_count))
    while ready_stages:
        pipeline_stage = ready_stages.pop()
        if simulation.run_ready_passes(pipeline_stage):
            for neighbour in (pipeline_stage - 1, pipeline_stage + 1):
                if neighbour % stage_count != pipeline_stage:
                    ready_stages.append(neighbour % stage_count)
    return PipelineTimeline(tuple(simulation.pass_spans), stage_count)


class _PipelineSimulation:
    """The passes of a step that have run so far."""

    def __init__(
        self, times_by_stage: Sequence[Sequence[PassTime]], micro_batches: int, message_seconds: float
    ) -> None:
        self.times_by_stage, self.message_seconds = times_by_stage, message_seconds
        self.stage_count, chunk_count = len(times_by_stage), len(times_by_stage[0])
        self.last_entry = self.stage_count * chunk_count - 1
        self.waiting_passes = [
            deque(stage_passes(self.stage_count, chunk_count, pipeline_stage, micro_batches))
            for pipeline_stage in range(self.stage_count)
        ]
        self.stage_clocks = [0.0] * self.stage_count
        self.end_by_pass: dict[tuple[bool, int, int], float] = {}
        self.pass_spans: list[PassSpan] = []

    def run_ready_passes(self, pipeline_stage: int) -> bool:
        """Runs the next passes of a stage until one waits for its input. Returns whether any ran."""
        waiting_passes, has_advanced = self.waiting_passes[pipeline_stage], False
        while waiting_passes:
            pipeline_pass = waiting_passes[0]
            entry_index = pipeline_pass.chunk_index * self.stage_count + pipeline_stage
            arrival_seconds = self._input_arrival(pipeline_pass, entry_index)
            if arrival_seconds is None:
                break
            start_seconds = max(self.stage_clocks[pipeline_stage], arrival_seconds)
            chunk_time = self.times_by_stage[pipeline_stage][pipeline_pass.chunk_index]
            pass_seconds = chunk_time.forward if pipeline_pass.forward else chunk_time.backward
            end_seconds = start_seconds + pass_seconds
            self.end_by_pass[pipeline_pass.forward, entry_index, pipeline_pass.micro_batch] = end_seconds
            self.pass_spans.append(PassSpan(pipeline_stage, pipeline_pass, start_seconds, end_seconds))
            self.stage_clocks[pipeline_stage] = end_seconds
            waiting_passes.popleft()
            has_advanced = True
        return has_advanced

    def _input_arrival(self, pipeline_pass: PipelinePass, entry_index: int) -> float | None:
        """The time in seconds at which the input of a pass arrives; None if it is not known yet."""
        if pipeline_pass.forward and entry_index == 0:
            return 0.0
        if not pipeline_pass.forward and entry_index == self.last_entry:
            return self.end_by_pass.get((True, entry_index, pipeline_pass.micro_batch))
        source_entry = entry_index - 1 if pipeline_pass.forward else entry_index + 1
        source_end = self.end_by_pass.get((pipeline_pass.forward, source_entry, pipeline_pass.micro_batch))
        return None if source_end is None else source_end + self.message_seconds


SIMULATED_PERIODS = 4
"""A schedule repeats itself closely enough after this many rounds of one micro-batch for each stage."""


def pipeline_seconds(
    times_by_stage: Sequence[Sequence[PassTime]], micro_batches: int, message_seconds: float = 0.0
) -> float:
    """The length of the timeline in seconds. The middle of a long step repeats itself, so it is extrapolated.

    Args:
        times_by_stage, message_seconds: as for :func:`simulate_pipeline`.
    """
    pipeline_parallel_size = len(times_by_stage)
    if pipeline_parallel_size == 1:
        return micro_batches * sum(chunk.total_seconds for chunk in times_by_stage[0])
    simulated_micro_batches = SIMULATED_PERIODS * pipeline_parallel_size
    if micro_batches <= simulated_micro_batches + pipeline_parallel_size:
        return simulate_pipeline(times_by_stage, micro_batches, message_seconds).total_seconds
    shorter_seconds, longer_seconds = (
        simulate_pipeline(times_by_stage, micro_batch_count, message_seconds).total_seconds
        for micro_batch_count in (simulated_micro_batches - pipeline_parallel_size, simulated_micro_batches)
    )
    return (
        longer_seconds
        + (micro_batches - simulated_micro_batches)
        * (longer_seconds - shorter_seconds)
        / pipeline_parallel_size
    )
