"""Converts files of conversations into WebDataset shards prepared for Energon.

Records are read as a stream. Worker processes decode and measure their media; samples go into shards in
the order of the input; worker processes write the shards. The main process never holds pixels. Unusable
records are listed in ``quarantine.jsonl`` and counted by reason: the number of samples plus refused
records always equals the number of records read. A killed conversion continues when it is started again
with the same arguments (:mod:`data_tools.resume`).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from megatron_vl import durable
from megatron_vl.data.pixels import MAX_PIXELS
from megatron_vl.errors import UserError

from .formats import FORMATS, RecordError, read_conversation
from .identities import Identities
from .media import MediaInfo, inspect, read_media, resolve
from .records import BadLine, read_records
from .resume import ResumeError, VerdictJournal, Workspace, make_plan, names
from .shards import Entry, IndexWriter, Shard, finish_shard

RECORDS_A_TASK = 16
MOST_IGNORED_KEYS = 100
OTHER_KEYS = "other keys"


class ConvertError(UserError, ValueError):
    """A conversion that cannot start or continue; the message says what to do."""


@dataclass
class DataReport:
    """The results of a conversion."""

    records: int = 0
    train: int = 0
    val: int = 0
    images: int = 0
    videos: int = 0
    bytes: int = 0
    shards: int = 0
    refused: dict[str, dict[str, int]] = field(default_factory=dict)
    """Number of refused records by input file and reason."""
    ignored: dict[str, dict[str, int]] = field(default_factory=dict)
    """How often a key without effect occurs in the samples, by location (``records``, ``turns``, ``content
    parts``, ``listed media``) and key. At each location, keys beyond the first 100 are counted together."""
    answer_media: int = 0
    """Images and videos in the assistant's turns; the model sees them but does not learn them."""
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> DataReport:
        """Reads the report of a complete data set."""
        stored = json.loads(path.read_text())
        return cls(**{name: value for name, value in stored.items() if name != "samples"})

    @property
    def samples(self) -> int:
        return self.train + self.val

    @property
    def quarantined(self) -> int:
        """Number of records that could not be used."""
        return self.records - self.samples

    def add(self, entry: Entry) -> None:
        """Counts the keys without effect in a sample."""
        for location, key in entry.ignored:
            counts = self.ignored.setdefault(location, {})
            key = key if key in counts or len(counts) < MOST_IGNORED_KEYS else OTHER_KEYS
            counts[key] = counts.get(key, 0) + 1
        self.answer_media += entry.answer_media

    def as_json(self) -> dict[str, Any]:
        return {"samples": self.samples, **self.__dict__}


@dataclass(frozen=True)
class ConversionOptions:
    """Settings of a conversion."""

    media_root: Path
    out: Path
    workers: int = 1
    val_fraction: float = 0.0
    samples_per_shard: int = 1000
    bytes_per_shard: int = 256 << 20
    max_pixels: int = MAX_PIXELS
    """Largest picture or video frame; larger ones are refused by their header, before decoding."""
    format: str = ""
    """Name of the format (:data:`data_tools.formats.FORMATS`) of all records; empty: each record's own."""
    duplicate_ids: Literal["refuse", "keep"] = "refuse"
    """What to do with a record whose ``id`` occurred in an earlier usable record."""
    force: bool = False
    """Delete what an earlier conversion left in ``out``."""


def convert(
    inputs: list[Path], options: ConversionOptions, progress: Callable[[str], None] | None = None
) -> DataReport:
    """Converts conversation files into one data set, or continues an interrupted conversion of
    the same files.

    Args:
        inputs: JSON or JSON-lines files; their samples follow each other.
        progress: receives a line of text now and then; None: nothing is shown.

    Raises:
        ConvertError: the options are impossible, the output folder holds something else, the disk is full, or
            a worker process died.
        ShardError: a medium changed while it was converted.
        ReadError: an input is not JSON.
    """
    _check(inputs, options)
    start = time.monotonic()
    plan = make_plan(
        inputs,
        options.media_root,
        val_fraction=options.val_fraction,
        samples_per_shard=options.samples_per_shard,
        bytes_per_shard=options.bytes_per_shard,
        max_pixels=options.max_pixels,
        duplicate_ids=options.duplicate_ids,
        format=options.format,
    )
    try:
        space = Workspace(options.out, plan, options.force)
    except ResumeError as error:
        raise ConvertError(str(error)) from error

    try:
        if space.complete:
            return DataReport.read(options.out / "report.json")
        report = _convert(inputs, options, space, progress)
    except (OSError, sqlite3.Error) as error:
        raise ConvertError(
            f"{error}; nothing is lost: fix this and start again with the same arguments"
        ) from error
    finally:
        space.close()

    report.seconds = round(time.monotonic() - start, 3)
    return report


