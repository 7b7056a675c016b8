"""Checks a medium once: decodes it completely and measures it, so that nothing is decoded to count tokens.

The loader makes grids and pixels of what was stored then.
"""

import re
import zlib
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from torch import Tensor

from megatron_vl.data.sample.frame_archive import PixelError, is_frame_archive
from megatron_vl.data.sample.grids import MAX_ASPECT_RATIO, VideoInfo, image_grid, pixels_text, video_grid
from megatron_vl.data.sample.images import (
    DEFAULT_MAX_PIXELS,
    ImageTooLargeError,
    decode_image,
    open_image,
    pixel_planes,
)
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.sample.videos import probe_video, video_planes
from megatron_vl.spec.positions import GridTHW
from megatron_vl.system.errors import UserError

SAFE_SUFFIX = re.compile(r"[a-z0-9]{1,8}")
VIDEO_SUFFIXES = set("mp4 mov mkv webm avi mpg mpeg m4v flv wmv ts gif ogv 3gp".split())


class UnusableError(UserError, ValueError):
    """Something that cannot be trained on. The message gives details.

    Attributes:
        reason: the heading under which it is counted.
        size: its number of tokens or patches if that is too large, otherwise 0.
    """

    def __init__(self, reason: str, detail: str = "", size: int = 0) -> None:
        super().__init__(detail or reason)
        self.reason, self.size = reason, size


class MediaInfo(NamedTuple):
    """A verified medium. Sizes are upright (EXIF applied), as the loader decodes them."""

    kind: str
    suffix: str
    size_bytes: int
    height: int
    width: int
    num_frames: int = 0
    fps: float = 0.0
    crc32: int = 0
    """Checksum of the file's bytes, by which a change after the verification is noticed."""
    sampling: str = ""
    """Of a video given as images: how frames are taken of it."""
    assumed_fps: bool = False
    """Whether neither the record nor the file of a video gives a frame rate."""
    has_more_images: bool = False
    """Whether an image file is an animation or has several pages. The first image is used."""

    def loader_record(self, key: str) -> dict[str, object]:
        """The fields that the loader needs to count tokens without decoding."""
        return {
            "key": key,
            "kind": self.kind,
            "height": self.height,
            "width": self.width,
            "crc32": self.crc32,
            **({"frames": self.num_frames, "fps": self.fps} if self.kind == "video" else {}),
            **({"sampling": self.sampling} if self.sampling else {}),
        }


def describe_reference(reference: Any) -> str:
    """A reference in a message."""
    if isinstance(reference, bytes):
        return "bytes in the record"
    text = str(reference)
    if text[:5].lower() == "data:":
        return "data: URI"
    return text if len(text) <= 200 else text[:60] + "..."


def inspect_medium(
    media_kind: str, reference: Any, media_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS
) -> MediaInfo:
    """Decodes a medium completely and measures it.

    Args:
        reference: the medium's name in messages, and the suffix of a video.

    Raises:
        UnusableError: the medium does not decode, or is too large or too narrow.
    """
    shown_reference = describe_reference(reference)
    try:
        if media_kind == "image":
            media_info = _inspect_image(media_bytes, max_pixels)
        else:
            media_info = _inspect_video(reference, media_bytes, max_pixels)
    except ImageTooLargeError as error:
        raise UnusableError(f"{media_kind} too large", f"{shown_reference}: {error}; shrink it") from error
    except PixelError as error:
        # A library names its source in memory as an object, which means nothing to a reader and differs in
        # every run.
        plain_message = re.sub(r" ?<_io\.BytesIO object at 0x[0-9a-f]+>|: '<none>'", "", str(error))
        raise UnusableError(f"{media_kind} does not decode", f"{shown_reference}: {plain_message}") from error

    refuse_narrow(media_kind, shown_reference, media_info.height, media_info.width)
    return media_info


def refuse_narrow(media_kind: str, name: str, height: int, width: int) -> None:
    """Raises UnusableError for an image or video that the models' processors refuse for its shape."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        raise UnusableError(
            f"{media_kind} too narrow",
            f"{name}: {pixels_text(height, width)} is more than {MAX_ASPECT_RATIO} to 1",
        )


def _inspect_image(media_bytes: bytes, max_pixels: int) -> MediaInfo:
    pixels = decode_image(media_bytes, max_pixels)
    with open_image(media_bytes, max_pixels) as image:
        image_format = image.format or ""
        # The other images of an MPO are previews of the first.
        has_more_images = image_format != "MPO" and getattr(image, "is_animated", False)
    suffix = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}.get(
        image_format, image_format.lower()
    )
    suffix = suffix if SAFE_SUFFIX.fullmatch(suffix) else "img"
    return MediaInfo(
        *("image", suffix, len(media_bytes), pixels.shape[1], pixels.shape[2]),
        crc32=zlib.crc32(media_bytes),
        has_more_images=has_more_images,
    )


def _inspect_video(reference: Any, media_bytes: bytes, max_pixels: int) -> MediaInfo:
    video_info = probe_video(media_bytes, max_pixels)
    written_suffix = PurePosixPath(str(reference)[-64:]).suffix[1:].lower()
    suffix = written_suffix if written_suffix in VIDEO_SUFFIXES else "mp4"
    is_archive = is_frame_archive(media_bytes)
    return MediaInfo(
        "video",
        "zip" if is_archive else suffix,
        len(media_bytes),
        video_info.height,
        video_info.width,
        num_frames=video_info.frame_count,
        fps=video_info.fps,
        crc32=zlib.crc32(media_bytes),
        sampling=video_info.sampling if is_archive else "",
        assumed_fps=video_info.assumed_fps,
    )


# --- Stored media: the fields of MediaInfo.loader_record ----------------------------------------------------


def stored_media_grid(media_record: dict[str, Any], settings: PixelSettings) -> GridTHW:
    """The grid of a stored medium, from its stored size."""
    if media_record["kind"] == "image":
        height, width = media_record["height"], media_record["width"]
        return image_grid(height, width, settings, media_record.get("limits"))
    return video_grid(stored_video_info(media_record), settings)


def stored_video_info(media_record: dict[str, Any]) -> VideoInfo:
    """The facts of a stored video. Raises KeyError if one is missing."""
    frames, fps, height, width = (media_record[name] for name in ("frames", "fps", "height", "width"))
    sampling, limits = media_record.get("sampling", "as a file"), media_record.get("limits", {})
    return VideoInfo(frames, fps, height, width, sampling, limits=limits)


def decode_media_planes(
    media_record: dict[str, Any], media_bytes: bytes, grid: GridTHW, settings: PixelSettings
) -> Tensor:
    """Decodes a stored medium. An image larger than its stored size is refused.

    Raises:
        PixelError: the medium does not decode.
    """
    if media_record["kind"] == "image":
        pixels = decode_image(media_bytes, media_record["height"] * media_record["width"])
        return pixel_planes(pixels[None], grid, settings)
    return video_planes(media_bytes, stored_video_info(media_record), grid, settings)
