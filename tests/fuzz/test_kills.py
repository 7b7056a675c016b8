"""Two kills here; ``python -m tests.fuzz.kills`` does twenty."""

from pathlib import Path

from tests.fuzz.kills import run_kills


def test_killed_run_equals_the_undisturbed_one(tmp_path: Path) -> None:
    assert run_kills(tmp_path, kills=2, seed=3, steps=40)["kills"] == 2
