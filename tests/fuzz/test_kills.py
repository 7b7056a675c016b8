"""A kill or two here; ``python -m tests.fuzz.kills`` does twenty."""

from pathlib import Path

import pytest

from tests.fuzz.kills import run_kills


@pytest.mark.parametrize(("workers", "kills"), [(0, 1), (2, 2)])
def test_killed_run_equals_the_undisturbed_one(tmp_path: Path, workers: int, kills: int) -> None:
    assert run_kills(tmp_path, kills=kills, seed=3, steps=40, workers=workers)["kills"] == kills
