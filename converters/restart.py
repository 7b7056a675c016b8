"""Manages a conversion's output folder: locks it, continues after a kill, and marks it as finished.

A conversion keeps a journal, ``unfinished.jsonl``, from before its first byte until after its last one. The
first line describes the conversion. Each further line records one written tensor with its SHA-256. If the
conversion is started again with the same arguments on the same source, it reads those tensors back, keeps the
ones whose hash is unchanged, and writes the others. So the result does not depend on when it was killed. With
other arguments, it is refused.

A folder with a journal is unfinished, and a folder without one is finished. At the end, data files get their
final names, then the manifest (or a Hugging Face folder's small files) is written, and then the journal is
deleted. A lock on the journal keeps a second conversion out of the folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl.journal import Journal
from megatron_vl.weights.manifest import FORMAT, MANIFEST, UNFINISHED
from megatron_vl.weights.tensor_files import TensorWriter, WeightsError, partial_path

MEGATRON_FILES = (
    r"(manifest\.json|(weights-\d+-of-\d+|tp\d+_pp\d+|ep\d+_etp\d+_pp\d+)\.safetensors)(\.partial)?"
)
HF_FILES = r"model(-\d+-of-\d+)?\.safetensors(\.partial|\.index\.json)?"
"""Names of the files that a conversion (above) or an export writes. ``--force`` removes no other files."""


class DiskFull(WeightsError):
    """The disk has too little space for the remaining files. Written files stay, to continue later."""


@dataclass
class Output:
    """The files of a conversion while they are being written.

    Attributes:
        kept: (file, tensor) pairs that an earlier attempt wrote and that need not be written again.
        digests: (file, tensor) -> SHA-256, for all tensors written so far.
    """

    writers: dict[str, TensorWriter]
    kept: frozenset[tuple[str, str]]
    digests: dict[tuple[str, str], str]
    _journal: Journal = field(repr=False)

    def record(self, file: str, name: str, digest: str) -> None:
        self.digests[file, name] = digest
        self._journal.add([file, name, digest])

    def kept_files(self) -> int:
        """Number of files in which every tensor was kept."""
        return sum(
            all((file, name) in self.kept for name in writer.names()) for file, writer in self.writers.items()
        )

    def commit(self) -> None:
        """Gives all files their final names, once their bytes are on the disk."""
        for writer in self.writers.values():
            writer.commit(sync=True)


@contextmanager
def writing(
    out: Path,
    inputs: Sequence[Path],
    headers: dict[str, bytes],
    work: dict[str, Any],
    *,
    force: bool,
    workers: int,
    hf: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Output]:
    """A context that locks ``out`` and opens a file for each header.

    The caller writes the tensors, commits the files and completes the folder. After a disk error or an
    interruption, written files stay for the next attempt. If the weights are at fault, all files are removed.

    Args:
        inputs: the folders that are read.
        headers: file -> its header.
        work: the description of the conversion, in JSON types. If ``out`` is unfinished and its description
            is equal, the conversion continues.
        force: whether to replace the weights in ``out`` (a HF checkpoint if ``hf``), or another unfinished
            conversion there.
        workers: number of threads that read back the tensors of an earlier attempt.
        hf: whether ``out`` becomes a Hugging Face folder.
        say: receives a line about the files and tensors that were kept.

    Raises:
        FileExistsError: ``out`` holds something that is not to be replaced.
        WeightsError: ``out`` is one of ``inputs``.
        DiskFull: the disk has too little space.
    """
    work = json.loads(json.dumps({"kind": "Hugging Face" if hf else "Megatron"} | work))
    journal, done = _claim(out, inputs, work, force, hf)
    writers: dict[str, TensorWriter] = {}
    try:
        _tidy(out, headers, bool(done), hf)
        for name, header in headers.items():
            writers[name] = TensorWriter(out / name, header, keep=True)
        output = Output(writers, _verified(done, writers, workers), done, journal)
        _check_space(out, writers)
        if done:
            say(_continuing(output))

        yield output

    except BaseException as error:
        for writer in writers.values():
            writer.close()
        useless = not done or isinstance(error, WeightsError) and not isinstance(error, DiskFull)
        if useless:
            _remove_weights(out, hf)
        journal.close(remove=useless)
        raise

    journal.close(remove=True)


def _continuing(output: Output) -> str:
    total = sum(len(writer.names()) for writer in output.writers.values())
    return (
        f"continuing: {output.kept_files()} of {len(output.writers)} files kept, "
        f"{len(output.kept)} of {total} tensors"
    )


def _claim(
    out: Path, inputs: Sequence[Path], work: dict[str, Any], force: bool, hf: bool
) -> tuple[Journal, dict[tuple[str, str], str]]:
    """Checks that this conversion may write to ``out``, and removes the files that it replaces.

    Returns:
        The locked journal of the folder, and its (file, tensor) -> SHA-256.
    """
    if any(out.resolve() == path.resolve() for path in inputs):
        raise WeightsError(f"--out {out} is the input folder")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out {out} is a file")

    if not (out / UNFINISHED).is_file():
        _check_replaceable(out, force, hf)
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal(out / UNFINISHED, _entry, alone=True)
    begun, *written = [*journal.known()] or [None]
    if not isinstance(begun, dict):  # damaged
        begun, written = None, []

    try:
        if begun == work:
            return journal, {(file, name): digest for file, name, digest in written}

        if begun is None:
            _check_replaceable(out, force, hf)
        elif not force or begun.get("kind") != work["kind"]:
            raise FileExistsError(_unfinished(out, begun, work))

        journal.restart()
        journal.add(work)  # before any removal, so that the folder counts as unfinished from now on
        begun = work
        _remove_weights(out, hf)
        return journal, {}

    except BaseException:
        journal.close(remove=begun is None)
        raise


def _entry(value: Any) -> Any:
    """A line of the journal: the description of the work, or [file, tensor, SHA-256]."""
    if not isinstance(value, dict):
        [_, _, _] = value
    return value


def _unfinished(out: Path, then: dict[str, Any], now: dict[str, Any]) -> str:
    """The message if ``out`` holds an unfinished conversion ``then`` that differs from ``now``."""
    if then.get("kind") != now["kind"]:
        return f"--out {out} holds an unfinished conversion to {then.get('kind')} weights; give another --out"
    return (
        f"--out {out} holds an unfinished conversion, and {_difference(then, now)}; repeat "
        "its command to continue it, give --force to start over, or give another --out"
    )


def _check_replaceable(out: Path, force: bool, hf: bool) -> None:
    """Raises FileExistsError unless ``out`` is empty, or holds such weights and ``force`` is given."""
    present = [path for path in out.iterdir() if path.name != UNFINISHED] if out.is_dir() else []
    if not present:
        return
    mark = out / ("config.json" if hf else MANIFEST)
    only_weights = len(_weights_in(out, hf)) == len(present)
    if not (only_weights or mark in present and (hf or _is_manifest(mark))):
        raise FileExistsError(
            f"--out {out} is not empty and holds no checkpoint of this kind, so nothing in it is replaced; "
            "give another folder"
        )
    if not force:
        raise FileExistsError(
            f"--out {out} is not empty; give another folder, or --force to replace the checkpoint there"
        )


def _is_manifest(path: Path) -> bool:
    try:
        manifest = json.loads(path.read_text())
    except ValueError:
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


def _weights_in(out: Path, hf: bool) -> list[Path]:
    names = re.compile(HF_FILES if hf else MEGATRON_FILES)
    return [path for path in out.iterdir() if names.fullmatch(path.name)]


def _remove_weights(out: Path, hf: bool) -> None:
    """Removes the weights, the manifest first, so that the remaining files do not count as complete."""
    for path in sorted(_weights_in(out, hf), key=lambda path: path.name != MANIFEST):
        path.unlink()


def _difference(then: Any, now: Any, what: str = "") -> str:
    """Describes the first field in which two descriptions of a conversion differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *then]:
            if then.get(key) != now.get(key):
                return _difference(then.get(key), now.get(key), f"{what} {key}".strip())
    return f"{what} was {_short(then)}, but is now {_short(now)}"


