"""A data set's table of questions, checked before a prompt is made of it.

VLMEvalKit 0.0.20 trusts its tables: it evaluates cells as Python, writes pictures to paths made of cells, and opens any
path or address it finds in one. A table may come from anybody; :mod:`worker` takes the evaluation away, and here are the
paths and the pictures.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from data_tools.formats import RecordError
from data_tools.media import resolve
from megatron_vl.data.pixels import PixelError, open_image
from toolkit.evaluate.early import wrong_columns

INDEX = re.compile(r"\w[\w .,:+=-]{0,200}")
MEDIA = re.compile(r"video|path|prefix|media|image|clip|frame|folder|subtitle", re.IGNORECASE)
"""Columns of video sets that may be made parts of a path."""
REFERENCE = 64
"""An ``image`` of at most this many characters is the index of the row whose picture is meant, as in VLMEvalKit."""


class TableError(ValueError):
    """A table that is not used; the message names row and column."""


def check_rows(rows: Iterable[Mapping[str, Any]], root: Path, max_pixels: int, name: str = "") -> None:
    """Raises TableError at the first row with a path that leaves its folder or a picture that cannot be used.

    Args:
        rows: column -> value, as VLMEvalKit has read them; ``image`` and ``image_path`` may be lists.
        root: folder of the data sets; pictures that lie in files must be inside it.
        max_pixels: largest picture, by its header.
        name: of the table, for the message.
    """
    indices: set[str] = set()
    for number, row in enumerate(rows, 1):
        try:
            _check_row(row, number, indices, root, max_pixels)
        except TableError as error:
            raise TableError(f"{name}.tsv: {error}" if name else str(error)) from error


def _check_row(row: Mapping[str, Any], number: int, indices: set[str], root: Path, max_pixels: int) -> None:
    """``indices``: those of the rows before; this one's is added."""
    index = str(row.get("index"))
    if not INDEX.fullmatch(index):
        raise TableError(f"row {number}: index {index[:80]!r} cannot be part of a file name; letters, digits and _ can")
    if index in indices:
        raise TableError(f"row {number}: index {index!r} is there twice")
    indices.add(index)
    images = _listed(row.get("image"), number)
    for data in images:
        _check_picture(data, number, max_pixels)
    for path in _listed(row.get("image_path"), number):
        _check_path(path, number, root, written=bool(images), max_pixels=max_pixels)


def check_own(rows: list[dict[str, Any]], name: str, scored: bool) -> None:
    """Raises TableError where VLMEvalKit would end with a bare KeyError or AssertionError on a user's own table.

    Args:
        rows: column -> cell, as in the file.
        scored: multiple choice is to be scored, for which it takes the column ``answer``.
    """
    if problem := wrong_columns(list(map(str, rows[0])) if rows else [], scored):
        raise TableError(f"{name}.tsv: {problem}")
    indices = {str(row.get("index")) for row in rows}
    for number, row in enumerate(rows, 1):
        image = row.get("image")
        if isinstance(image, str) and 0 < len(image) <= REFERENCE and image not in indices and not image.startswith("["):
            raise TableError(
                f"{name}.tsv: row {number}: column image: {image!r} is neither a picture in base64 nor the index of a row that "
                "has one; paths of pictures go into a column image_path"
            )


def check_video_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Raises TableError at the first row of a video set whose cells lead out of a folder: clips and frames are written to
    paths made of them.

    Args:
        rows: column -> value, as VLMEvalKit has read them.
        folder: what VLMEvalKit was given as the folder of data sets; some sets complete their paths themselves.
    """
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            if MEDIA.search(str(name)) and str(name) != "image":
                for path in _strings(value):
                    _check_inside(path, f"row {number}: column {name}", folder)
        for key in ("index", "original_index"):
            if key in row and not INDEX.fullmatch(str(row[key])):
                raise TableError(f"row {number}: {key} {str(row[key])[:80]!r} cannot be part of a file name")


def _strings(value: Any) -> Iterator[str]:
    """All strings of a cell: one, several between semicolons, or a list or dictionary written down."""
    if isinstance(value, str) and value[:1] in "[{" and value:
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            pass  # then it is a string that begins so
    if isinstance(value, str):
        yield from value.split(";")
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _strings(part)


def _check_inside(path: str, where: str, folder: Path) -> None:
    parts = PurePosixPath(path.strip()).parts
    if ".." in parts or "\0" in path or (parts[:1] == ("/",) and not PurePosixPath(path.strip()).is_relative_to(folder)):
        raise TableError(f"{where}: {path[:200]!r} leaves the folder of the data set")


def _listed(value: Any, number: int) -> list[str]:
    """The strings of a cell that holds one, or a list of them written down or read already."""
    if value is None or (isinstance(value, float) and value != value):
        return []
    if isinstance(value, str) and value.startswith("["):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise TableError(f"row {number}: {value[:80]!r} is not a list of strings") from error
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(part, str) for part in values):
        raise TableError(f"row {number}: image and image_path must be strings or lists of strings")
    return values


def _check_picture(data: str, number: int, max_pixels: int) -> None:
    if len(data) <= REFERENCE:
        return
    try:
        open_image(base64.b64decode(data, validate=True), max_pixels).close()
    except (PixelError, binascii.Error, ValueError) as error:
        raise TableError(f"row {number}: column image: {error}") from error


def _check_path(path: str, number: int, root: Path, *, written: bool, max_pixels: int) -> None:
    """``written``: the picture is in the table, and VLMEvalKit writes it to this path in a folder of its own."""
    if written:
        parts = PurePosixPath(path).parts
        if path.startswith("/") or ".." in parts or "\0" in path or not parts:
            raise TableError(f"row {number}: image_path {path[:200]!r} leaves the folder of pictures")
        return
    try:
        with open_image(resolve(path, root.resolve()).read_bytes(), max_pixels):
            pass
    except (RecordError, PixelError, OSError) as error:
        raise TableError(f"row {number}: image_path: {error}; pictures must be inside {root}") from error
