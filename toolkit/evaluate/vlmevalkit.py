"""Prepares VLMEvalKit 0.0.20 to run here: local files instead of downloads, work-arounds, no judge
of its own."""

from __future__ import annotations

import abc
import csv
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from multiprocessing.pool import ThreadPool
from pathlib import Path, PurePosixPath
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

from toolkit.evaluate.sources import PICTURES_AND_VIDEOS, Sources
from toolkit.evaluate.table import MEDIA, TableError, strings

ACCEPTED = "any table"
"""Replaces both the MD5 of every file and the expected MD5, so any table passes; the report shows
the real one."""
RELIED_ON = "relied on"
"""A line in :class:`NoJudge`'s file: the data set continued without a judgement, so its numbers
are not scores."""
NO_JUDGE = "exact_matching"


class NotInstalled(Exception):
    """VLMEvalKit is installed but cannot be imported."""


def check_import() -> None:
    """Raises NotInstalled if one of VLMEvalKit's packages, or a system library that one of them
    needs, is missing."""
    try:
        import cv2  # noqa: F401  # it is the one that most often lacks a library, and fails within a second
        import vlmeval.dataset  # noqa: F401
    except ImportError as error:
        hint = ""
        if "libGL" in str(error):
            hint = "; install it (Debian: apt install libgl1), or opencv-python-headless for opencv-python"
        raise NotInstalled(f"VLMEvalKit cannot be imported: {error}{hint}") from error


def real(sources: Sources, text: str) -> str:
    """Replaces the paths in a message by those that the user knows."""
    for target, source in sources.links.items():
        text = text.replace(str(target), str(source))
    return text.replace(str(sources.data), str(sources.root))


def missing(sources: Sources) -> str:
    """Names the first picture or video that a table names and a repository lacks, or the
    missing table itself."""
    csv.field_size_limit(sys.maxsize)
    for target, source in sources.links.items():
        below = [path.relative_to(target).parts for path in target.rglob("*")]
        held = {PurePosixPath(*parts[i:]) for parts in below for i in range(len(parts))}
        tables = sorted(target.glob("*.tsv"))
        if not tables and target.parent != sources.data:
            return f"{source / sources.parts[0]}.tsv is missing"
        for path in chain.from_iterable(map(_media, tables)):
            if path.suffix.lower() in PICTURES_AND_VIDEOS and path not in held:
                return f"{source / path} is missing"
    return ""


def _media(table: Path) -> Iterator[PurePosixPath]:
    """All file names in the cells of a table, including partial paths."""
    with table.open(encoding="utf-8-sig", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t"):
            cells = [cell for column, cell in row.items() if MEDIA.match(str(column))]
            yield from map(PurePosixPath, strings(cells))


def _refused(sources: Sources, wanted: str) -> TableError:
    """The error to raise where VLMEvalKit would download."""
    path = sources.root if "://" in wanted else sources.root / wanted.rpartition("/")[2]
    otherwise = "VLMEvalKit finds it incomplete" if path.exists() else f"{path} is missing"
    unpacked = "" if path == sources.root else ", with its archives unpacked"
    return TableError(
        f"--data {sources.name}: {missing(sources) or otherwise}; VLMEvalKit would download {wanted[:200]}, "
        f"but nothing is downloaded or unpacked here: put it in {path}{unpacked}"
    )


def install(sources: Sources) -> None:
    """Replaces VLMEvalKit's functions that find and download files by ``sources``."""
    import huggingface_hub
    import vlmeval.dataset
    from vlmeval.smp import file as files
    from vlmeval.smp import misc

    own_cache_path = _own_cache_path()

    def get_cache_path(repo_id: str, branch: str | None = "main", repo_type: str = "datasets") -> str | None:
        return sources.repository(own_cache_path, repo_id, branch)

    def refuse(*arguments: Any, repo_id: str = "", dataset_id: str = "", **_: Any) -> NoReturn:
        raise _refused(sources, str(repo_id or dataset_id or (arguments[0] if arguments else "")))

    accept_tables()
    new: dict[str, Callable[..., Any]] = {"get_cache_path": get_cache_path}
    new |= dict.fromkeys(("snapshot_download", "hf_hub_download", "download_file"), refuse)
    for module in _modules("vlmeval"):
        for attribute in new.keys() & vars(module).keys():
            setattr(module, attribute, new[attribute])
    huggingface_hub.snapshot_download = refuse  # VDC imports it from there at run time
    huggingface_hub.login = lambda *_, **__: None  # MVBench logs in before it downloads

    vlmeval.dataset.vdc.modelscope_flag_set = misc.modelscope_flag_set  # vdc uses it without importing it
    # Sets that combine several video sets lack an abstract method that they do not use.
    vlmeval.dataset.ConcatVideoDataset.prepare_dataset = lambda *_: None
    for kind in vlmeval.dataset.VIDEO_DATASET:
        abc.update_abstractmethods(kind)
    # For each table of several, VLMEvalKit forks 32 copies of this process to decode pictures.
    files.mp = SimpleNamespace(Pool=lambda _: ThreadPool(os.cpu_count()))


@cache
def accept_tables() -> set[str]:
    """Lets VLMEvalKit accept tables in a known form whatever their MD5. Returns the MD5s that it knows."""
    published: set[Any] = set()
    for module in _modules("vlmeval.dataset"):
        if hasattr(module, "md5"):
            vars(module)["md5"] = lambda _: ACCEPTED
        for kind in [one for one in vars(module).values() if isinstance(one, type)]:
            for attribute, known in list(vars(kind).items()):
                if attribute not in ("MD5", "DATASET_MD5", "MP4_MD5"):
                    continue
                several = isinstance(known, dict)
                published |= set(known.values() if several else [known])
                setattr(kind, attribute, dict.fromkeys(known, ACCEPTED) if several else ACCEPTED)
    return published - {ACCEPTED, "", "None", None}


def checksums(tables: list[Path]) -> dict[str, dict[str, Any]]:
    """Maps each table to its MD5, and whether VLMEvalKit knows that MD5."""
    found = {table.name: hashlib.md5(table.read_bytes()).hexdigest() for table in tables}
    return {name: {"md5": md5, "of VLMEvalKit": md5 in accept_tables()} for name, md5 in found.items()}


def _modules(package: str) -> list[ModuleType]:
    return [module for name, module in list(sys.modules.items()) if f"{name}.".startswith(f"{package}.")]


@cache
def _own_cache_path() -> Callable[..., str | None]:
    from vlmeval.smp.misc import get_cache_path

    return get_cache_path


class NoJudge:
    """Stands in for VLMEvalKit's language-model judge where there is none.

    Args:
        mark: file that gets a line each time the judge is asked.
    """

    fail_msg = "Failed to obtain answer via API."

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def working(self) -> bool:
        """Returns False: some data sets then match answers exactly, others give up."""
        self._note("wanted")
        return False

    def generate(self, *_: Any, **__: Any) -> str:
        """Raises: the data set then continues without an answer, and its result is not a score."""
        self._note(RELIED_ON)
        raise RuntimeError(f"this data set needs a language model as judge, but --judge is {NO_JUDGE}")

    def _note(self, what: str) -> None:
        with self.mark.open("a") as file:
            file.write(what + "\n")


def without_judge(mark: Path) -> None:
    """Replaces every judge by :class:`NoJudge`."""
    for module in _modules("vlmeval"):
        if hasattr(module, "build_judge"):
            vars(module)["build_judge"] = lambda **_: NoJudge(mark)
