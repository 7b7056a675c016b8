"""The files that VLMEvalKit can see: links in a folder of its own, without archives or pickles to unpack."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from data_tools.formats.frames import VIDEO_SUFFIXES
from toolkit.evaluate.early import parts_of

PICTURES_AND_VIDEOS = {f".{suffix}" for suffix in VIDEO_SUFFIXES | {"jpg", "jpeg", "png", "webp", "bmp"}}
SHOWN = PICTURES_AND_VIDEOS | {".tsv", ".csv", ".json", ".jsonl", ".txt", ".srt", ".vtt", ".parquet", ""}


class Sources:
    """Fills the folder ``data`` (``$LMUData`` of this process) for the data set ``name``: with its
    ``tables``, and with its media in ``root`` (``--lmu-data``)."""

    def __init__(self, name: str, root: Path, tables: Path, data: Path) -> None:
        self.name = name
        self.root = root.resolve()
        self.data = data
        self.kind, self.parts = parts_of(name)
        self.tables = sorted(tables.glob("*.tsv"))
        self.folders = [self.root, tables, data]  # media may be read from these folders
        self.links: dict[Path, Path] = {}  # folder of links -> the user's folder
        for table in self.tables:
            (data / table.name).symlink_to(table)
        for folder in ("datasets", "videos"):  # for DREAM-1K and MVU-Eval, for EgoExoBench
            if self.kind == "video" and (self.root / folder).is_dir():
                self._mirror(self.root / folder, data / folder)

    def repository(self, cached: Callable[..., str | None], repo_id: str, branch: str | None) -> str | None:
        """Finds a set's repository: ``--lmu-data/NAME``, ``--lmu-data/REPOSITORY``, or
        its ``cached`` copy."""
        short = repo_id.rpartition("/")[2]
        target = self.data / "repositories" / short / (branch or "main")
        if target not in self.links:
            folders = [self.root / name for name in (*self.parts, short) if (self.root / name).is_dir()]
            found = folders[0] if folders else cached(repo_id, branch=branch)
            if found is None:
                return None
            self._mirror(Path(found), target)
        return str(target)

    def _mirror(self, source: Path, target: Path) -> None:
        """Links to the media and texts of ``source``; links that lead outside it are left out."""
        inside = source.resolve()
        if inside.parent.name == "snapshots":  # Hugging Face's cache: its files are links to blobs/
            inside = inside.parent.parent
        self.folders.append(inside)
        self.links[target] = source
        for folder, _, files in os.walk(source):
            own = target / Path(folder).relative_to(source)
            own.mkdir(parents=True, exist_ok=True)
            for name in files:
                real = (Path(folder) / name).resolve()
                if real.suffix.lower() in SHOWN and real.is_file() and real.is_relative_to(inside):
                    (own / name).symlink_to(real)
                    self.tables += [real] if real.suffix == ".tsv" else []
