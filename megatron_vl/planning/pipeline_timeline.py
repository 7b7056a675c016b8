"""The timeline of a step's pipeline: the start and end of each pass on each stage.

The order of passes on a stage is that of :mod:`.schedule`. A pass begins when the stage's previous pass has
ended and its own input has arrived. A forward pass waits for the same micro-batch of the previous chunk, and
a backward pass for that of the next chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vl.planning.cost import PassTime
from megatron_vl.planning.schedule import PipelinePass, stage_passes


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


def simulate_pipeline(
    times_by_stage: Sequence[Sequence[PassTime]], micro_batches: int, message_seconds: float = 0.0
) -> PipelineTimeline:
    """The timeline of one step.

    Args:
        times_by_stage: the times of each stage's chunks for one micro-batch.
        message_seconds: seconds of a message from one stage to another.
    """
    pipeline_parallel_size, virtual_pipeline_size = len(times_by_stage), len(times_by_stage[0])
    pass_orders = [
        stage_passes(pipeline_parallel_size, virtual_pipeline_size, pipeline_stage, micro_batches)
        for pipeline_stage in range(pipeline_parallel_size)
    ]
    last_entry = pipeline_parallel_size * virtual_pipeline_size - 1
    end_by_pass: dict[tuple[bool, int, int], float] = {}
    stage_clocks = [0.0] * pipeline_parallel_size
    next_positions = [0] * pipeline_parallel_size
    pass_spans: list[PassSpan] = []

    # Stages whose next pass may be able to run. A stage that waits is tried again after its neighbours.
    ready_stages = list(range(pipeline_parallel_size))

    while ready_stages:
        pipeline_stage = ready_stages.pop()
        has_advanced = False

        while next_positions[pipeline_stage] < len(pass_orders[pipeline_stage]):
            pipeline_pass = pass_orders[pipeline_stage][next_positions[pipeline_stage]]
            entry_index = pipeline_pass.chunk_index * pipeline_parallel_size + pipeline_stage
            arrival_seconds = _input_arrival(
                end_by_pass,
                pipeline_pass,
                entry_index,
                last_entry,
                message_seconds if pipeline_parallel_size > 1 else 0.0,
            )
            if arrival_seconds is None:
                break
            start_seconds = max(stage_clocks[pipeline_stage], arrival_seconds)
            chunk_time = times_by_stage[pipeline_stage][pipeline_pass.chunk_index]
            end_seconds = start_seconds + (
                chunk_time.forward if pipeline_pass.forward else chunk_time.backward
            )
            end_by_pass[pipeline_pass.forward, entry_index, pipeline_pass.micro_batch] = end_seconds
            pass_spans.append(PassSpan(pipeline_stage, pipeline_pass, start_seconds, end_seconds))
            stage_clocks[pipeline_stage] = end_seconds
            next_positions[pipeline_stage] += 1
            has_advanced = True

        if has_advanced:
            for neighbour in (pipeline_stage - 1, pipeline_stage + 1):
                if neighbour % pipeline_parallel_size != pipeline_stage:
                    ready_stages.append(neighbour % pipeline_parallel_size)

    return PipelineTimeline(tuple(pass_spans), pipeline_parallel_size)


def _input_arrival(
    end_by_pass: dict[tuple[bool, int, int], float],
    pipeline_pass: PipelinePass,
    entry_index: int,
    last_entry: int,
    message_seconds: float,
) -> float | None:
    """The time in seconds at which the input of a pass arrives; None if it is not known yet."""
    if pipeline_pass.forward:
        if entry_index == 0:
            return 0.0
        previous_end = end_by_pass.get((True, entry_index - 1, pipeline_pass.micro_batch))
        return None if previous_end is None else previous_end + message_seconds
    if entry_index == last_entry:
        return end_by_pass.get((True, entry_index, pipeline_pass.micro_batch))
    following_end = end_by_pass.get((False, entry_index + 1, pipeline_pass.micro_batch))
    return None if following_end is None else following_end + message_seconds


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
