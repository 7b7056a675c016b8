"""What a run keeps: the last good checkpoint through skipped steps, lines and validations through kills, and
its folder from other runs, also where a file system has no locks."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vl.system.durable_files import drop_incomplete_line
from megatron_vl.system.processes import own_process
from megatron_vl.training.state.keep import (
    OWNER_FILE,
    last_good_text,
    lock_run_dir,
    read_owner,
    unlock_run_dir,
)
from megatron_vl.training.state.save import CheckpointSaver
from megatron_vl.weights.run_folder import CheckpointError
from tests.support.tiny_run import environment, metrics, options_of, trainings
from toolkit.checkpoint.contents import verify_checkpoint
from toolkit.common.launch import single_rank_variables

QUICK = ["--data.num_workers", "0", "--checkpoint.keep", "1", "--checkpoint.interval", "1"]
ELSEWHERE = dataclasses.replace(own_process(), machine_id="another", host_name="node7")


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("step_*[0-9]"))


@pytest.mark.ranks
def test_skipped_steps_delete_no_good_checkpoint(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Step 3 spoils the weights and is saved. What follows is skipped, and only step 2 is of use."""
    run = tmp_path / "run"
    good, stopped = trainings(
        prepared, (run, [*QUICK, "--stop_after", "2"]), (run, [*QUICK, "--optimizer.lr", "1e30"])
    )
    assert f"checkpoints in {run}: [2]\n" in good
    assert "3 consecutive steps (last: 6) had a loss or gradient that was not finite" in stopped
    assert steps_in(run) == [2, 3, 4, 5] and verify_checkpoint(run / "step_00000002") == []


@pytest.mark.ranks
def test_run_of_the_tower_without_any_image_fails_at_its_end(
    prepared: dict[str, Path], tmp_path: Path
) -> None:
    tower_on_text = ["--model.freeze_language", "true", "--data.path", "synthetic:text", "--steps", "4"]
    first_half = ["--stop_after", "2"]
    run, quick = tmp_path / "run", ["--data.num_workers", "0"]
    stopped, failed = trainings(
        prepared, (run, [*quick, *tower_on_text, *first_half]), (run, [*quick, *tower_on_text])
    )
    assert "trained 2 steps" in stopped and "nothing was trained" not in stopped
    assert "nothing was trained: in every step, every gradient is zero; parts of the vision tower" in failed


@pytest.mark.ranks
def test_records_that_a_kill_cut_off_are_made_up_at_the_next_start(
    prepared: dict[str, Path], tmp_path: Path
) -> None:
    """Killed during the last validation: the line of it is torn, as may be the other files' last lines."""
    run = tmp_path / "run"
    start = (run, [*QUICK, "--eval.interval", "2", "--log.samples", "true", "--steps", "4"])
    trainings(prepared, start)
    names = ("metrics.jsonl", "eval.jsonl", "samples.jsonl")
    whole = {name: metrics(run, name) for name in names}
    for name in names:
        (run / name).write_bytes((run / name).read_bytes()[:-9])
    (run / "quarantine.jsonl").write_text('{"step": 3, "ke')

    first, second = trainings(prepared, start, start)
    assert "nothing to do" in first and "step 4/4 | validation loss" in first
    assert "nothing to do" in second and "| validation loss" not in second
    kept = {name: [json.loads(line) for line in (run / name).read_text().splitlines()] for name in names}
    assert [line["step"] for line in kept["eval.jsonl"]] == [0, 2, 4]
    assert kept["eval.jsonl"][-1]["loss"] == whole["eval.jsonl"][-1]["loss"]
    assert kept["metrics.jsonl"] == whole["metrics.jsonl"][:-1] and len(kept["samples.jsonl"]) == 3
    assert (run / "quarantine.jsonl").read_text() == ""


@pytest.mark.parametrize("whole", [b"", b"1\n22\n", b"1\n" + b"2" * 200_000 + b"\n"])
@pytest.mark.parametrize("torn", [b"", b"3", b"3" * 200_000])
def test_torn_last_line_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "lines"
    drop_incomplete_line(path)
    assert not path.exists()
    path.write_bytes(whole + torn)
    drop_incomplete_line(path)
    assert path.read_bytes() == whole


def saver_of(run: Path, kept: int = 1) -> CheckpointSaver:
    grid: Any = SimpleNamespace(rank=0, world_size=1)
    return CheckpointSaver(run, None, None, grid, kept)  # type: ignore[arg-type]


