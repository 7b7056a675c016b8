"""Finds the media of a conversation inside the media root, decodes them once and measures them."""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from megatron_vl.data.pixels import (
    MAX_ASPECT,
    PixelError,
    TooLargeError,
    decode_image,
    open_image,
    probe_video,
)

from .embedded import Stored
from .formats import RecordError

SUFFIX = re.compile(r"[a-z0-9]{1,8}")
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


@dataclass(frozen=True)
class MediaInfo:
    """A verified medium. Sizes are upright (EXIF applied), as the loader decodes them."""

    kind: str
    suffix: str
    bytes: int
    height: int
    width: int
    stored_height: int
    """Height in the file, before EXIF orientation."""
    stored_width: int
    format: str = ""
    mode: str = ""
    frames: int = 0
    fps: float = 0.0
    crc32: int = 0
    """Checksum of the file's bytes, so that what is stored and read later is what was verified."""

    def record(self, key: str) -> dict[str, object]:
        """The fields that the loader needs to count tokens without decoding."""
        out: dict[str, object] = {
            "key": key,
            "kind": self.kind,
            "height": self.height,
            "width": self.width,
            "crc32": self.crc32,
        }
        return out | {"frames": self.frames, "fps": self.fps} if self.kind == "video" else out


def resolve(reference: str, root: Path) -> Path:
    """Resolves ``reference`` to a file, following links. ``root`` must be resolved.

    Raises:
        RecordError: the file lies outside ``root``, is missing, is remote, or is not a regular file.
    """
    if re.match(r"(?i)(?!file:)[a-z][a-z0-9+.-]+://", reference):
        raise RecordError(
            "remote medium", f"{reference}: only local files and data: URIs are read; download it first"
        )

    if reference.lower().startswith("file://"):
        written = reference
        parts = urlsplit(reference)
        if parts.netloc not in ("", "localhost"):  # file://a.jpg names the machine a.jpg, not a file
            raise RecordError("bad media reference", f"{written}: write a path, or file:///ABSOLUTE/PATH")
        reference = unquote(parts.path)

    try:
        path = (root / reference).resolve()
        inside = path.is_relative_to(root)
        exists, regular = (path.exists(), path.is_file()) if inside else (False, False)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, a loop of links
        raise RecordError("bad media reference", f"{reference[:200]!r}: {error}") from error

    if not inside:
        raise RecordError("outside the media root", f"{reference} is not inside the media root")
    if not exists:
        raise RecordError("medium missing", f"{reference} does not exist in the media root")
    if not regular:
        raise RecordError("not a file", f"{reference} is not a regular file")

    return path


def read_media(reference: str | bytes | Stored, root: Path) -> bytes:
    """Reads a medium: a file inside ``root``, a base64 ``data:`` URI, or one that was set aside or is given
    itself. Raises :class:`RecordError`."""
    if isinstance(reference, bytes):
        return reference
    if isinstance(reference, Stored):
        return reference.read()
    if reference[:5].lower() == "data:":
        head, comma, body = reference.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RecordError("bad media reference", "a data: URI must be base64")
        try:
            return base64.b64decode(unquote(body) if "%" in body else body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RecordError("bad media reference", f"a data: URI is not base64: {error}") from error
    path = resolve(reference, root)
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError("medium unreadable", f"{reference}: {error.strerror}") from error


def inspect(kind: str, reference: str, data: bytes, max_pixels: int) -> MediaInfo:
    """Decodes a medium completely and measures it. Raises :class:`RecordError` if it is unusable."""
    shown = reference if len(reference) <= 200 else reference[:60] + "..."
    try:
        info = _image(data, max_pixels) if kind == "image" else _video(reference, data, max_pixels)
    except TooLargeError as error:
        raise RecordError(
            f"{kind} too large", f"{shown}: {error}; --max-megapixels sets the limit"
        ) from error
    except PixelError as error:
        # A library names its in-memory source as an object; that means nothing to a reader and differs in
        # every run.
        plain = re.sub(r" ?<_io\.BytesIO object at 0x[0-9a-f]+>|: '<none>'", "", str(error))
        raise RecordError(f"{kind} does not decode", f"{shown}: {plain}") from error

    if max(info.height, info.width) > MAX_ASPECT * min(info.height, info.width):
        raise RecordError(
            f"{kind} too narrow", f"{shown}: {info.height} x {info.width} is more than {MAX_ASPECT} to 1"
        )

    return info


def _image(data: bytes, max_pixels: int) -> MediaInfo:
    pixels = decode_image(data, max_pixels)
    with open_image(data, max_pixels) as image:
        width, height = image.size
        form = image.format or ""
        mode = image.mode
    suffix = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif", "JPEG2000": "jp2"}.get(form, form.lower())
    suffix = suffix if SUFFIX.fullmatch(suffix) else "img"
    size = (pixels.shape[1], pixels.shape[2], height, width)
    return MediaInfo("image", suffix, len(data), *size, form, mode, crc32=zlib.crc32(data))


def _video(reference: str, data: bytes, max_pixels: int) -> MediaInfo:
    info = probe_video(data, max_pixels)
    written = Path(reference[-64:]).suffix[1:].lower()
    suffix = written if written in VIDEO_SUFFIXES else "mp4"
    size = (info.height, info.width, info.height, info.width)
    return MediaInfo(
        "video", suffix, len(data), *size, frames=info.frames, fps=info.fps, crc32=zlib.crc32(data)
    )