def _convert(
    inputs: list[Path], options: ConversionOptions, space: Workspace, progress: Callable[[str], None] | None
) -> DataReport:
    meter = _Meter(sum(path.stat().st_size for path in inputs), progress)
    report = DataReport()
    journal = VerdictJournal(space.work / "journal.jsonl")
    known = journal.known()
    root = options.media_root.resolve()
    partial = space.work / "quarantine.jsonl"

    with (
        _Pool(options.workers) as pool,
        partial.open("w", encoding="utf-8") as quarantine,
        _Duplicates(options.duplicate_ids, space.work / "ids.sqlite") as duplicates,
    ):
        writer = _Writer(pool, root, options, report, space)
        batches = meter.mark(_batches(_records(inputs, meter)))
        tasks = ((batch, root, options, next(known, None)) for batch in batches)
        for number, result in enumerate(pool.ordered(_verify, tasks)):
            if number >= journal.count:
                journal.add([entry.infos if isinstance(entry, Entry) else entry for entry in result])
            for entry in map(duplicates.first_or_refusal, result):
                report.records += 1
                if isinstance(entry, Entry):
                    report.add(entry)
                    writer.add(entry)
                else:
                    quarantine.write(json.dumps(entry, ensure_ascii=False) + "\n")
                    by_reason = report.refused.setdefault(entry["file"], {})
                    by_reason[entry["reason"]] = by_reason.get(entry["reason"], 0) + 1
            meter.show(report, going_on=number < journal.count)

        meter.finish(report)
        writer.finish()

    journal.close()
    durable.put(partial, options.out / "quarantine.jsonl")

    # The time it took is left out, so that the same input gives the same files.
    stored = {name: value for name, value in report.as_json().items() if name != "seconds"}
    durable.write(options.out / "report.json", (json.dumps(stored, indent=2) + "\n").encode())
    space.finish(
        {s.name: {"samples": s.samples, "bytes": s.bytes, "sha256": s.sha256} for s in writer.index.shards}
    )

    return report


def _check(inputs: list[Path], options: ConversionOptions) -> None:
    for path in inputs:
        if not path.is_file():
            raise ConvertError(f"--input {path} is not a file")
    if not options.media_root.is_dir():
        raise ConvertError(f"--media-root {options.media_root} is not a folder")
    if not 0 <= options.val_fraction < 1:
        raise ConvertError(f"--val-fraction {options.val_fraction} must be at least 0 and below 1")
    if options.format and options.format not in FORMATS:
        raise ConvertError(f"--format {options.format} is unknown; valid: {', '.join(FORMATS)}")
    sizes = {
        "--workers": options.workers,
        "--samples-per-shard": options.samples_per_shard,
        "--shard-mb": options.bytes_per_shard,
        "--max-megapixels": options.max_pixels,
    }
    if wrong := [name for name, value in sizes.items() if value < 1]:
        raise ConvertError(f"{' and '.join(wrong)} must be positive")


def _records(inputs: list[Path], meter: _Meter) -> Iterator[tuple[int, str, int, Any]]:
    """Yields (index among all records, file, number in the file, record)."""
    index = 0
    for name, path in zip(names(inputs), inputs, strict=True):
        for number, record in read_records(path, meter.advance):
            yield index, name, number, record
            index += 1


