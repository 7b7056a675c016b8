"""``keep`` never deletes the checkpoint with the best validation loss, which the end of a run names."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vl.config import CheckpointConfig, LoraConfig, RunConfigError, TrainConfig, parse_config
from megatron_vl.estimate.parameters import checkpoint_bytes
from megatron_vl.spec.families import read_spec
from megatron_vl.training.run_messages import end_summary
from megatron_vl.training.state.keep import (
    EVALUATIONS_FILE,
    best_steps,
    check_free_space,
    read_validations,
)
from megatron_vl.training.state.save import CheckpointSaver
from tests.support.tiny_run import options_of, trainings
from toolkit.cli import main


def evaluated(run: Path, *lines: tuple[int, float | None, str]) -> None:
    """Appends validations (step, loss, rows) as a run does."""
    with (run / EVALUATIONS_FILE).open("a") as file:
        for step, loss, rows in lines:
            print(json.dumps({"step": step, "loss": loss, "seconds": 1.0, "rows": rows}), file=file)


def save_steps(run: Path, *steps: int) -> None:
    for step in steps:
        (run / f"step_{step:08d}").mkdir(parents=True, exist_ok=True)


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in run.glob("step_*[0-9]"))


def clean(run: Path, keep: int, keep_every: int = 0) -> list[int]:
    """Deletes old checkpoints as a start of a run does whose latest step was not skipped."""
    grid: Any = SimpleNamespace(rank=0, world_size=1)
    saver = CheckpointSaver(run, None, None, grid, keep, keep_every)  # type: ignore[arg-type]
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
    assert best_steps(tmp_path, [10, 20, 30, 40]) == {10, 20}
    assert clean(tmp_path, keep=1) == [10, 20, 40]


def test_run_that_went_back_forgets_what_it_left(tmp_path: Path) -> None:
    """The user has deleted steps 30 and 40, and trained from step 20 on with other settings."""
    save_steps(tmp_path, 20, 30, 40)
    evaluated(tmp_path, (20, 2.0, "a"), (30, 0.1, "a"), (40, 0.2, "a"), (30, 1.9, "a"), (40, 3.0, "a"))
    (tmp_path / EVALUATIONS_FILE).open("a").write('{"step": 50, "lo')  # torn by a kill
    left = [(each.step, each.loss) for each in read_validations(tmp_path)]
    assert left == [(20, 2.0), (30, 1.9), (40, 3.0)]
    assert clean(tmp_path, keep=1) == [30, 40]
    assert read_validations(tmp_path / "none") == []


@pytest.mark.ranks
def test_run_keeps_and_names_its_best_checkpoint(prepared: dict[str, Path], tmp_path: Path) -> None:
    """The second start spoils the weights; a third has nothing to do and says the same."""
    run = tmp_path / "run"
    options = ["--eval.interval", "1", "--checkpoint.interval", "1", "--checkpoint.keep", "1"]
    options += ["--data.num_workers", "0", "--optimizer.warmup_steps", "0", "--steps", "4"]
    spoilt = (run, [*options, "--optimizer.lr", "30"])
    first, second, third = trainings(prepared, (run, [*options, "--stop_after", "2"]), spoilt, spoilt)
    losses = {each.step: each.loss for each in read_validations(run)}
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
    (run / "hf" / "step_00000020").mkdir(parents=True)
    (run / "hf" / "step_00000020" / "config.json").touch()
    assert f"generate --checkpoint {run}/hf/step_00000020 " in end_summary(config, 30, 1, 5)[4]


def test_disk_too_small_for_a_checkpoint_is_named_at_the_start(
    tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = read_spec(tiny_checkpoint())
    run = tmp_path / "new" / "run"
    config = TrainConfig(checkpoint=CheckpointConfig(dir=str(run), interval=10))
    size, usage = checkpoint_bytes(config, spec), shutil.disk_usage(tmp_path)

    def free(number: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=int(number * size)))

    free(0.9)
    with pytest.raises(RunConfigError, match=f"checkpoint.dir {run}: a checkpoint takes .* GB free; make"):
        check_free_space(config, spec)
    free(1.1)
    check_free_space(config, spec)
    check_free_space(TrainConfig(), spec)
    save_steps(run, 10, 20)
    free(0.9)  # a kill has left half a checkpoint, which this start deletes
    save_steps(run, 30)
    (run / "step_00000040.partial").mkdir()
    (run / "step_00000040.partial" / "data").write_bytes(bytes(size // 2))
    check_free_space(config, spec)
