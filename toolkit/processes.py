"""Ending programs that start others."""

from __future__ import annotations

import contextlib
import os
import signal

from megatron_vl.processes import processes


def kill_tree(root: int) -> None:
    """SIGKILL to a process and all below it. The launcher gives ranks sessions of their own, so its group is not enough."""
    parents = {process.pid: process.parent for process in processes()}
    tree = {root}
    while below := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= below
    for pid in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
