"""What can be said about ``--data`` before VLMEvalKit, or torch, is imported, which takes up to half a minute.

Nothing of VLMEvalKit is executed here: the names of its data sets are looked for in its source code. Where that leaves a doubt,
nothing is said, and :mod:`toolkit.evaluate.worker` decides.
"""

from __future__ import annotations

import ast
import csv
import importlib.util
import warnings
from pathlib import Path


class UsageError(Exception):
    """Arguments that cannot be used; exit code 2."""


def check_data(name: str, root: Path, scored: bool) -> None:
    """Checks ``--data`` and ``--lmu-data`` as far as it can be done at once.

    Args:
        name: ``--data``.
        root: ``--lmu-data``.
        scored: answers are to be scored, and not only to be given.

    Raises:
        UsageError: ``root`` is no folder, ``name`` no name, a table is not there, or an own one lacks a column.
    """
    if not root.is_dir():
        raise UsageError(f"--lmu-data {root} is not a folder; tables and videos are read from there")
    if "/" in name or not name.strip(".") or name.endswith(".tsv"):
        raise UsageError(
            f"--data {name}: give the name of a data set, without a folder and without .tsv; --lmu-data takes the folder"
        )
    names = read_names()
    if names is None:
        return
    root = root.resolve()
    for table in names.tables_of(name) or []:
        if not (root / f"{table}.tsv").is_file():
            raise UsageError(missing_table(name, root / f"{table}.tsv"))
    if not names.may_have(name) and (problem := wrong_columns(_header(root / f"{name}.tsv"), scored)):
        raise UsageError(f"{name}.tsv: {problem}")


def missing_table(name: str, path: Path) -> str:
    """What is said about a table that is not there."""
    return (
        f"--data {name}: {path} does not exist; put the table of that name there (nothing is downloaded), "
        "or give its folder as --lmu-data"
    )


def wrong_columns(columns: list[str], scored: bool) -> str:
    """What an own table lacks of the columns that VLMEvalKit takes without asking; empty: nothing, or there are none at all."""
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


# ------------------------------------------------------------------------------------------------- names of VLMEvalKit


class Names:
    """The names of VLMEvalKit's data sets.

    Args:
        sources: its modules of data sets by their paths. Raises SyntaxError and ValueError where they cannot be read.
    """

    def __init__(self, sources: dict[str, bytes]) -> None:
        self.text = b"\n".join(sources.values())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings that are none
            self.several = _several(ast.parse(sources["__init__.py"]))
            self.video_words = _video_words(sources)

    def tables_of(self, name: str) -> list[str] | None:
        """The tables without which a data set cannot be; None: it may be one of videos, whose files can be in many places."""
        return self.several.get(name, [name]) if _stems(name).isdisjoint(self.video_words) else None

    def may_have(self, name: str) -> bool:
        """Whether VLMEvalKit may have a data set of this name: the columns are its own affair then."""
        quoted = [quote + stem.encode() + quote for stem in _stems(name) for quote in (b"'", b'"')]
        return any(word in self.text for word in quoted)


def read_names() -> Names | None:
    """None: VLMEvalKit is not installed, or its source code is not as in 0.0.20."""
    package = importlib.util.find_spec("vlmeval")
    for folder in (package.submodule_search_locations or []) if package else []:
        root = Path(folder) / "dataset"
        sources = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.py")}
        if {"__init__.py", "video_dataset_config.py"} <= set(sources):
            try:
                return Names(sources)
            except (SyntaxError, ValueError):
                return None
    return None


def _several(module: ast.Module) -> dict[str, list[str]]:
    """Data sets of several tables: ``ConcatDataset.DATASET_SETS``. Raises ValueError: there is none."""
    for kind in module.body:
        if isinstance(kind, ast.ClassDef) and kind.name == "ConcatDataset":
            for line in kind.body:
                if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "DATASET_SETS":
                    return ast.literal_eval(line.value)
    raise ValueError("no ConcatDataset.DATASET_SETS")


def _video_words(sources: dict[str, bytes]) -> set[str]:
    """All strings in the modules about videos. Names of video sets are among them, or begin with one of them and ``_``."""
    words = set()
    for path, text in sources.items():
        about_videos = path == "video_dataset_config.py" or b"VideoBaseDataset" in text or b"ConcatVideoDataset" in text
        if about_videos and path != "__init__.py":
            nodes = ast.walk(ast.parse(text))
            words |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return words


def _stems(name: str) -> set[str]:
    """A name, and what stands in it before a ``_`` or ``-``: VLMEvalKit puts some names together from such parts."""
    return {name} | {name[:i] for i, letter in enumerate(name) if letter in "_-" and i}
