"""Finds the media of a conversation inside the media root, decodes them once and measures them."""

from __future__ import annotations

import base64
import binascii
import itertools
import re
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from megatron_vl.data.sample.frame_files import FrameFile, FrameFileInfo, Sampling, is_frame_file, pack_frames
from megatron_vl.data.sample.pixels import (
    MAX_ASPECT,
    PixelError,
    TooLargeError,
    decode_image,
    open_image,
    probe_video,
)

from .embedded import Stored, is_embedded
from .formats import RecordError
from .formats.frames import VIDEO_SUFFIXES, Frames, may_be_folder

SUFFIX = re.compile(r"[a-z0-9]{1,8}")
PICTURE_SUFFIXES = set("jpg jpeg jpe png webp gif bmp tif tiff jp2 ppm avif tga".split())
"""Of the files in a folder of frames; others are passed over."""
ASSUMED_FPS = 2.0
"""Frames a second of a video that is given as pictures, if its record does not say: as in qwen-vl-utils and
LLaMA-Factory."""


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
    sampling: str = ""
    """Of a video given as pictures: how frames are taken of it."""
    assumed_fps: bool = False
    """Whether the record of a video given as pictures does not say how many there are a second."""

    def record(self, key: str) -> dict[str, object]:
        """The fields that the loader needs to count tokens without decoding."""
        out: dict[str, object] = {
            "key": key,
            "kind": self.kind,
            "height": self.height,
            "width": self.width,
            "crc32": self.crc32,
        }
        if self.kind == "video":
            out |= {"frames": self.frames, "fps": self.fps}
        return out | {"sampling": self.sampling} if self.sampling else out


def resolve(reference: str, root: Path | None, *, folder: bool = False) -> Path:
    """Resolves ``reference`` to a file, following links. ``root`` must be resolved; None: there is none.

    Args:
        folder: it may also be a folder.

    Raises:
        RecordError: the file lies outside ``root``, is missing, is remote, or is not a regular file; or there
            is no ``root``.
    """
    if re.match(r"(?i)(?!file:)[a-z][a-z0-9+.-]+://", reference):
        raise RecordError(
            "remote medium", f"{reference}: only local files and data: URIs are read; download it first"
        )

    if root is None:
        raise RecordError("no media root", f"{reference[:200]!r} is a file; give its folder as --media-root")

    if reference.lower().startswith("file://"):
        written = reference
        parts = urlsplit(reference)
        if parts.netloc not in ("", "localhost"):  # file://a.jpg names the machine a.jpg, not a file
            raise RecordError("bad media reference", f"{written}: write a path, or file:///ABSOLUTE/PATH")
        reference = unquote(parts.path)

    try:
        path = (root / reference).resolve()
        inside = path.is_relative_to(root)
        exists = inside and path.exists()
        regular = exists and (path.is_file() or (folder and path.is_dir()))
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, a loop of links
        raise RecordError("bad media reference", f"{reference[:200]!r}: {error}") from error

    if not inside:
        raise RecordError("outside the media root", _outside(reference, root))
    if not exists:
        raise RecordError("medium missing", f"{reference} does not exist in the media root")
    if not regular:
        raise RecordError("not a file", f"{reference} is not a regular file")

    return path


def _outside(reference: str, root: Path) -> str:
    """Says that a reference leads out of the media root, and which link does."""
    path = root / reference
    for link in (*reversed(path.parents), path):
        if link.is_relative_to(root) and link.is_symlink() and not link.resolve().is_relative_to(root):
            return (
                f"{reference}: the link {link} leads to {link.resolve()}, which is not inside the media root;"
                " copy what it leads to, or give a --media-root that holds both"
            )
    return f"{reference} is not inside the media root"


def check_reference(kind: str, reference: Any, root: Path | None) -> None:
    """Raises :class:`RecordError` if a file of a medium is missing, or lies outside ``root``."""
    if isinstance(reference, Frames) and not isinstance(reference.pictures, str):
        for picture in reference.pictures:
            check_reference("image", picture, root)
    elif isinstance(reference, Frames) or not is_embedded(reference):
        path = reference.pictures if isinstance(reference, Frames) else reference
        resolve(str(path), root, folder=kind == "video" and may_be_folder(path))


