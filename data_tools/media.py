"""Finds the media of a conversation inside the media root, and reads them."""

import base64
import binascii
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from megatron_vl.data.sample.frame_archive import FrameArchiveInfo, pack_frames
from megatron_vl.system.errors import is_machine_fault, retry_machine_faults

from .formats import RecordError
from .formats.medium_limits import FrameSequence

BASE64_IMAGE_PREFIXES = ("/9j/", "iVBORw0KGgo", "R0lGOD", "UklGR")
"""How JPEG, PNG, GIF and WebP begin in base64."""
MAX_SHOWN = 200
MISSING = "medium missing"
ASSUMED_FPS = 2.0
"""Frames a second of a video that is given as images, if its record does not say: as in qwen-vl-utils and
LLaMA-Factory."""


@dataclass(frozen=True)
class MediaRoots:
    """The folders in which media are looked for, one after the other.

    Args:
        folders: resolved paths.
        follow_links: whether a link may lead out of its folder.
    """

    folders: tuple[Path, ...] = ()
    follow_links: bool = False


def resolve_reference(reference: str, roots: MediaRoots) -> Path:
    """Resolves ``reference`` from the first of the folders where it names a file inside any of them.

    Raises:
        RecordError: it is remote, lies outside the folders, is missing, or is not a regular file.
    """
    shown = reference[:MAX_SHOWN]
    if re.match(r"(?i)(?!file:)[a-z][a-z0-9+.-]+://", reference):
        raise RecordError(
            "remote medium", f"{shown}: only local files and data: URIs are read; download it first"
        )
    if not roots.folders:
        raise RecordError("no media root", f"{shown!r} is a file; give its folder as --media-root")

    refusals = []
    for folder in roots.folders:
        try:
            return _resolve_in(folder, _local_path(reference), roots)
        except RecordError as refusal:
            refusals.append(refusal)
    raise next((refusal for refusal in refusals if refusal.reason != MISSING), refusals[0])


def _resolve_in(folder: Path, reference: str, roots: MediaRoots) -> Path:
    shown = reference[:MAX_SHOWN]
    try:
        named_path = Path(os.path.normpath(folder / reference))
        media_path = named_path if roots.follow_links else (folder / reference).resolve()
        # "../images/1.png" may lead from one of the folders into another.
        if not any(map(media_path.is_relative_to, roots.folders)):
            if any(map(named_path.is_relative_to, roots.folders)):
                detail = (
                    f"{shown} leads to {media_path}, outside the media root; --follow-links allows such links"
                )
            else:
                detail = f"{shown} is outside the media root {folder}; add --media-root {media_path.parent}"
            raise RecordError("outside the media root", detail)
        mode = retry_machine_faults(media_path.stat, media_path).st_mode
    except RecordError:
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RecordError(MISSING, f"{shown} does not exist in the media root") from error
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a name too long, a loop of links
        if is_machine_fault(error):
            raise
        raise RecordError("bad media reference", f"{shown!r}: {error}"[: 2 * MAX_SHOWN]) from error

    if not stat.S_ISREG(mode):
        raise RecordError("not a file", f"{shown} is not a regular file; of a video, list its images")
    return media_path


def _local_path(reference: str) -> str:
    """The path that a reference names, which may be an address ``file:///PATH``."""
    if not reference.lower().startswith("file://"):
        return reference
    url_parts = urlsplit(reference)
    if url_parts.netloc not in ("", "localhost"):  # file://a.jpg names the machine a.jpg, not a file
        detail = f"{reference[:MAX_SHOWN]}: write a path, or file:///ABSOLUTE/PATH"
        raise RecordError("bad media reference", detail)
    return unquote(url_parts.path)


def is_embedded(reference: Any) -> bool:
    """Whether a reference holds the medium itself, or an image of it."""
    if isinstance(reference, FrameSequence):
        return any(map(is_embedded, reference.images))
    return isinstance(reference, bytes) or reference[:5].lower() == "data:" or _is_base64_image(reference)


def _is_base64_image(reference: str) -> bool:
    """Whether a reference is an image in base64 without ``data:``: it begins as the formats do."""
    return len(reference) > MAX_SHOWN and reference.startswith(BASE64_IMAGE_PREFIXES)


def read_media(reference: Any, roots: MediaRoots) -> bytes:
    """Reads the bytes of a medium. A video that is given as images becomes a file of frames.

    Args:
        reference: a path inside one of the folders, a base64 ``data:`` URI, base64 alone, or the bytes.

    Raises:
        RecordError: the medium cannot be read.
    """
    if isinstance(reference, bytes):
        return reference
    if isinstance(reference, FrameSequence):
        frames = (
            ("" if is_embedded(image) else PurePosixPath(image).name, read_media(image, roots))
            for image in reference.images
        )
        info = FrameArchiveInfo(reference.fps or ASSUMED_FPS, "whole", assumed_fps=reference.fps is None)
        return pack_frames(frames, info)

    if _is_base64_image(reference):
        return _decode_base64(reference)
    if reference[:5].lower() == "data:":
        uri_header, comma, uri_body = reference.partition(",")
        if not comma or not uri_header.lower().endswith(";base64"):
            raise RecordError("bad media reference", "a data: URI must be base64")
        return _decode_base64(unquote(uri_body) if "%" in uri_body else uri_body)

    media_path = resolve_reference(reference, roots)
    try:
        return retry_machine_faults(media_path.read_bytes, media_path)
    except OSError as error:
        if is_machine_fault(error):
            raise
        raise RecordError("medium unreadable", f"{reference}: {error.strerror}") from error


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RecordError("bad media reference", f"embedded bytes are not base64: {error}") from error
