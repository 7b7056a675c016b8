"""Divides the work of a conversion among nodes: each verifies its part of the records, one writes the shards.

The records are counted in blocks, and part ``i`` of ``n`` takes every ``n``-th block. It decodes and measures
their media and notes the verdicts in ``OUT/.convert/part-i-of-n.jsonl``, one line for each batch. Whoever
converts in that folder afterwards takes these verdicts as if they were its own, from parts of any ``n``, so
that the data set does not depend on how the work was divided.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.journal import Journal, read_lines

from .resume import as_plain, parse_verdicts

BATCHES_A_BLOCK = 16
"""A block is a run of records, so that a part reads few row groups of a table that it does not need."""
NAME = re.compile(r"part-(\d+)-of-(\d+)\.jsonl")


@dataclass(frozen=True)
class Part:
    """Part ``index`` (from 0) of ``count``."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def name(self) -> str:
        return f"part-{self.index}-of-{self.count}"

    def has(self, batch: int) -> bool:
        """Whether a batch of records belongs to this part."""
        return batch // BATCHES_A_BLOCK % self.count == self.index

    def wants(self, first: int, end: int, batch_size: int) -> bool:
        """Whether one of the records from ``first`` to before ``end`` belongs to this part."""
        block = batch_size * BATCHES_A_BLOCK
        blocks = range(first // block, (end - 1) // block + 1)
        return len(blocks) >= self.count or any(b % self.count == self.index for b in blocks)


def part_journal(work: Path, part: Part) -> Journal:
    """The verdicts of a part, in the order of the batches: entries (batch, verdicts); batch -1: the end."""
    return Journal(work / f"{part.name}.jsonl", _entry)


def journal_line(batch: int, verdicts: list[Any]) -> dict[str, Any]:
    """A line of a part's journal."""
    return {"batch": batch, "verdicts": as_plain(verdicts)}


class PartVerdicts:
    """The verdicts that parts left in a folder, asked for in the order of the batches."""

    def __init__(self, work: Path) -> None:
        self.merged = heapq.merge(*map(_entries, sorted(work.glob("part-*-of-*.jsonl"))), key=lambda e: e[0])
        self.waiting: tuple[int, list[Any]] | None = None

    def of(self, batch: int) -> list[Any] | None:
        """The verdicts on a batch; None if no part has them. Batches must be asked for in ascending order."""
        while self.waiting is None or self.waiting[0] < batch:
            self.waiting = next(self.merged, (1 << 62, []))
        return self.waiting[1] if self.waiting[0] == batch else None


def missing_parts(work: Path) -> str:
    """Says which parts are not complete; empty if those of one ``n`` are. Raises FileNotFoundError if there
    is no part at all."""
    counts: dict[int, set[int]] = {}
    for path in work.glob("part-*-of-*.jsonl"):
        if (match := NAME.fullmatch(path.name)) is not None:
            done = counts.setdefault(int(match[2]), set())
            if _is_complete(path):
                done.add(int(match[1]))
    if not counts:
        raise FileNotFoundError(work)
    if any(len(done) == count for count, done in counts.items()):
        return ""
    count = max(counts, key=lambda n: len(counts[n]) / n)
    gone = [i for i in range(count) if i not in counts[count]]
    more = f" and {len(gone) - 10} more" if len(gone) > 10 else ""
    return ", ".join(f"{i}/{count}" for i in gone[:10]) + more


def _is_complete(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64))
        return file.read().endswith(b'{"batch": -1, "verdicts": []}\n')


def _entries(path: Path) -> Iterator[tuple[int, list[Any]]]:
    return (entry for entry, _ in read_lines(path, _entry) if entry[0] >= 0)


def _entry(value: Any) -> tuple[int, list[Any]]:
    return value["batch"], parse_verdicts(value["verdicts"])
