"""Finds the record that had an ``id`` first, for any number of records in little memory."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

CACHE_KB = 64 << 10
"""Memory for the table; the rest of it is in its file."""


class Identities:
    """The ids so far, in an SQLite table that keeps 64 MiB in memory and the rest in a file.

    Ids are compared by 128 bits of their BLAKE2b digests. Among 1e8 ids, the probability that two different
    ones count as equal is about 1e-23.

    Args:
        path: the file, which is useless afterwards: a continued conversion reads all records again and
            refills the table. It is never synced to the disk.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.files: list[str] = []
        """Names of the input files; the table stores indices into this list."""
        self.table = sqlite3.connect(path, isolation_level=None)

        without_journal = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE")
        for setting in (*without_journal, f"cache_size=-{CACHE_KB}"):
            self.table.execute(f"PRAGMA {setting}")
        columns = "id BLOB PRIMARY KEY, file INTEGER, record INTEGER"
        self.table.execute(f"CREATE TABLE ids ({columns}) WITHOUT ROWID")

        # One transaction that never ends: pages go to the file only when the memory is full.
        self.table.execute("BEGIN")

    def first(self, identity: str, file: str, record: int) -> tuple[str, int]:
        """Returns file and number of the first record with this id, which is the given record if the
        id is new.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        # A string from JSON may contain single surrogates, which UTF-8 cannot encode.
        key = hashlib.blake2b(identity.encode(errors="surrogatepass"), digest_size=16).digest()
        if not self.files or self.files[-1] != file:
            self.files.append(file)

        row = (key, len(self.files) - 1, record)
        added = self.table.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", row)
        if added.rowcount:
            return file, record

        index, number = self.table.execute("SELECT file, record FROM ids WHERE id = ?", (key,)).fetchone()
        return self.files[index], number

    def close(self) -> None:
        self.table.close()
