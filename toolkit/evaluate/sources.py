"""The files of VLMEvalKit's data sets, as a worker shows them to it: found on this machine, never written, never fetched.

VLMEvalKit 0.0.20 keeps tables in one folder (``$LMUData``) and sets of videos as copies of their Hugging Face repositories. It
compares checksums, downloads and unpacks (also pickles) what does not agree, and writes frames, clips, locks and tables of
its own between the files. Here it gets a folder of its own with links to tables and media; where it would download, the file
that it missed is named.
"""

from __future__ import annotations

import abc
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from data_tools.media import VIDEO_SUFFIXES
from toolkit.evaluate.early import missing_table
from toolkit.evaluate.table import TableError

SHOWN = {f".{suffix}" for suffix in VIDEO_SUFFIXES | {"jpg", "jpeg", "png", "webp", "bmp", "tsv", "csv", "json", "jsonl", "txt"}}
"""Files of a repository that VLMEvalKit gets to see. Archives and pickles are not: it would unpack them."""
SHOWN |= {".srt", ".vtt", ".parquet", ""}


OWN: dict[str, Any] = {}
"""VLMEvalKit's functions by their names, before others were put in their place."""
NOW: dict[str, Any] = {}
"""What stands in their place."""


class Digest(str):
    """An MD5 that VLMEvalKit takes for the one it wants; ``compared`` is told whether it was.

    Tables in the form of a published one are as good as that one here, and the report says which it was.
    """

    compared: Callable[[bool], None]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str) and other:
            self.compared(str.__eq__(self, other))
        return True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Sources:
    """Where this process' VLMEvalKit finds files.

    Args:
        root: ``--lmu-data``.
        data: ``$LMUData`` of this process, its own and fresh.
        tables: folder that all workers share, for copies of the tables.
    """

    def __init__(self, root: Path, data: Path, tables: Path) -> None:
        self.root, self.data, self.tables = root.resolve(), data, tables
        self.folders = [self.root, data]
        """Media may be read from these."""
        self.checksums: dict[str, dict[str, Any]] = {}
        """Table or other checked file -> its MD5, and whether it is the one that VLMEvalKit knows."""
        self.name = ""
        """The data set, in messages."""
        self.parts: list[str] = []
        """Folders of ``root`` that may hold its repository."""
        self.missing: Path | None = None
        """What VLMEvalKit looked for in vain, last of all."""
        self._links: dict[Path, Path] = {}

    # ------------------------------------------------------------------------------------------------------- tables

    def table(self, name: str) -> Path:
        """Puts ``NAME.tsv`` where VLMEvalKit looks for it. Raises TableError when there is none."""
        source = self.root / f"{name}.tsv"
        if "/" in name or not source.is_file():
            raise TableError(missing_table(self.name, source))
        self.tables.mkdir(exist_ok=True)
        copy = self.tables / source.name
        with (self.tables / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():
                shutil.copyfile(source, copy)
        link = self.data / source.name
        if not link.exists():
            link.symlink_to(copy)
        return link

    def offered(self, names: list[str]) -> None:
        """The tables of video sets that lie beside the videos' folders; most sets have none there."""
        for path in sorted(self.root.glob("*.tsv")):
            if any(_letters(path.stem).startswith(_letters(name)) for name in names):  # STI-Bench's is STIBench.tsv too
                self.table(path.stem)
        for folder in ("datasets", "videos"):  # DREAM-1K and MVU-Eval keep their videos in the first, EgoExoBench in the second
            if (self.root / folder).is_dir():
                self.mirror(self.root / folder, self.data / folder)

    # ------------------------------------------------------------------------------------------------- repositories

    def mirror(self, source: Path, target: Path) -> None:
        """Folders of our own with links to the media and texts of ``source``; links that lead out of it are left out."""
        inside = source.resolve()
        if inside.parent.name == "snapshots":  # of Hugging Face's cache: its files are links to blobs/
            inside = inside.parent.parent
        self.folders.append(inside)
        self._links[target] = source
        for folder, _, files in os.walk(source):
            own = target / Path(folder).relative_to(source)
            own.mkdir(parents=True, exist_ok=True)
            for name in files:
                path = (Path(folder) / name).resolve()
                if path.suffix.lower() in SHOWN and path.is_file() and path.is_relative_to(inside) and not (own / name).exists():
                    (own / name).symlink_to(path)

    def repository(self, known: Callable[..., str | None], repo_id: str, branch: str | None, repo_type: str) -> str | None:
        """A data set's repository: ``--lmu-data/NAME``, ``--lmu-data/REPOSITORY``, or what Hugging Face's cache has of it."""
        if repo_type != "datasets":
            return None
        short = repo_id.rpartition("/")[2]
        target = self.data / "repositories" / short / (branch or "main")
        if target in self._links:
            return str(target)
        source = next((self.root / name for name in (*self.parts, short) if (self.root / name).is_dir()), None)
        if source is None:
            cached = known(repo_id, branch=branch, repo_type=repo_type)
            source = Path(cached) if cached else None
        if source is None:
            self.missing = self.data / short
            return None
        self.mirror(source, target)
        return str(target)

    def real(self, text: str) -> str:
        """A message with the paths that the user knows."""
        for target, source in self._links.items():
            text = text.replace(str(target), str(source))
        return text.replace(str(self.data), str(self.root))

    def _download(self, *arguments: Any, **more: Any) -> Any:
        """Stands for every function that VLMEvalKit downloads with."""
        short = str(more.get("repo_id") or more.get("dataset_id") or "").rpartition("/")[2]
        if self.missing is None and short and not (self.root / short).exists():
            self.missing = self.data / short
        wanted = more.get("repo_id") or more.get("dataset_id") or (arguments[0] if arguments else "")
        if self.missing is not None:
            raise TableError(f"--data {self.name}: {self.real(str(self.missing))} is missing; {self._how(str(wanted))}")
        raise TableError(f"--data {self.name}: VLMEvalKit finds it incomplete; {self._how(str(wanted))}")

    def _how(self, wanted: str) -> str:
        short = wanted.rpartition("/")[2]
        place = f"{self.root / short}, with its archives unpacked" if "://" not in wanted and short else str(self.root)
        return f"VLMEvalKit would download {wanted[:200]}; nothing is downloaded or unpacked here: put it in {place}"

    # ------------------------------------------------------------------------------------------------------ patches

    def install(self) -> None:
        """Puts all this in the place of VLMEvalKit's own functions, in every module of it that has been imported."""
        import huggingface_hub
        import vlmeval.dataset
        from vlmeval.smp import file as files
        from vlmeval.smp import misc

        os.environ["VLMEVALKIT_USE_MODELSCOPE"] = "0"  # what it does unless it is told not to
        own = {"get_cache_path": misc.get_cache_path, "md5": files.md5, "download_file": files.download_file}
        own |= {name: getattr(huggingface_hub, name) for name in ("snapshot_download", "hf_hub_download")}
        for name, function in own.items():
            OWN.setdefault(name, function)
        known, checksum = OWN["get_cache_path"], OWN["md5"]

        def get_cache_path(repo_id: str, branch: str | None = "main", repo_type: str = "datasets") -> str | None:
            return self.repository(known, repo_id, branch, repo_type)

        def md5(what: Any) -> str:
            found = Digest(checksum(what))
            name = Path(str(what)[-200:]).name

            def compared(equal: bool) -> None:
                self.checksums[name] = {"md5": str(found), "of VLMEvalKit": equal}

            found.compared = compared
            return found

        new = {"get_cache_path": get_cache_path, "md5": md5}
        new |= dict.fromkeys(("snapshot_download", "hf_hub_download", "download_file"), self._download)
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "vlmeval":
                for attribute, function in new.items():
                    if getattr(module, attribute, None) in (OWN[attribute], NOW.get(attribute, OWN[attribute])):
                        setattr(module, attribute, function)
        NOW.update(new)
        huggingface_hub.snapshot_download = self._download  # VDC takes it from there while it runs
        huggingface_hub.login = lambda *_, **__: None  # MVBench logs in before it downloads
        vlmeval.dataset.vdc.modelscope_flag_set = misc.modelscope_flag_set  # which it does not import
        # Sets of several video sets lack an abstract method that they do not use.
        vlmeval.dataset.ConcatVideoDataset.prepare_dataset = lambda *_: None
        for kind in vlmeval.dataset.VIDEO_DATASET:
            abc.update_abstractmethods(kind)
        # For each table of several it forks 32 copies of this process, to decode pictures.
        files.mp = SimpleNamespace(Pool=lambda _: ThreadPool(os.cpu_count()))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remembers which file VLMEvalKit looked for in vain, last of all, before it wanted to download."""
        own = {name: getattr(os.path, name) for name in ("exists", "isfile", "isdir")}

        def looking(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
            def look(path: Any) -> bool:
                found = ask(path)
                if not found and isinstance(path, (str, os.PathLike)) and str(path).startswith(str(self.data)):
                    self.missing = Path(path) if not Path(path).is_relative_to(self.data / "images") else self.missing
                return found

            return look

        self.missing = None
        for name, ask in own.items():
            setattr(os.path, name, looking(ask))
        try:
            yield
        finally:
            for name, ask in own.items():
                setattr(os.path, name, ask)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name))


def parts_of(name: str) -> tuple[str, list[str]]:
    """What VLMEvalKit makes a data set of: its kind, and the names of its tables or repositories.

    ``kind`` is ``table``, ``tables`` (several in one, ``ConcatDataset``) or ``video``.
    """
    from vlmeval.dataset import DATASET_CLASSES, ConcatDataset, ConcatVideoDataset, supported_video_datasets

    if name in ConcatDataset.DATASET_SETS:
        return "tables", list(ConcatDataset.DATASET_SETS[name])
    made = supported_video_datasets.get(name)
    if made is not None:
        base, kind = str(made.keywords.get("dataset", name)), made.func
    else:
        base, kind = name, next((one for one in DATASET_CLASSES if name in one.supported_datasets()), None)
    if kind is None or getattr(kind, "MODALITY", "IMAGE") != "VIDEO":
        return "table", [name]
    parts = kind.DATASET_SETS.get(base, [base]) if issubclass(kind, ConcatVideoDataset) else [base]
    return "video", list(dict.fromkeys([base, *parts]))
