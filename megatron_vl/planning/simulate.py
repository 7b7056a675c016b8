"""The timeline of a step's pipeline: when each stage computes which micro-batch of which chunk.

The order of passes on a stage is Megatron-core's (:func:`megatron_vl.planning.memory.play_schedule` counts
what it holds; :func:`passes` lists it). A pass begins when the stage's previous pass has ended and its input
has arrived: a forward pass waits for the same micro-batch of the chunk before, a backward pass for that of
the chunk after.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_vl.planning.cost import PassTime
from megatron_vl.planning.memory import warm_up_passes


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass in the order of a stage."""

    forward: bool
    chunk: int
    """Virtual chunk of the stage."""
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Span:
    """One pass with its times in seconds."""

    stage: int
    step: Pass
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """All passes of a pipeline in one step."""

    spans: tuple[Span, ...]
    stages: int

    @property
    def seconds(self) -> float:
        """From the first pass to the end of the last."""
        return max(span.end for span in self.spans)

    def busy(self, stage: int) -> float:
        """Seconds in which a stage computes."""
        return sum(span.end - span.start for span in self.spans if span.stage == stage)

    @property
    def bubble(self) -> float:
        """Share of the stages' time in which they wait."""
        whole = self.stages * self.seconds
        return 1 - sum(self.busy(stage) for stage in range(self.stages)) / whole if whole else 0.0


@functools.lru_cache(maxsize=512)
def passes(pp: int, vpp: int, stage: int, micro_batches: int) -> tuple[Pass, ...]:
    """The passes of a stage in the order in which Megatron-core runs them."""
    total = micro_batches * vpp

    def nth(i: int, forward: bool) -> Pass:
        if vpp == 1:
            return Pass(forward, 0, i)
        chunk = (i // pp) % vpp
        micro_batch = i // (pp * vpp) * pp + i % pp
        return Pass(forward, chunk if forward else vpp - 1 - chunk, micro_batch)

    warm_up = warm_up_passes(pp, vpp, stage, micro_batches)
    order = [nth(i, True) for i in range(warm_up)]
    for i in range(total - warm_up):
        order += [nth(warm_up + i, True), nth(i, False)]
    return (*order, *[nth(i, False) for i in range(total - warm_up, total)])


def simulate(times: Sequence[Sequence[PassTime]], micro_batches: int, message: float = 0.0) -> Timeline:
    """The timeline of one step.

    Args:
        times: of each stage, of each of its chunks.
        message: seconds that a tensor takes from a stage to another.
    """
    pp, vpp = len(times), len(times[0])
    orders = [passes(pp, vpp, stage, micro_batches) for stage in range(pp)]
    last = pp * vpp - 1
    ended: dict[tuple[bool, int, int], float] = {}
    clock = [0.0] * pp
    position = [0] * pp
    spans: list[Span] = []
    # Stages that may have become able to go on. A pass that has to wait is tried again after its neighbours.
    ready = list(range(pp))

    while ready:
        stage = ready.pop()
        moved = False

        while position[stage] < len(orders[stage]):
            step = orders[stage][position[stage]]
            entry = step.chunk * pp + stage
            arrived = _arrival(ended, step, entry, last, message if pp > 1 else 0.0)
            if arrived is None:
                break
            start = max(clock[stage], arrived)
            time = times[stage][step.chunk]
            end = start + (time.forward if step.forward else time.backward)
            ended[step.forward, entry, step.micro_batch] = end
            spans.append(Span(stage, step, start, end))
            clock[stage] = end
            position[stage] += 1
            moved = True

        if moved:
            ready += [near % pp for near in (stage - 1, stage + 1) if near % pp != stage]

    return Timeline(tuple(spans), pp)


def _arrival(
    ended: dict[tuple[bool, int, int], float], step: Pass, entry: int, last: int, message: float
) -> float | None:
    """When the input of a pass is there; None if it is not known yet."""
    if step.forward:
        if entry == 0:
            return 0.0
        before = ended.get((True, entry - 1, step.micro_batch))
        return None if before is None else before + message
    if entry == last:
        return ended.get((True, entry, step.micro_batch))
    after = ended.get((False, entry + 1, step.micro_batch))
    return None if after is None else after + message


PERIODS = 4
"""Rounds of micro-batches after which a schedule repeats itself exactly enough."""


def pipeline_seconds(times: Sequence[Sequence[PassTime]], micro_batches: int, message: float = 0.0) -> float:
    """The length of the timeline. Long steps are simulated in part, as their middle repeats itself."""
    pp = len(times)
    if pp == 1:
        return micro_batches * sum(chunk.both for chunk in times[0])
    short = PERIODS * pp
    if micro_batches <= short + pp:
        return simulate(times, micro_batches, message).seconds
    first, second = (simulate(times, n, message).seconds for n in (short - pp, short))
    return second + (micro_batches - short) * (second - first) / pp
