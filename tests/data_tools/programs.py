"""Prints by how many MiB a new process grows while it takes ids: ``python -m tests.data_tools.programs KIND
FOLDER``.

A process forked from the tests would hide it: it would take memory that the tests had used and freed.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path

from data_tools import record_ids

COUNT = 300_000


def table(folder: Path) -> Callable[[int], None]:
    """Ids in the data tool's table, which has 256 KiB of memory here."""
    record_ids.CACHE_SIZE_KB = 256
    ids = record_ids.RecordIdTable(folder / "ids.sqlite")

    def fill(count: int) -> None:
        for i in range(count):
            ids.first_occurrence(f"str: {i}", "a.jsonl", i)

    return fill


def dictionary(folder: Path) -> Callable[[int], None]:
    """Ids in a dictionary, which must grow, or the measurement would show nothing."""
    kept: dict[bytes, tuple[str, int]] = {}

    def fill(count: int) -> None:
        for i in range(count):
            kept[hashlib.blake2b(b"%d" % i, digest_size=16).digest()] = ("a.jsonl", i)

    return fill


def resident() -> float:
    """MiB of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


if __name__ == "__main__":
    fill = {"table": table, "dictionary": dictionary}[sys.argv[1]](Path(sys.argv[2]))
    fill(1)
    before = resident()
    fill(COUNT)
    print(resident() - before)
