"""Finds the record that had an ``id`` first, for any number of records in little memory."""

from __future__ import annotations

import hashlib
import sqlite3
from functools import cached_property
from pathlib import Path

CACHE_SIZE_KB = 64 << 10
"""Memory for the table; the rest of it is in its file."""


class RecordIdTable:
    """The ids so far, in an SQLite table that keeps 64 MiB in memory and the rest in a file.

    Ids are compared by 128 bits of their BLAKE2b digests. Among 1e8 ids, the probability that two different
    ones count as equal is about 1e-23.

    Args:
        table_path: the file. It is never synced to the disk, because a continued conversion reads all records
            again and refills the table.
    """

    def __init__(self, table_path: Path) -> None:
        self.path = table_path
        self.file_names: list[str] = []
        """Names of the input files; the table stores indices into this list."""

    @cached_property
    def _connection(self) -> sqlite3.Connection:
        """Opened late, because forked worker processes must not share it."""
        self.path.unlink(missing_ok=True)
        connection = sqlite3.connect(self.path, isolation_level=None)
        without_journal = ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE")
        for pragma_setting in (*without_journal, f"cache_size=-{CACHE_SIZE_KB}"):
            connection.execute(f"PRAGMA {pragma_setting}")
        column_definitions = "id BLOB PRIMARY KEY, file INTEGER, record INTEGER"
        connection.execute(f"CREATE TABLE ids ({column_definitions}) WITHOUT ROWID")

        # One transaction that never ends: pages go to the file only when the memory is full.
        connection.execute("BEGIN")
        return connection

    def first_occurrence(self, record_identity: str, file_name: str, record_number: int) -> tuple[str, int]:
        """Returns the file and number of the first record with this id: the given record if the id is new.

        Raises:
            sqlite3.Error: the file cannot be written.
        """
        # A string from JSON may contain single surrogates, which UTF-8 cannot encode.
        id_digest = hashlib.blake2b(record_identity.encode(errors="surrogatepass"), digest_size=16).digest()
        if not self.file_names or self.file_names[-1] != file_name:
            self.file_names.append(file_name)

        table_row = (id_digest, len(self.file_names) - 1, record_number)
        insert_cursor = self._connection.execute("INSERT OR IGNORE INTO ids VALUES (?, ?, ?)", table_row)
        if insert_cursor.rowcount:
            return file_name, record_number

        file_index, first_record = self._connection.execute(
            "SELECT file, record FROM ids WHERE id = ?", (id_digest,)
        ).fetchone()
        return self.file_names[file_index], first_record

    def close(self) -> None:
        if "_connection" in self.__dict__:
            self._connection.close()