def read_media(kind: str, reference: Any, root: Path | None) -> bytes:
    """Reads a medium: a file inside ``root``, a base64 ``data:`` URI, or one that was set aside or is given
    itself. A video that is given as pictures becomes a file of frames. Raises :class:`RecordError`."""
    if isinstance(reference, bytes):
        return reference
    if isinstance(reference, Stored):
        return reference.read()
    if isinstance(reference, Frames):
        return _read_frames(reference, root)

    if reference[:5].lower() == "data:":
        head, comma, body = reference.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise RecordError("bad media reference", "a data: URI must be base64")
        try:
            return base64.b64decode(unquote(body) if "%" in body else body, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RecordError("bad media reference", f"a data: URI is not base64: {error}") from error

    path = resolve(reference, root, folder=kind == "video" and may_be_folder(reference))
    return _read_frames(Frames(reference), root) if path.is_dir() else _file_bytes(path, reference)


def _file_bytes(path: Path, reference: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise RecordError("medium unreadable", f"{reference}: {error.strerror}") from error


def _read_frames(frames: Frames, root: Path | None) -> bytes:
    sampling: Sampling = "whole"
    if isinstance(frames.pictures, str):
        path = resolve(frames.pictures, root, folder=True)
        if not path.is_dir():  # the file of a video, which has a rate of its own
            return _file_bytes(path, frames.pictures)
        sampling = "as a file"
    info = FrameFileInfo(frames.fps or ASSUMED_FPS, sampling, assumed_fps=frames.fps is None)
    pictures = ((_name(picture), read_media("image", picture, root)) for picture in pictures_of(frames, root))
    return pack_frames(pictures, info)


def _name(reference: Any) -> str:
    """The file name of a picture; empty if it has none."""
    return PurePosixPath(reference).name if not is_embedded(reference) else ""


def pictures_of(frames: Frames, root: Path | None) -> list[Any]:
    """The references of a video's pictures, those of a folder in the natural order of their names.

    Raises:
        RecordError: the folder cannot be read, has no pictures, or two with the same number.
    """
    if not isinstance(frames.pictures, str):
        return list(frames.pictures)
    folder = resolve(frames.pictures, root, folder=True)
    try:
        names = [path.name for path in folder.iterdir() if path.suffix[1:].lower() in PICTURE_SUFFIXES]
    except OSError as error:
        raise RecordError("medium unreadable", f"{frames}: {error.strerror}") from error
    ordered = sorted((natural_order(name), name) for name in names if not name.startswith("."))
    if not ordered:
        raise RecordError("no frames", f"the folder {frames} holds no pictures")
    for (before, one), (after, other) in itertools.pairwise(ordered):
        if before == after:
            raise RecordError("two frames of one number", f"{one} and {other} in {frames}")
    return [f"{folder}/{name}" for _, name in ordered]


def natural_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts file names by the numbers in them: frame_2 comes before frame_10. The suffix does
    not count."""
    pieces = re.split(r"([0-9]+)", name.rpartition(".")[0])
    return [(int(piece), "") if i % 2 else (0, piece) for i, piece in enumerate(pieces)]


def describe(reference: Any) -> str:
    """A reference in a message."""
    if isinstance(reference, bytes):
        return "bytes in the record"
    text = str(reference)
    if text[:5].lower() == "data:":
        return "data: URI"
    return text if len(text) <= 200 else text[:60] + "..."


def inspect(kind: str, reference: Any, data: bytes, max_pixels: int) -> MediaInfo:
    """Decodes a medium completely and measures it; ``reference`` names it in messages.
    Raises :class:`RecordError` if it is unusable."""
    shown = describe(reference)
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


def _video(reference: Any, data: bytes, max_pixels: int) -> MediaInfo:
    info = probe_video(data, max_pixels)
    written = PurePosixPath(str(reference)[-64:]).suffix[1:].lower()
    suffix = written if written in VIDEO_SUFFIXES else "mp4"
    sampling, assumed_fps = "", False
    if is_frame_file(data):
        suffix, sampling = "zip", info.sampling
        assumed_fps = FrameFile(data).info.assumed_fps

    return MediaInfo(
        "video",
        suffix,
        len(data),
        *(info.height, info.width, info.height, info.width),
        frames=info.frames,
        fps=info.fps,
        crc32=zlib.crc32(data),
        sampling=sampling,
        assumed_fps=assumed_fps,
    )