def test_step_folder_that_is_a_link_loses_only_the_link(tmp_path: Path, capsys) -> None:
    """A user has moved steps to a larger disk. Links that an earlier start could not delete go too."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    for step in (1, 2, 3):
        (disk / f"step_{step:08d}" / "weights").mkdir(parents=True)
    run.mkdir()
    for step, name in ((1, "step_00000001.old.partial"), (2, "step_00000002"), (3, "step_00000003")):
        (run / name).symlink_to(disk / f"step_{step:08d}")

    saver = saver_of(run)
    assert sorted(path.name for path in run.glob("step_*")) == ["step_00000002", "step_00000003"]
    saver.note_step(is_updated=False)
    saver.delete_old_checkpoints()
    assert steps_in(run) == [2, 3], "a skipped step proves nothing"
    saver.note_step(is_updated=True)
    saver.wait_until_saved()
    assert steps_in(run) == [3] and steps_in(disk) == [1, 2, 3] and capsys.readouterr().out == ""
    saver.close()


def test_failed_save_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    assert last_good_text(tmp_path) == "there is no earlier checkpoint"
    (tmp_path / "step_00000004").mkdir()
    saver = saver_of(tmp_path)
    saver.save_error = "checkpoint of step 6 could not be written: no space"
    with pytest.raises(CheckpointError, match="no space; the last good checkpoint is step 4"):
        saver.wait_until_saved()
    saver.close()


def test_save_whose_files_another_run_has_deleted_names_that_run(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    (tmp_path / OWNER_FILE).write_text(json.dumps(dataclasses.asdict(ELSEWHERE)))
    snapshot: Any = SimpleNamespace(step=2, optimizer_state=None)
    saver._write_snapshot(snapshot)
    assert "node7) has begun to write to" in (saver.save_error or "")
    saver.close()


@pytest.mark.parametrize(
    "number, is_held",
    [(errno.EAGAIN, True), (errno.EACCES, True), (errno.ENOLCK, False), (errno.ENOSYS, False)],
)
def test_lock_is_taken_by_another_run_at_two_errors_only(tmp_path, monkeypatch, number, is_held) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    if is_held:
        with pytest.raises(CheckpointError, match="another run .* is writing to"):
            lock_run_dir(tmp_path)
        assert read_owner(tmp_path) is None
    else:
        unlock_run_dir(lock_run_dir(tmp_path))
        assert read_owner(tmp_path) == own_process()


def test_living_owner_is_refused_and_dead_one_followed_without_locks(tmp_path, monkeypatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def take_over_from(owner: Any) -> bool:
        (tmp_path / OWNER_FILE).write_text(json.dumps(dataclasses.asdict(owner)))
        unlock_run_dir(lock_run_dir(tmp_path))
        return read_owner(tmp_path) == own_process()

    monkeypatch.setattr(fcntl, "flock", flock)
    sleeper = subprocess.Popen(["sleep", "600"])
    alive = dataclasses.replace(own_process(), pid=sleeper.pid, start_time=time.time())
    with pytest.raises(CheckpointError, match=f"another run \\(process {sleeper.pid} on .*\\) is writing to"):
        take_over_from(alive)
    assert take_over_from(
        dataclasses.replace(alive, start_time=alive.start_time - 60)
    )  # its number is used again
    sleeper.kill()
    time.sleep(0.2)
    assert take_over_from(alive), "killed, although nobody has waited for it"
    sleeper.wait()
    assert take_over_from(alive) and take_over_from(ELSEWHERE) and take_over_from(own_process())
    (tmp_path / OWNER_FILE).write_text('{"host_na')  # torn by a power cut
    unlock_run_dir(lock_run_dir(tmp_path))
    assert read_owner(tmp_path) == own_process()


WITHOUT_LOCKS = """
import errno, fcntl, sys
def flock(*_): raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
from megatron_vl.train import main
sys.exit(main())
"""


@pytest.mark.ranks
def test_run_whose_folder_another_has_taken_ends_and_deletes_nothing(prepared, tmp_path) -> None:
    run = tmp_path / "run"
    words = [sys.executable, "-c", WITHOUT_LOCKS, *options_of(prepared, run, *QUICK, steps=4000)]
    variables = environment() | single_rank_variables()
    older = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    while older.poll() is None and not steps_in(run):
        time.sleep(0.05)
    (run / OWNER_FILE).write_text(json.dumps(dataclasses.asdict(ELSEWHERE)))
    _, err = older.communicate(timeout=120)
    assert older.returncode == 1
    assert f"another run (process {ELSEWHERE.pid} on node7) has begun to write to {run}, so this one" in err
    assert read_owner(run) == ELSEWHERE and verify_checkpoint(sorted(run.glob("step_*[0-9]"))[-1]) == []
