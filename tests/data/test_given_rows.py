"""Rows in memory are dealt to the data-parallel ranks step by step, in order."""

from __future__ import annotations

import pytest

from megatron_vl.data.given_rows import GivenRows, replica_rows


def test_given_rows_give_each_rank_its_share_of_a_step() -> None:
    steps = [["a", "b", "c", "d"], ["e", "f"]]
    assert list(replica_rows(steps, 0, 2)) == ["a", "b", "e"]
    assert list(replica_rows(steps, 1, 2)) == ["c", "d", "f"]
    assert list(replica_rows(steps, 0, 1)) == ["a", "b", "c", "d", "e", "f"]


def test_given_rows_end() -> None:
    rows = GivenRows(["a", "b"])  # type: ignore[list-item]
    assert list(rows) == ["a", "b"]
    with pytest.raises(StopIteration):
        next(rows)
