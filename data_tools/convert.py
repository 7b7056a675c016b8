"""ShareGPT / OpenAI files -> WebDataset shards prepared for Energon.

Records are read as a stream; worker processes decode and measure their media; samples are put into shards in the order
of the input; worker processes write the shards. The main process sees no pixels. What cannot be used is listed in
``quarantine.jsonl`` and counted by reason: samples + refused = records read, always.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .formats import RecordError, read_conversation
from .media import MediaInfo, inspect, read_media, resolve
from .records import BadLine, read_records
from .shards import Entry, IndexWriter, Shard, write_shard

RECORDS_A_TASK = 16


class ConvertError(ValueError):
    """A conversion that cannot start or go on; the message says what to do."""


@dataclass
class Report:
    """What came of a conversion."""

    records: int = 0
    train: int = 0
    val: int = 0
    images: int = 0
    videos: int = 0
    bytes: int = 0
    shards: int = 0
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    """Records by input file and reason."""
    seconds: float = 0.0

    @property
    def samples(self) -> int:
        return self.train + self.val

    def as_json(self) -> dict[str, Any]:
        return {"samples": self.samples, **self.__dict__}


@dataclass(frozen=True)
class Options:
    """How to convert."""

    media_root: Path
    out: Path
    workers: int = 1
    val_fraction: float = 0.0
    samples_per_shard: int = 1000
    bytes_per_shard: int = 256 << 20


def convert(inputs: list[Path], options: Options, progress: Callable[[str], None] | None = None) -> Report:
    """Converts conversation files into one data set.

    Args:
        inputs: JSON or JSON-lines files; their samples follow each other.
        progress: gets a line of text now and then; None: nothing is shown.

    Raises:
        ConvertError: impossible options, an output folder that is not empty, or a worker process that died.
        ReadError: an input that is no JSON.
    """
    _check(inputs, options)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    meter = _Meter(sum(path.stat().st_size for path in inputs), progress)
    report = Report()
    root = options.media_root.resolve()
    with _Pool(options.workers) as pool, (options.out / "quarantine.jsonl").open("w", encoding="utf-8") as quarantine:
        writer = _Writer(pool, root, options, report)
        tasks = ((batch, root) for batch in _batches(_records(inputs, meter)))
        for result in pool.ordered(_verify, tasks):
            for entry in result:
                report.records += 1
                if isinstance(entry, Entry):
                    writer.add(entry)
                else:
                    quarantine.write(json.dumps(entry, ensure_ascii=False) + "\n")
                    by_reason = report.refused.setdefault(entry["file"], {})
                    by_reason[entry["reason"]] = by_reason.get(entry["reason"], 0) + 1
            meter.show(report)
        writer.finish()
    report.seconds = round(time.monotonic() - start, 3)
    # Without the time it took: the same input gives the same files.
    stored = {name: value for name, value in report.as_json().items() if name != "seconds"}
    (options.out / "report.json").write_text(json.dumps(stored, indent=2) + "\n")
    return report


def _check(inputs: list[Path], options: Options) -> None:
    for path in inputs:
        if not path.is_file():
            raise ConvertError(f"--input {path} is not a file")
    if not options.media_root.is_dir():
        raise ConvertError(f"--media-root {options.media_root} is not a folder")
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConvertError(f"--out {options.out} is not an empty folder; give another one or remove it")
    if not 0 <= options.val_fraction < 1:
        raise ConvertError(f"--val-fraction {options.val_fraction} must be at least 0 and below 1")
    if options.workers < 1 or options.samples_per_shard < 1 or options.bytes_per_shard < 1:
        raise ConvertError("--workers, --samples-per-shard and --shard-mb must be at least 1")


def _records(inputs: list[Path], meter: _Meter) -> Iterator[tuple[int, str, int, Any]]:
    """(place among all records, file, number in the file, record)."""
    place = 0
    for path in inputs:
        for number, record in read_records(path, meter.advance):
            yield place, path.name, number, record
            place += 1


def _batches(records: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for record in records:
        batch.append(record)
        if len(batch) == RECORDS_A_TASK:
            yield batch
            batch = []
    if batch:
        yield batch


# ------------------------------------------------------------------------------------------- in the worker processes


def _verify(batch: list[tuple[int, str, int, Any]], root: Path) -> list[Entry | dict[str, Any]]:
    """Samples ready for a shard; for a record that cannot be used, its line of the quarantine file."""
    out: list[Entry | dict[str, Any]] = []
    for place, file, number, record in batch:
        source = {"file": file, "record": number}
        try:
            if isinstance(record, BadLine):
                raise RecordError("not JSON", str(record))
            conversation = read_conversation(record)
            infos = [_inspect(kind, reference, root) for kind, reference in conversation.media]
        except RecordError as error:
            out.append({**source, "reason": error.reason, "detail": str(error)})
        else:
            out.append(Entry(f"{place:09d}", conversation.messages, conversation.media, infos, source))
    return out


def _inspect(kind: str, reference: str, root: Path) -> MediaInfo:
    if reference[:5].lower() == "data:":
        return inspect(kind, "data: URI", read_media(reference, root))
    return _inspect_file(kind, reference, resolve(reference, root), root)


@lru_cache(maxsize=4096)
def _inspect_file(kind: str, reference: str, path: Path, root: Path) -> MediaInfo:
    """A file that many records share is decoded once in each process."""
    return inspect(kind, reference, read_media(str(path), root))


# ----------------------------------------------------------------------------------------------- in the main process


class _Writer:
    """Spreads samples over train and val and writes their shards, in order.

    Every ``1 / val_fraction``-th sample goes to val. Both splits get at least one sample as soon as there are two: the
    first sample is never val's, and the last train sample moves over when val would stay empty.
    """

    def __init__(self, pool: _Pool, root: Path, options: Options, report: Report) -> None:
        self.pool, self.root, self.options, self.report = pool, root, options, report
        self.index = IndexWriter(options.out)
        self.open: dict[str, list[Entry]] = {"train": [], "val": []}
        self.open_bytes = {"train": 0, "val": 0}
        self.started: Counter[str] = Counter()
        self.seen = self.number = 0
        self.writing: deque[Future[Shard]] = deque()

    def add(self, entry: Entry) -> None:
        fraction = self.options.val_fraction
        is_val = int((self.seen + 1) * fraction + 1e-9) > int(self.seen * fraction + 1e-9)
        self.seen += 1
        self._put("val" if is_val else "train", entry)

    def _put(self, part: str, entry: Entry) -> None:
        # A full shard is written when the next sample comes: the last one stays here until the end.
        held = self.open[part]
        full = len(held) >= self.options.samples_per_shard or self.open_bytes[part] + entry.bytes > self.options.bytes_per_shard
        if held and full:
            self._flush(part)
        self.open[part].append(entry)
        self.open_bytes[part] += entry.bytes
        setattr(self.report, part, getattr(self.report, part) + 1)

    def _flush(self, part: str) -> None:
        entries, self.open[part], self.open_bytes[part] = self.open[part], [], 0
        if not entries:
            return
        for entry in entries:
            self.report.images += sum(info.kind == "image" for info in entry.infos)
            self.report.videos += sum(info.kind == "video" for info in entry.infos)
        name = f"{part}-{self.started[part]:06d}.tar"
        self.started[part] += 1
        self.writing.append(self.pool.submit(write_shard, name, self.number, entries, self.root, self.options.out))
        self.number += 1
        while len(self.writing) > 2 * self.options.workers:
            self._collect()

    def _collect(self) -> None:
        shard = _result(self.writing.popleft())
        self.index.add(shard)
        self.report.shards += 1
        self.report.bytes += shard.bytes

    def finish(self) -> None:
        if self.options.val_fraction > 0 and not self.report.val and self.report.train > 1:
            moved = self.open["train"].pop()
            self.report.train -= 1
            self._put("val", moved)
        for part in self.open:
            self._flush(part)
        while self.writing:
            self._collect()
        self.index.finish()


class _Pool:
    """Worker processes, or none of them for one worker. Results come in the order of the tasks, few are under way."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Pool:
        if self.workers > 1:
            # fork: workers share what is imported here, and start at once; nothing has started threads yet.
            self.executor = ProcessPoolExecutor(self.workers, multiprocessing.get_context("fork"), initializer=_one_thread)
        return self

    def __exit__(self, *error: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self.executor is not None:
            return self.executor.submit(function, *arguments)
        done: Future[Any] = Future()
        done.set_result(function(*arguments))
        return done

    def ordered(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:
        waiting: deque[Future[Any]] = deque()
        for arguments in tasks:
            waiting.append(self.submit(function, *arguments))
            if len(waiting) >= 4 * self.workers:
                yield _result(waiting.popleft())
        while waiting:
            yield _result(waiting.popleft())


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ConvertError("a worker process died (out of memory, or a medium crashed its decoder); try --workers 1") from error


class _Meter:
    """Progress by bytes of input: rate and time left."""

    def __init__(self, total: int, show: Callable[[str], None] | None) -> None:
        self.total, self.write, self.read = total, show, 0
        self.start = self.shown = time.monotonic()
        self.every = 1.0 if sys.stderr.isatty() else 10.0

    def advance(self, count: int) -> None:
        self.read += count

    def show(self, report: Report) -> None:
        now = time.monotonic()
        if self.write is None or now - self.shown < self.every:
            return
        self.shown = now
        done = min(self.read / max(self.total, 1), 1.0)
        left = (now - self.start) * (1 - done) / max(done, 1e-9)
        refused = report.records - report.samples
        rate = report.records / (now - self.start)
        self.write(f"{done:4.0%}  {report.records} records, {refused} refused, {rate:.0f} records/s, {left:.0f} s left")


def default_workers() -> int:
    """Processes when none are asked for: the cores that may be used, 8 at most."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
