"""The files of a data set, as VLMEvalKit gets to see them: links in a folder of its own, nothing fetched, nothing unpacked."""

from __future__ import annotations

import csv
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from data_tools.media import VIDEO_SUFFIXES
from toolkit.evaluate.early import parts_of
from toolkit.evaluate.table import MEDIA, TableError, strings

PICTURES_AND_VIDEOS = {f".{suffix}" for suffix in VIDEO_SUFFIXES | {"jpg", "jpeg", "png", "webp", "bmp"}}
SHOWN = PICTURES_AND_VIDEOS | {".tsv", ".csv", ".json", ".jsonl", ".txt", ".srt", ".vtt", ".parquet", ""}
"""Files of a repository that VLMEvalKit gets to see. Archives and pickles are not: it would unpack them."""


def copy_tables(name: str, root: Path, folder: Path) -> None:
    """Copies the tables of a data set, which VLMEvalKit may write over; most sets of videos have none beside their folder."""
    kind, parts = parts_of(name)
    folder.mkdir()
    for path in sorted(root.glob("*.tsv")):
        letters = "".join(filter(str.isalnum, path.stem))  # STI-Bench's table is STIBench.tsv too
        video = kind == "video" and any(letters.startswith("".join(filter(str.isalnum, part))) for part in parts)
        if path.stem in parts or video:
            shutil.copyfile(path, folder / path.name)


class Sources:
    """Where this process' VLMEvalKit finds files.

    Args:
        name: of the data set.
        root: ``--lmu-data``.
        tables: folder with the set's tables.
        data: ``$LMUData`` of this process, its own and empty.
    """

    def __init__(self, name: str, root: Path, tables: Path, data: Path) -> None:
        self.name, self.root, self.data = name, root.resolve(), data
        self.kind, self.parts = parts_of(name)
        self.folders = [self.root, tables, data]
        """Media may be read from these."""
        self.tables: list[Path] = []
        self.links: dict[Path, Path] = {}
        """Folder of links -> folder of the user."""
        self.cached: Callable[..., str | None] = lambda *_, **__: None
        """What Hugging Face's cache has of a repository, and a branch."""
        for table in sorted(tables.glob("*.tsv")):
            _link(data / table.name, table)
            self.tables.append(table)
        for folder in ("datasets", "videos") if self.kind == "video" else ():  # of DREAM-1K and MVU-Eval, of EgoExoBench
            if (self.root / folder).is_dir():
                self._mirror(self.root / folder, data / folder)

    def _mirror(self, source: Path, target: Path) -> None:
        """Links to the media and texts of ``source``; links that lead out of it are left out."""
        inside = source.resolve()
        if inside.parent.name == "snapshots":  # of Hugging Face's cache: its files are links to blobs/
            inside = inside.parent.parent
        self.folders.append(inside)
        self.links[target] = source
        for folder, _, files in os.walk(source):
            own = target / Path(folder).relative_to(source)
            own.mkdir(parents=True, exist_ok=True)
            for path in ((Path(folder) / name) for name in files):
                real = path.resolve()
                if real.suffix.lower() in SHOWN and real.is_file() and real.is_relative_to(inside):
                    _link(own / path.name, real)
                    self.tables += [real] if real.suffix == ".tsv" else []

    def repository(self, repo_id: str, branch: str | None = "main", repo_type: str = "datasets") -> str | None:
        """A set's repository: ``--lmu-data/NAME``, ``--lmu-data/REPOSITORY``, or what Hugging Face's cache has of it."""
        short = repo_id.rpartition("/")[2]
        target = self.data / "repositories" / short / (branch or "main")
        if target not in self.links:
            folders = [self.root / name for name in (*self.parts, short) if (self.root / name).is_dir()]
            cached = None if folders else self.cached(repo_id, branch=branch, repo_type=repo_type)
            if not folders and not cached:
                return None
            self._mirror(folders[0] if folders else Path(str(cached)), target)
        return str(target)

    def real(self, text: str) -> str:
        """A message with the paths that the user knows."""
        for target, source in self.links.items():
            text = text.replace(str(target), str(source))
        return text.replace(str(self.data), str(self.root))

    def missing(self) -> str:
        """The first picture or video that a table names and a repository lacks, or its table, as a part of a message."""
        csv.field_size_limit(sys.maxsize)
        for target, source in self.links.items():
            below = [path.relative_to(target).parts for path in target.rglob("*")]
            held = {PurePosixPath(*parts[i:]) for parts in below for i in range(len(parts))}
            tables = sorted(target.glob("*.tsv"))
            if not tables and target.parent != self.data:
                return f"{source / self.parts[0]}.tsv is missing"
            for table in tables:
                with table.open(encoding="utf-8-sig", newline="") as file:
                    for row in csv.DictReader(file, delimiter="\t"):
                        cells = [cell for column, cell in row.items() if MEDIA.match(str(column))]
                        for path in map(PurePosixPath, strings(cells)):
                            if path.suffix.lower() in PICTURES_AND_VIDEOS and path not in held:
                                return f"{source / path} is missing"
        return ""

    def refuse(self, *arguments: Any, repo_id: str = "", dataset_id: str = "", **_: Any) -> NoReturn:
        """Stands for every function that VLMEvalKit downloads with. Raises TableError."""
        wanted = str(repo_id or dataset_id or (arguments[0] if arguments else ""))
        place = self.root if "://" in wanted else self.root / wanted.rpartition("/")[2]
        what = self.missing() or (f"{place} is missing" if not place.exists() else "VLMEvalKit finds it incomplete")
        raise TableError(
            f"--data {self.name}: {what}; VLMEvalKit would download {wanted[:200]}; nothing is downloaded or unpacked "
            f"here: put it in {place}" + ("" if place == self.root else ", with its archives unpacked")
        )


def _link(path: Path, target: Path) -> None:
    if not path.is_symlink():
        path.symlink_to(target)
