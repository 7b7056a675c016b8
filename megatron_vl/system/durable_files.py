"""Files that survive a power failure.

There are two rules. A file's bytes are on the disk before the file gets its name, and a name is on the disk
before anything refers to it. On POSIX, this takes ``fsync`` of the file, a rename, and ``fsync`` of the
folder with the new name. Each function that writes returns when all of this is done. At any moment, a file
has either its old content or its new content.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron_vl.system import progress
from megatron_vl.system.errors import naming_file

PARTIAL_SUFFIX = ".partial"
_BLOCK_BYTES = 1 << 16


def fsync_path(synced_path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to the disk."""
    file_descriptor = os.open(synced_path, os.O_RDONLY)
    try:
        fsync_file(file_descriptor, synced_path)
    finally:
        os.close(file_descriptor)


def fsync_file(file_descriptor: int, file_path: Path) -> None:
    with naming_file(file_path), progress.waiting_for_disk(file_path):
        os.fsync(file_descriptor)


def fsync_tree(dir_path: Path) -> None:
    for path in dir_path.iterdir():
        if path.is_dir():
            fsync_tree(path)
        else:
            fsync_path(path)
    fsync_path(dir_path)


def rename_path(old_path: Path, new_path: Path) -> None:
    """Renames a file or folder that is already on the disk, replacing whatever has the new name."""
    os.replace(old_path, new_path)
    fsync_path(new_path.parent)


def begin_flush(file_descriptor: int, start: int, num_bytes: int) -> None:
    """Lets the system write a range of a file to the disk from now on, while more of it is produced.

    Otherwise the disk waits until the page cache holds a tenth of the memory, or for :func:`fsync_file`.
    """
    if num_bytes >= _BLOCK_BYTES:  # a smaller range would be written again with its neighbours
        os.posix_fadvise(file_descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def open_new_file(final_path: Path) -> Iterator[BinaryIO]:
    """A context with the open file ``NAME.partial``, which gets its final name ``NAME`` at the end.

    If the context ends with an error, the file is removed.
    """
    partial_path = final_path.with_name(final_path.name + PARTIAL_SUFFIX)
    try:
        with naming_file(partial_path), partial_path.open("wb") as file:
            yield file
            file.flush()
            fsync_file(file.fileno(), partial_path)
    except BaseException:
        partial_path.unlink(missing_ok=True)
        raise
    rename_path(partial_path, final_path)


def write_file(final_path: Path, file_content: bytes) -> None:
    """Writes a file as ``NAME.partial``, then gives it its final name ``NAME``."""
    with open_new_file(final_path) as file:
        file.write(file_content)


def make_dirs(dir_path: Path) -> None:
    if not dir_path.is_dir():
        make_dirs(dir_path.parent)
        dir_path.mkdir(exist_ok=True)
        fsync_path(dir_path.parent)


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
