"""Ending programs that start others."""

from __future__ import annotations

import contextlib

import psutil


def kill_tree(root: int) -> None:
    """SIGKILL to a process and all below it. The launcher gives ranks sessions of their own, so its group is
    not enough."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
