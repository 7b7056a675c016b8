"""Which checkpoint of a run's folder is the latest; without torch."""

import shutil
from pathlib import Path

import pytest

from megatron_vl.weights.run_folder import (
    CheckpointError,
    SavedCheckpoint,
    find_latest_checkpoint,
    saved_checkpoints,
    step_dir_path,
)


def test_latest_checkpoint_is_the_largest_step_wherever_the_folder_lies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (2, 100_000_000, 4):
        step_dir_path(run, step).mkdir(parents=True)
    shutil.move(run, tmp_path / "moved")
    latest = find_latest_checkpoint(tmp_path / "moved")
    assert latest == SavedCheckpoint(tmp_path / "moved" / "step_100000000", 100_000_000)


def test_folders_that_are_no_checkpoint_are_not_seen(tmp_path: Path) -> None:
    for name in ("step_00000002", "step_00000009.partial", "step_x", "steps_3", "step_00000008.old.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000007").write_text("")
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [2]
    assert find_latest_checkpoint(tmp_path / "nowhere") is None
    assert find_latest_checkpoint(tmp_path / "step_00000007") is None


def test_interrupted_rollback_must_be_finished_first(tmp_path: Path) -> None:
    step_dir_path(tmp_path, 6).mkdir()
    (tmp_path / "abandoned" / "after_step_00000004").mkdir(parents=True)
    assert find_latest_checkpoint(tmp_path) == SavedCheckpoint(tmp_path / "step_00000006", 6)
    (tmp_path / "abandoned" / "after_step_00000002.partial").mkdir()
    with pytest.raises(
        CheckpointError, match=f"finish it with `megatron-vl checkpoint rollback {tmp_path} 2`"
    ):
        find_latest_checkpoint(tmp_path)
