"""A signal makes all ranks save and end together; a dead rank does not keep the others waiting."""

import fcntl
import os
import signal
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

import psutil
import pytest

from megatron_vl import launch
from megatron_vl.system.processes import list_children
from megatron_vl.system.signals import handle_stop_signals, shield_loader_worker
from tests.support.tiny_run import command, environment, metrics
from toolkit.checkpoint.contents import verify_checkpoint

LAUNCHER = [sys.executable, "-m", "megatron_vl.launch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ALONE = [sys.executable, "-m", "megatron_vl", "train", "--nproc-per-node", "1"]
"""One rank, in the process that a terminal signals."""


def start(
    launcher: list[str], prepared: dict[str, Path], run: Path, lines: int = 0, ranks: int = 2, **more: Any
) -> Popen[str]:
    """Starts a long run of one rank, or of two with two loader workers each; waits for lines of its log."""
    ranks = 1 if launcher is ALONE else ranks
    words = command(prepared, run, "--global_batch_size", "2", ranks=ranks, steps=1000)
    assert words[:3] == TORCHRUN
    # A terminal sends Ctrl-C to a whole group of processes.
    options = {"stdout": PIPE, "stderr": PIPE, "text": True, "start_new_session": True}
    after = words.index("megatron_vl.train") + 1 if launcher is ALONE else 3
    options |= {"env": environment(), "cwd": prepared["folder"], **more}
    process = Popen([*launcher, *words[after:]], **options)
    wait_for(lambda: len(metrics(run)) >= lines, process)
    return process


def wait_for(condition: Callable[[], object], process: Popen[str]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.05)


def last_saved_step(run: Path) -> int:
    """The last step in the log of a run that a signal stopped, whose checkpoint is whole."""
    last = metrics(run)[-1]["step"]
    assert verify_checkpoint(run / f"step_{last:08d}") == []
    return last


def ranks_of(process: Popen[str]) -> list[int]:
    return [pid for pid, command in list_children(process.pid).items() if "megatron_vl.train" in command]


@pytest.mark.ranks
def test_launcher_saves_at_ctrl_c_and_ends_when_a_rank_dies(prepared, tmp_path):
    run = tmp_path / "run"
    first = start(LAUNCHER, prepared, run, lines=3)
    os.killpg(first.pid, signal.SIGINT)
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    last = last_saved_step(run)
    assert f"a signal stopped the run after step {last} of 1000; start it again to continue" in out
    assert err.count("SIGINT: the ranks save and end; Ctrl-C again ends them at once") == 1
    assert "Traceback" not in err

    second = start(LAUNCHER, prepared, run, lines=last + 2)
    assert metrics(run)[last]["step"] == last + 1
    commands = list_children(second.pid).values()
    assert set(commands) == {tuple(second.args)}, "on CPU the ranks are forks of the launcher"
    os.kill(ranks_of(second)[1], signal.SIGKILL)
    began = time.monotonic()
    out, err = second.communicate(timeout=60)
    # torchrun would wait 30 seconds for a rank that takes SIGTERM for a wish to save.
    assert time.monotonic() - began < 25
    assert second.returncode == 128 + signal.SIGKILL
    assert "rank 1 was ended by SIGKILL" in err and "ChildFailedError" not in err
    assert "memory runs out" not in err and err.count("for lack of memory") == 1


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("launcher", [LAUNCHER, ALONE], ids=["launcher", "alone"])
def test_pipe_without_reader_changes_nothing_and_a_closed_terminal_saves(launcher, prepared, tmp_path):
    """As ``train ... | head -3`` in a terminal, of which it is the only program."""
    run, (terminal, side_of_program) = tmp_path / "run", os.openpty()
    control: Any = {"preexec_fn": lambda: fcntl.ioctl(side_of_program, termios.TIOCSCTTY, 0)}
    process = start(launcher, prepared, run, stderr=side_of_program, **control)
    os.close(side_of_program)
    for _ in range(3):
        process.stdout.readline()
    process.stdout.close()
    wait_for(lambda: len(metrics(run)) >= 6, process)

    os.close(terminal)  # the system sends SIGHUP, and what the program prints there fails
    assert process.wait(timeout=60) == 0
    assert 6 <= last_saved_step(run) < 1000


def test_nohup_stays_what_it_is():
    def ignores() -> bool:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        handle_stop_signals()
        return signal.getsignal(signal.SIGHUP) == signal.SIG_IGN

    assert in_fork(ignores) == 0


@pytest.mark.full
@pytest.mark.ranks
def test_second_ctrl_c_ends_the_run_at_once(prepared, tmp_path):
    run = tmp_path / "run"
    process = start(LAUNCHER, prepared, run, lines=3)
    # A stopped rank finishes no step, so the first Ctrl-C alone would not end the run.
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    os.killpg(process.pid, signal.SIGINT)
    with pytest.raises(TimeoutExpired):
        process.wait(timeout=2)

    below = psutil.Process(process.pid).children(recursive=True)
    assert len(below) >= 6, "two ranks with two loader workers each"
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert time.monotonic() - began < 20
    assert "Traceback" not in err and "killed from outside" not in err
    assert psutil.wait_procs(below, timeout=5)[1] == []


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("launcher", [LAUNCHER, ALONE], ids=["launcher", "alone"])
def test_early_ctrl_c_ends_the_run_without_saving(launcher, prepared, tmp_path):
    """It comes before the checks are done, long before the first step."""
    run = tmp_path / "run"
    process = start(launcher, prepared, run)
    if launcher is ALONE:
        wait_for(lambda: takes_signals(process.pid), process)
    else:
        # A fork takes signals before it has a session of its own; until then, Ctrl-C ends it without a word.
        wait_for(lambda: [os.getsid(pid) == pid for pid in ranks_of(process)] == [True] * 2, process)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert out.count("a signal stopped the run before its first step; nothing was saved") == 1
    assert err.count("Ctrl-C again ends") == 1
    assert "Traceback" not in err and "was ended by" not in err
    assert not list(run.glob("step_*"))


def takes_signals(pid: int) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (signal.SIGUSR1 - 1) & 1)


