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

from megatron_vl.journal import JsonLinesJournal, read_journal_lines

from .resume import parse_verdicts

BATCHES_PER_BLOCK = 16
"""A block is a run of records, so that a part reads few row groups of a table that it does not need."""
PART_FILE_NAME = re.compile(r"part-(\d+)-of-(\d+)\.jsonl")


@dataclass(frozen=True)
class WorkPart:
    """Part ``index`` (from 0) of ``num_parts``."""

    index: int
    num_parts: int

    def __str__(self) -> str:
        return f"{self.index}/{self.num_parts}"

    @property
    def name(self) -> str:
        return f"part-{self.index}-of-{self.num_parts}"

    def owns_batch(self, batch_number: int) -> bool:
        """Whether a batch of records belongs to this part."""
        return batch_number // BATCHES_PER_BLOCK % self.num_parts == self.index

    def overlaps_records(self, first_record: int, end_record: int, batch_size: int) -> bool:
        """Whether one of the records from ``first_record`` to before ``end_record`` belongs to this part."""
        block_size = batch_size * BATCHES_PER_BLOCK
        block_numbers = range(first_record // block_size, (end_record - 1) // block_size + 1)
        if len(block_numbers) >= self.num_parts:  # every part owns one of so many blocks
            return True
        return any(block_number % self.num_parts == self.index for block_number in block_numbers)


def part_journal(work_dir: Path, work_part: WorkPart) -> JsonLinesJournal:
    """The verdicts of a part, in the order of the batches: entries (batch, verdicts); batch -1: the end."""
    return JsonLinesJournal(work_dir / f"{work_part.name}.jsonl", _parse_entry)


class PartVerdicts:
    """The verdicts that parts left in a folder, asked for in the order of the batches."""

    def __init__(self, work_dir: Path) -> None:
        self.merged_entries = heapq.merge(
            *map(_read_entries, sorted(work_dir.glob("part-*-of-*.jsonl"))), key=lambda entry: entry[0]
        )
        self.next_entry: tuple[int, list[Any]] | None = None

    def verdicts_of_batch(self, batch_number: int) -> list[Any] | None:
        """The verdicts on a batch; None if no part has them. Batches must be asked for in ascending order."""
        while self.next_entry is None or self.next_entry[0] < batch_number:
            self.next_entry = next(self.merged_entries, (1 << 62, []))
        return self.next_entry[1] if self.next_entry[0] == batch_number else None


def describe_missing_parts(work_dir: Path) -> str:
    """Says which parts are not complete; empty if all parts of one division are.

    Raises:
        FileNotFoundError: there is no part at all.
    """
    parts_by_count: dict[int, set[int]] = {}
    for journal_path in work_dir.glob("part-*-of-*.jsonl"):
        if (name_match := PART_FILE_NAME.fullmatch(journal_path.name)) is not None:
            complete_parts = parts_by_count.setdefault(int(name_match[2]), set())
            if _is_complete(journal_path):
                complete_parts.add(int(name_match[1]))
    if not parts_by_count:
        raise FileNotFoundError(work_dir)

    if any(len(complete_parts) == num_parts for num_parts, complete_parts in parts_by_count.items()):
        return ""

    # If the work was divided more than once, the division that is closest to its end is meant.
    num_parts = max(parts_by_count, key=lambda part_count: len(parts_by_count[part_count]) / part_count)
    missing_indices = sorted(set(range(num_parts)) - parts_by_count[num_parts])
    more_text = f" and {len(missing_indices) - 10} more" if len(missing_indices) > 10 else ""
    return ", ".join(f"{i}/{num_parts}" for i in missing_indices[:10]) + more_text


def _is_complete(journal_path: Path) -> bool:
    with journal_path.open("rb") as file:
        file.seek(max(0, journal_path.stat().st_size - 64))
        return file.read().endswith(b'{"batch": -1, "verdicts": []}\n')


def _read_entries(journal_path: Path) -> Iterator[tuple[int, list[Any]]]:
    return (entry for entry, _ in read_journal_lines(journal_path, _parse_entry) if entry[0] >= 0)


def _parse_entry(journal_value: Any) -> tuple[int, list[Any]]:
    return journal_value["batch"], parse_verdicts(journal_value["verdicts"])
