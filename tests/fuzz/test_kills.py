"""A kill or two here; ``python -m tests.fuzz.kills`` does twenty."""

from pathlib import Path

import pytest

from tests.fuzz.kills import run_kills

pytestmark = [pytest.mark.ranks, pytest.mark.full]


@pytest.mark.parametrize(
    ("ranks", "workers", "kills", "steps", "offload"),
    [(2, 0, 1, 24, False), (2, 0, 2, 24, True), (4, 2, 2, 36, False)],
)
def test_killed_run_equals_the_undisturbed_one(
    tmp_path: Path, ranks: int, workers: int, kills: int, steps: int, offload: bool
) -> None:
    done = run_kills(
        tmp_path, kills=kills, seed=3, steps=steps, workers=workers, ranks=ranks, offload=offload
    )
    assert done["kills"] == kills