def in_fork(program: Callable[[], object]) -> int:
    """The exit code of a fork that runs a program; that of a signal is negative."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if program() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_late_request_does_not_end_a_rank_that_has_ended_well():
    def late(number: signal.Signals) -> bool:
        launch._run_as_rank("keyword", [])
        os.kill(os.getpid(), number)
        return True

    assert in_fork(lambda: late(signal.SIGUSR1)) == 0
    assert in_fork(lambda: late(signal.SIGTERM)) == -signal.SIGTERM


def test_loader_workers_ignore_ctrl_c_only_if_their_rank_takes_it():
    def ignores() -> bool:
        shield_loader_worker()
        return signal.getsignal(signal.SIGINT) == signal.SIG_IGN

    assert in_fork(lambda: handle_stop_signals() or ignores()) == 0
    assert in_fork(lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and ignores()) == 1


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("launcher", "number"),
    [(LAUNCHER, signal.SIGTERM), (TORCHRUN, signal.SIGTERM), (ALONE, signal.SIGINT), (ALONE, signal.SIGHUP)],
)
def test_every_launcher_saves_at_each_signal(launcher, number, prepared, tmp_path):
    """torchrun signals the loaders' worker processes with the ranks, and ends with a report of its own."""
    run = tmp_path / "run"
    process = start(launcher, prepared, run, lines=3, ranks=1)
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode == 0) == (launcher is not TORCHRUN), err
    assert f"stopped the run after step {last_saved_step(run)} of 1000" in out, err
    assert err.count("the run saves and ends") == (launcher is ALONE and number == signal.SIGINT)
