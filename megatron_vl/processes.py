"""The processes of this machine, from Linux's ``/proc``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


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
