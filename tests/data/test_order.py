"""A run reads the same rows in the same steps whatever its ranks and workers are."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

import megatron_vl.data.order as order_module
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import LoaderError, build_loader
from megatron_vl.data.order import Deal, RowOrder, first_deal, read_deal
from megatron_vl.data.state import StateError
from megatron_vl.spec.families import read_spec
from tests.tiny import tiny_checkpoint

from .datasets import converted

COUNT = 60
SLOW = pytest.mark.slow


# --- Arithmetic ---------------------------------------------------------------------------------------------

ORDERS = [RowOrder(1, 1), RowOrder(8, 4), RowOrder(6, 1), RowOrder(6, 6), RowOrder(12, 3)]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_places_and_counts_of_rows(order):
    """Counted one row after the other."""
    made: Counter[int] = Counter()
    last = dict.fromkeys(range(order.streams), -1)
    for row in range(60):
        for stream in range(order.streams):
            assert order.taken(stream, row) == made[stream]
            assert order.last(stream, row) == last[stream]
        stream, number = order.place(row)
        assert number == made[stream] and 0 <= stream < order.streams
        made[stream] += 1
        last[stream] = row
    assert max(made.values()) - min(made.values()) <= 1


@pytest.mark.parametrize(
    ("order", "rows_per_step", "ranks", "workers"),
    [
        (RowOrder(8, 2), 4, 4, 4),  # begun on 2 ranks x 4 workers, and twice the GPUs
        (RowOrder(8, 2), 4, 4, 2),
        (RowOrder(8, 4), 8, 8, 2),
        (RowOrder(6, 3), 4, 2, 3),
        (RowOrder(1, 1), 4, 4, 3),
    ],
    ids=str,
)
def test_every_process_has_rows_to_make(order, rows_per_step, ranks, workers):
    """One without rows would look for its next turn without end."""
    deal = Deal(order, 0, rows_per_step, ranks)
    for rank in range(ranks):
        turns = list(islice(deal.turns(rank, workers), 4 * order.streams * rows_per_step * workers))
        assert {turn.stream for turn in turns} == set(deal.streams_of(rank))
        assert {turn.worker for turn in turns} == set(range(workers))


def test_streams_that_take_too_long_to_find_are_bounded(monkeypatch):
    """The bound holds all streams that are taken."""
    deal = Deal(RowOrder(12, 3), 31, 10, 5)
    exact = [set(deal.streams_of(rank)) for rank in range(5)]
    monkeypatch.setattr(order_module, "MOST_COUNTED", 0)
    assert all(set(deal.streams_of(rank)) >= exact[rank] for rank in range(5))


def test_the_first_rows_of_eight_streams_in_four_lanes():
    """By hand: the lanes in turn, and the two streams of each lane in turn."""
    places = [RowOrder(8, 4).place(row) for row in range(10)]
    assert places == [(0, 0), (2, 0), (4, 0), (6, 0), (1, 0), (3, 0), (5, 0), (7, 0), (0, 1), (2, 1)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("start", [0, 24, 31])
def test_every_row_has_one_rank_and_every_stream_one_keeper(order, ranks, start):
    deal = Deal(order, start, 12, ranks)
    hosted = [set(deal.streams_of(rank)) for rank in range(ranks)]
    last: dict[int, int] = {}
    for step in range(6):
        parts = [deal.rows_of(rank, step) for rank in range(ranks)]
        first = start + 12 * step
        assert sorted(sum(parts, [])) == list(range(first, first + 12))
        assert {len(part) for part in parts} == {12 // ranks}
        for rank, part in enumerate(parts):
            taken = {order.place(row)[0] for row in part}
            assert taken <= hosted[rank]
            last |= dict.fromkeys(taken, rank)

        kept = [deal.kept_by(rank, first + 12) for rank in range(ranks)]
        assert sorted(sum(kept, [])) == list(range(order.streams))
        for stream, rank in last.items():
            rows = [row for row in deal.rows_of(rank, step) if order.place(row)[0] == stream]
            if rows:
                assert stream not in set(sum(kept, [])) - set(kept[deal.keeper(stream, first + 12)])
    if ranks <= order.lanes and order.lanes % ranks == 0 and 12 % order.lanes == 0:
        assert sum(map(len, hosted)) == order.streams, "each stream is read once"


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_workers_share_the_rows_of_a_rank(workers):
    deal = Deal(RowOrder(6, 3), 0, 12, 3)
    readers = deal.workers_of(1, workers)
    assert set(readers) == {2, 3} and {w for each in readers.values() for w in each} == set(range(workers))
    places = [deal.order.place(row) for step in range(5) for row in deal.rows_of(1, step)]
    turns = list(islice(deal.turns(1, workers), len(places)))
    assert [(turn.stream, turn.number) for turn in turns] == places
    made = Counter(turn.worker for turn in turns)
    assert len(made) == workers and max(made.values()) <= 2 * min(made.values()) + 1


def test_a_first_start_has_a_stream_for_each_worker_or_as_many_as_it_is_told():
    assert first_deal(0, 4, 2, 12).order == RowOrder(8, 4)
    assert first_deal(24, 4, 2, 12).order == RowOrder(24, 12)
    assert first_deal(6, 4, 2, 12).order == RowOrder(6, 6)
    deal = first_deal(24, 4, 2, 12)
    assert read_deal(json.loads(json.dumps(deal.as_json()))) == deal
    for damaged in (None, {}, deal.as_json() | {"lanes": 5}, deal.as_json() | {"ranks": 0}):
        with pytest.raises(StateError, match="damaged"):
            read_deal(damaged)


# --- Loaders ------------------------------------------------------------------------------------------------


def turns(text: str) -> list[dict[str, str]]:
    return [{"from": "human", "value": text}, {"from": "gpt", "value": "yes"}]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("order")
    records = [{"conversations": turns("x " * (3 + i % 11))} for i in range(COUNT)]
    records[17]["conversations"] = turns("x " * 400)  # cannot be used, which is counted once
    return converted(folder, records, samples_per_shard=7)[0]


def options(path: Path, workers: int, **changes: Any) -> DataConfig:
    settings = {"seq_len": 64, "packing_buffer": 4, "shuffle_buffer": 5, "max_bad_share": 1.0, **changes}
    return DataConfig(path=str(path), num_workers=workers, **settings)


def hf() -> Path:
    return tiny_checkpoint("qwen2_5_vl")


Step = tuple[list[list[str]], dict[str, int]]
"""The keys of a step's rows, in order, and what was dropped."""


