"""A file of JSON lines that work appends to while it goes on, so that it can continue after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any


def read_lines(path: Path, parse: Callable[[Any], Any]) -> Iterator[tuple[Any, int]]:
    """Yields what ``parse`` makes of each line's value, and the offset at which the line ends.

    It stops before the first line that a kill or a power cut left incomplete or damaged. ``parse`` says so by
    a ValueError, TypeError or KeyError.
    """
    end = 0
    with path.open("rb") as file:
        for line in file:
            try:
                value = parse(json.loads(line))
            except (ValueError, TypeError, KeyError):
                return
            if not line.endswith(b"\n"):
                return
            end += len(line)
            yield value, end


class Journal:
    """Appends lines to a file, after those that were read from it.

    What follows the first incomplete or damaged line is dropped: that work is done again.

    Args:
        parse: turns the value of a line into an entry (see :func:`read_lines`).
        alone: keep other processes out by a lock, which ends with this process.

    Raises:
        FileExistsError: another process has the lock, or has removed the file.
    """

    def __init__(self, path: Path, parse: Callable[[Any], Any], *, alone: bool = False) -> None:
        self.path, self._parse = path, parse
        self._file = path.open("a+b")
        self._between_lines = threading.Lock()
        try:
            if alone:
                self._take_lock()
            self.count = whole = 0
            for _, end in read_lines(path, parse):
                self.count += 1
                whole = end
            self._file.truncate(whole)
        except BaseException:
            self._file.close()
            raise

    def _take_lock(self) -> None:
        folder = self.path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"another process is writing to {folder}; wait for it, or give another --out"
            ) from None
        except OSError:
            return  # the file system has no locks
        if not self.path.exists() or not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):
            raise FileExistsError(f"another process has just finished writing to {folder}")

    def known(self) -> Iterator[Any]:
        """Yields the entries that were in the file when it was opened."""
        return (entry for entry, _ in islice(read_lines(self.path, self._parse), self.count))

    def restart(self) -> None:
        """Removes all lines."""
        self._file.truncate(0)
        self.count = 0

    def add(self, value: Any) -> None:
        """Appends a line. Threads may call it at the same time."""
        with self._between_lines:
            self._file.write(json.dumps(value).encode() + b"\n")
            self._file.flush()

    def close(self, *, remove: bool = False, sync: bool = False) -> None:
        """Ends the writing: removes the file, or flushes it to the disk first."""
        if sync:
            os.fsync(self._file.fileno())
        if remove:
            self.path.unlink(missing_ok=True)
        self._file.close()
