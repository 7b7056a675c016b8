"""A file of JSON lines to which long work appends its results, so that it can continue after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 1 << 16
"""Bytes that are read at a time to find the end of the last complete line."""


def read_journal_lines(journal_path: Path, parse_entry: Callable[[Any], Any]) -> Iterator[tuple[Any, int]]:
    """Yields (result of ``parse_entry`` for a line's value, offset in bytes at which the line ends).

    It stops before the first line that a kill or a power cut left incomplete or damaged.

    Args:
        parse_entry: raises ValueError, TypeError or KeyError for a damaged value.
    """
    line_end = 0
    with journal_path.open("rb") as journal_file:
        for json_line in journal_file:
            try:
                journal_entry = parse_entry(json.loads(json_line))
            except (ValueError, TypeError, KeyError):
                return
            if not json_line.endswith(b"\n"):
                return
            line_end += len(json_line)
            yield journal_entry, line_end


def drop_incomplete_line(lines_path: Path) -> None:
    """Cuts off a last line that a kill or a full disk left incomplete, so that none is appended to it."""
    if not lines_path.exists():
        return
    with lines_path.open("r+b") as lines_file:
        complete_bytes, last_line_end = lines_file.seek(0, os.SEEK_END), 0
        while complete_bytes and not last_line_end:
            block_start = max(0, complete_bytes - _BLOCK_BYTES)
            lines_file.seek(block_start)
            last_line_end = lines_file.read(complete_bytes - block_start).rfind(b"\n") + 1
            complete_bytes = block_start + last_line_end
        lines_file.truncate(complete_bytes)


class JsonLinesJournal:
    """Appends lines to a file, after its complete lines.

    The first incomplete or damaged line and all lines after it are dropped. Their work is done again.

    Args:
        parse_entry: turns the value of a line into an entry (see :func:`read_journal_lines`).
        is_exclusive: whether to keep other processes out by a lock, which ends with this process.

    Raises:
        FileExistsError: another process has the lock, or has removed the file.
    """

    def __init__(
        self, journal_path: Path, parse_entry: Callable[[Any], Any], *, is_exclusive: bool = False
    ) -> None:
        self.journal_path, self._parse_entry = journal_path, parse_entry
        self._journal_file = journal_path.open("a+b")
        self._write_lock = threading.Lock()
        try:
            if is_exclusive:
                self._take_lock()
            self.num_known = complete_bytes = 0
            for _, line_end in read_journal_lines(journal_path, parse_entry):
                self.num_known += 1
                complete_bytes = line_end
            self._journal_file.truncate(complete_bytes)
        except BaseException:
            self._journal_file.close()
            raise

    def _take_lock(self) -> None:
        folder = self.journal_path.parent
        try:
            fcntl.flock(self._journal_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"another process is writing to {folder}; wait for it, or give another --out"
            ) from None
        except OSError:
            return  # the file system has no locks
        if not self.journal_path.exists() or not os.path.samestat(
            os.fstat(self._journal_file.fileno()), self.journal_path.stat()
        ):
            raise FileExistsError(f"another process has just finished writing to {folder}")

    def known_entries(self) -> Iterator[Any]:
        """Yields the entries that were in the file when it was opened."""
        return (
            entry
            for entry, _ in islice(read_journal_lines(self.journal_path, self._parse_entry), self.num_known)
        )

    def remove_entries(self) -> None:
        """Removes all lines."""
        self._journal_file.truncate(0)
        self.num_known = 0

    def append_entry(self, entry_value: Any) -> None:
        """Appends a line. Threads may call it at the same time."""
        with self._write_lock:
            self._journal_file.write(json.dumps(entry_value).encode() + b"\n")
            self._journal_file.flush()

    def close(self, *, remove_file: bool = False, sync_to_disk: bool = False) -> None:
        """Closes the file.

        Args:
            remove_file: whether to delete it.
            sync_to_disk: whether to flush it to the disk first.
        """
        if sync_to_disk:
            os.fsync(self._journal_file.fileno())
        if remove_file:
            self.journal_path.unlink(missing_ok=True)
        self._journal_file.close()
