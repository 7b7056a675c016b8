"""Rows of a data set, from anybody: VLMEvalKit makes paths of their cells and opens what they name."""

from __future__ import annotations

import ast
import base64
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from data_tools.media import resolve
from megatron_vl.data.pixels import open_image

INDEX = re.compile(r"\w[\w .,:+=-]{0,200}")
MEDIA = re.compile(r"(?!image$).*(video|path|prefix|media|image|clip|frame|folder|subtitle)", re.IGNORECASE)
"""Columns of video sets that may be made parts of a path; ``image`` holds pictures."""
REFERENCE = 64
"""An ``image`` of at most this many characters is the index of the row whose picture is meant."""


class TableError(ValueError):
    """A table that is not used; the message names row and column."""


@contextmanager
def _at(place: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise TableError(f"{place}: {error}") from error


def check_rows(rows: Iterable[Mapping[str, Any]], root: Path, max_pixels: int, name: str) -> None:
    """Raises TableError at the first row of the table ``name`` with a path that leaves its folder, or a
    picture, in it or in a file inside ``root``, that cannot be used or has over ``max_pixels``."""
    indices: set[str] = set()
    for number, row in enumerate(rows, 1):
        with _at(f"{name}.tsv: row {number}"):
            index = _checked_index(row.get("index"))
            if index in indices:
                raise TableError(f"index {index!r} is there twice")
            indices.add(index)
            with _at("column image"):
                pictures = list(strings(row.get("image"), strict=True))
                for data in pictures:
                    if len(data) > REFERENCE:
                        open_image(base64.b64decode(data, validate=True), max_pixels).close()
            with _at("column image_path"):
                for path in strings(row.get("image_path"), strict=True):
                    if pictures:  # which VLMEvalKit writes to this path in a folder of its own
                        _check_inside(path, None)
                    else:
                        open_image(resolve(path, root.resolve()).read_bytes(), max_pixels).close()


def check_video_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Raises TableError at the first row of a video set with a cell that leads out of ``folder``: VLMEvalKit
    writes clips and frames to paths made of cells."""
    for number, row in enumerate(rows, 1):
        for column, cell in row.items():
            with _at(f"row {number}: column {column}"):
                if column in ("index", "original_index"):
                    _checked_index(cell)
                for path in strings(cell) if MEDIA.match(str(column)) else []:
                    _check_inside(path, folder)


def strings(cell: Any, *, strict: bool = False) -> Iterator[str]:
    """The strings of a cell: one, several between semicolons, or of a list or dictionary, also a written one.
    ``strict``: a string is one, and a ValueError says where a list is none or holds something else."""
    if isinstance(cell, str) and cell[:1] in ("[", "{"):
        try:
            cell = ast.literal_eval(cell)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            if strict:
                raise ValueError(f"{cell[:80]!r} is not a list of strings") from error
    if isinstance(cell, str):
        yield from [cell] if strict else cell.split(";")
    elif isinstance(cell, (list, tuple, dict)):
        for part in cell.values() if isinstance(cell, dict) else cell:
            yield from strings(part, strict=strict)
    elif strict and cell is not None and cell == cell:  # an empty cell is not a number
        raise ValueError(f"{cell!r}: there must be strings or lists of strings")


def _checked_index(index: Any) -> str:
    if not INDEX.fullmatch(str(index)):
        raise TableError(f"index {str(index)[:80]!r} cannot be part of a file name; letters, digits, _ can")
    return str(index)


def _check_inside(path: str, folder: Path | None) -> None:
    pure = PurePosixPath(path.strip())
    outside = pure.is_absolute() and (folder is None or not pure.is_relative_to(folder))
    if outside or ".." in pure.parts or "\0" in path or (folder is None and not pure.parts):
        raise TableError(f"{path[:200]!r} leaves the folder of the data set")
