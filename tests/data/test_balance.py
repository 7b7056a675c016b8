"""The rows of a step are spread so that no rank has much more work, and none is lost."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_vl.data.balance import balance


def loads(costs: list[list[float]], places) -> list[float]:
    return [sum(costs[place.rank][place.row] for place in own) for own in places]


@pytest.mark.parametrize("ranks, rows", [(2, 2), (3, 3), (8, 4), (64, 4)])
def test_every_row_has_one_place_and_the_largest_load_does_not_grow(ranks: int, rows: int) -> None:
    rng = random.Random(ranks)
    for _ in range(20):
        costs = [[rng.choice([0.0, rng.uniform(1, 100)]) for _ in range(rows)] for _ in range(ranks)]
        places = balance(costs)
        assert sorted((p.rank, p.row) for own in places for p in own) == [
            (r, i) for r in range(ranks) for i in range(rows)
        ]
        assert [len(own) for own in places] == [rows] * ranks
        assert max(loads(costs, places)) <= max(map(sum, costs)) + 1e-9


def test_it_finds_what_trying_everything_finds() -> None:
    rng = random.Random(3)
    for _ in range(50):
        costs = [[float(rng.randint(0, 20)) for _ in range(2)] for _ in range(2)]
        rows = [cost for own in costs for cost in own]
        halves = [sum(half) for half in itertools.combinations(rows, 2)]
        best = min(max(half, sum(rows) - half) for half in halves)
        assert max(loads(costs, balance(costs, tolerance=0.0))) == best


def test_rows_of_pictures_and_of_text_alone_are_mixed() -> None:
    costs = [[100.0] * 4, [0.0] * 4]
    assert loads(costs, balance(costs)) == [200.0, 200.0]


def test_an_even_step_stays_where_it_was_read() -> None:
    places = balance([[5.0, 5.0], [5.0, 5.0], [5.0, 5.0]])
    assert [[(p.rank, p.row) for p in own] for own in places] == [[(r, 0), (r, 1)] for r in range(3)]
