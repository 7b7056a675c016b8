"""Writes the sizes of all samples of a data set, from which a run plans its batches.

Only the text of the samples is read and tokenized. The result of each shard goes into a file of its own, so
that a killed run continues; at the end, they are joined into the files that :mod:`megatron_vl.data.sizes`
describes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.errors import FatalSampleError
from numpy.typing import NDArray

from megatron_vl import durable
from megatron_vl.config import DataConfig
from megatron_vl.data.description import META, SIZES, DataSet, read_description
from megatron_vl.data.loader import RawSample, RowEncoder, grid_of, stored_video
from megatron_vl.data.location import location
from megatron_vl.data.sizes import MEDIUM, SAMPLE, SHARDS, Medium, data_sets, has_sizes, text_id
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec

from .survey import Reader, Source


class SizesWriteError(UserError, ValueError):
    """Sizes that cannot be written. The message says why."""


@dataclass(frozen=True)
class Indexed:
    """What was done for one data set."""

    path: Path
    samples: int
    unusable: int
    media: int
    bytes: int
    seconds: float
    """0 if the sizes were there."""

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


def index(
    data: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    workers: int = 1,
    progress: Callable[[str], None] | None = None,
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
    found = data_sets(read_description(location(data.path)))
    return [_index(one, name, encoder, workers, progress) for one in found]


def _index(
    data: DataSet, name: str, encoder: RowEncoder, workers: int, progress: Callable[[str], None] | None
) -> Indexed:
    if not isinstance(data.path, Path):
        raise SizesWriteError(
            f"{data.path} is in an object store; index the local folder, then copy {META} too"
        )
    done = data.path / META / SIZES / name
    if has_sizes(data, name):
        return _summary(data.path, done, 0.0)

    start = time.monotonic()
    # Parts of another content are not continued.
    work = done.with_name(f"{name}-{data.uuid[:8]}{durable.PARTIAL}")
    try:
        work.mkdir(parents=True, exist_ok=True)
        shards = _measure(data, encoder, work, workers, progress)
        _join(work, shards, data.uuid)
        durable.sync_tree(work)
        shutil.rmtree(done, ignore_errors=True)  # of an earlier content
        durable.rename(work, done)
    except OSError as error:
        raise SizesWriteError(
            f"the sizes of {data.path} cannot be written ({error}); nothing is lost: fix this and start again"
        ) from error
    return _summary(data.path, done, time.monotonic() - start)


def _summary(path: Path, folder: Path, seconds: float) -> Indexed:
    samples, media = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("samples", "media"))
    held = sum(file.stat().st_size for file in folder.iterdir())
    unusable = int((samples["tokens"] == 0).sum())
    return Indexed(path, len(samples), unusable, len(media), held, round(seconds, 3))


# --- One shard after the other ------------------------------------------------------------------------------


@dataclass
class _Task:
    source: Source
    shard: int
    encoder: RowEncoder
    part: Path


_tasks: list[_Task] = []
"""Set before the worker processes are forked, so that none gets a tokenizer through a pipe."""
_readers: dict[str, Reader] = {}
"""The reader of each split in this process. To make one takes as long as its split has shards."""
PASSING = ("reading takes too long", "shard missing", "shard unreadable")
"""Reasons for which a sample cannot be read that are the storage's and not the sample's."""


def _measure(
    data: DataSet, encoder: RowEncoder, work: Path, workers: int, progress: Callable[[str], None] | None
) -> dict[str, int]:
    """Writes a file for each shard. Returns the samples of each, in order."""
    held = [Source.whole(data, split) for split, names in data.splits.items() if names]
    shards: dict[str, int] = {}
    _tasks.clear()
    for source in held:
        for number, (first, end) in enumerate(pairwise(source.starts)):
            if source.shards[number] not in shards:
                _tasks.append(_Task(source, number, encoder, work / f"{len(shards)}.npz"))
                shards[source.shards[number]] = end - first

    missing = [number for number, task in enumerate(_tasks) if not task.part.is_file()]
    start = time.monotonic()
    try:
        for done, _ in enumerate(_run(missing, workers), start=1):
            if progress:
                rate = done / max(time.monotonic() - start, 1e-9)
                left = (len(missing) - done) / rate
                progress(f"{done} of {len(missing)} shards of {data.path}, {left:.0f} s left")
    finally:
        for reader in _readers.values():
            reader.close()
        _readers.clear()
        _tasks.clear()
    return shards


def _run(numbers: list[int], workers: int) -> Iterator[None]:
    if workers <= 1 or len(numbers) <= 1:
        yield from map(_measure_shard, numbers)
        return
    # Forked processes would not survive the tokenizer's own threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_measure_shard, numbers)


def _measure_shard(number: int) -> None:
    task = _tasks[number]
    source = task.source
    if source.split not in _readers:
        _readers[source.split] = Reader(source, task.encoder.data.sample_timeout_s)
    reader = _readers[source.split]
    samples, media = [], [np.zeros(0, MEDIUM)]
    count = 0
    for place in range(source.starts[task.shard], source.starts[task.shard + 1]):
        tokens, found = measure(task.encoder, _read(reader, place))
        media.append(found)
        count += len(found)
        samples.append((tokens, count))

    partial = task.part.with_suffix(durable.PARTIAL)
    with partial.open("wb") as file:
        np.savez(file, samples=np.array(samples, SAMPLE), media=np.concatenate(media))
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


def measure(encoder: RowEncoder, sample: RawSample | None) -> tuple[int, NDArray[np.void]]:
    """The tokens of a sample's text, and its media as :data:`MEDIUM`; no tokens if it cannot be used.

    Args:
        sample: None: the data set's description excludes it.
    """
    unusable = 0, np.zeros(0, MEDIUM)
    try:
        if sample is None or sample.broken:
            return unusable
        record = json.loads(sample.text or b"")
        media = np.array([_medium(item) for item in record["media"]], MEDIUM)
        grids = [grid_of(item, encoder.settings) for item in record["media"]]
        token_ids, _ = encoder.chat.encode(record["messages"], grids, record.get("tools", ()))
    except Exception:  # a sample from outside may cause any error; a run counts and lists it
        return unusable
    return len(token_ids) - sum(map(encoder.chat.medium_tokens, grids)), media


def _medium(item: dict[str, Any]) -> Medium:
    height, width = item["height"], item["width"]
    if item["kind"] == "image":
        return height, width, 0, 0.0, 0
    video = stored_video(item)
    return height, width, video.frames, video.fps, int(video.sampling == "whole")


def _join(work: Path, shards: dict[str, int], content: str) -> None:
    """Joins the files of the shards, and removes them."""
    parts = [work / f"{number}.npz" for number in range(len(shards))]
    counts = []
    for part, (shard, samples) in zip(parts, shards.items(), strict=True):
        with np.load(part) as held:
            if len(held["samples"]) != samples:
                raise SizesWriteError(f"{part} does not hold {samples} samples of {shard}; delete {work}")
            counts.append(len(held["media"]))

    all_samples = np.lib.format.open_memmap(
        work / "samples.npy", mode="w+", dtype=SAMPLE, shape=(sum(shards.values()),)
    )
    all_media = np.lib.format.open_memmap(work / "media.npy", mode="w+", dtype=MEDIUM, shape=(sum(counts),))
    at = before = 0
    for part, media in zip(parts, counts, strict=True):
        with np.load(part) as held:
            samples = held["samples"]
            samples["media_end"] += before
            all_samples[at : at + len(samples)] = samples
            all_media[before : before + media] = held["media"]
        at, before = at + len(samples), before + media
    all_samples.flush()
    all_media.flush()
    durable.write(work / SHARDS, json.dumps({"content": content, "shards": shards}).encode())
    for part in parts:
        part.unlink()
