"""Children of a process as /proc tells them: dead ones that nobody waited for are none, whatever a process calls itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from megatron_vl.processes import children, processes


def test_living_children_with_their_words(tmp_path: Path) -> None:
    # The kernel puts the program's name in parentheses into the line of numbers: one that looks like its end is no harm.
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    running = subprocess.Popen([program, "60"])
    ended = subprocess.Popen([sys.executable, "-c", ""])
    try:
        deadline = time.monotonic() + 30
        while Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        found = {process.pid: process.command for process in children(os.getpid())}
        assert found[running.pid] == (os.fsencode(program), b"60") and ended.pid not in found
        zombie = next(process for process in processes() if process.pid == ended.pid)
        assert (zombie.parent, zombie.command) == (os.getpid(), ())
    finally:
        running.kill()
        running.wait()
        ended.wait()
