"""Checks untrusted rows of a data set: VLMEvalKit makes paths of their cells and opens those files."""

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
"""Columns of video sets that may become parts of a path; ``image`` holds pictures."""
REFERENCE = 64
"""An ``image`` of at most this many characters is the index of the row that holds the picture."""


class TableError(ValueError):
    """The table is refused; the message names row and column."""


@contextmanager
def _at(where: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise TableError(f"{where}: {error}") from error


def check_rows(rows: Iterable[Mapping[str, Any]], root: Path, max_pixels: int, name: str) -> None:
    """Raises TableError at the first row of table ``name`` with a path that leaves its folder, or with a
    picture (in the table or in a file inside ``root``) that is unreadable or has more than ``max_pixels``."""
    indices: set[str] = set()
    for number, row in enumerate(rows, 1):
        with _at(f"{name}.tsv: row {number}"):
            index = _checked_index(row.get("index"))
            if index in indices:
                raise TableError(f"index {index!r} occurs twice")
            indices.add(index)

            with _at("column image"):
                pictures = list(strings(row.get("image"), strict=True))
                for data in pictures:
                    if len(data) > REFERENCE:
                        open_image(base64.b64decode(data, validate=True), max_pixels).close()

            with _at("column image_path"):
                for path in strings(row.get("image_path"), strict=True):
                    if pictures:  # VLMEvalKit writes them to this path in its own folder
                        _check_inside(path, None)
                    else:
                        open_image(resolve(path, root.resolve()).read_bytes(), max_pixels).close()


def check_video_rows(rows: Iterable[Mapping[str, Any]], folder: Path) -> None:
    """Raises TableError at the first row of a video set with a cell that leads out of ``folder``, because
    VLMEvalKit writes clips and frames to paths made of cells."""
    for number, row in enumerate(rows, 1):
        for column, cell in row.items():
            with _at(f"row {number}: column {column}"):
                if column in ("index", "original_index"):
                    _checked_index(cell)
                for path in strings(cell) if MEDIA.match(str(column)) else []:
                    _check_inside(path, folder)


def strings(cell: Any, *, strict: bool = False) -> Iterator[str]:
    """The strings of a cell, which holds one string, several separated by semicolons, or a list or
    dictionary, also written as text. ``strict`` takes a string as one and raises ValueError for a list
    with other items."""
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
        raise ValueError(f"{cell!r}: only strings and lists of strings are valid")


def _checked_index(index: Any) -> str:
    if not INDEX.fullmatch(str(index)):
        raise TableError(
            f"index {str(index)[:80]!r} cannot be part of a file name; use letters, digits and _"
        )
    return str(index)


def _check_inside(path: str, folder: Path | None) -> None:
    pure = PurePosixPath(path.strip())
    outside = pure.is_absolute() and (folder is None or not pure.is_relative_to(folder))
    if outside or ".." in pure.parts or "\0" in path or (folder is None and not pure.parts):
        raise TableError(f"{path[:200]!r} leaves the folder of the data set")
