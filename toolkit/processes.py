"""Ending programs that start others."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_tree(root: int) -> None:
    """SIGKILL to a process and all below it. The launcher gives ranks sessions of their own, so its group is not enough."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # gone meanwhile
            parents[int(entry.name)] = int(fields[1])
    tree = {root}
    while below := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= below
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
