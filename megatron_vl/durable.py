"""Files that survive a power failure.

Two rules: a file's bytes are on the disk before it gets its name, and a name is on the disk before anything
refers to it. On POSIX this takes ``fsync`` of the file, a rename, and ``fsync`` of the folder that holds the
new name. Each of these functions returns when all of this is done. At any moment, a file has either its old
content or its new content.
"""

from __future__ import annotations

import os
from pathlib import Path

PARTIAL = ".partial"
"""The end of a file's name until the file is complete."""


def sync(path: Path) -> None:
    """Flushes the content of a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
        os.fsync(file.fileno())

    rename(partial, path)


def make_folder(path: Path) -> None:
    """Creates a folder and the missing ones above it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
