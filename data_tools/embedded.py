"""Keeps media that are written in the records themselves on the disk until their shard is written.

Data URIs and the pictures of tables would otherwise wait in memory for their shard to be full. The process
that verifies a batch writes them into one file, ``.convert/media/N``; samples refer to a part of it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .formats.frames import Frames


@dataclass(frozen=True)
class Stored:
    """The bytes of a medium within a file."""

    path: Path
    offset: int
    length: int

    def read(self) -> bytes:
        """Raises OSError if they are gone."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self.length)
        if len(data) < self.length:
            raise OSError(f"{self.path} is shorter than when it was written")
        return data


class HasReferences(Protocol):
    references: list[tuple[str, Any]]


def is_embedded(reference: Any) -> bool:
    """Whether a reference holds the medium itself, or a picture of it."""
    if isinstance(reference, Frames):
        return not isinstance(reference.pictures, str) and any(map(is_embedded, reference.pictures))
    return isinstance(reference, bytes) or (isinstance(reference, str) and reference[:5].lower() == "data:")


class MediaFile:
    """Collects the embedded media of a batch in one file, which is made when the first one comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0

    def keep(self, data: bytes) -> Stored:
        """Raises OSError if they cannot be written."""
        with self.path.open("ab" if self.size else "wb") as file:
            file.write(data)
        stored = Stored(self.path, self.size, len(data))
        self.size += len(data)
        return stored


class MediaFolder:
    """The files of embedded media that samples still refer to. A file is removed with its last reference."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.uses: Counter[Path] = Counter()

    def path(self, batch: int) -> Path:
        """The file of a batch."""
        return self.folder / str(batch)

    def hold(self, entries: Iterable[HasReferences]) -> None:
        """Counts the references of samples that wait for their shard."""
        self.uses.update(_files(entries))

    def release(self, entries: Iterable[HasReferences]) -> None:
        """Takes back what :meth:`hold` counted, and removes files that nothing refers to."""
        for path, count in Counter(_files(entries)).items():
            self.uses[path] -= count
            if not self.uses[path]:
                del self.uses[path]
                path.unlink(missing_ok=True)


def _files(entries: Iterable[HasReferences]) -> list[Path]:
    return [ref.path for entry in entries for _, ref in entry.references if isinstance(ref, Stored)]
