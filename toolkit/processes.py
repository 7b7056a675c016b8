"""Ends programs that have started others."""

from __future__ import annotations

import contextlib

import psutil


def kill_tree(root: int) -> None:
    """Sends SIGKILL to a process and all its descendants. Ranks run in their own sessions, so killing the
    launcher's process group is not enough."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for one in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
