"""Which record had an ``id`` first, for any number of records in little memory."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

CACHE_KB = 64 << 10
"""Memory of the table; what does not fit lies in its file."""


class Identities:
    """The ids so far, in an SQLite table of which 64 MiB are in memory and the rest in a file.

    An id is known by 128 bits of its BLAKE2b digest: of 1e8 ids, two different ones are taken for the same
    with a probability of about 1e-23.

    Args:
        path: of the file, which is of no use afterwards: a conversion that goes on reads all records again,
            and fills the table anew. Nothing of it is ever synced to the disk.
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self.files: list[str] = []
        """Names of the input files; the table has their places in this list."""
        self.table = sqlite3.connect(path, isolation_level=None)

        without_journal = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE")
        for setting in (*without_journal, f"cache_size=-{CACHE_KB}"):
            self.table.execute(f"PRAGMA {setting}")
        columns = "id BLOB PRIMARY KEY, file INTEGER, record INTEGER"
        self.table.execute(f"CREATE TABLE ids ({columns}) WITHOUT ROWID")

        # One transaction without end: pages go to the file only when the memory is full.
        self.table.execute("BEGIN")

    def first(self, identity: str, file: str, record: int) -> tuple[str, int]:
        """File and number of the first record with this id, which is the given one where it is new.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        # A string from JSON may hold halves of surrogate pairs, which UTF-8 has no bytes for.
        key = hashlib.blake2b(identity.encode(errors="surrogatepass"), digest_size=16).digest()
        if not self.files or self.files[-1] != file:
            self.files.append(file)

        row = (key, len(self.files) - 1, record)
        added = self.table.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", row)
        if added.rowcount:
            return file, record

        place, number = self.table.execute("SELECT file, record FROM ids WHERE id = ?", (key,)).fetchone()
        return self.files[place], number

    def close(self) -> None:
        self.table.close()
