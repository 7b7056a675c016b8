"""Dead children that nobody waited for do not count, whatever a process calls itself; a tree ends whole."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from megatron_vl import launch
from megatron_vl.parallel import heartbeat
from megatron_vl.system import host_memory
from megatron_vl.system.processes import kill_process_tree, list_children
from tests.support.ranks import python_path


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_living_children_with_their_words(tmp_path: Path) -> None:
    # The kernel puts the program's name in parentheses into the line of numbers; this looks like its end.
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    running = subprocess.Popen([program, "60"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        found = list_children(os.getpid())
        assert found[running.pid] == (str(program), "60")
        assert ended.pid not in found
    finally:
        running.kill()
        running.wait()
        ended.wait()
    assert list_children(ended.pid) == {}


TREE = """
import subprocess, sys
below = 'import subprocess; subprocess.Popen(["sleep", "60"], start_new_session=True).wait()'
children = [subprocess.Popen(["sleep", "60"]) for _ in range(99)]
children.append(subprocess.Popen([sys.executable, "-c", below], start_new_session=True))
print("all run", flush=True)
children[0].wait()
print("saw one die", flush=True)
"""


def test_tree_is_killed_from_the_top_also_below_a_session_of_its_own() -> None:
    root = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    with root.stdout:
        assert root.stdout.readline() == "all run\n"
        wait_until(lambda: len(psutil.Process(root.pid).children(recursive=True)) == 101)
        below = psutil.Process(root.pid).children(recursive=True)
        kill_process_tree(root.pid)
        assert root.wait() == -9
        assert root.stdout.read() == ""
    wait_until(lambda: all(map(has_ended, below)))
    kill_process_tree(root.pid)  # what has ended already is no error


STOPS_ONE = """
import signal, subprocess, threading, time
from megatron_vl.launch import kill_stopped_ranks
stopped, running = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
stopped.send_signal(signal.SIGSTOP)
threading.Thread(target=kill_stopped_ranks, args=(0.5, 0.1), daemon=True).start()
start = time.monotonic()
print(stopped.wait(30), time.monotonic() - start > 0.5, running.poll())
running.kill()
"""


def test_launcher_kills_a_child_that_stays_stopped_and_no_other() -> None:
    """In a process of its own, because it looks at all children."""
    done = subprocess.run([sys.executable, "-c", STOPS_ONE], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["-9", "True", "None"], done.stderr
    assert "was stopped for 0 s and is killed" in done.stderr


def test_memory_and_own_process_are_known_without_proc(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", Mock(side_effect=FileNotFoundError("/proc/meminfo")))
    monkeypatch.setattr(psutil, "Process", Mock(side_effect=psutil.NoSuchProcess(1)))
    assert host_memory.available_bytes() > 0 and host_memory.memory_limits_text()
    assert heartbeat.own_process().pid == os.getpid() and not heartbeat.own_process().is_local()
    assert launch._find_rank_pids() == [] and not launch._is_stopped_process(1)


def test_closed_stderr_is_no_bug(tmp_path):
    words = [sys.executable, "-m", "toolkit", "data", "convert", "--input", str(tmp_path / "none.jsonl")]
    words += ["--out", str(tmp_path / "out")]
    ended = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *words], capture_output=True)
    assert (ended.returncode, ended.stdout) == (1, b"")


LOSES_ITS_LAUNCHER = """
import os, signal
from megatron_vl.system.signals import hide_native_warnings
hide_native_warnings()
from torch.distributed import DistError, TCPStore
reader, writer = os.pipe()
launcher = os.fork()
if not launcher:
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    os.write(writer, str(store.port).encode())
    signal.pause()
store = TCPStore("127.0.0.1", int(os.read(reader, 9)), None, False)
os.kill(launcher, signal.SIGKILL)
os.waitpid(launcher, 0)
try:
    store.get("anything")
except DistError:
    print("ended")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "has_frames"),
    [({}, False), pytest.param({"TORCH_CPP_LOG_LEVEL": "WARNING"}, True, marks=pytest.mark.full)],
)
def test_killed_launcher_leaves_no_frames_of_torch(level: dict[str, str], has_frames: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    environment |= {"PYTHONPATH": python_path(), **level}
    words = [sys.executable, "-c", LOSES_ITS_LAUNCHER]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ended\n" and ("frame #0" in done.stderr) == has_frames
