"""A journal keeps its whole lines through kills, and has one writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_vl.journal import Journal


def lines(path: Path, *, alone: bool = False) -> list[int]:
    journal = Journal(path, int, alone=alone)
    try:
        return list(journal.known())
    finally:
        journal.close()


@pytest.mark.parametrize("damage", [b"4", b'"four"\n5\n', b"\0\0\0\n5\n", b"[4\n"])
def test_what_follows_a_damaged_line_is_dropped(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"1\n2\n3\n" + damage)
    journal = Journal(path, int)
    known = journal.known()
    journal.add(6)
    assert list(known) == [1, 2, 3] and journal.count == 3
    journal.close(sync=True)
    assert path.read_bytes() == b"1\n2\n3\n6\n" and lines(path) == [1, 2, 3, 6]


def test_two_writers_of_one_journal_are_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", int, alone=True)
    journal.add(1)
    with pytest.raises(FileExistsError, match="another process is writing"):
        lines(tmp_path / "journal", alone=True)
    journal.restart()
    journal.add(2)
    assert lines(tmp_path / "journal") == [2]
    journal.close(remove=True)
    assert not (tmp_path / "journal").exists()