class _Duplicates:
    """Refuses records whose id occurred in an earlier usable record, if that is requested.

    Args:
        duplicates: :attr:`ConversionOptions.duplicate_ids`.
        path: a file that grows by about 30 bytes per record during the conversion.
    """

    def __init__(self, duplicates: str, path: Path) -> None:
        self.refuse = duplicates == "refuse"
        self.path = path
        self.seen: Identities | None = None

    def __enter__(self) -> _Duplicates:
        return self

    def __exit__(self, *error: object) -> None:
        if self.seen is not None:
            self.seen.close()

    def first_or_refusal(self, entry: Entry | dict[str, Any]) -> Entry | dict[str, Any]:
        """Returns the entry, or the line of the quarantine file that replaces it."""
        if not self.refuse or not isinstance(entry, Entry) or not entry.identity:
            return entry
        if self.seen is None:
            # Opened late, because forked worker processes must not share the open table.
            self.seen = Identities(self.path)

        here = (entry.source["file"], entry.source["record"])
        file, record = self.seen.first(entry.identity, *here)
        if (file, record) == here:
            return entry

        shown = _printable(entry.identity[:100])
        detail = f"{shown} is also the id of record {record} of {file}; --duplicate-ids keep accepts both"
        return {**entry.source, "field": "id", "reason": "duplicate id", "detail": detail}


def _batches(records: Iterator[Any]) -> Iterator[list[Any]]:
    batch: list[Any] = []
    for record in records:
        batch.append(record)
        if len(batch) == RECORDS_A_TASK:
            yield batch
            batch = []
    if batch:
        yield batch


# --- In the worker processes --------------------------------------------------------------------------------


def _verify(
    batch: list[tuple[int, str, int, Any]], root: Path, options: ConversionOptions, known: list[Any] | None
) -> list[Entry | dict[str, Any]]:
    """Returns samples ready for a shard; for an unusable record, its line of the quarantine file.

    Args:
        known: the verdicts of an earlier run on this batch; None: decode the media now.
    """
    out: list[Entry | dict[str, Any]] = []
    for i, (index, file, number, record) in enumerate(batch):
        source = {"file": file, "record": number}
        verdict = known[i] if known is not None else None
        if isinstance(verdict, dict):
            out.append(verdict)
            continue

        try:
            if isinstance(record, BadLine):
                raise RecordError(record.reason, str(record))
            conversation = read_conversation(record, options.format)
            infos = (
                verdict
                if verdict is not None
                else _inspect_all(conversation.media, conversation.fields, root, options.max_pixels)
            )
        except RecordError as error:
            out.append(
                {**source, "field": error.field, "reason": error.reason, "detail": _printable(str(error))}
            )
        else:
            entry = Entry(
                f"{index:09d}",
                conversation.messages,
                conversation.media,
                infos,
                source,
                conversation.identity,
            )
            entry.ignored = [(where, _printable(key)) for where, key in conversation.ignored]
            entry.answer_media = conversation.answer_media
            entry.tools = conversation.tools
            out.append(entry)

    return out


def _printable(detail: str) -> str:
    """Replaces invalid Unicode, which names in a record may contain, but text about them must not."""
    return detail.encode(errors="backslashreplace").decode()


def _inspect_all(
    media: list[tuple[str, str]], fields: list[str], root: Path, max_pixels: int
) -> list[MediaInfo]:
    infos = []
    for (kind, reference), where in zip(media, fields, strict=True):
        try:
            infos.append(_inspect(kind, reference, root, max_pixels))
        except RecordError as error:
            error.field = where
            raise
    return infos


def _inspect(kind: str, reference: str, root: Path, max_pixels: int) -> MediaInfo:
    if reference[:5].lower() == "data:":
        return inspect(kind, "data: URI", read_media(reference, root), max_pixels)
    return _inspect_file(kind, reference, resolve(reference, root), root, max_pixels)


@lru_cache(maxsize=4096)
def _inspect_file(kind: str, reference: str, path: Path, root: Path, max_pixels: int) -> MediaInfo:
    """Inspects a file; each process decodes a file that many records share only once."""
    return inspect(kind, reference, read_media(str(path), root), max_pixels)


# --- In the main process ------------------------------------------------------------------------------------


