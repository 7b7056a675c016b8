"""Which checkpoint of a run's folder is the latest, after roll-backs, kills, copies and damage; without
torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_vl.json_files import write_json
from megatron_vl.weights.run_folder import (
    CheckpointError,
    CheckpointPoint,
    Lineage,
    SavedCheckpoint,
    StartPoint,
    StepMissingError,
    aside_path,
    choose_start_point,
    find_latest_checkpoint,
    saved_checkpoints,
    split_by_branch,
    step_dir_path,
    write_lineage,
)
from tests.support.run_json import write_run_json


class Run:
    """What the trainer leaves in a folder, without weights: a start and its saves; it remembers nothing."""

    def __init__(self, folder: Path, *, resume: bool = True, **options) -> None:
        self.folder = folder
        self.choice: StartPoint = choose_start_point(folder if resume else None, **options)
        self.lineage = self.choice.lineage

    def save(self, *steps: int, latest_json: bool = True) -> Run:
        for step in steps:
            serial = max([saved.lineage.serial for saved in saved_checkpoints(self.folder)], default=0) + 1
            lineage = dataclasses.replace(self.lineage, serial=serial)
            path = step_dir_path(self.folder, step)
            if path.exists():
                old = next(saved for saved in saved_checkpoints(self.folder) if saved.path == path)
                os.replace(path, aside_path(old))

            path.mkdir(parents=True)
            write_run_json(path, {"step": step, "lineage": lineage.as_json()})
            write_lineage(path, step, lineage)
            if latest_json:
                write_json(
                    self.folder / "latest.json", {"step": step, "serial": serial, "branch": lineage.branch}
                )

            self.lineage = dataclasses.replace(lineage, parent=CheckpointPoint(lineage.branch, step))

        return self

    @property
    def begins_at(self) -> int:
        return self.choice.source_checkpoint.step if self.choice.source_checkpoint else 0


def test_after_a_roll_back_the_new_branch_is_the_latest(tmp_path: Path) -> None:
    """A run to 6, back to 2, a save at 3, a kill and a plain restart lead to 3, not 6."""
    Run(tmp_path).save(2, 4, 6)
    back = Run(tmp_path, step=2)
    assert back.begins_at == 2
    back.save(3)
    assert find_latest_checkpoint(tmp_path).step == 3
    restart = Run(tmp_path)
    assert restart.begins_at == 3 and restart.lineage.branch == back.lineage.branch
    restart.save(5)
    assert find_latest_checkpoint(tmp_path).step == 5
    present, left = split_by_branch(tmp_path)
    assert [saved.step for saved in present] == [2, 3, 5] and [saved.step for saved in left] == [4, 6]


def test_a_repeated_request_goes_on_with_its_branch_and_a_new_attempt_rolls_back_again(
    tmp_path: Path,
) -> None:
    Run(tmp_path).save(2, 4, 6)
    Run(tmp_path, step=4).save(5, 6)
    again = Run(tmp_path, step=4)
    assert again.begins_at == 6
    assert again.lineage.branch == find_latest_checkpoint(tmp_path).lineage.branch
    [told] = again.choice.user_messages
    assert "done before" in told and "up to step 6" in told and "--checkpoint.attempt 2" in told

    shutil.move(tmp_path / "step_00000004", tmp_path / "gone")
    [told] = Run(tmp_path, step=4).choice.user_messages
    assert "Step 4 itself no longer exists (checkpoint.keep)" in told and "attempt" not in told
    shutil.move(tmp_path / "gone", tmp_path / "step_00000004")

    fresh = Run(tmp_path, step=4, attempt=2)
    assert fresh.begins_at == 4 and fresh.lineage.branch != again.lineage.branch
    fresh.save(5)
    assert Run(tmp_path, step=4, attempt=2).begins_at == 5
    assert Run(tmp_path, step=4).begins_at == 5  # the first attempt was done, too


def test_a_repeated_request_for_the_latest_step_keeps_what_was_trained(tmp_path: Path) -> None:
    """There is nothing to abandon, but the request must still be remembered."""
    Run(tmp_path).save(4)
    Run(tmp_path, step=4).save(6)
    assert Run(tmp_path, step=4).begins_at == 6


def test_a_roll_back_without_a_save_has_not_happened(tmp_path: Path) -> None:
    Run(tmp_path).save(2, 4)
    back = Run(tmp_path, step=2)
    assert "Until then, a start without checkpoint.step resumes from step 4" in back.choice.user_messages[0]
    assert Run(tmp_path).begins_at == 4
    assert Run(tmp_path, step=2).begins_at == 2


def test_two_roll_backs_and_one_to_an_abandoned_branch(tmp_path: Path) -> None:
    first = Run(tmp_path).save(2, 4, 6)
    second = Run(tmp_path, step=4).save(5, 7)
    third = Run(tmp_path, step=2).save(3)
    assert find_latest_checkpoint(tmp_path).step == 3
    assert [saved.step for saved in split_by_branch(tmp_path)[0]] == [2, 3]

    to_second = Run(tmp_path, step=5)
    assert to_second.choice.source_checkpoint.checkpoint_point == CheckpointPoint(second.lineage.branch, 5)
    to_second.save(8)
    assert [saved.step for saved in split_by_branch(tmp_path)[0]] == [2, 4, 5, 8]
    assert {saved.checkpoint_point for saved in split_by_branch(tmp_path)[1]} == {
        CheckpointPoint(first.lineage.branch, 6),
        CheckpointPoint(second.lineage.branch, 7),
        CheckpointPoint(third.lineage.branch, 3),
    }


def test_the_same_step_of_another_branch_is_kept_and_can_be_gone_back_to(tmp_path: Path) -> None:
    first = Run(tmp_path).save(2, 4, 6)
    second = Run(tmp_path, step=2).save(4)
    assert {path.name for path in tmp_path.glob("step_*4*")} == {
        "step_00000004",
        f"step_00000004.branch_{first.lineage.branch}.2",
    }
    assert find_latest_checkpoint(tmp_path).checkpoint_point == CheckpointPoint(second.lineage.branch, 4)
    assert Run(tmp_path, step=4).choice.source_checkpoint.checkpoint_point == CheckpointPoint(
        second.lineage.branch, 4
    )
    assert Run(
        tmp_path, step=4, branch=first.lineage.branch
    ).choice.source_checkpoint.checkpoint_point == CheckpointPoint(first.lineage.branch, 4)


def test_killed_between_setting_aside_and_naming(tmp_path: Path) -> None:
    """The run began again in a used folder; its first save meets the latest step, which stays the latest."""
    Run(tmp_path).save(2, 4)
    Run(tmp_path, resume=False)
    last = find_latest_checkpoint(tmp_path)
    os.replace(last.path, aside_path(last))
    assert find_latest_checkpoint(tmp_path).checkpoint_point == last.checkpoint_point
    assert find_latest_checkpoint(tmp_path).path.name.startswith("step_00000004.branch_")
    assert Run(tmp_path).begins_at == 4


@pytest.mark.parametrize("state", ["missing", "one save old"])
def test_latest_json_is_not_needed(tmp_path: Path, state: str) -> None:
    Run(tmp_path).save(2, 4)
    back = Run(tmp_path, step=2)
    back.save(3, latest_json=False)  # killed between the checkpoint's name and this file
    if state == "missing":
        (tmp_path / "latest.json").unlink()
    assert find_latest_checkpoint(tmp_path).step == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "latest.json is damaged"),
        ("[4]", "latest.json is damaged"),
        ('{"step": 4}', "latest.json is damaged"),
        ('{"step": 5, "serial": 2}', "names step 5, but"),
        ('{"step": "4", "serial": 2}', "names step 4, but"),
        ('{"step": 4, "serial": 3}', "names step 4, but its folder holds an earlier save than number 3"),
    ],
)
def test_a_latest_json_that_does_not_fit_is_refused_but_a_roll_back_is_a_way_out(
    tmp_path: Path, text: str, message: str
) -> None:
    """A copy without the newest checkpoint must not silently continue from an older one."""
    Run(tmp_path).save(2, 4)
    (tmp_path / "latest.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        find_latest_checkpoint(tmp_path)
    assert Run(tmp_path, step=2).begins_at == 2


def test_damage_of_one_lineage_file_is_made_up_for_by_run_json_and_of_both_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).save(2, 4, 6)
    Run(tmp_path, step=2).save(3)
    (tmp_path / "step_00000003" / "lineage.json").write_text(
        (tmp_path / "step_00000006" / "lineage.json").read_text()
    )
    (tmp_path / "step_00000006" / "lineage.json").unlink()
    text = (tmp_path / "step_00000004" / "lineage.json").read_text()
    (tmp_path / "step_00000004" / "lineage.json").write_text(text.replace('"serial": 2', '"serial": 9'))

    assert find_latest_checkpoint(tmp_path).step == 3
    facts = json.loads((tmp_path / "step_00000003" / "run.json").read_text())
    write_run_json(tmp_path / "step_00000003", facts | {"lineage": None})
    with pytest.raises(CheckpointError, match="step_00000003/lineage.json is damaged"):
        find_latest_checkpoint(tmp_path)
    (tmp_path / "step_00000003" / "run.json").write_text("{")

    with pytest.raises(CheckpointError, match="step_00000003/lineage.json is damaged"):
        find_latest_checkpoint(tmp_path)


def test_of_folders_with_only_weights_the_largest_step_is_the_latest(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        step_dir_path(tmp_path, step).mkdir()
    assert find_latest_checkpoint(tmp_path).step == 6 and Run(tmp_path, step=4).begins_at == 4


def test_a_moved_folder_and_a_single_step_of_it(tmp_path: Path) -> None:
    Run(tmp_path / "run").save(2, 4, 6)
    Run(tmp_path / "run", step=2).save(3)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    assert find_latest_checkpoint(tmp_path / "moved").step == 3
    assert Run(tmp_path / "moved", step=2).begins_at == 3
    shutil.copytree(tmp_path / "moved" / "step_00000004", tmp_path / "alone" / "step_00000004")
    assert find_latest_checkpoint(tmp_path / "alone").step == 4


def test_what_is_not_a_checkpoint_is_not_seen(tmp_path: Path) -> None:
    Run(tmp_path).save(2)
    for name in ("step_00000009.partial", "step_x", "step_00000008.branch_1.2.old.partial", "steps_3"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000007").write_text("")
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [2]
    assert find_latest_checkpoint(tmp_path / "nowhere") is None
    assert find_latest_checkpoint(tmp_path / "step_00000007") is None


def test_a_step_that_is_not_there_names_those_that_are(tmp_path: Path) -> None:
    Run(tmp_path).save(2, 4)
    with pytest.raises(StepMissingError, match=r"checkpoint.step 3 is not in .*; existing steps: 2, 4$"):
        Run(tmp_path, step=3)
    with pytest.raises(StepMissingError, match=r"checkpoint.step 2 of checkpoint.branch other is not in"):
        Run(tmp_path, step=2, branch="other")


def test_a_branch_name_never_leads_out_of_the_folder(tmp_path: Path) -> None:
    """Lineage is untrusted, and the branch becomes part of a folder's name."""
    step_dir_path(tmp_path, 2).mkdir()
    write_lineage(step_dir_path(tmp_path, 2), 2, Lineage(1, "../../elsewhere"))
    with pytest.raises(CheckpointError, match="is not the name of a branch"):
        find_latest_checkpoint(tmp_path)
    assert aside_path(SavedCheckpoint(step_dir_path(tmp_path, 2), 2, Lineage(1, "a"))).parent == tmp_path


def test_looking_for_the_latest_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys, pathlib; from megatron_vl.weights.run_folder import find_latest_checkpoint; "
    code += "find_latest_checkpoint(pathlib.Path('.')); assert 'torch' not in sys.modules"
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", code], cwd=root, check=True, env=os.environ | {"PYTHONPATH": str(root)}
    )
