"""Ranks that share a row compute what one rank computes, and exchange what the route says."""

from __future__ import annotations

import pytest

from megatron_vl.kernels.linear_attention.shard_exchange import shard_route
from tests.kernels.shard_checks import NAMES, ROWS, changed_bits, errors_of_ranks
from tests.support.ranks import call

INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def route(cu_seqlens: list[int], cp_size: int, rank: int) -> tuple[int, int, int, int, int, int]:
    """Tokens and ranks before, tokens and ranks after, end of the first sequence, start of the last."""
    r = shard_route(cu_seqlens, cp_size, rank)
    return (r.tokens_before, r.ranks_before, r.tokens_after, r.ranks_after, r.first_end, r.last_start)


def test_one_sequence_over_all_ranks() -> None:
    cu_seqlens = [0, 12]
    assert route(cu_seqlens, 3, 0) == (0, 0, 8, 2, 4, 0)
    assert route(cu_seqlens, 3, 1) == (4, 1, 4, 1, 4, 0)
    assert route(cu_seqlens, 3, 2) == (8, 2, 0, 0, 4, 0)
    between = [shard_route(cu_seqlens, 3, rank).is_between for rank in range(3)]
    assert between == [False, True, False]
    assert shard_route(cu_seqlens, 3, 0).any_between and shard_route(cu_seqlens, 3, 0).any_cut


def test_a_bound_on_an_edge_cuts_no_sequence() -> None:
    assert route([0, 1, 4, 8], 2, 0) == (0, 0, 0, 0, 1, 1)
    assert route([0, 1, 4, 8], 2, 1) == (0, 0, 0, 0, 4, 0)
    assert not shard_route([0, 1, 4, 8], 2, 0).any_cut
    # The middle shard is one whole sequence; the cut is elsewhere.
    assert route([0, 4, 8, 9, 14, 16], 4, 1) == (0, 0, 0, 0, 4, 0)
    assert shard_route([0, 4, 8, 9, 14, 16], 4, 1).any_cut
    assert not shard_route([0, 4, 8, 9, 14, 16], 4, 1).any_between


def test_one_token_on_a_side_of_an_edge() -> None:
    assert route([0, 5, 7, 9, 12], 3, 0) == (0, 0, 1, 1, 4, 0)
    assert route([0, 5, 7, 9, 12], 3, 1) == (4, 1, 1, 1, 1, 3)
    assert route([0, 5, 7, 9, 12], 3, 2) == (1, 1, 0, 0, 1, 1)
    assert not shard_route([0, 5, 7, 9, 12], 3, 1).is_between  # two sequences, one each way


def test_a_sequence_that_ends_on_an_edge_does_not_go_on() -> None:
    assert route([0, 2, 8, 12], 3, 0) == (0, 0, 4, 1, 2, 2)
    assert route([0, 2, 8, 12], 3, 1) == (2, 1, 0, 0, 4, 0)
    assert route([0, 2, 8, 12], 3, 2) == (0, 0, 0, 0, 4, 0)
    assert not shard_route([0, 2, 8, 12], 3, 1).any_between


def test_short_shards_and_empty_sequences() -> None:
    assert route([0, 3, 4], 4, 2) == (2, 2, 0, 0, 1, 0)
    assert route([0, 3, 4], 4, 3) == (0, 0, 0, 0, 1, 0)
    assert route([0, 2, 2, 2, 6], 2, 0) == (0, 0, 3, 1, 2, 2)
    assert route([0, 3, 3, 6], 2, 1) == (0, 0, 0, 0, 3, 0)
    assert not shard_route([0, 3, 3, 6], 2, 1).any_cut


def test_a_row_without_equal_shards_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 10 tokens has no 4 equal shards"):
        shard_route([0, 10], 4, 0)


def check(errors: dict[str, dict[str, float]], output_bound: float, gradient_bound: float) -> None:
    apart = errors.pop("without exchange", None)
    assert apart is None or all(error > 0.02 for error in apart.values()), apart
    for row, of_row in errors.items():
        assert set(of_row) == set(NAMES)
        for name, error in of_row.items():
            assert error < (output_bound if name == "out" else gradient_bound), (row, name, error)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shards_compute_what_the_whole_row_does(ranks: int) -> None:
    check(call(errors_of_ranks, ranks, kind="float64", rows=list(ROWS)), 1e-13, 1e-12)


@pytest.mark.ranks
def test_kernels_compute_what_the_whole_row_does() -> None:
    rows = ["shards of every kind", "shards of two tokens"]
    errors = call(errors_of_ranks, 4, environment=INTERPRETED, kind="float32", rows=rows)
    check(errors, 3e-6, 3e-6)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_kernels_for_all_rows(ranks: int) -> None:
    errors = call(
        errors_of_ranks, ranks, environment=INTERPRETED, timeout_s=1200, kind="float32", rows=list(ROWS)
    )
    check(errors, 3e-6, 3e-6)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "environment", [{}, pytest.param(INTERPRETED, marks=pytest.mark.full)], ids=["torch", "kernels"]
)
def test_a_sequence_changes_no_bit_of_the_others(environment: dict[str, str]) -> None:
    bits = call(changed_bits, 4, environment=environment, kind="float32")
    assert bits == {"others changed": 0, "itself not changed": 0}
