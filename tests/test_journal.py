"""A journal keeps its whole lines through kills, and has one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vl.journal import JsonLinesJournal


def lines(path: Path, *, alone: bool = False) -> list[int]:
    journal = JsonLinesJournal(path, int, is_exclusive=alone)
    try:
        return list(journal.known_entries())
    finally:
        journal.close()


@pytest.mark.parametrize("damage", [b"4", b'"four"\n5\n', b"\0\0\0\n5\n", b"[4\n"])
def test_what_follows_a_damaged_line_is_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"1\n2\n3\n" + damage)
    journal = JsonLinesJournal(path, int)
    known = journal.known_entries()
    journal.append_entry(6)
    assert list(known) == [1, 2, 3] and journal.num_known == 3
    journal.close(sync_to_disk=True)
    assert path.read_bytes() == b"1\n2\n3\n6\n" and lines(path) == [1, 2, 3, 6]


def test_two_writers_of_one_journal_are_refused(tmp_path: Path) -> None:
    journal = JsonLinesJournal(tmp_path / "journal", int, is_exclusive=True)
    journal.append_entry(1)
    with pytest.raises(FileExistsError, match="another process is writing"):
        lines(tmp_path / "journal", alone=True)
    journal.remove_entries()
    journal.append_entry(2)
    assert lines(tmp_path / "journal") == [2]
    journal.close(remove_file=True)
    assert not (tmp_path / "journal").exists()
