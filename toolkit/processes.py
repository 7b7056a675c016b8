"""Kills programs together with the processes that they have started."""

from __future__ import annotations

import contextlib

import psutil


def kill_tree(root: int) -> None:
    """Sends SIGKILL to a process and all its descendants.

    Ranks run in their own sessions, so killing the launcher's process group is not enough.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(root)
        for member in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
