"""A video that consists of images, in one file: an uncompressed zip archive of the images' original
bytes.

The archive's comment says how many images there are in a second and how they are sampled. The same images
always give the same bytes. Any program for zip archives can open the file.
"""

import io
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from megatron_vl.system.errors import UserError

ZIP_MAGIC = (b"PK\x03\x04", b"PK\x05\x06")
FRAME_ARCHIVE_FORMAT = "megatron-vl frames"
MAX_NAME_LENGTH = 60
MIN_FRAME_RATE, MAX_FRAME_RATE = 1e-3, 1e3

Sampling = Literal["as a file", "whole"]
"""How frames are sampled: by the rule for video files, or all of them, because the listed images were
chosen already."""


class PixelError(UserError, ValueError):
    """Processor settings, an image or a video cannot be used. The message says why."""


@dataclass(frozen=True)
class FrameArchiveInfo:
    """What the comment of an archive says."""

    fps: float
    sampling: Sampling
    assumed_fps: bool = False
    """Whether the frame rate is a guess, because the record gave none."""


def is_frame_archive(file_bytes: bytes) -> bool:
    """Whether a file is a zip archive, which no file of a video is."""
    return file_bytes.startswith(ZIP_MAGIC)


def pack_frames(named_images: Iterable[tuple[str, bytes]], archive_info: FrameArchiveInfo) -> bytes:
    """The archive of image files, in their order.

    Args:
        named_images: file name, for messages, and content of each.
    """
    archive_buffer = io.BytesIO()
    with zipfile.ZipFile(archive_buffer, "w", zipfile.ZIP_STORED) as archive:
        for image_number, (file_name, image_bytes) in enumerate(named_images):
            # The end of the name, in characters that every program can show.
            shown_name = re.sub(r"[/\\:]", "_", file_name[-MAX_NAME_LENGTH:])
            shown_name = "".join(c if c.isprintable() else "_" for c in shown_name)
            entry_name = f"{image_number:09d} {shown_name}".strip()
            # The earliest time of the format. With the time of writing, the bytes would differ.
            archive.writestr(zipfile.ZipInfo(entry_name, (1980, 1, 1, 0, 0, 0)), image_bytes)
        archive.comment = json.dumps({"format": FRAME_ARCHIVE_FORMAT, **asdict(archive_info)}).encode()
    return archive_buffer.getvalue()


class FrameArchive:
    """Reads an archive.

    Raises:
        PixelError: :func:`pack_frames` did not write it, or it is damaged.
    """

    def __init__(self, archive_bytes: bytes) -> None:
        try:
            self._zip_archive = zipfile.ZipFile(io.BytesIO(archive_bytes))
            self.archive_info = _read_archive_comment(self._zip_archive.comment)
        except MemoryError:
            raise
        except Exception as error:  # the reader of zip archives raises all kinds of errors
            raise PixelError(f"not an archive of frames ({type(error).__name__}: {error})") from error
        self._zip_entries = self._zip_archive.infolist()
        for i, entry in enumerate(self._zip_entries):
            # An uncompressed entry cannot grow when it is read.
            if entry.compress_type != zipfile.ZIP_STORED or entry.filename[:9] != f"{i:09d}":
                raise PixelError("not an archive of frames (its entries are others)")

    def __len__(self) -> int:
        return len(self._zip_entries)

    def image_name(self, image_number: int) -> str:
        """The name that an image's file had, or its number counted from 1."""
        return self._zip_entries[image_number].filename[10:] or f"frame {image_number + 1}"

    def read_image(self, image_number: int) -> bytes:
        """The file of an image, counted from 0. Raises PixelError if it is damaged."""
        try:
            return self._zip_archive.read(self._zip_entries[image_number])
        except MemoryError:
            raise
        except Exception as error:
            raise PixelError(
                f"{self.image_name(image_number)} is damaged ({type(error).__name__}: {error})"
            ) from error


def _read_archive_comment(archive_comment: bytes) -> FrameArchiveInfo:
    fields = json.loads(archive_comment)
    if fields.pop("format") != FRAME_ARCHIVE_FORMAT:
        raise ValueError("its comment is another")
    archive_info = FrameArchiveInfo(**fields)
    if archive_info.sampling not in ("as a file", "whole") or not is_frame_rate(archive_info.fps):
        raise ValueError(f"its comment is {str(fields)[:200]}")
    return archive_info


def is_frame_rate(candidate_rate: Any) -> bool:
    """Whether a value can be a number of images per second."""
    is_number = isinstance(candidate_rate, int | float) and not isinstance(candidate_rate, bool)
    return is_number and MIN_FRAME_RATE <= candidate_rate <= MAX_FRAME_RATE
