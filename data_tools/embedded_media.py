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

from .formats import Conversation
from .formats.frame_sequence import FrameSequence


@dataclass(frozen=True)
class StoredMedium:
    """The bytes of a medium within a file."""

    path: Path
    byte_offset: int
    byte_length: int

    def read_bytes(self) -> bytes:
        """Raises OSError if they are gone."""
        with self.path.open("rb") as media_file:
            media_file.seek(self.byte_offset)
            media_bytes = media_file.read(self.byte_length)
        if len(media_bytes) < self.byte_length:
            raise OSError(f"{self.path} is shorter than when it was written")
        return media_bytes


class HasConversation(Protocol):
    """A sample that waits for its shard."""

    conversation: Conversation


def is_embedded(reference: Any) -> bool:
    """Whether a reference holds the medium itself, or a picture of it."""
    if isinstance(reference, FrameSequence):
        return not isinstance(reference.pictures, str) and any(map(is_embedded, reference.pictures))
    return isinstance(reference, bytes) or (isinstance(reference, str) and reference[:5].lower() == "data:")


class EmbeddedMediaFile:
    """Collects the embedded media of a batch in one file. A batch without any makes no file."""

    def __init__(self, file_path: Path) -> None:
        self.path = file_path
        self.size_bytes = 0

    def append_medium(self, media_bytes: bytes) -> StoredMedium:
        """Raises OSError if they cannot be written."""
        with self.path.open("ab" if self.size_bytes else "wb") as file:
            file.write(media_bytes)
        stored_medium = StoredMedium(self.path, self.size_bytes, len(media_bytes))
        self.size_bytes += len(media_bytes)
        return stored_medium


class EmbeddedMediaFolder:
    """The files of embedded media that samples still refer to. A file is removed with its last reference."""

    def __init__(self, media_dir: Path) -> None:
        self.media_dir = media_dir
        shutil.rmtree(media_dir, ignore_errors=True)
        media_dir.mkdir(parents=True)
        self.reference_counts: Counter[Path] = Counter()

    def batch_path(self, batch_number: int) -> Path:
        """The file of a batch."""
        return self.media_dir / str(batch_number)

    def add_references(self, waiting_samples: Iterable[HasConversation]) -> None:
        """Counts the references of samples that wait for their shard."""
        self.reference_counts.update(_embedded_media_paths(waiting_samples))

    def release_references(self, written_samples: Iterable[HasConversation]) -> None:
        """Takes back what :meth:`add_references` counted, and removes files that nothing refers to."""
        for path, count in Counter(_embedded_media_paths(written_samples)).items():
            self.reference_counts[path] -= count
            if not self.reference_counts[path]:
                del self.reference_counts[path]
                path.unlink(missing_ok=True)


def _embedded_media_paths(samples: Iterable[HasConversation]) -> list[Path]:
    media_paths = []
    for sample in samples:
        for _, reference in sample.conversation.media_references:
            if isinstance(reference, StoredMedium):
                media_paths.append(reference.path)
    return media_paths
