"""Videos that a record gives as pictures: a list of them, or a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatron_vl.data.sample.frame_files import FASTEST, SLOWEST, is_rate

from .canonical import RecordError, shown

VIDEO_SUFFIXES = {
    "mp4",
    "mov",
    "mkv",
    "webm",
    "avi",
    "mpg",
    "mpeg",
    "m4v",
    "flv",
    "wmv",
    "ts",
    "gif",
    "ogv",
    "3gp",
}
RATES = ("sample_fps", "fps", "raw_fps")
"""Keys that say how many of the listed pictures there are a second; the first that is there counts. The last
is the rate of the video that a folder was made of."""


@dataclass(frozen=True)
class Frames:
    """A video given as pictures."""

    pictures: str | tuple[Any, ...]
    """The path of a folder; or the pictures in order, each as it is written for a picture."""
    fps: float | None = None
    """Pictures a second; None: the record does not say."""

    def __str__(self) -> str:
        """How messages name it."""
        if isinstance(self.pictures, str):
            return self.pictures
        first = self.pictures[0]
        name = first if isinstance(first, str) and first[:5].lower() != "data:" else "pictures in the record"
        return f"{name[:120]} and {len(self.pictures) - 1} more" if len(self.pictures) > 1 else name[:120]


def may_be_folder(reference: Any) -> bool:
    """Whether a video's reference may be a folder: a path that does not end like the file of a video."""
    if not isinstance(reference, str) or reference[:5].lower() == "data:":
        return False
    if "://" in reference and not reference.lower().startswith("file://"):
        return False
    return PurePosixPath(reference[-64:]).suffix[1:].lower() not in VIDEO_SUFFIXES


def read_rate(item: dict[str, Any], where: str, *, listed: bool) -> tuple[str, float] | None:
    """The key and value of a rate beside a video; None if there is none.

    Args:
        where: prefix of the key in messages. listed: the video is a list of pictures.

    Raises:
        RecordError: it is no rate.
    """
    keys = RATES[:2] if listed else RATES[::-1]
    key = next((key for key in keys if item.get(key) not in (None, "")), None)
    if key is None:
        return None
    value = item[key]
    if isinstance(value, str):  # Qwen's own documentation writes '1'
        try:
            value = float(value)
        except ValueError:
            pass
    if not is_rate(value):
        detail = f"{shown(item[key])} is no number of frames a second from {SLOWEST:g} to {FASTEST:g}"
        raise RecordError("bad frame rate", detail, f"{where}{key}")
    return key, float(value)
