"""Interprets and checks ``--data`` before VLMEvalKit or torch is imported, which takes half a minute."""

from __future__ import annotations

import csv
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vl.errors import UsageError


@cache
def names() -> dict[str, Any]:
    """VLMEvalKit 0.0.20's data sets by kind: ``table``; ``tables`` (several in one) and ``video``
    with their parts."""
    return json.loads(Path(__file__).with_name("names.json").read_text())


def parts_of(name: str) -> tuple[str, list[str]]:
    """The parts of a data set: its kind as in :func:`names`, and the names of its tables or repositories."""
    for kind in ("tables", "video"):
        if name in names()[kind]:
            return kind, names()[kind][name]
    return "table", [name]


def is_own(name: str) -> bool:
    """Whether a table belongs to the user and is unknown to VLMEvalKit."""
    return parts_of(name)[0] == "table" and name not in names()["table"]


def find_data(data: str, folder: Path | None, usual: Path) -> tuple[str, Path]:
    """Derives the name of a data set and the folder of its files from ``--data`` and
    ``--lmu-data``. Raises UsageError."""
    path = Path(data)
    if path.suffix == ".tsv" and path.is_file() and path.stem.strip("."):
        if folder is not None:
            raise UsageError(
                f"--lmu-data {folder}: leave it out; --data {data} is a table whose own folder is used"
            )
        return path.stem, path.parent.resolve()
    if "/" in data or not data.strip(".") or path.suffix == ".tsv":
        raise UsageError(
            f"--data {data} is not a file; give the path of a table, NAME.tsv, or the name of a data set"
        )
    return data, folder or usual


def check_data(name: str, root: Path, scored: bool) -> None:
    """Raises UsageError if ``root`` is not a folder, if a table is missing, or if the user's own table lacks
    a column that ``scored`` needs."""
    if not root.is_dir():
        raise UsageError(f"--lmu-data {root} is not a folder; tables and videos are read from there")
    kind, parts = parts_of(name)
    for part in parts if kind != "video" else []:
        path = root.resolve() / f"{part}.tsv"
        if not path.is_file():
            raise UsageError(
                f"--data {name}: {path} does not exist; put the table of that name there (nothing is "
                "downloaded), or give its folder as --lmu-data"
            )
    if is_own(name) and (problem := wrong_columns(_header(root / f"{name}.tsv"), scored)):
        raise UsageError(f"{name}.tsv: {problem}")


def copy_tables(name: str, root: Path, folder: Path) -> None:
    """Copies the tables of a data set, because VLMEvalKit may overwrite them. Most video sets have
    none in ``root``."""
    kind, parts = parts_of(name)
    folder.mkdir()
    for path in sorted(root.glob("*.tsv")):
        # STI-Bench's table may also be called STIBench.tsv.
        like = kind == "video" and any(_letters(path.stem).startswith(_letters(part)) for part in parts)
        if path.stem in parts or like:
            shutil.copyfile(path, folder / path.name)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name))


def wrong_columns(columns: list[str], scored: bool) -> str:
    """Names the required columns that a user's own table lacks; empty if it lacks none or has no
    columns at all."""
    needed = ["index", "question", *(["answer"] if scored and {"A", "B"} <= set(columns) else [])]
    missing = [column for column in needed if column not in columns] if columns else []
    return f"no column {', '.join(missing)}; it has {', '.join(columns)[:300]}" if missing else ""


def _header(path: Path) -> list[str]:
    """The columns of a table; empty if the file is not a table, which VLMEvalKit reports better."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next((row for row in csv.reader(file, delimiter="\t") if row), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
