"""Videos that a record gives as pictures: a list of them, or a folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatron_vl.data.sample.frame_archive import MAX_FRAME_RATE, MIN_FRAME_RATE, is_frame_rate
from megatron_vl.data.sample.medium import VIDEO_SUFFIXES

from .conversation import RecordError, shorten_value

FRAME_RATE_KEYS = ("sample_fps", "fps", "raw_fps")
"""Keys of a frame rate, in pictures a second. The first that has a value counts. The last one is the rate of
the video that a folder was made of."""


@dataclass(frozen=True)
class FrameSequence:
    """A video given as pictures."""

    pictures: str | tuple[Any, ...]
    """The path of a folder; or the pictures in order, each as it is written for a picture."""
    fps: float | None = None
    """Pictures a second; None: the record does not say."""

    def __str__(self) -> str:
        """How messages name it."""
        if isinstance(self.pictures, str):
            return self.pictures

        name = "pictures in the record"
        first_picture = self.pictures[0]
        if isinstance(first_picture, str) and first_picture[:5].lower() != "data:":
            name = first_picture[:120]
        return f"{name} and {len(self.pictures) - 1} more" if len(self.pictures) > 1 else name


def may_be_frame_folder(reference: Any) -> bool:
    """Whether a video's reference may be a folder: a path that does not end like the file of a video."""
    if not isinstance(reference, str) or reference[:5].lower() == "data:":
        return False
    if "://" in reference and not reference.lower().startswith("file://"):
        return False
    return PurePosixPath(reference[-64:]).suffix[1:].lower() not in VIDEO_SUFFIXES


def read_frame_rate(
    json_object: dict[str, Any], key_prefix: str, *, is_picture_list: bool
) -> tuple[str, float] | None:
    """The key and value of the frame rate that an object gives for a video; None if it gives none.

    Args:
        key_prefix: prefix of the key in messages.
        is_picture_list: whether the video is a list of pictures, and not a folder.

    Raises:
        RecordError: the value is not a frame rate.
    """
    rate_keys = FRAME_RATE_KEYS[:2] if is_picture_list else FRAME_RATE_KEYS[::-1]
    rate_key = next((name for name in rate_keys if json_object.get(name) not in (None, "")), None)
    if rate_key is None:
        return None

    rate_value = json_object[rate_key]
    if isinstance(rate_value, str):  # Qwen's own documentation writes '1'
        with contextlib.suppress(ValueError):
            rate_value = float(rate_value)
    if not is_frame_rate(rate_value):
        raise RecordError(
            "bad frame rate",
            f"{shorten_value(json_object[rate_key])} is no number of "
            f"frames a second from {MIN_FRAME_RATE:g} to {MAX_FRAME_RATE:g}",
            f"{key_prefix}{rate_key}",
        )
    return rate_key, float(rate_value)