class _Writer:
    """Distributes samples over train and val and writes their shards, in order.

    Every ``1 / val_fraction``-th sample goes to val. With two or more samples, both splits get at least one:
    the first sample never goes to val, and the last train sample moves to val if val would stay empty.
    """

    def __init__(
        self, pool: _Pool, root: Path, options: ConversionOptions, report: DataReport, space: Workspace
    ) -> None:
        self.pool = pool
        self.root = root
        self.options = options
        self.report = report
        self.index = IndexWriter(space.meta)
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
        # A full shard is written when the next sample arrives; the last one stays here until the end.
        held = self.open[part]
        full = (
            len(held) >= self.options.samples_per_shard
            or self.open_bytes[part] + entry.bytes > self.options.bytes_per_shard
        )
        if held and full:
            self._flush(part)
        self.open[part].append(entry)
        self.open_bytes[part] += entry.bytes
        setattr(self.report, part, getattr(self.report, part) + 1)

    def _flush(self, part: str) -> None:
        entries = self.open[part]
        self.open[part] = []
        self.open_bytes[part] = 0
        if not entries:
            return

        for entry in entries:
            self.report.images += sum(info.kind == "image" for info in entry.infos)
            self.report.videos += sum(info.kind == "video" for info in entry.infos)

        name = f"{part}-{self.started[part]:06d}.tar"
        self.started[part] += 1
        self.writing.append(
            self.pool.submit(finish_shard, name, self.number, entries, self.root, self.options.out)
        )
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
    """Worker processes, or none for one worker. Results arrive in the order of the tasks; few
    tasks are pending."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> _Pool:
        if self.workers > 1:
            # fork: workers share what is imported here and start at once; no threads have been started yet.
            self.executor = ProcessPoolExecutor(
                self.workers, multiprocessing.get_context("fork"), initializer=_start_worker
            )
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


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    if sys.platform == "linux":
        import ctypes

        # A worker whose parent was killed would wait for its next task indefinitely (it holds both ends of
        # the queue).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _result(future: Future[Any]) -> Any:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise ConvertError(
            "a worker process died (out of memory, or a media file crashed its decoder); try --workers 1"
        ) from error


class _Meter:
    """Shows progress by input bytes of finished records, and rate and time left of the work of this run."""

    def __init__(self, total: int, show: Callable[[str], None] | None) -> None:
        self.total = total
        self.write = show
        self.read = 0
        self.done = 0
        self.start = self.shown = time.monotonic()
        self.done_before = self.records_before = 0
        self.every = 1.0 if sys.stderr.isatty() else 10.0
        self.marks: deque[int] = deque()
        """Bytes read when each pending batch was complete, because reading is ahead of the work."""
        self.silent = True

    def advance(self, count: int) -> None:
        self.read += count

    def mark(self, batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        for batch in batches:
            self.marks.append(self.read)
            yield batch

    def show(self, report: DataReport, going_on: bool = False) -> None:
        """Counts one more finished batch. ``going_on``: the records so far are from an earlier run."""
        self.done = self.marks.popleft()
        now = time.monotonic()
        if going_on:
            self.start = now
            self.done_before = self.done
            self.records_before = report.records
        if now - self.shown >= self.every:
            self._say(report, now, going_on)

    def finish(self, report: DataReport) -> None:
        """Shows the final figures if lines were shown before."""
        self.done = self.total
        if not self.silent:
            self._say(report, time.monotonic(), False)

    def _say(self, report: DataReport, now: float, going_on: bool) -> None:
        if self.write is None:
            return
        self.shown = now
        self.silent = False
        text = (
            f"{min(self.done / max(self.total, 1), 1.0):4.0%}  {report.records} records, "
            f"{report.quarantined} quarantined"
        )
        if going_on:
            self.write(f"{text}; reading what an earlier run did")
            return
        left = (now - self.start) * max(self.total - self.done, 0) / max(self.done - self.done_before, 1)
        rate = (report.records - self.records_before) / max(now - self.start, 1e-9)
        self.write(f"{text}, {rate:.0f} records/s, {left:.0f} s left")


def default_workers() -> int:
    """Default number of processes: the available cores, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
