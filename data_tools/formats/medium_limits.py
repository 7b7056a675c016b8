"""Limits that a record gives for one medium, under the names of qwen-vl-utils: its size, frames and times.

Keys that qwen-vl-utils does not read for a medium (``nframes`` of a list of images) are left alone.
"""

import contextlib
import dataclasses
import itertools
import math
from typing import Any

from megatron_vl.data.sample.frame_archive import is_frame_rate
from megatron_vl.data.sample.grids import AREA_LIMITS, CLIP_LIMITS, FRAME_LIMITS, TIMES_LIMIT
from megatron_vl.data.sample.medium import describe_reference

from .conversation import RecordError, shorten_value

REASON = "bad limits of a medium"
LARGEST = 1e15
SECOND_LIMITS = ("fps", *CLIP_LIMITS)
"""Limits that may have a fraction. The others are whole numbers from 1."""
FRAME_RATE_KEYS = ("sample_fps", "fps")
"""Keys of the rate of a list of images. The first that has a value counts."""


@dataclasses.dataclass(frozen=True)
class FrameSequence:
    """A video given as images."""

    images: tuple[Any, ...]
    """In order, each as it is written for an image."""
    fps: float | None = None
    """Images a second; None: the record does not say."""

    def __str__(self) -> str:
        first, others = describe_reference(self.images[0]), len(self.images) - 1
        return f"{first} and {others} more" if others else first


def read_frame_rate(json_object: dict[str, Any], key_prefix: str) -> tuple[str, float] | tuple[None, None]:
    """The key and value of the rate that an object gives for a list of images; None if it gives none.

    Raises:
        RecordError: the value is not a frame rate.
    """
    key = next((name for name in FRAME_RATE_KEYS if json_object.get(name) not in (None, "")), None)
    if key is None:
        return None, None
    rate = _parse_number(json_object[key])
    if not is_frame_rate(rate):
        detail = f"{shorten_value(json_object[key])} is no number of frames a second"
        raise RecordError("bad frame rate", detail, f"{key_prefix}{key}")
    return key, float(rate)


def read_medium_limits(
    media_kind: str, medium: Any, json_object: dict[str, Any], key_prefix: str
) -> tuple[Any, dict[str, Any], list[str]]:
    """The limits that an object gives for its medium.

    Args:
        key_prefix: prefix of the object's keys in messages.

    Returns:
        The medium (a list of images with known times has their mean rate), its limits, and the keys that were
        read.

    Raises:
        RecordError: a limit has no possible value, or two contradict each other.
    """
    is_list = isinstance(medium, FrameSequence)
    limits: dict[str, Any] = {
        name: _read_number(name, json_object[name], f"{key_prefix}{name}")
        for name in AREA_LIMITS + (FRAME_LIMITS if media_kind == "video" and not is_list else ())
        if json_object.get(name) not in (None, "")
    }
    read_keys = [*limits]
    if limits.get("video_start") == 0:  # which changes nothing
        del limits["video_start"]
    for lower, upper in (("min_pixels", "max_pixels"), ("min_frames", "max_frames"), CLIP_LIMITS):
        if lower in limits and limits[lower] > limits.get(upper, math.inf):
            raise RecordError(REASON, f"{lower} is above {upper}", f"{key_prefix}{lower}")
    if "fps" in limits and "nframes" in limits:
        raise RecordError(REASON, "give either fps or nframes", f"{key_prefix}nframes")
    if ("resized_height" in limits) != ("resized_width" in limits):
        raise RecordError(REASON, "give both resized_height and resized_width", f"{key_prefix}resized_height")

    if is_list and (time_keys := _read_times(medium, json_object, key_prefix)):
        limits[TIMES_LIMIT], rate_keys = time_keys
        seconds, intervals = limits[TIMES_LIMIT][-1] - limits[TIMES_LIMIT][0], len(medium.images) - 1
        if intervals and not is_frame_rate(seconds and intervals / seconds):
            raise RecordError("bad frame rate", f"{intervals + 1} images in {seconds:g} s", key_prefix)
        medium = dataclasses.replace(medium, fps=intervals / seconds if intervals else medium.fps or 1.0)
        read_keys += rate_keys
    return medium, limits, read_keys


def _parse_number(value: Any) -> Any:
    """A number that may be written as text, as in Qwen's own documentation."""
    with contextlib.suppress(ValueError):
        return float(value) if isinstance(value, str) else value
    return value


def _read_number(name: str, value: Any, field_path: str) -> float:
    number = _parse_number(value)
    if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) < LARGEST:
        if name in SECOND_LIMITS and (number > 0 or name == "video_start" and number == 0):
            return float(number)
        if name not in SECOND_LIMITS and number >= 1 and number == int(number):
            return int(number)
    raise RecordError(REASON, f"{shorten_value(value)} is no possible {name}", field_path)


def _read_times(
    medium: FrameSequence, json_object: dict[str, Any], key_prefix: str
) -> tuple[list[float], list[str]] | None:
    """The seconds of each image of a list, and the keys that give them; None: the record does not."""
    key = next((key for key in ("timestamps", "frames_indices") if json_object.get(key)), "")
    if not key:
        return None
    values, rate_key, rate = json_object[key], "", 1.0
    if key == "frames_indices":
        rate_key = next((name for name in ("raw_fps", "fps") if json_object.get(name)), "")
        if not rate_key:
            raise RecordError(REASON, "frames_indices need fps, the rate of the source", key_prefix + key)
        rate = _read_number("fps", json_object[rate_key], f"{key_prefix}{rate_key}")
    is_ascending = (
        isinstance(values, list)
        and all(isinstance(each, int | float) and 0 <= each < LARGEST for each in values)
        and all(earlier <= later for earlier, later in itertools.pairwise(values))
    )
    if not is_ascending or len(values) != len(medium.images):
        detail = f"{len(medium.images)} ascending numbers are required, one for each image"
        raise RecordError(REASON, detail, f"{key_prefix}{key}")
    return [float(value / rate) for value in values], [key, *filter(None, [rate_key])]
