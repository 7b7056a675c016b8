"""Videos that a record gives as images: a list of them, or a folder."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from megatron_vl.data.sample.frame_archive import MAX_FRAME_RATE, MIN_FRAME_RATE, is_frame_rate
from megatron_vl.data.sample.medium import VIDEO_SUFFIXES

from .conversation import RecordError, shorten_value

FRAME_RATE_KEYS = ("sample_fps", "fps", "raw_fps")
"""Keys of a frame rate, in images a second. The first that has a value counts. The last one is the rate of
the video that a folder was made of."""


@dataclass(frozen=True)
class FrameSequence:
    """A video given as images."""

    images: str | tuple[Any, ...]
    """The path of a folder; or the images in order, each as it is written for an image."""
    fps: float | None = None
    """Images a second; None: the record does not say."""

    def __str__(self) -> str:
        """How messages name it."""
        if isinstance(self.images, str):
            return self.images
        first = self.images[0]
        is_path = isinstance(first, str) and first[:5].lower() != "data:"
        name = first[:120] if is_path else "images in the record"
        return f"{name} and {len(self.images) - 1} more" if len(self.images) > 1 else name


def may_be_frame_folder(reference: Any) -> bool:
    """Whether a video's reference may be a folder: a path that does not end like the file of a video."""
    if not isinstance(reference, str) or reference[:5].lower() == "data:":
        return False
    if "://" in reference and not reference.lower().startswith("file://"):
        return False
    return PurePosixPath(reference[-64:]).suffix[1:].lower() not in VIDEO_SUFFIXES


def parse_number(value: Any) -> Any:
    """A number that may be written as text, as in Qwen's own documentation."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def read_frame_rate(
    json_object: dict[str, Any], key_prefix: str, *, is_image_list: bool
) -> tuple[str, float] | tuple[None, None]:
    """The key and value of the frame rate that an object gives for a video; None if it gives none.

    Args:
        key_prefix: prefix of the key in messages.
        is_image_list: whether the video is a list of images, and not a folder.

    Raises:
        RecordError: the value is not a frame rate.
    """
    rate_keys = FRAME_RATE_KEYS[:2] if is_image_list else FRAME_RATE_KEYS[::-1]
    rate_key = next((name for name in rate_keys if json_object.get(name) not in (None, "")), None)
    if rate_key is None:
        return None, None

    rate_value = parse_number(json_object[rate_key])
    if not is_frame_rate(rate_value):
        detail = (
            f"{shorten_value(json_object[rate_key])} is no number of "
            f"frames a second from {MIN_FRAME_RATE:g} to {MAX_FRAME_RATE:g}"
        )
        raise RecordError("bad frame rate", detail, f"{key_prefix}{rate_key}")
    return rate_key, float(rate_value)
