"""The child processes of a process."""

from __future__ import annotations

import contextlib

import psutil


def children(parent: int) -> dict[int, tuple[str, ...]]:
    """The living children of a process: id -> words of the command line.

    A child that ends during the call is left out.
    """
    found = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(parent).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # also raised for a zombie
                found[process.pid] = tuple(process.cmdline())
    return found
