"""Manages a conversion's output folder: claims it, continues after a kill, and marks it finished only
at the end.

A conversion keeps a journal, ``unfinished.jsonl``, from before its first byte until after its last. The first
line says what is converted to what; each further line records one written tensor with its SHA-256. Started
again with the same arguments on the same source, a conversion reads those tensors back, keeps the ones whose
bytes have that hash and writes the others. Whenever it was killed, the result is that of an undisturbed run.
With other arguments it is refused.

A folder with a journal is unfinished, and one without is finished. Data files get their names only at the
end; then the manifest (or a Hugging Face folder's small files) is written, and then the journal is deleted. A
lock on the journal keeps a second conversion out of the folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_vl.weights.manifest import FORMAT, MANIFEST, UNFINISHED
from megatron_vl.weights.tensor_files import TensorWriter, WeightsError, partial_path

MEGATRON_FILES = (
    r"(manifest\.json|(weights-\d+-of-\d+|tp\d+_pp\d+|ep\d+_etp\d+_pp\d+)\.safetensors)(\.partial)?"
)
HF_FILES = r"model(-\d+-of-\d+)?\.safetensors(\.partial|\.index\.json)?"
"""Names of the files that a conversion or an export writes; ``--force`` removes nothing else."""


class DiskFull(WeightsError):
    """There is not enough room for the remaining files. What was written stays, so the
    conversion can continue."""


class WriteJournal:
    """The journal of a folder, locked for this process.

    Attributes:
        work: what is converted to what; None for a new journal, or one whose first line was never completed.
        done: (file, tensor) -> SHA-256 of each written tensor.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / UNFINISHED
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._write_lock = threading.Lock()
        try:
            self._claim()
            self.work, self.done, self._end = self._read()
        except BaseException:
            os.close(self._fd)
            raise

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileExistsError(
                f"another process is writing to {self.path.parent}; wait for it, or give another --out"
            ) from None
        except OSError:
            return  # the file system has no locks
        if not self.path.exists() or not os.path.samestat(os.fstat(self._fd), os.stat(self.path)):
            raise FileExistsError(f"another process has just finished writing to {self.path.parent}")

    def _read(self) -> tuple[dict[str, Any] | None, dict[tuple[str, str], str], int]:
        """Work, finished tensors and the end of the last whole line, because a kill may leave
        an incomplete one."""
        data = self.path.read_bytes()
        lines = data[: data.rfind(b"\n") + 1].splitlines()
        try:
            work = json.loads(lines[0]) if lines else None
            done = {(file, name): digest for file, name, digest in map(json.loads, lines[1:])}
        except (ValueError, TypeError) as error:
            raise WeightsError(
                f"{self.path} is damaged ({error}); empty its folder, or give another --out"
            ) from error
        return work, done, sum(len(line) + 1 for line in lines)

    def begin(self, work: dict[str, Any]) -> None:
        """Discards the journal's contents and writes its first line."""
        os.ftruncate(self._fd, 0)
        self.work = work
        self.done = {}
        self._end = 0
        self._append(work)

    def resume(self) -> None:
        """Continues after the last whole line."""
        os.ftruncate(self._fd, self._end)

    def record(self, file: str, name: str, digest: str) -> None:
        """Records that a tensor has been written."""
        with self._write_lock:
            self.done[file, name] = digest
            self._append([file, name, digest])

    def _append(self, value: Any) -> None:
        line = memoryview(json.dumps(value, separators=(",", ":")).encode() + b"\n")
        while len(line):
            written = os.pwrite(self._fd, line, self._end)
            line = line[written:]
            self._end += written

    def close(self, *, remove: bool) -> None:
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


