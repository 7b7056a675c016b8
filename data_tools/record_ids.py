"""Finds the record that had an ``id`` first."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

CACHE_KIB = 1 << 18
"""Memory for pages of the database: 2.5 million ids need no disk."""


class RecordIds:
    """The ids so far, in a database on the disk: memory does not grow with their number.

    It holds hashes of 128 bits. Among 1e8 ids, the probability that two different ones have one hash is about
    1e-23.
    """

    def __init__(self, database_path: Path) -> None:
        self._database = sqlite3.connect(database_path, isolation_level=None)
        # A killed conversion starts again, so nothing of this must survive.
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._database.execute("CREATE TABLE ids (hash BLOB PRIMARY KEY, file, record) WITHOUT ROWID")
        self._database.execute("BEGIN EXCLUSIVE")  # one transaction: the page cache is written as it fills

    def first_occurrence(self, record_identity: str, file_name: str, record_number: int) -> tuple[str, int]:
        """Returns the file and number of the first record with this id: the given record if the id is new."""
        # A string from JSON may contain single surrogates, which UTF-8 cannot encode.
        digest = hashlib.blake2b(record_identity.encode(errors="surrogatepass"), digest_size=16).digest()
        entry = (digest, file_name, record_number)
        if self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", entry).rowcount:
            return file_name, record_number
        first = self._database.execute("SELECT file, record FROM ids WHERE hash = ?", (digest,))
        return first.fetchone()

    def close(self) -> None:
        self._database.close()
