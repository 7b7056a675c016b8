"""Files that survive a power failure.

Two rules: a file's bytes are on the disk before it gets its name, and a name is on the disk before anything
refers to it. On POSIX this takes ``fsync`` of the file, a rename, and ``fsync`` of the folder that holds the
new name. Each of these functions returns when all of this is done. At any moment, a file has either its old
content or its new content.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

from megatron_vl import progress

PARTIAL = ".partial"
"""The end of a file's name until the file is complete."""
PIECE_BYTES = 256 << 20
"""Bytes that are flushed between two signs of progress."""
_ALL_OF_SYNC_FILE_RANGE = 1 | 2 | 4
"""Linux's flags of sync_file_range: wait for earlier writes of the range, write it, and wait for that."""


def sync(path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        flush(handle, path)
    finally:
        os.close(handle)


def flush(handle: int, path: Path) -> None:
    """Flushes an open file or folder to the disk. The pieces of a large file count as progress.

    Args:
        path: the name of the file in the message of a run that ends because its disk does not answer.
    """
    with progress.syncing(path):
        _flush_pieces(handle, path)
        os.fsync(handle)  # of what is flushed already, the size and the place on the disk are missing


def _flush_pieces(handle: int, path: Path) -> None:
    """Writes the content of a file to the disk piece by piece, where the system can do that."""
    sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
    state = os.fstat(handle)
    if sync_file_range is None or not stat.S_ISREG(state.st_mode) or state.st_size <= PIECE_BYTES:
        return

    whole = ctypes.c_int64
    for at in range(0, state.st_size, PIECE_BYTES):
        if sync_file_range(handle, whole(at), whole(PIECE_BYTES), _ALL_OF_SYNC_FILE_RANGE):
            number = ctypes.get_errno()
            if number in (errno.EINVAL, errno.ENOSYS, errno.ESPIPE):
                return  # the file system has no such call
            # A failed write is reported once, so a later fsync would not raise it.
            raise OSError(number, os.strerror(number), str(path))
        progress.tick()


def sync_tree(folder: Path) -> None:
    """Flushes a folder and everything in it to the disk."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


def rename(old: Path, new: Path) -> None:
    """Renames a file or folder that is already on the disk, replacing whatever has the new name."""
    os.replace(old, new)
    sync(new.parent)


def put(partial: Path, path: Path) -> None:
    """Flushes a file that was just written and gives it its final name."""
    sync(partial)
    rename(partial, path)


def write(path: Path, data: bytes) -> None:
    """Writes a file as ``NAME.partial``, then gives it its final name."""
    partial = path.with_name(path.name + PARTIAL)

    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        flush(file.fileno(), partial)

    rename(partial, path)


def make_folder(path: Path) -> None:
    """Creates a folder and the missing ones above it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
