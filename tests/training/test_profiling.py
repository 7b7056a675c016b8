"""Traces of chosen steps (the section ``profile``): the steps that were asked for, and no other effect."""

import gzip
import json
import operator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_vl.config import parse_config
from megatron_vl.training.hooks import Profile


def traced(path: Path) -> tuple[set[str], int]:
    """The steps in a trace, and how many operations of torch."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    spans = {event["name"] for event in events if event.get("ph") == "X"}
    operations = sum(event.get("cat") == "cpu_op" for event in events)
    return {name for name in spans if name.startswith("step ")}, operations


def profile(folder: Path, steps: str, run_steps: range, rank: int = 0) -> tuple[Profile, list[float]]:
    """Returns the hook, and the seconds of writing that each step left out of the speed of steps."""
    options = ["--profile.steps", steps, "--checkpoint.dir", str(folder), "--profile.ranks", "[0,2]"]
    hook, seconds = Profile(parse_config(options), rank), [0.0] * len(run_steps)
    for i, step in enumerate(run_steps):
        log = SimpleNamespace(exclude_seconds=lambda excluded, i=i: operator.setitem(seconds, i, excluded))
        trainer: Any = SimpleNamespace(step=step - 1, metrics_log=log)
        hook.before_step(trainer)
        torch.ones(8, 8) @ torch.ones(8, 8)
        trainer.step = step
        hook.after_step(trainer, None, None)
    return hook, seconds


def test_first_and_last_step_are_in_the_trace_and_no_other(tmp_path: Path) -> None:
    _, seconds = profile(tmp_path, "[2,4]", range(1, 7))
    assert [second > 0 for second in seconds] == [False, False, False, True, False, False]
    (path,) = (tmp_path / "profile").iterdir()
    assert path.name == "rank_00000_steps_2_to_4.pt.trace.json.gz"
    steps, operations = traced(path)
    assert steps == {"step 2", "step 3", "step 4"} and operations > 0
    profile(tmp_path / "rank_1", "[2,4]", range(1, 7), rank=1)
    assert not (tmp_path / "rank_1").exists(), "profile.ranks are 0 and 2"


def test_trace_of_a_run_that_begins_or_ends_between_the_steps_has_fewer(tmp_path: Path) -> None:
    profile(tmp_path, "[2,4]", range(3, 7))
    [path] = (tmp_path / "profile").iterdir()
    assert traced(path)[0] == {"step 3", "step 4"}
    hook, _ = profile(tmp_path, "[2,4]", range(1, 3))
    assert hook.finish_trace() > 0 and hook.finish_trace() == 0
    assert traced(path)[0] == {"step 2"}
    profile(tmp_path / "past", "[2,4]", range(5, 7))
    assert not (tmp_path / "past").exists()


def test_folder_that_cannot_be_written_costs_the_trace_alone(tmp_path: Path, capfd) -> None:
    (tmp_path / "file").touch()
    profile(tmp_path / "file", "[2,2]", range(1, 4))
    assert "could not be written" in capfd.readouterr().err
