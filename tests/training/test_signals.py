"""A signal makes all ranks save and end together; a dead rank does not keep the others waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_vl.processes import children
from tests.training.small_run import command, environment, metrics, prepare
from toolkit.checkpoint.contents import verify_checkpoint

LAUNCHER = [sys.executable, "-m", "megatron_vl.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = [sys.executable, "-m", "megatron_vl", "train", "--nproc-per-node", "1"]
"""One rank, in the process that a terminal signals."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    return prepare(
        tmp_path_factory.mktemp("signals") / "prepared",
        tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32),
    )


def start(launcher: list[str], prepared: dict[str, Path], run: Path, ranks: int = 2) -> subprocess.Popen[str]:
    """Data-parallel ranks with two loader workers each, far from their last step."""
    words = command(prepared, run, "--global_batch_size", "2", ranks=ranks, steps=4000)
    assert words[:3] == TORCHRUN
    # A terminal sends Ctrl-C to a whole group of processes.
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    after = words.index("megatron_vl.train") + 1 if launcher is ALONE else 3
    return subprocess.Popen([*launcher, *words[after:]], env=environment(), cwd=prepared["folder"], **options)


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [pid for pid, command in children(process.pid).items() if "megatron_vl.train" in command]


@pytest.mark.ranks
def test_the_launcher_saves_at_ctrl_c_and_ends_when_a_rank_dies(prepared, tmp_path):
    run = tmp_path / "run"
    first = start(LAUNCHER, prepared, run)
    wait_for(lambda: len(metrics(run)) >= 3, first)
    os.killpg(first.pid, signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    last = metrics(run)[-1]["step"]
    assert f"a signal stopped the run after step {last} of 4000; start it again to continue" in out
    assert "NOTE: checkpoint.interval is 0" in out
    assert err.count("SIGINT: the ranks save and end; Ctrl-C again ends them at once") == 1
    assert "Traceback" not in err
    assert verify_checkpoint(run / f"step_{last:08d}") == []

    second = start(LAUNCHER, prepared, run)
    wait_for(lambda: metrics(run)[-1]["step"] >= last + 2, second)
    assert metrics(run)[last]["step"] == last + 1
    commands = children(second.pid).values()
    assert set(commands) == {tuple(second.args)}, "on CPU the ranks are forks of the launcher"
    os.kill(ranks_of(second)[1], signal.SIGKILL)
    began = time.monotonic()
    out, err = second.communicate(timeout=60)
    # torchrun would wait 30 seconds for a rank that takes SIGTERM for a wish to save.
    assert time.monotonic() - began < 25
    assert second.returncode == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in err and "ChildFailedError" not in err


@pytest.mark.full
@pytest.mark.ranks
def test_a_second_ctrl_c_ends_the_run_at_once(prepared, tmp_path):
    run = tmp_path / "run"
    process = start(LAUNCHER, prepared, run)
    wait_for(lambda: len(metrics(run)) >= 3, process)
    # A stopped rank finishes no step, so the first Ctrl-C alone would not end the run.
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)

    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 20
    assert "Traceback" not in err and "killed from outside" not in err


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("launcher", [LAUNCHER, TORCHRUN, ALONE], ids=["launcher", "torchrun", "alone"])
def test_every_launcher_saves_at_each_signal(launcher, number, prepared, tmp_path):
    """torchrun signals the loaders' worker processes with the ranks, and ends with a report of its own."""
    run = tmp_path / "run"
    process = start(launcher, prepared, run, ranks=1)
    wait_for(lambda: len(metrics(run)) >= 3, process)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode == 0) == (launcher is not TORCHRUN), err
    last = metrics(run)[-1]["step"]
    assert f"stopped after step {last} of 4000" in out, err
    assert verify_checkpoint(run / f"step_{last:08d}") == []


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", [LAUNCHER, TORCHRUN], ids=["launcher", "torchrun"])
def test_one_message_for_all_ranks(launcher, tmp_path):
    options = [
        "--standalone",
        "--nproc-per-node",
        "3",
        "-m",
        "megatron_vl.train",
        "--model.hf",
        str(tmp_path / "nowhere"),
    ]

    options += ["--global_batch_size", "6"]
    done = subprocess.run(
        [*launcher, *options], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.count("holds no config.json") == 1
    assert ("Traceback" in done.stderr) == (launcher is TORCHRUN)
