"""Kills programs together with the processes that they have started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def kill_process_tree(root_pid: int) -> None:
    """Sends SIGKILL to a process and all its descendants.

    Ranks run in their own sessions, so killing the launcher's process group is not enough. All
    are stopped first: a launcher that sees a rank die could start another one, or end as if all were well.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for tree_process in list(_stopped_tree(psutil.Process(root_pid))):
            with contextlib.suppress(psutil.NoSuchProcess):
                tree_process.kill()


def _stopped_tree(parent_process: psutil.Process) -> Iterator[psutil.Process]:
    """Stops a process and everything below it, parents first: what is stopped starts no further process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent_process.suspend()
        yield parent_process
        for child_process in parent_process.children():
            yield from _stopped_tree(child_process)
