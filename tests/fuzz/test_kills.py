"""A kill or two here; ``python -m tests.fuzz.kills`` does twenty."""

from pathlib import Path

import pytest

from tests.fuzz.kills import run_kills

pytestmark = [pytest.mark.ranks, pytest.mark.full]


@pytest.mark.parametrize(
    ("ranks", "workers", "kills", "steps"),
    [(2, 0, 1, 24), (4, 2, 2, 36)],
)
def test_killed_run_equals_the_undisturbed_one(
    tmp_path: Path, ranks: int, workers: int, kills: int, steps: int
) -> None:
    assert (
        run_kills(tmp_path, kills=kills, seed=3, steps=steps, workers=workers, ranks=ranks)["kills"] == kills
    )
