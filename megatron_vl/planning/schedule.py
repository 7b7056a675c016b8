"""The order of the passes of a pipeline stage in a step.

It is that of Megatron-core's ``forward_backward_pipelining_with(out)_interleaving``: warm-up forward passes,
then alternating forward and backward passes, then the remaining backward passes. With interleaving, the
chunks take turns of ``pipeline_parallel_size`` micro-batches each. Backward passes go from the last chunk to
the first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelinePass:
    """One pass in the order of a stage."""

    forward: bool
    chunk_index: int
    """Virtual chunk of the stage."""
    micro_batch: int


def warmup_forward_passes(
    pipeline_parallel_size: int, virtual_pipeline_size: int, pipeline_stage: int, micro_batches: int
) -> int:
    """Number of forward passes of a stage before its first backward pass."""
    pass_count = (
        (pipeline_parallel_size - pipeline_stage - 1) * 2
        + (virtual_pipeline_size - 1) * pipeline_parallel_size
        if virtual_pipeline_size > 1
        else pipeline_parallel_size - pipeline_stage - 1
    )
    return min(pass_count, micro_batches * virtual_pipeline_size)


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


def in_flight_by_pass(
    pipeline_parallel_size: int, virtual_pipeline_size: int, pipeline_stage: int, micro_batches: int
) -> list[tuple[int, ...]]:
    """The number of micro-batches in flight in each chunk of a stage, after every forward pass of a step."""
    in_flight_counts = [0] * virtual_pipeline_size
    recorded_states = []
    for pipeline_pass in stage_passes(
        pipeline_parallel_size, virtual_pipeline_size, pipeline_stage, micro_batches
    ):
        in_flight_counts[pipeline_pass.chunk_index] += 1 if pipeline_pass.forward else -1
        if pipeline_pass.forward:
            recorded_states.append(tuple(in_flight_counts))
    return recorded_states
