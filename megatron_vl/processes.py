"""The processes that another one has started."""

from __future__ import annotations

import contextlib

import psutil


def children(parent: int) -> dict[int, tuple[str, ...]]:
    """The living children of a process: id -> words of the command line. One that ends meanwhile is left
    out."""
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(parent).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # a dead one that nobody waited for, too
                found[process.pid] = tuple(process.cmdline())
    return found
