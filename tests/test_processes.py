"""Dead children that nobody waited for do not count, whatever a process calls itself; a tree ends whole."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_vl.processes import children
from toolkit.processes import kill_tree


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_living_children_with_their_words(tmp_path: Path) -> None:
    # The kernel puts the program's name in parentheses into the line of numbers: one that looks like its end
    # is no harm.
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    running = subprocess.Popen([program, "60"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        wait_until(lambda: psutil.Process(ended.pid).status() == psutil.STATUS_ZOMBIE)
        found = children(os.getpid())
        assert found[running.pid] == (str(program), "60")
        assert ended.pid not in found
    finally:
        running.kill()
        running.wait()
        ended.wait()
    assert children(ended.pid) == {}


GRANDCHILD = """
import subprocess, sys
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def test_a_tree_ends_whole_also_below_a_session_of_its_own() -> None:
    root = subprocess.Popen([sys.executable, "-c", GRANDCHILD], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    with root.stdout:
        below = psutil.Process(int(root.stdout.readline()))
    kill_tree(root.pid)
    assert root.wait() == -9
    wait_until(lambda: not below.is_running() or below.status() == psutil.STATUS_ZOMBIE)
    kill_tree(root.pid)  # what has ended already is no error