@dataclass
class Output:
    """The files of a conversion while they are being written.

    Attributes:
        kept: (file, tensor) pairs of an earlier attempt that need not be written again.
        digests: (file, tensor) -> SHA-256 of everything written so far.
    """

    writers: dict[str, TensorWriter]
    kept: frozenset[tuple[str, str]]
    _journal: WriteJournal = field(repr=False)

    @property
    def digests(self) -> Mapping[tuple[str, str], str]:
        return self._journal.done

    def record(self, file: str, name: str, digest: str) -> None:
        self._journal.record(file, name, digest)

    def kept_files(self) -> int:
        """Number of files in which every tensor was kept."""
        return sum(
            all((file, name) in self.kept for name in writer.names()) for file, writer in self.writers.items()
        )

    def commit(self) -> None:
        """Renames all files to their final names after their bytes are on the disk."""
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
    """Claims ``out`` and opens a file for each header; the caller writes, commits and completes the folder.

    After a disk error or an interruption, what was written stays for the next attempt. If the weights are at
    fault, everything is removed.

    Args:
        work: what is converted to what, JSON types only; an unfinished ``out`` with equal work is continued.
        force: replace the weights (a HF checkpoint if ``hf``) or another unfinished conversion in ``out``.
        say: receives a line about what was kept of an earlier attempt.

    Raises:
        FileExistsError: ``out`` holds something else.
        ValueError: ``out`` is one of ``inputs``.
    """
    journal = _claim(
        out, inputs, json.loads(json.dumps({"kind": "Hugging Face" if hf else "Megatron"} | work)), force, hf
    )
    writers: dict[str, TensorWriter] = {}
    try:
        _tidy(out, headers, bool(journal.done), hf)
        for name, header in headers.items():
            writers[name] = TensorWriter(out / name, header, keep=True)
        output = Output(writers, _verified(journal, writers, workers), journal)
        _check_space(out, writers)
        if journal.done:
            total = sum(len(writer.names()) for writer in writers.values())
            say(
                f"continuing: {output.kept_files()} of {len(writers)} files kept, "
                f"{len(output.kept)} of {total} tensors"
            )

        yield output
    except BaseException as error:
        for writer in writers.values():
            writer.close()
        useless = not journal.done or isinstance(error, WeightsError) and not isinstance(error, DiskFull)
        if useless:
            _remove_weights(out, hf)
        journal.close(remove=useless)
        raise

    journal.close(remove=True)


def _claim(out: Path, inputs: Sequence[Path], work: dict[str, Any], force: bool, hf: bool) -> WriteJournal:
    """Returns the folder's journal if this conversion may write there; removes what is to be replaced."""
    if any(out.resolve() == path.resolve() for path in inputs):
        raise WeightsError(f"--out {out} is the input folder")
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out {out} is a file")

    if not (out / UNFINISHED).is_file():
        _check_replaceable(out, force, hf)
    out.mkdir(parents=True, exist_ok=True)
    journal = WriteJournal(out)
    try:
        if journal.work == work:
            journal.resume()
            return journal

        if journal.work is None:
            _check_replaceable(out, force, hf)
        elif not force or journal.work.get("kind") != work["kind"]:
            raise FileExistsError(
                f"--out {out} holds an unfinished conversion, and {_difference(journal.work, work)}; repeat "
                "its command to continue it, give --force to start over, or give another --out"
                if journal.work.get("kind") == work["kind"]
                else (
                    f"--out {out} holds an unfinished conversion to {journal.work.get('kind')} weights; "
                    "give another --out"
                )
            )

        journal.begin(work)  # before any removal: from here on the folder is unfinished
        _remove_weights(out, hf)
        return journal
    except BaseException:
        journal.close(remove=journal.work is None)
        raise


def _check_replaceable(out: Path, force: bool, hf: bool) -> None:
    """Raises :class:`FileExistsError` unless ``out`` is empty, or holds such weights and
    ``force`` is given."""
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


def _tidy(out: Path, headers: dict[str, bytes], going_on: bool, hf: bool) -> None:
    """Makes all files partial again. A manifest goes first; without it, the journal would
    already be deleted."""
    for path in sorted(_weights_in(out, hf), key=lambda path: path.name != MANIFEST):
        if path.name in headers and going_on and not partial_path(path).exists():
            os.replace(path, partial_path(path))
        elif path.name.removesuffix(".partial") not in headers or not path.name.endswith(".partial"):
            path.unlink()


def _verified(
    journal: WriteJournal, writers: dict[str, TensorWriter], workers: int
) -> frozenset[tuple[str, str]]:
    """The tensors in the journal whose bytes are in place."""

    def same(item: tuple[tuple[str, str], str]) -> bool:
        (file, name), digest = item
        return writers[file].stored_sha256(name) == digest

    items = [
        item
        for item in journal.done.items()
        if item[0][0] in writers and item[0][1] in writers[item[0][0]].names()
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
