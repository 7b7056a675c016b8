"""Files that survive a power cut.

Two rules: a file's bytes are on the disk before it gets its name, and a name is on the disk before anything
refers to it. On POSIX that takes ``fsync`` of the file, a rename, and ``fsync`` of the folder that holds the
new name; each of these functions returns when that is done. A file under a name has its old content or the
new one at any moment.
"""

from __future__ import annotations

import os
from pathlib import Path

PARTIAL = ".partial"
"""What a file's name ends in until the file is whole."""


def sync(path: Path) -> None:
    """Puts the content of a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Puts a folder with all that is in it on the disk."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_tree(path)
        else:
            sync(path)
    sync(folder)


def rename(old: Path, new: Path) -> None:
    """Gives another name, in place of what may have it, to a file or folder that is on the disk already."""
    os.replace(old, new)
    sync(new.parent)


def put(partial: Path, path: Path) -> None:
    """Gives its name to a file that was just written."""
    sync(partial)
    rename(partial, path)


def write(path: Path, data: bytes) -> None:
    """Writes a whole file under ``NAME.partial``, then gives it its name."""
    partial = path.with_name(path.name + PARTIAL)

    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())

    rename(partial, path)


def make_folder(path: Path) -> None:
    """Creates a folder and those above it, where they are missing."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)
