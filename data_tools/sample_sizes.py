"""Writes the sizes of all samples of a data set, from which a run plans its batches.

Only the text of the samples is read and tokenized. The result of each shard goes into a file of its own, so
that a killed run continues and several nodes can share the work; at the end, they are joined into the files
that :mod:`megatron_vl.data.source.sizes` describes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.errors import FatalSampleError
from numpy.typing import NDArray

from megatron_vl import durable
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import RawSample, RowEncoder, grid_of, stored_video
from megatron_vl.data.sample.chat import ChatError, TemplateError
from megatron_vl.data.source.bad_samples import NOT_IN_TEMPLATE
from megatron_vl.data.source.description import META, SIZES, DataSet, read_description
from megatron_vl.data.source.location import location
from megatron_vl.data.source.sizes import MEDIUM, SAMPLE, SHARDS, Medium, data_sets, has_sizes, text_id
from megatron_vl.errors import UserError
from megatron_vl.processes import end_with_parent
from megatron_vl.spec.families import ModelSpec

from .parts import Part
from .sources import Reader, Source

Progress = Callable[[str], None]


class SizesWriteError(UserError, ValueError):
    """Sizes that cannot be written. The message says why."""


@dataclass(frozen=True)
class Indexed:
    """What was done for one data set."""

    path: Path
    samples: int
    unusable: int
    reasons: dict[str, int]
    """How many samples are unusable for each reason."""
    media: int
    bytes: int
    seconds: float
    """0 if the sizes were there."""

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


@dataclass(frozen=True)
class IndexedPart:
    """What one of several nodes did for one data set."""

    path: Path
    measured: int
    """Shards that this call measured."""
    left: int
    """Shards that no call has measured yet. They belong to other parts."""
    joined: bool
    """Whether the sizes of the whole data set were there."""
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


def index(
    data: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[Indexed]:
    """Writes the sizes of a data set, or of all data sets of a metadataset. Those that are there stay.

    Raises:
        SizesWriteError: a data set is not on a local disk, its shards cannot be read, or its folder cannot be
            written.
        LoaderError, DescriptionError: there is no data set.
        ChatError, PixelError, FileNotFoundError: the tokenizer, template or processor cannot be used.
    """
    name = text_id(hf_dir, spec, data)
    encoder = RowEncoder(data, spec, hf_dir)
    return [_index(one, name, encoder, workers, progress) for one in _local_sets(data)]


def index_part(
    data: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    part: Part,
    workers: int = 1,
    progress: Progress | None = None,
) -> list[IndexedPart]:
    """Measures every ``part.count``-th shard; :func:`index` joins the results, and measures what is left.

    Raises:
        As :func:`index`.
    """
    name = text_id(hf_dir, spec, data)
    encoder = RowEncoder(data, spec, hf_dir)
    return [_index_part(one, name, encoder, part, workers, progress) for one in _local_sets(data)]


def _local_sets(data: DataConfig) -> list[DataSet]:
    found = data_sets(read_description(location(data.path)))
    for one in found:
        if not isinstance(one.path, Path):
            raise SizesWriteError(
                f"{one.path} is in an object store; index the local folder, then copy {META} too"
            )
    return found


def _index(data: DataSet, name: str, encoder: RowEncoder, workers: int, progress: Progress | None) -> Indexed:
    done = _folder(data, name)
    if has_sizes(data, name):
        return _summary(done, 0.0)

    start = time.monotonic()
    with _work(data, name) as work:
        tasks = _tasks_of(data, encoder, work)
        _measure(tasks, f"shards of {data.path}", workers, progress)

        joined = work / f"joined-{_unique()}"
        joined.mkdir()
        _join(joined, tasks, data.uuid)
        durable.sync_tree(joined)
        if not has_sizes(data, name):
            shutil.rmtree(done, ignore_errors=True)  # of an earlier content
        durable.rename(joined, done)
        shutil.rmtree(work, ignore_errors=True)
    return _summary(done, time.monotonic() - start)


def _index_part(
    data: DataSet, name: str, encoder: RowEncoder, part: Part, workers: int, progress: Progress | None
) -> IndexedPart:
    path = _data_folder(_folder(data, name))
    if has_sizes(data, name):
        return IndexedPart(path, 0, 0, True, 0.0)

    start = time.monotonic()
    measured = left = 0
    with _work(data, name) as work:
        tasks = _tasks_of(data, encoder, work)
        own = tasks[part.index :: part.count]
        measured = _measure(own, f"shards of part {part} of {data.path}", workers, progress)
        left = sum(not task.part.is_file() for task in tasks)
    joined = has_sizes(data, name)
    return IndexedPart(path, measured, 0 if joined else left, joined, round(time.monotonic() - start, 3))


def _folder(data: DataSet, name: str) -> Path:
    assert isinstance(data.path, Path)
    return data.path / META / SIZES / name


def _data_folder(sizes: Path) -> Path:
    return sizes.parents[2]


@contextmanager
def _work(data: DataSet, name: str) -> Iterator[Path]:
    """The folder of the shards' results; those of another content are not continued.

    Several processes may work in it, on one machine or several: each writes files of its own and renames them
    when they are whole. Whoever is first with the sizes removes the folder, and the others find them done.

    Raises:
        SizesWriteError: something in it cannot be written.
    """
    done = _folder(data, name)
    work = done.with_name(f"{done.name}-{data.uuid[:8]}{durable.PARTIAL}")
    try:
        work.mkdir(parents=True, exist_ok=True)
        yield work
    except OSError as error:
        if not has_sizes(data, name):
            raise SizesWriteError(
                f"{done} cannot be written ({error}); nothing is lost: fix this and start again"
            ) from error
        shutil.rmtree(work, ignore_errors=True)


def _unique() -> str:
    """A part of a name that no other process takes."""
    return f"{socket.gethostname()}-{os.getpid()}"


def _summary(folder: Path, seconds: float) -> Indexed:
    samples, media = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("samples", "media"))
    held = sum(file.stat().st_size for file in folder.iterdir())
    unusable = int((samples["tokens"] == 0).sum())
    shards = json.loads((folder / SHARDS).read_text())["shards"].values()
    reasons = sum((Counter(shard["unusable"]) for shard in shards), Counter[str]())
    return Indexed(_data_folder(folder), len(samples), unusable, reasons, len(media), held, round(seconds, 3))


# --- One shard after the other ------------------------------------------------------------------------------


@dataclass
class _Task:
    source: Source
    shard: int
    encoder: RowEncoder
    part: Path
    """The file of its results."""

    @property
    def name(self) -> str:
        return self.source.shards[self.shard]

    @property
    def samples(self) -> int:
        return self.source.starts[self.shard + 1] - self.source.starts[self.shard]


_tasks: list[_Task] = []
"""What is measured now. Set before the worker processes are forked, so that none gets a tokenizer through a
pipe."""
_readers: dict[str, Reader] = {}
"""The reader of each split in this process. To make one takes as long as its split has shards."""
PASSING = ("reading takes too long", "shard missing", "shard unreadable")
"""Reasons for which a sample cannot be read that are the storage's and not the sample's."""


def _tasks_of(data: DataSet, encoder: RowEncoder, work: Path) -> list[_Task]:
    """One task for each shard, in order. A shard of two splits has one."""
    tasks: dict[str, _Task] = {}
    for source in [Source.whole(data, split) for split, names in data.splits.items() if names]:
        for number, name in enumerate(source.shards):
            tasks.setdefault(name, _Task(source, number, encoder, work / f"{len(tasks)}.npz"))
    return list(tasks.values())


def _measure(tasks: Sequence[_Task], name: str, workers: int, progress: Progress | None) -> int:
    """Writes the files that are missing. Returns their number."""
    _tasks[:] = [task for task in tasks if not task.part.is_file()]
    missing = len(_tasks)
    start = time.monotonic()

    try:
        for done, _ in enumerate(_run(missing, workers), start=1):
            if progress:
                rate = done / max(time.monotonic() - start, 1e-9)
                progress(f"{done} of {missing} {name}, {(missing - done) / rate:.0f} s left")
    finally:
        for reader in _readers.values():
            reader.close()
        _readers.clear()
        _tasks.clear()
    return missing


def _run(missing: int, workers: int) -> Iterator[None]:
    if workers <= 1 or missing <= 1:
        yield from map(_measure_shard, range(missing))
        return
    # Forked processes would not survive the tokenizer's own threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork")
    # A worker whose parent was killed would wait for its next shard for ever.
    with ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool:
        yield from pool.map(_measure_shard, range(missing))


def _measure_shard(number: int) -> None:
    task = _tasks[number]
    if task.part.is_file():  # another process was faster
        return
    source = task.source
    if source.split not in _readers:
        _readers[source.split] = Reader(source, task.encoder.data.sample_timeout_s)
    reader = _readers[source.split]
    samples, media, unusable = [], [np.zeros(0, MEDIUM)], []
    count = all_turns = 0
    for place in range(source.starts[task.shard], source.starts[task.shard + 1]):
        tokens, turns, found, reason = measure(task.encoder, _read(reader, place))
        all_turns += turns
        unusable += [reason] if reason else []
        media.append(found)
        count += len(found)
        samples.append((tokens, count))

    partial = task.part.with_name(f"{task.part.stem}-{_unique()}{durable.PARTIAL}")
    with partial.open("wb") as file:
        np.savez(
            file,
            samples=np.array(samples, SAMPLE),
            media=np.concatenate(media),
            turns=all_turns,
            unusable=np.array(unusable, str),
        )
    durable.put(partial, task.part)


def _read(reader: Reader, place: int) -> RawSample | None:
    """A sample. Raises :class:`SizesWriteError` if the storage fails: the sample itself may be whole."""
    try:
        sample = reader.read(place, whole=False)
    except FatalSampleError as error:
        raise SizesWriteError(f"{error}; then start `megatron-vl data index` again") from error
    if sample is not None and sample.broken and sample.broken[0] in PASSING:
        raise SizesWriteError(
            f"{sample.broken[0]}: {sample.broken[1]}. Start `megatron-vl data index` again when the storage"
            " answers: it continues"
        )
    return sample


def measure(encoder: RowEncoder, sample: RawSample | None) -> tuple[int, int, NDArray[np.void], str]:
    """The tokens of a sample's text, the assistant's turns, its media as :data:`MEDIUM`, and "". If it cannot
    be used: no tokens, turns or media, and the reason. A fault of the machine is none of the sample.

    Args:
        sample: None: the data set's description excludes it.

    Raises:
        SizesWriteError: files or memory fail.
    """
    none = np.zeros(0, MEDIUM)
    try:
        if sample is None or sample.broken:
            return 0, 0, none, sample.broken[0] if sample and sample.broken else ""
        record = json.loads(sample.text or b"")
        media = np.array([_medium(item) for item in record["media"]], MEDIUM)
        grids = [grid_of(item, encoder.settings) for item in record["media"]]
        token_ids, _ = encoder.chat.encode(record["messages"], grids, record.get("tools", ()))
    except TemplateError:
        return 0, 0, none, NOT_IN_TEMPLATE
    except Exception as error:  # a sample from outside may cause any error; a run counts and lists it
        cause = error.__cause__ if isinstance(error, ChatError) else error
        if isinstance(cause, OSError | MemoryError):
            raise SizesWriteError(
                f"sample {sample.__key__ if sample else ''}: {type(cause).__name__}: {cause}. Start"
                " `megatron-vl data index` again when the machine has the files and the memory: it continues"
            ) from error
        return 0, 0, none, "cannot be encoded"
    turns = sum(message["role"] == "assistant" for message in record["messages"])
    return len(token_ids) - sum(map(encoder.chat.medium_tokens, grids)), turns, media, ""


def _medium(item: dict[str, Any]) -> Medium:
    height, width = item["height"], item["width"]
    if item["kind"] == "image":
        return height, width, 0, 0.0, 0
    video = stored_video(item)
    return height, width, video.frames, video.fps, int(video.sampling == "whole")


def _join(joined: Path, tasks: Sequence[_Task], content: str) -> None:
    """Joins the files of the shards."""
    counts = []
    shards = {}
    for task in tasks:
        with np.load(task.part) as held:
            if len(held["samples"]) != task.samples:
                raise SizesWriteError(
                    f"{task.part} does not hold {task.samples} samples of {task.name}; delete"
                    f" {task.part.parent}"
                )
            counts.append(len(held["media"]))
            reasons = Counter(held["unusable"].tolist())
            turns = int(held["turns"])
            shards[task.name] = {"samples": task.samples, "turns": turns, "unusable": reasons}

    all_samples = np.lib.format.open_memmap(
        joined / "samples.npy", mode="w+", dtype=SAMPLE, shape=(sum(task.samples for task in tasks),)
    )
    all_media = np.lib.format.open_memmap(joined / "media.npy", mode="w+", dtype=MEDIUM, shape=(sum(counts),))
    at = before = 0
    for task, media in zip(tasks, counts, strict=True):
        with np.load(task.part) as held:
            samples = held["samples"]
            samples["media_end"] += before
            all_samples[at : at + len(samples)] = samples
            all_media[before : before + media] = held["media"]
        at, before = at + len(samples), before + media
    all_samples.flush()
    all_media.flush()
    durable.write(joined / SHARDS, json.dumps({"content": content, "shards": shards}).encode())
