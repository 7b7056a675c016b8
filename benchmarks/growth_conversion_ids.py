"""Measures memory and time of finding equal ids among many.

    python benchmarks/growth_conversion_ids.py

Both structures receive the same ids, whose digests are in random order; one in 1000 of them occurs twice.
Each structure runs in its own process. ``dictionary`` is what the converter used until 2026-11-22: a
dictionary from digest to (file, record). ``table`` is :class:`data_tools.record_ids.RecordIdTable`. Memory is
the peak of RssAnon (memory that no file backs) minus its value before the first id. The page cache, which
holds a part of the table's file while there is room, is not included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import platform
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from data_tools.record_ids import RecordIdTable

REPEATED = 1000
"""Every id with this interval occurs a second time, a hundred numbers later."""
First = Callable[[str, str, int], tuple[str, int]]


def ids(count: int) -> Iterator[str]:
    """Yields as many ids as records; all differ except one in 1000."""
    for i in range(count):
        number = i - 100 if i % REPEATED == 100 else i
        yield f"str: sample_{number:012d}"


def dictionary(folder: Path) -> First:
    """The former structure, with the work that it did for each record."""
    first: dict[bytes, tuple[str, int]] = {}

    def check(identity: str, file: str, record: int) -> tuple[str, int]:
        key = hashlib.blake2b(identity.encode(errors="replace"), digest_size=16).digest()
        return first.setdefault(key, (file, record))

    return check


def table(folder: Path) -> First:
    return RecordIdTable(folder / "ids.sqlite").first_occurrence


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def measure(make: Callable[[Path], First], count: int, folder: Path, results: Connection) -> None:
    """Sends seconds, bytes and duplicates of one structure."""
    before = anonymous()
    peak = 0
    repeated = 0
    first = make(folder)
    begin = time.monotonic()
    cpu = time.process_time()

    for record, identity in enumerate(ids(count)):
        here = ("a.jsonl", record)
        repeated += first(identity, *here) != here
        if record % 50_000 == 0 or record == count - 1:
            peak = max(peak, anonymous())

    spent = {"seconds": time.monotonic() - begin, "cpu_seconds": time.process_time() - cpu}
    on_disk = sum(path.stat().st_size for path in folder.iterdir())
    results.send(spent | {"rss_anon": peak - before, "file": on_disk, "duplicates": repeated})


def benchmark(count: int, root: Path | None) -> dict[str, dict[str, Any]]:
    results = {}
    for make in (dictionary, table):
        with tempfile.TemporaryDirectory(dir=root) as folder:
            receive, send = multiprocessing.Pipe(duplex=False)
            arguments = (make, count, Path(folder), send)
            process = multiprocessing.get_context("spawn").Process(target=measure, args=arguments)
            process.start()
            send.close()
            results[make.__name__] = receive.recv()
            process.join()
    return results


def show(count: int, results: dict[str, dict[str, Any]]) -> str:
    lines = [
        f"{count} ids, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        f"{'':<12}{'s':>8}{'CPU s':>8}{'us per id':>10}{'RssAnon MiB':>13}{'file MiB':>10}{'duplicates':>12}",
    ]
    for name, result in results.items():
        line = f"{name:<12}{result['seconds']:8.1f}{result['cpu_seconds']:8.1f}"
        line += f"{result['cpu_seconds'] / count * 1e6:10.2f}"
        line += f"{result['rss_anon'] / 2**20:13.1f}{result['file'] / 2**20:10.1f}{result['duplicates']:12d}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=10_000_000, help="number of records (default 10 million)")
    parser.add_argument(
        "--dir", type=Path, help="folder for the table's file (default: the temporary folder)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()
    results = benchmark(args.ids, args.dir)
    print(show(args.ids, results))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
