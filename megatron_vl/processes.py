"""The processes of this machine, from Linux's ``/proc``, and how many files one may open."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


OPEN_FILES = 65_536
"""What a process of the largest runs needs: one or two connections to each of some ten thousand ranks."""


@dataclass(frozen=True)
class Process:
    """One process as it was when it was looked at."""

    pid: int
    parent: int
    command: tuple[bytes, ...]
    """Its words; empty for one that has ended and was not waited for."""


def processes() -> Iterator[Process]:
    """All that may be seen; one that ends meanwhile is left out."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The second field, the name in parentheses, may hold anything.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        yield Process(int(folder.name), parent, tuple(command.removesuffix(b"\0").split(b"\0")) if command else ())


def children(parent: int) -> list[Process]:
    """The living children of a process."""
    return [process for process in processes() if process.parent == parent and process.command]


def raise_open_files() -> int:
    """Lets this process open up to :data:`OPEN_FILES` files, as far as the system permits it. Returns how many it may.

    The usual limit of 1,024 can be raised by the process itself: the server of a store holds two connections to each rank, a
    gloo group one to each member.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if now == resource.RLIM_INFINITY:
        return OPEN_FILES

    possible = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if now < possible:
        resource.setrlimit(resource.RLIMIT_NOFILE, (possible, most))
    return max(now, possible)
