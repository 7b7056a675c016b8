"""The simulator's timelines against timelines worked out by hand."""

from __future__ import annotations

import pytest
from megatron_vl.planning.cost import PassTime
from megatron_vl.planning.pipeline_timeline import PipelineTimeline, pipeline_seconds, simulate_pipeline
from megatron_vl.planning.schedule import stage_passes

UNIT = PassTime(1.0, 2.0)


def spans(timeline: PipelineTimeline, stage: int) -> list[tuple[str, int, int, float, float]]:
    """(F or B, chunk, micro-batch, start, end) of a stage, in order."""
    return [
        (
            "F" if s.pipeline_pass.forward else "B",
            s.pipeline_pass.chunk_index,
            s.pipeline_pass.micro_batch,
            s.start_seconds,
            s.end_seconds,
        )
        for s in timeline.pass_spans
        if s.pipeline_stage == stage
    ]


def test_two_stages_and_three_micro_batches() -> None:
    """Drawn on paper, F 1 and B 2::

    stage 0  F0 F1 .  B0 B0 F2 B1 B1 .  B2 B2      0 1 2 | 4 5 6 ...
    stage 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2
    """
    timeline = simulate_pipeline([[UNIT], [UNIT]], 3)
    assert spans(timeline, 0) == [
        ("F", 0, 0, 0, 1),
        ("F", 0, 1, 1, 2),
        ("B", 0, 0, 4, 6),
        ("F", 0, 2, 6, 7),
        ("B", 0, 1, 7, 9),
        ("B", 0, 2, 10, 12),
    ]
    assert spans(timeline, 1) == [
        ("F", 0, 0, 1, 2),
        ("B", 0, 0, 2, 4),
        ("F", 0, 1, 4, 5),
        ("B", 0, 1, 5, 7),
        ("F", 0, 2, 7, 8),
        ("B", 0, 2, 8, 10),
    ]
    assert timeline.total_seconds == 12


def test_a_slow_first_stage_is_what_counts() -> None:
    """The last stage waits for every row; the end is the first stage's last backward pass."""
    timeline = simulate_pipeline([[PassTime(3.0, 6.0)], [UNIT]], 3)
    assert [s[3:] for s in spans(timeline, 0)] == [(0, 3), (3, 6), (6, 12), (12, 15), (15, 21), (21, 27)]
    assert timeline.total_seconds == 27


def test_messages_take_their_time() -> None:
    """One micro-batch on two stages: there and back, a message each way."""
    assert (
        simulate_pipeline([[UNIT], [UNIT]], 1, message_seconds=0.25).total_seconds
        == 1 + 0.25 + 1 + 2 + 0.25 + 2
    )
    assert simulate_pipeline([[UNIT]], 1, message_seconds=0.25).total_seconds == 3


def test_four_stages_in_steady_state() -> None:
    """Equal stages: (micro-batches + pp - 1) units of a forward and a backward pass."""
    assert simulate_pipeline([[UNIT]] * 4, 9).total_seconds == (9 + 3) * 3


def test_two_stages_with_two_chunks() -> None:
    """Interleaved, four micro-batches, F 1 and B 2 a chunk. Stage 0 runs four forward passes ahead::

        stage 0  F0a F1a F0b F1b F2a ..., stage 1 begins one unit later and has two ahead

    The ideal of the interleaved schedule holds: the bubble is that of one chunk, (pp - 1) x (F + B).
    """
    timeline = simulate_pipeline([[UNIT, UNIT], [UNIT, UNIT]], 4)
    first, second = spans(timeline, 0), spans(timeline, 1)
    assert [(s[0], s[1], s[2]) for s in first[:8]] == [
        ("F", 0, 0),
        ("F", 0, 1),
        ("F", 1, 0),
        ("F", 1, 1),
        ("F", 0, 2),
        ("B", 1, 0),
        ("F", 0, 3),
        ("B", 1, 1),
    ]
    assert [(s[0], s[1], s[2]) for s in second[:6]] == [
        ("F", 0, 0),
        ("F", 0, 1),
        ("F", 1, 0),
        ("B", 1, 0),
        ("F", 1, 1),
        ("B", 1, 1),
    ]
    # Chunk 1 of stage 0 needs chunk 0 of stage 1: F0b begins at 2, when F0a of stage 1 has ended.
    assert first[2] == ("F", 1, 0, 2, 3) and second[2] == ("F", 1, 0, 3, 4)
    assert second[3] == ("B", 1, 0, 4, 6) and first[5] == ("B", 1, 0, 6, 8)
    for stage in (first, second):
        assert sum(end - start for *_, start, end in stage) == 4 * 2 * 3
    assert timeline.total_seconds == 4 * 2 * 3 + 3


@pytest.mark.parametrize(
    ("pp", "vpp", "micro_batches"), [(2, 1, 6), (4, 1, 3), (2, 2, 4), (4, 2, 8), (4, 3, 12)]
)
def test_each_pass_runs_once_and_backward_after_forward(pp: int, vpp: int, micro_batches: int) -> None:
    """The order is compared with Megatron-core's own table in tests/toolkit/test_plan.py."""
    for stage in range(pp):
        done: set[tuple[bool, int, int]] = set()
        for step in stage_passes(pp, vpp, stage, micro_batches):
            key = (step.forward, step.chunk_index, step.micro_batch)
            assert key not in done and (step.forward or (True, *key[1:]) in done)
            done.add(key)
        assert len(done) == 2 * vpp * micro_batches


@pytest.mark.parametrize("vpp", [1, 2])
def test_long_steps_are_simulated_in_part(vpp: int) -> None:
    times = [[PassTime(1 + s / 5 + v / 7, 2 + s / 3) for v in range(vpp)] for s in range(4)]
    for micro_batches in (32, 64):
        whole = simulate_pipeline(times, micro_batches, 0.1).total_seconds
        assert pipeline_seconds(times, micro_batches, 0.1) == pytest.approx(whole, rel=0.002)