def _short(value: Any) -> str:
    return "absent" if value is None else str(value)


def _tidy(out: Path, headers: dict[str, bytes], continues: bool, hf: bool) -> None:
    """Gives all files their partial names again, and removes those that are not needed.

    The manifest is removed first, so that the remaining files do not count as complete.
    """
    for path in sorted(_weights_in(out, hf), key=lambda path: path.name != MANIFEST):
        if path.name in headers and continues and not partial_path(path).exists():
            os.replace(path, partial_path(path))
        elif path.name.removesuffix(".partial") not in headers or not path.name.endswith(".partial"):
            path.unlink()


def _verified(
    done: dict[tuple[str, str], str], writers: dict[str, TensorWriter], workers: int
) -> frozenset[tuple[str, str]]:
    """The (file, tensor) pairs in the journal whose bytes in the files still have the recorded hash."""

    def same(item: tuple[tuple[str, str], str]) -> bool:
        (file, name), digest = item
        return writers[file].stored_sha256(name) == digest

    items = [
        item for item in done.items() if item[0][0] in writers and item[0][1] in writers[item[0][0]].names()
    ]
    with ThreadPoolExecutor(max(1, workers)) as pool:
        return frozenset(item[0] for item, kept in zip(items, pool.map(same, items), strict=True) if kept)


def _check_space(folder: Path, writers: Mapping[str, TensorWriter]) -> None:
    free = shutil.disk_usage(folder).free
    size = sum(max(0, writer.size - writer.allocated) for writer in writers.values())
    if free < size:
        raise DiskFull(
            f"{folder}: {size / 1e9:.1f} GB must be written, but the disk has {free / 1e9:.1f} GB free"
        )
