"""What ``--data`` means, and what can be said about it before VLMEvalKit, or torch, is imported: that takes
half a minute."""

from __future__ import annotations

import csv
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any


class UsageError(Exception):
    """Arguments that cannot be used; exit code 2."""


@cache
def names() -> dict[str, Any]:
    """VLMEvalKit 0.0.20's data sets: ``table``, and with what they are made of ``tables`` (several in one)
    and ``video``."""
    return json.loads(Path(__file__).with_name("names.json").read_text())


def parts_of(name: str) -> tuple[str, list[str]]:
    """What a data set is made of: its kind, as in :func:`names`, and the names of its tables or
    repositories."""
    for kind in ("tables", "video"):
        if name in names()[kind]:
            return kind, names()[kind][name]
    return "table", [name]


def is_own(name: str) -> bool:
    """Whether a table is a user's own, and none that VLMEvalKit knows."""
    return parts_of(name)[0] == "table" and name not in names()["table"]


def find_data(data: str, folder: Path | None, usual: Path) -> tuple[str, Path]:
    """The name of a data set and the folder of its files, from ``--data`` and ``--lmu-data``. Raises
    UsageError."""
    path = Path(data)
    if path.suffix == ".tsv" and path.is_file() and path.stem.strip("."):
        if folder is not None:
            raise UsageError(
                f"--lmu-data {folder}: leave it out; --data {data} is a table, and its folder is taken"
            )
        return path.stem, path.parent.resolve()
    if "/" in data or not data.strip(".") or path.suffix == ".tsv":
        raise UsageError(
            f"--data {data} is no file; give the path of a table, NAME.tsv, or the name of a data set"
        )
    return data, folder or usual


def check_data(name: str, root: Path, scored: bool) -> None:
    """Raises UsageError: ``root`` is no folder, a table is not there, or an own one lacks a column that
    ``scored`` needs."""
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
    """Copies the tables of a data set: VLMEvalKit may write over them. Most sets of videos have none in
    ``root``."""
    kind, parts = parts_of(name)
    folder.mkdir()
    for path in sorted(root.glob("*.tsv")):
        # STI-Bench's table is STIBench.tsv too.
        like = kind == "video" and any(_letters(path.stem).startswith(_letters(part)) for part in parts)
        if path.stem in parts or like:
            shutil.copyfile(path, folder / path.name)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name))


def wrong_columns(columns: list[str], scored: bool) -> str:
    """What an own table lacks of the columns that VLMEvalKit takes without asking; empty: nothing, or it has
    no columns."""
    needed = ["index", "question", *(["answer"] if scored and {"A", "B"} <= set(columns) else [])]
    missing = [column for column in needed if column not in columns] if columns else []
    return f"no column {', '.join(missing)}; it has {', '.join(columns)[:300]}" if missing else ""


def _header(path: Path) -> list[str]:
    """The columns of a table; none where it is no table, which VLMEvalKit tells better."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next((row for row in csv.reader(file, delimiter="\t") if row), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
