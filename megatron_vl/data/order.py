"""The order of a run's rows, and which rank and loader process make each of them.

The samples are divided among a fixed number of *streams*. A stream is a part of the data set with its own
shuffling, packing and epochs, so its rows depend on nothing else. All rows of a run form one sequence, which
takes the streams in turn (:class:`RowOrder`). Each step takes the next ``global_batch_size`` rows of this
sequence, whatever the number of ranks, so a run that goes on with other ranks or loader processes reads the
same rows in the same steps.

Ranks and processes only share out the work (:class:`Deal`). A rank that takes rows of a stream reads all of
it, but decodes no pictures for the rows that another rank takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron_vl.data.state import StateError

MOST_COUNTED = 1 << 20
"""Largest number of rows that are dealt on trial to find the streams of each rank, which takes about a
second."""


@dataclass(frozen=True)
class RowOrder:
    """The sequence of all rows of a run.

    Successive rows go to the lanes in turn, and the rows of a lane to its streams in turn. Lanes exist so
    that the rows of one data-parallel rank come from its own streams.
    """

    streams: int
    lanes: int
    """A divisor of ``streams``; lane i has the streams from i * (streams / lanes) on."""

    @property
    def width(self) -> int:
        """Streams of a lane."""
        return self.streams // self.lanes

    def place(self, row: int) -> tuple[int, int]:
        """The stream of a row, and the row's number in that stream."""
        number, lane = divmod(row, self.lanes)
        round_, turn = divmod(number, self.width)
        return lane * self.width + turn, round_

    def taken(self, stream: int, rows: int) -> int:
        """How many of the first ``rows`` rows come from a stream."""
        lane, turn = divmod(stream, self.width)
        of_lane = max(0, -(-(rows - lane) // self.lanes))
        return max(0, -(-(of_lane - turn) // self.width))

    def last(self, stream: int, rows: int) -> int:
        """The last of the first ``rows`` rows that comes from a stream; -1: none does."""
        taken = self.taken(stream, rows)
        lane, turn = divmod(stream, self.width)
        return ((taken - 1) * self.width + turn) * self.lanes + lane if taken else -1


@dataclass(frozen=True)
class Turn:
    """One row that a rank takes: which of its processes makes it, and from where."""

    worker: int
    stream: int
    number: int


@dataclass(frozen=True)
class Deal:
    """Shares out the rows of each step among data-parallel ranks.

    The rows of a step are sorted by lane, and each rank takes the next equal part of them.
    """

    order: RowOrder
    start: int
    """Number of rows that the run had taken before this deal."""
    rows_per_step: int
    ranks: int

    @property
    def share(self) -> int:
        """Rows of a rank in a step."""
        return self.rows_per_step // self.ranks

    def rows_of(self, rank: int, step: int) -> list[int]:
        """The rows that a rank takes in a step, counted from the start of this deal."""
        return _sorted_step(self, step)[rank * self.share : (rank + 1) * self.share]

    def streams_of(self, rank: int) -> list[int]:
        """All streams that a rank ever takes rows from; if finding them takes too long, a few more."""
        order = self.order
        if math.lcm(order.streams, self.rows_per_step) <= MOST_COUNTED:
            return _streams_by_rank(self)[rank]

        # Rows of the lanes before `lane` in a step: a step may begin at any lane.
        each, rest = divmod(self.rows_per_step, order.lanes)
        first, end = rank * self.share, (rank + 1) * self.share
        lanes = range(order.lanes) if rest else range(first // each, -(-end // each))
        found: list[int] = []
        for lane in lanes:
            least = each * lane + max(0, rest - (order.lanes - lane))
            most = each * (lane + 1) + min(lane + 1, rest)
            if least < end and most > first:
                found += range(lane * order.width, (lane + 1) * order.width)
        return found

    def keeper(self, stream: int, rows: int) -> int:
        """The rank that saves a stream when ``rows`` rows of the run are taken.

        It is the one that took the last row of the stream. If there is none since the start of this deal, the
        streams are divided equally among the ranks.
        """
        last = self.order.last(stream, rows)
        if last < self.start:
            return stream * self.ranks // self.order.streams
        return _sorted_step(self, (last - self.start) // self.rows_per_step).index(last) // self.share

    def kept_by(self, rank: int, rows: int) -> list[int]:
        """The streams that a rank saves."""
        streams, ranks = self.order.streams, self.ranks
        parts = range(-(-rank * streams // ranks), -(-(rank + 1) * streams // ranks))
        return [s for s in sorted({*self.streams_of(rank), *parts}) if self.keeper(s, rows) == rank]

    def workers_of(self, rank: int, workers: int) -> dict[int, list[int]]:
        """The processes of a rank that read each of its streams.

        Each stream has one process. If there are more processes than streams, several read the same stream
        and make its rows in turn.
        """
        streams = self.streams_of(rank)
        if len(streams) >= workers:
            return {stream: [i % workers] for i, stream in enumerate(streams)}
        return {s: list(range(i, workers, len(streams))) for i, s in enumerate(streams)}

    def turns(self, rank: int, workers: int) -> Iterator[Turn]:
        """The rows that a rank takes, in order and without end."""
        dealt = self.workers_of(rank, workers)
        done: Counter[int] = Counter()
        step = 0
        while True:
            for row in self.rows_of(rank, step):
                stream, number = self.order.place(row)
                readers = dealt[stream]
                yield Turn(readers[done[stream] % len(readers)], stream, number)
                done[stream] += 1
            step += 1

    def as_json(self) -> dict[str, int]:
        return {
            "streams": self.order.streams,
            "lanes": self.order.lanes,
            "start": self.start,
            "rows_per_step": self.rows_per_step,
            "ranks": self.ranks,
        }


def first_deal(streams: int, ranks: int, workers: int, rows_per_step: int) -> Deal:
    """The deal of a run that begins.

    Args:
        streams: number of streams that the user asked for; 0: one for each loader process of this start.
        workers: loader processes of a rank.
    """
    order = RowOrder(ranks * workers, ranks)
    if streams:
        order = RowOrder(streams, math.gcd(streams, rows_per_step))
    return Deal(order, 0, rows_per_step, ranks)


def read_deal(value: Any) -> Deal:
    """A deal from JSON. Raises :class:`StateError` if it is none."""
    names = ("streams", "lanes", "start", "rows_per_step", "ranks")
    given: list[Any] = [value.get(name) if isinstance(value, dict) else None for name in names]
    if not all(
        type(number) is int and number >= (name != "start") for name, number in zip(names, given, strict=True)
    ):
        raise StateError("the loader state is damaged: it does not say how rows were dealt")
    streams, lanes, start, rows_per_step, ranks = given
    if streams % lanes or rows_per_step % ranks:
        raise StateError("the loader state is damaged: its streams, lanes, rows and ranks do not fit")
    return Deal(RowOrder(streams, lanes), start, rows_per_step, ranks)


@lru_cache(maxsize=8)
def _sorted_step(deal: Deal, step: int) -> list[int]:
    """The rows of a step by lane, and in order within a lane."""
    first = deal.start + step * deal.rows_per_step
    lanes = deal.order.lanes
    return sorted(range(first, first + deal.rows_per_step), key=lambda row: (row % lanes, row))


@lru_cache(maxsize=2)
def _streams_by_rank(deal: Deal) -> list[list[int]]:
    """The streams of each rank. Steps repeat after as many rows as streams and rows of a step divide."""
    steps = deal.order.streams // math.gcd(deal.order.streams, deal.rows_per_step)
    found: list[set[int]] = [set() for _ in range(deal.ranks)]
    for step in range(steps):
        for number, row in enumerate(_sorted_step(deal, step)):
            found[number // deal.share].add(deal.order.place(row)[0])
    return [sorted(streams) for streams in found]
