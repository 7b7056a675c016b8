"""A video given as pictures, in one file: an uncompressed zip archive of the pictures' original bytes.

The archive's comment says how many pictures there are a second and how they are sampled. The same pictures
always give the same bytes. Any program for zip archives can open it.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
FORMAT = "megatron-vl frames"
LONGEST_NAME = 60
SLOWEST, FASTEST = 1e-3, 1e3
"""Limits of pictures a second."""

Sampling = Literal["as a file", "whole"]
"""How frames are taken: by the rule for video files; or all of them, because whoever listed the pictures has
chosen them."""


class FrameFileError(ValueError):
    """An archive that :func:`pack_frames` did not write, or that was damaged since."""


@dataclass(frozen=True)
class FrameFileInfo:
    """What the comment of an archive says."""

    fps: float
    """Pictures a second."""
    sampling: Sampling
    assumed_fps: bool = False
    """Whether nobody said how many pictures there are a second."""


def is_frame_file(data: bytes) -> bool:
    """Whether a file is a zip archive, which no file of a video is."""
    return data.startswith(MAGIC)


def pack_frames(pictures: Iterable[tuple[str, bytes]], info: FrameFileInfo) -> bytes:
    """The archive of picture files, in their order.

    Args:
        pictures: file name, for messages, and content of each.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for number, (name, picture) in enumerate(pictures):
            # The earliest time that the format knows: the time of writing would make the bytes differ.
            entry = zipfile.ZipInfo(f"{number:09d} {_plain(name)}".strip(), (1980, 1, 1, 0, 0, 0))
            archive.writestr(entry, picture)
        archive.comment = json.dumps({"format": FORMAT, **asdict(info)}).encode()
    return out.getvalue()


def _plain(name: str) -> str:
    """The end of a file name, in characters that every program can show."""
    return "".join(c if c.isprintable() and c not in "/\\:" else "_" for c in name[-LONGEST_NAME:])


class FrameFile:
    """Reads an archive.

    Raises:
        FrameFileError: it is not one of :func:`pack_frames`, or it is damaged.
    """

    def __init__(self, data: bytes) -> None:
        try:
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            self.info = _read_comment(self._archive.comment)
        except Exception as error:  # the reader of zip archives raises all kinds of errors
            raise FrameFileError(f"not an archive of frames ({type(error).__name__}: {error})") from error
        self._entries = self._archive.infolist()
        # Nothing that is stored here can grow when it is read.
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in self._entries)
        if not stored or any(entry.filename[:9] != f"{i:09d}" for i, entry in enumerate(self._entries)):
            raise FrameFileError("not an archive of frames (its entries are others)")

    def __len__(self) -> int:
        """Number of pictures."""
        return len(self._entries)

    def name(self, number: int) -> str:
        """The name that a picture's file had, or its number counted from 1."""
        return self._entries[number].filename[10:] or f"frame {number + 1}"

    def read(self, number: int) -> bytes:
        """The file of a picture, counted from 0. Raises FrameFileError."""
        try:
            return self._archive.read(self._entries[number])
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
            raise FrameFileError(f"{self.name(number)} is damaged ({problem})") from error


def _read_comment(comment: bytes) -> FrameFileInfo:
    fields = json.loads(comment)
    if fields.pop("format") != FORMAT:
        raise ValueError("its comment is another")
    info = FrameFileInfo(**fields)
    if info.sampling not in ("as a file", "whole") or not is_rate(info.fps):
        raise ValueError(f"its comment is {str(fields)[:200]}")
    return info


def is_rate(value: object) -> bool:
    """Whether a value can be a number of pictures a second."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and SLOWEST <= value <= FASTEST  # type: ignore[operator]
