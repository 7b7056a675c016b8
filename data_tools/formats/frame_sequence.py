"""Videos that a record gives as a list of images."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.sample.frame_archive import MAX_FRAME_RATE, MIN_FRAME_RATE, is_frame_rate

from .conversation import RecordError, shorten_value

FRAME_RATE_KEYS = ("sample_fps", "fps")
"""Keys of a frame rate, in images a second. The first that has a value counts."""


@dataclass(frozen=True)
class FrameSequence:
    """A video given as images."""

    images: tuple[Any, ...]
    """In order, each as it is written for an image."""
    fps: float | None = None
    """Images a second; None: the record does not say."""

    def __str__(self) -> str:
        """How messages name it."""
        first = self.images[0]
        is_path = isinstance(first, str) and first[:5].lower() != "data:"
        name = first[:120] if is_path else "images in the record"
        return f"{name} and {len(self.images) - 1} more" if len(self.images) > 1 else name


def parse_number(value: Any) -> Any:
    """A number that may be written as text, as in Qwen's own documentation."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def read_frame_rate(json_object: dict[str, Any], key_prefix: str) -> tuple[str, float] | tuple[None, None]:
    """The key and value of the frame rate that an object gives for a list of images; None if it gives none.

    Args:
        key_prefix: prefix of the key in messages.

    Raises:
        RecordError: the value is not a frame rate.
    """
    rate_key = next((name for name in FRAME_RATE_KEYS if json_object.get(name) not in (None, "")), None)
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