class Run:
    """All data-parallel ranks of a run, one after the other in this process."""

    def __init__(
        self, path: Path, ranks: int, workers: int, rows: int = 12, *, planned: bool = False, **changes: Any
    ) -> None:
        self.share, self.states = rows // ranks, []
        spec = read_spec(hf())
        self.loaders = [
            build_loader(
                options(path, workers, **changes),
                spec,
                hf(),
                dp_rank=rank,
                dp_size=ranks,
                rows_per_step=rows,
                planned=planned,
            )
            for rank in range(ranks)
        ]

    def after(self, states: list[dict[str, Any]]) -> Run:
        for rank, loader in enumerate(self.loaders):
            loader.load_state_dict(states[rank % len(states)], states.__getitem__)
        return self

    def steps(self, count: int) -> list[Step]:
        found = []
        for _ in range(count):
            rows = [next(loader) for loader in self.loaders for _ in range(self.share)]
            dropped = sum((Counter(row.dropped) for row in rows), Counter())
            found.append(([row.keys for row in rows], dict(dropped)))
        return found

    def stop(self) -> list[dict[str, Any]]:
        """The states, as a checkpoint holds them; then the processes end."""
        states = [json.loads(json.dumps(loader.state_dict())) for loader in self.loaders]
        for loader in self.loaders:
            loader.close()
        return states


def moved(path: Path, places: list[tuple[int, int, int]], **changes: Any) -> Iterator[Step]:
    """A run that moves: for each place the number of ranks, workers and steps."""
    states: list[dict[str, Any]] = []
    for ranks, workers, steps in places:
        run = Run(path, ranks, workers, **changes)
        if states:
            run.after(states)
        yield from run.steps(steps)
        states = run.stop()


@pytest.mark.parametrize("streams", [0, pytest.param(12, marks=SLOW), pytest.param(5, marks=SLOW)])
def test_a_run_that_moves_reads_what_a_run_that_stays_reads(dataset, streams):
    """On 4, 2, 3, 4, 1, 6 and 12 ranks; the samples of a row and the rows of a step are in the same order."""
    whole = list(moved(dataset, [(4, 0, 14)], streams=streams))
    places = [(4, 0, 2), (2, 0, 3), (3, 0, 2), (4, 0, 1), (1, 0, 2), (6, 0, 3), (12, 0, 1)]
    assert list(moved(dataset, places, streams=streams)) == whole
    assert sum(sum(dropped.values()) for _, dropped in whole) >= 2


