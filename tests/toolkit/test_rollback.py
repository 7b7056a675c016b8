"""Rolling a run back: what moves, kills between its renames, and what is refused."""

import json
import os
from functools import partial
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest

from megatron_vl.training.state.keep import lock_run_dir, unlock_run_dir
from megatron_vl.weights.run_folder import CheckpointError, find_latest_checkpoint, saved_checkpoints
from toolkit.checkpoint import rollback
from toolkit.checkpoint.rollback import roll_back
from toolkit.cli import main

STEPS = (2, 4, 6, 8)
EXPORTS = ("step_00000004", "step_00000006", "step_00000006_merged", "step_00000008.partial")
LOGS = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")


class Killed(BaseException):
    """Raised in the place of a kill."""


def make_run(folder: Path) -> Path:
    """A run's folder without weights, killed after step 9 while it wrote a line."""
    for step in STEPS:
        (folder / f"step_{step:08d}").mkdir(parents=True)
        (folder / f"step_{step:08d}" / "run.json").write_text(str(step))
    for name in EXPORTS:
        (folder / "hf" / name).mkdir(parents=True)
    for name in LOGS:
        (folder / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 4, 5, 8, 9)))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1')
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(rollback, "has_all_files", lambda path: path.is_dir())
    return make_run(tmp_path / "run")


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in folder.rglob("*")
        if path.name not in (".lock", ".owner.json")
    }


def test_rollback_moves_what_came_after_the_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "rollback", str(run), "4"]) == 0
    aside = run / "abandoned" / "after_step_00000004"
    assert capsys.readouterr().out == f"{run} is at step 4; what came after it is in {aside}\n"
    assert [saved.step for saved in saved_checkpoints(run)] == [2, 4]
    assert [saved.step for saved in saved_checkpoints(aside)] == [6, 8]
    assert [path.name for path in (run / "hf").iterdir()] == ["step_00000004"]
    assert {path.name for path in (aside / "hf").iterdir()} == set(EXPORTS[1:])
    for name in LOGS:
        assert (run / name).read_text() == '{"step": 1}\n{"step": 4}\n'
        assert (aside / name).read_text() == '{"step": 5}\n{"step": 8}\n{"step": 9}\n'
    assert not (aside / "quarantine.jsonl").exists()


def test_second_rollback_to_a_step_has_a_folder_of_its_own(run: Path) -> None:
    roll_back(run, 4)
    (run / "step_00000006").mkdir()
    assert roll_back(run, 4) == run / "abandoned" / "after_step_00000004.2"
    assert roll_back(run, 4) is None, "nothing came after it"
    roll_back(run, 2)
    assert [saved.step for saved in saved_checkpoints(run)] == [2]
    aside = {f"after_step_{name}" for name in ("00000002", "00000004", "00000004.2")}
    assert {path.name for path in (run / "abandoned").iterdir()} == aside


def test_rollback_continues_after_a_kill_between_any_two_renames(run, tmp_path, monkeypatch) -> None:
    """Until then the run does not start, no other step is taken, and the folder may move."""
    roll_back(make_run(tmp_path / "undisturbed"), 4)
    wanted = files(tmp_path / "undisturbed")
    replace = os.replace
    for renames in range(100):
        killed = make_run(tmp_path / f"killed_{renames}")
        renaming = Mock(wraps=replace, side_effect=[DEFAULT] * renames + [Killed])
        monkeypatch.setattr(os, "replace", renaming)
        try:
            roll_back(killed, 4)
        except Killed:
            monkeypatch.setattr(os, "replace", replace)
        else:
            break
        for call in (partial(find_latest_checkpoint, killed), partial(roll_back, killed, 2)):
            with pytest.raises(CheckpointError, match="a roll-back of .* to step 4 was interrupted"):
                call()
        moved = killed.rename(tmp_path / f"moved_{renames}")
        roll_back(moved, 4)
        assert files(moved) == wanted, renames
        latest = find_latest_checkpoint(moved)
        assert latest is not None and latest.step == 4
    # Two steps, three exports, a kept and a moved file of each log, and the folder itself.
    assert renames == 2 + 3 + 2 * len(LOGS) + 1


@pytest.mark.parametrize("step", [0, 3, 9])
def test_rollback_to_a_missing_step_names_those_that_exist(run: Path, step: int) -> None:
    before = files(run)
    with pytest.raises(CheckpointError, match=f"no checkpoint of step {step}; existing steps: 2, 4, 6, 8"):
        roll_back(run, step)
    assert files(run) == before


def test_rollback_refuses_an_incomplete_step_a_held_and_another_folder(run, tmp_path, monkeypatch) -> None:
    before, lock_file = files(run), lock_run_dir(run)
    for command in (["rollback", str(run), "4"], ["restart-data", str(run)]):
        assert main(["checkpoint", *command]) == 1
    with pytest.raises(CheckpointError, match="another run .* is writing to"):
        roll_back(run, 4)
    unlock_run_dir(lock_file)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="step_00000004 is incomplete or damaged"):
        roll_back(run, 4)
    assert files(run) == before

    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint of a run"):
        roll_back(tmp_path / "hf", 4)
    assert not list((tmp_path / "hf").iterdir())
