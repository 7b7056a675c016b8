"""Ranks that share a row compute what one rank computes, and exchange what the route says."""

import pytest

from megatron_vl.kernels.linear_attention.shard_exchange import shard_route
from tests.kernels.shard_checks import NAMES, ROWS, errors_of_ranks
from tests.support.ranks import call

INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


EDGES = [
    # One sequence over all ranks; the middle one has neither its start nor its end.
    ([0, 12], [(0, 0, 8, 2, 4, 0), (4, 1, 4, 1, 4, 0), (8, 2, 0, 0, 4, 0)], [1]),
    # A bound on an edge cuts no sequence.
    ([0, 1, 4, 8], [(0, 0, 0, 0, 1, 1), (0, 0, 0, 0, 4, 0)], []),
    # One token on a side of an edge. The middle rank has two sequences, one each way.
    ([0, 5, 7, 9, 12], [(0, 0, 1, 1, 4, 0), (4, 1, 1, 1, 1, 3), (1, 1, 0, 0, 1, 1)], []),
    # A sequence that ends on an edge does not go on.
    ([0, 2, 8, 12], [(0, 0, 4, 1, 2, 2), (2, 1, 0, 0, 4, 0), (0, 0, 0, 0, 4, 0)], []),
    # Shards of one token, and empty sequences.
    ([0, 3, 4], [(0, 0, 2, 2, 1, 0), (1, 1, 1, 1, 1, 0), (2, 2, 0, 0, 1, 0), (0, 0, 0, 0, 1, 0)], [1]),
    ([0, 2, 2, 2, 6], [(0, 0, 3, 1, 2, 2), (1, 1, 0, 0, 3, 0)], []),
    ([0, 3, 3, 6], [(0, 0, 0, 0, 3, 0)] * 2, []),
]
"""Bounds of sequences; for each rank tokens and ranks before, tokens and ranks after, end of the first
sequence and start of the last; the ranks that are between."""


@pytest.mark.parametrize(("cu_seqlens", "expected", "between"), EDGES, ids=[str(each[0]) for each in EDGES])
def test_route_worked_out_by_hand(cu_seqlens: list, expected: list, between: list) -> None:
    ranks = range(len(expected))
    routes = [shard_route(cu_seqlens, len(expected), rank) for rank in ranks]
    for r, numbers in zip(routes, expected, strict=True):
        around = r.tokens_before, r.ranks_before, r.tokens_after, r.ranks_after
        assert (*around, r.first_end, r.last_start) == numbers
    assert routes[0].any_cut == any(numbers[0] for numbers in expected)
    assert [rank for rank in ranks if routes[rank].is_spanned] == between
    assert routes[0].any_spanned == bool(between)


def check(errors: dict[str, dict[str, float]], output_bound: float, gradient_bound: float) -> None:
    apart = errors.pop("without exchange", None)
    assert apart is None or all(error > 0.02 for error in apart.values()), apart
    for row, of_row in errors.items():
        assert set(of_row) == set(NAMES)
        for name, error in of_row.items():
            assert error < (output_bound if name == "out" else gradient_bound), (row, name, error)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [*(pytest.param(ranks, marks=pytest.mark.full) for ranks in (2, 4)), 8])
def test_shards_compute_what_the_whole_row_does(ranks: int) -> None:
    check(call(errors_of_ranks, ranks, kind="float64", rows=list(ROWS)), 1e-13, 1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (4, ["shards of every kind"]),
        *(pytest.param(ranks, list(ROWS), marks=pytest.mark.full) for ranks in (2, 4, 8)),
    ],
)
def test_kernels_compute_what_the_whole_row_does(ranks: int, rows: list[str]) -> None:
    kind = {"kind": "float32", "rows": rows}
    check(call(errors_of_ranks, ranks, environment=INTERPRETED, timeout_s=1200, **kind), 3e-6, 3e-6)