@SLOW
def test_workers_do_not_matter(dataset):
    """None, one, two, three and five processes of each rank; more than there are streams too."""
    whole = list(moved(dataset, [(2, 0, 7)], streams=4))
    places = [(2, 2, 2), (1, 3, 1), (2, 0, 1), (1, 5, 2), (2, 1, 1)]
    assert list(moved(dataset, places, streams=4)) == whole


def test_no_sample_comes_twice_or_never_in_an_epoch(dataset):
    """Each stream reads its own samples once before it reads one of them again."""
    steps = list(moved(dataset, [(4, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 9)], shuffle_buffer=0))
    order = RowOrder(4, 4)
    rows = [row for keys, _ in steps for row in keys]
    by_stream: dict[int, list[str]] = {stream: [] for stream in range(4)}
    for step in range(len(steps)):
        for place, row in enumerate(Deal(order, 12 * step, 12, 1).rows_of(0, 0)):
            by_stream[order.place(row)[0]] += rows[12 * step + place]

    parts = [set(keys) for keys in by_stream.values()]
    assert set.union(*parts) == {f"{i:09d}" for i in range(COUNT)} - {f"{17:09d}"}
    assert sum(map(len, parts)) == COUNT - 1
    for keys in by_stream.values():
        counts = Counter(keys)
        seen: Counter[str] = Counter()
        for key in keys:
            seen[key] += 1
            # The packer may hold back some samples of an epoch for rows of the next one.
            assert seen[key] <= min(seen[other] for other in counts) + 2
    assert all(max(Counter(keys).values()) >= 2 for keys in by_stream.values()), "no epoch ended"


def test_another_number_of_rows_in_a_step_goes_on_in_the_same_order(dataset):
    whole = [keys for keys, _ in moved(dataset, [(1, 0, 12)], rows=4)]
    first = Run(dataset, 1, 0, rows=4)
    got = [keys for keys, _ in first.steps(3)]
    second = Run(dataset, 2, 0, rows=6).after(first.stop())
    wider = [keys for keys, _ in second.steps(2)]
    assert got == whole[:3] and sorted(sum(wider, [])) == sorted(sum(whole[3:6], []))
    third = Run(dataset, 3, 0, rows=3).after(second.stop())
    assert "each step takes 3 rows, after 6" in third.loaders[0].notes[-1]
    assert sorted(sum([keys for keys, _ in third.steps(4)], [])) == sorted(sum(whole[6:9], []))


def test_what_moving_costs_is_said(dataset):
    states = Run(dataset, 4, 0).stop()
    even = Run(dataset, 2, 0).after(states)
    assert not any("are read by up to" in note for note in even.loaders[0].notes)
    uneven = Run(dataset, 3, 0).after(states)
    assert any("2 of 4 streams" in note and "divides 4" in note for note in uneven.loaders[0].notes)


def test_states_that_do_not_fit_are_refused(dataset):
    run = Run(dataset, 2, 0, streams=4)
    run.steps(1)
    next(run.loaders[0])
    with pytest.raises(StateError, match="only between steps"):
        run.loaders[0].state_dict()
    run.loaders[0].close()

    run = Run(dataset, 2, 0, streams=4)
    run.steps(1)
    early = run.stop()
    run = Run(dataset, 2, 0, streams=4).after(early)
    run.steps(1)
    late = run.stop()
    with pytest.raises(StateError, match="rank 1 stands at row 12, others at 24"):
        Run(dataset, 1, 0).after([late[0], early[1]])
    with pytest.raises(StateError, match="rank 1 is needed too"):
        Run(dataset, 1, 0).loaders[0].load_state_dict(late[0])
    with pytest.raises(StateError, match=r"among 4 streams, and data.streams is 6; leave .* or set it to 4"):
        Run(dataset, 2, 0, streams=6).after(late)
    late[1]["streams"].clear()
    with pytest.raises(StateError, match="rank 1 lacks stream"):
        Run(dataset, 2, 0).after(late)


def test_a_state_of_another_version_is_refused(dataset):
    [state] = Run(dataset, 1, 0).stop()
    state["identity"] = state["identity"] | {"version": 2}
    with pytest.raises(
        StateError, match="loader state has version 2 of its format, .* reads 1; .*restart_data"
    ):
        Run(dataset, 1, 0).after([state])


def test_more_streams_than_samples_are_refused(dataset):
    with pytest.raises(LoaderError, match=r"60 samples in train, but data.streams 61 need at least one each"):
        Run(dataset, 1, 0, streams=61)
    states = Run(dataset, 1, 0, streams=60).stop()
    for one, other in pairwise([Run(dataset, ranks, 0).after(states).steps(2) for ranks in (1, 4, 12)]):
        assert one == other
