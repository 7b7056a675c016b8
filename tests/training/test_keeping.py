"""What a run keeps: good and best checkpoints, lines through kills, and its folder from other runs."""

import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_vl.config import CheckpointConfig, LoraConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.estimate.parameters import checkpoint_bytes
from megatron_vl.spec.families import read_spec
from megatron_vl.system.durable_files import drop_incomplete_line
from megatron_vl.system.processes import own_process
from megatron_vl.training.run_messages import end_summary
from megatron_vl.training.state import keep
from megatron_vl.training.state.save import CheckpointSaver
from megatron_vl.weights.run_folder import CheckpointError, step_dir_path
from tests.data.media import write
from tests.support.tiny_run import metrics, options_of, trainings
from toolkit.checkpoint.contents import verify_checkpoint
from toolkit.cli import main

QUICK = ["--data.num_workers", "0", "--checkpoint.keep", "1", "--checkpoint.interval", "1"]
ELSEWHERE = dataclasses.replace(own_process(), machine_id="another", host_name="node7")


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("step_*[0-9]"))


@pytest.mark.ranks
def test_skipped_steps_delete_no_good_checkpoint(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Step 3 spoils the weights and is saved. What follows is skipped, and only step 2 is of use."""
    run = tmp_path / "run"
    starts = (["--stop_after", "2"], ["--optimizer.lr", "1e30"])
    good, stopped = trainings(prepared, *((run, [*QUICK, *options]) for options in starts))
    assert f"checkpoints in {run}: [2]\n" in good
    assert "3 consecutive steps (last: 6) had a loss or gradient that was not finite" in stopped
    assert steps_in(run) == [2, 3, 4, 5] and verify_checkpoint(run / "step_00000002") == []


@pytest.mark.ranks
def test_run_of_the_tower_without_any_image_fails_at_its_end(prepared, tmp_path: Path) -> None:
    tower_on_text = "--model.freeze_language true --data.path synthetic:text --steps 4 --data.num_workers 0"
    starts = (f"{tower_on_text} --stop_after 2", tower_on_text)
    stopped, failed = trainings(prepared, *((tmp_path / "run", options.split()) for options in starts))
    assert "trained 2 steps" in stopped and "nothing was trained" not in stopped
    assert "nothing was trained: in every step, every gradient is zero; parts of the vision tower" in failed


@pytest.mark.ranks
def test_records_that_a_kill_cut_off_are_made_up_at_the_next_start(prepared, tmp_path: Path) -> None:
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
    assert clean(run, 1, saver) == [3] and steps_in(disk) == [1, 2, 3] and capsys.readouterr().out == ""


def test_failed_save_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    assert keep.last_good_text(tmp_path) == "there is no earlier checkpoint"
    save_steps(tmp_path, 4)
    saver = saver_of(tmp_path)
    saver.save_error = "checkpoint of step 6 could not be written: no space"
    with pytest.raises(CheckpointError, match="no space; the last good checkpoint is step 4"):
        saver.wait_until_saved()
    saver.close()


def test_run_whose_folder_another_has_taken_saves_and_deletes_nothing(tmp_path: Path) -> None:
    saver = saver_of(tmp_path)
    (tmp_path / keep.OWNER_FILE).write_text(json.dumps(dataclasses.asdict(ELSEWHERE)))
    taken = rf"another run \(process {ELSEWHERE.pid} on node7\) has begun to write to {tmp_path}, so this one"
    with pytest.raises(CheckpointError, match=taken):
        saver.start_save(lambda: pytest.fail("the other run's files are not touched"), 4)
    save_steps(tmp_path, 2, 3)
    saver.note_step(is_updated=True)
    saver.wait_until_saved()
    assert steps_in(tmp_path) == [2, 3] and keep.read_owner(tmp_path) == ELSEWHERE

    snapshot: Any = SimpleNamespace(step=2, optimizer_state=None)
    saver._write_snapshot(snapshot)
    assert re.search(taken, saver.save_error or "")
    saver.close()


def lock_fails(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))


@pytest.mark.parametrize(
    "number, is_held",
    [(errno.EAGAIN, True), (errno.EACCES, True), (errno.ENOLCK, False), (errno.ENOSYS, False)],
)
def test_lock_is_taken_by_another_run_at_two_errors_only(tmp_path, monkeypatch, number, is_held) -> None:
    lock_fails(monkeypatch, number)
    if is_held:
        with pytest.raises(CheckpointError, match="another run .* is writing to"):
            keep.lock_run_dir(tmp_path)
    else:
        keep.unlock_run_dir(keep.lock_run_dir(tmp_path))
    assert keep.read_owner(tmp_path) == (None if is_held else own_process())


def test_living_owner_is_refused_and_dead_one_followed_without_locks(tmp_path, monkeypatch) -> None:
    def take_over_from(owner: Any, torn: str = "") -> bool:
        (tmp_path / keep.OWNER_FILE).write_text(torn or json.dumps(dataclasses.asdict(owner)))
        keep.unlock_run_dir(keep.lock_run_dir(tmp_path))
        return keep.read_owner(tmp_path) == own_process()

    lock_fails(monkeypatch, errno.ENOLCK)
    sleeper = subprocess.Popen(["sleep", "600"])
    alive = dataclasses.replace(own_process(), pid=sleeper.pid, start_time=time.time())
    with pytest.raises(CheckpointError, match=rf"another run \(process {sleeper.pid} on .*\) is writing to"):
        take_over_from(alive)
    assert take_over_from(dataclasses.replace(alive, start_time=time.time() - 60)), "its number is used again"
    sleeper.kill()
    time.sleep(0.2)
    assert take_over_from(alive), "killed, although nobody has waited for it"
    sleeper.wait()
    assert take_over_from(alive) and take_over_from(ELSEWHERE) and take_over_from(own_process())
    assert take_over_from(alive, '{"host_na'), "torn by a power cut"


def evaluated(run: Path, *lines: tuple[int, float | None, str]) -> None:
    with (run / keep.EVALUATIONS_FILE).open("a") as file:
        for step, loss, rows in lines:
            print(json.dumps({"step": step, "loss": loss, "seconds": 1.0, "rows": rows}), file=file)


def save_steps(run: Path, *steps: int) -> None:
    for step in steps:
        step_dir_path(run, step).mkdir(parents=True, exist_ok=True)


def clean(run: Path, keep: int, saver: CheckpointSaver | None = None) -> list[int]:
    """Deletes old checkpoints as a start of a run does whose latest step was not skipped."""
    saver = saver or saver_of(run, keep)
    saver.note_step(is_updated=True)
    saver.wait_until_saved()
    saver.close()
    return steps_in(run)


def test_best_checkpoint_stays_until_a_better_one_comes(tmp_path: Path) -> None:
    """Each cleaning is a start of its own, which knows the validations from the file alone."""
    save_steps(tmp_path, 10, 20, 30, 40)
    evaluated(tmp_path, (0, 1.0, "a"), (10, 3.0, "a"), (20, 2.0, "a"), (30, 2.5, "a"), (40, None, "a"))
    assert clean(tmp_path, keep=0) == [10, 20, 30, 40]
    assert clean(tmp_path, keep=1) == [20, 40], "step 0 is better, and was never saved"
    save_steps(tmp_path, 50, 55)
    evaluated(tmp_path, (50, 1.5, "a"))
    assert clean(tmp_path, keep=1) == [50, 55], "nothing is known of step 55, which was not evaluated"


def test_losses_on_other_rows_are_not_compared(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30, 40)
    evaluated(tmp_path, (10, 0.5, "a"), (20, 0.6, "a"), (20, 5.0, "b"), (30, 6.0, "b"), (40, 7.0, "b"))
    assert keep.best_steps(tmp_path, [10, 20, 30, 40]) == {10, 20}
    assert clean(tmp_path, keep=1) == [10, 20, 40]


def test_run_that_went_back_forgets_what_it_left(tmp_path: Path) -> None:
    """The user has deleted steps 30 and 40, and trained from step 20 on with other settings."""
    save_steps(tmp_path, 20, 30, 40)
    evaluated(tmp_path, (20, 2.0, "a"), (30, 0.1, "a"), (40, 0.2, "a"), (30, 1.9, "a"), (40, 3.0, "a"))
    (tmp_path / keep.EVALUATIONS_FILE).open("a").write('{"step": 50, "lo')  # torn by a kill
    left = [(each.step, each.loss) for each in keep.read_validations(tmp_path)]
    assert left == [(20, 2.0), (30, 1.9), (40, 3.0)]
    assert clean(tmp_path, keep=1) == [30, 40]
    assert keep.read_validations(tmp_path / "none") == []


@pytest.mark.ranks
def test_run_keeps_and_names_its_best_checkpoint(prepared: dict[str, Path], tmp_path: Path) -> None:
    """The second start spoils the weights; a third has nothing to do and says the same."""
    run = tmp_path / "run"
    options = ["--eval.interval", "1", "--checkpoint.interval", "1", "--checkpoint.keep", "1"]
    options += ["--data.num_workers", "0", "--optimizer.warmup_steps", "0", "--steps", "4"]
    spoilt = (run, [*options, "--optimizer.lr", "30"])
    first, second, third = trainings(prepared, (run, [*options, "--stop_after", "2"]), spoilt, spoilt)
    losses = {each.step: each.loss for each in keep.read_validations(run)}
    assert list(losses) == [0, 1, 2, 3, 4] and losses[2] < losses[0] < min(losses[3], losses[4])
    assert steps_in(run) == [2, 4]

    named = f"best validation loss: {losses[2]:.6f} at step 2, {run}/step_00000002\n"
    export = f"next: megatron-vl export --checkpoint {run}/step_00000002 --hf {prepared['hf']} --out {run}_hf"
    assert all(named + export in said for said in (first, second, third))
    assert "trained 2 steps in 0:00:" in first and "trained" not in third
    assert f"checkpoints in {run}: [2, 4]\n" in second and "\nstep 3/4 | loss " in second
    assert max(len(line) for line in second.splitlines() if line.startswith(("step ", "    "))) <= 100

    # The next command is one: it runs as it is printed.
    assert main(export.split()[2:]) == 0 and (Path(f"{run}_hf") / "config.json").is_file()

    # What a start expects of a checkpoint's size is right.
    config = parse_config(options_of(prepared, run))
    size = sum(file.stat().st_size for file in (run / "step_00000004").rglob("*") if file.is_file())
    assert checkpoint_bytes(config, read_spec(prepared["hf"])) == pytest.approx(size, rel=0.1)


def test_end_names_what_was_not_saved_and_asks_what_was_exported(tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(dir=str(tmp_path / "run"))
    config = dataclasses.replace(TrainConfig(checkpoint=checkpoint, lora=LoraConfig(rank=2)), steps=30)
    run = tmp_path / "run"
    assert end_summary(TrainConfig(), 3, 3, 3700.4) == ["trained 3 steps in 1:01:40"]
    save_steps(run, 20, 30)
    evaluated(run, (10, 1.0, "a"), (20, 2.0, "a"), (25, 1.5, "a"), (40, 0.1, "a"))
    said = end_summary(config, 30, 1, 5)
    assert said[2:4] == [
        "best validation loss: 1.000000 at step 10, which was not saved",
        f"best of the saved steps: 2.000000 at step 20, {run}/step_00000020",
    ]
    assert "--merge" in said[4] and f"--checkpoint {run}/step_00000020" in said[4]
    write(run / "hf" / "step_00000020" / "config.json", b"")
    assert f"generate --checkpoint {run}/hf/step_00000020 " in end_summary(config, 30, 1, 5)[4]


def test_disk_too_small_for_a_checkpoint_is_named_at_the_start(
    tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_checkpoint())
    run = tmp_path / "new" / "run"
    config = TrainConfig(checkpoint=CheckpointConfig(dir=str(run), interval=10))
    size = checkpoint_bytes(config, spec)

    def free(number: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(number * size)))

    free(0.9)
    with pytest.raises(RunConfigError, match=f"checkpoint.dir {run}: a checkpoint takes .* GB free; make"):
        keep.check_free_space(config, spec)
    free(1.1)
    keep.check_free_space(config, spec)
    keep.check_free_space(TrainConfig(), spec)
    save_steps(run, 10, 20)
    free(0.9)  # a kill has left half a checkpoint, which this start deletes
    save_steps(run, 30)
    write(run / "step_00000040.partial" / "data", bytes(size // 2))
    keep.check_free_space(config, spec)
