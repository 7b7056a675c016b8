"""Simulates a power cut: a file keeps the content, and a folder the names, of its last ``fsync``."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """Observes each ``fsync`` and rename of this process; ``before_rename`` is called with both paths."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, before_rename: Callable[[Path, Path], None] | None = None
    ) -> None:
        self.contents: dict[int, tuple[int, int]] = {}
        """Size and time of the last change of each file by its inode, as of its last ``fsync``."""
        self.names: dict[int, dict[str, int]] = {}
        """Inodes by name in each folder, by the folder's inode, as of its last ``fsync``."""
        fsync, replace = os.fsync, os.replace

        def recorded(handle: int) -> None:
            fsync(handle)
            state = os.fstat(handle)
            path = Path(f"/proc/self/fd/{handle}").resolve()
            if path.is_dir():
                self.names[state.st_ino] = {entry.name: entry.inode() for entry in os.scandir(path)}
            else:
                self.contents[state.st_ino] = (state.st_size, state.st_mtime_ns)

        def watched(old: Any, new: Any, **more: Any) -> None:
            if before_rename is not None:
                before_rename(Path(old), Path(new))
            replace(old, new, **more)

        monkeypatch.setattr(os, "fsync", recorded)
        monkeypatch.setattr(os, "replace", watched)

    def lost(self, root: Path, *, but: tuple[str, ...] = ()) -> list[str]:
        """What a power cut would take under ``root``: contents and names, except the names in ``but``."""
        found = []
        for path in sorted(root.iterdir()):
            if path.name in but:
                continue
            state = path.stat()

            if self.names.get(root.stat().st_ino, {}).get(path.name) != state.st_ino:
                found.append(f"the name {path.relative_to(root)}")
            if path.is_dir():
                found += [f"{path.name}: {line}" for line in self.lost(path)]
            elif self.contents.get(state.st_ino) != (state.st_size, state.st_mtime_ns):
                found.append(f"the content of {path.relative_to(root)}")
        return found
