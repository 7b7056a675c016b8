"""Kills programs together with the processes that they have started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil


def kill_tree(root: int) -> None:
    """Sends SIGKILL to a process and all its descendants.

    Ranks run in their own sessions, so killing the launcher's process group is not enough. No process lives
    to see one below it die: a launcher could start the next one, or end as if all were well.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in list(_stopped_tree(psutil.Process(root))):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()


def _stopped_tree(process: psutil.Process) -> Iterator[psutil.Process]:
    """Stops a process and everything below it, parents first: what is stopped starts no further process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.suspend()
        yield process
        for child in process.children():
            yield from _stopped_tree(child)
