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
from megatron_vl.data.sample.pixels import MAX_PIXELS
from megatron_vl.errors import UserError
from megatron_vl.journal import Journal
from megatron_vl.processes import end_with_parent

from .embedded import MediaFile, MediaFolder, is_embedded
from .formats import FORMATS, RecordError, read_conversation
from .formats.frames import Frames, may_be_folder
from .identities import Identities
from .inputs import InputError, Source, expand
from .media import MediaInfo, inspect, read_media, resolve
from .parts import Part, PartVerdicts, journal_line, missing_parts, part_journal
from .records import BadLine, read_records
from .resume import RECORD, ResumeError, Workspace, as_plain, make_plan, names, parse_verdicts
from .shards import WORK, Entry, IndexWriter, Shard, finish_shard

RECORDS_A_TASK = 16
MOST_IGNORED_KEYS = 100
OTHER_KEYS = "other keys"


class ConvertError(UserError, ValueError):
    """A conversion that cannot start or continue; the message says what to do."""


OF_A_RUN = ("seconds", "was_complete")
"""Results that differ from run to run, which ``report.json`` leaves out."""


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
    assumed_fps: int = 0
    """Videos given as pictures whose records do not say how many there are a second."""
    seconds: float = 0.0
    was_complete: bool = False
    """Whether an earlier conversion had written everything."""

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
        self.assumed_fps += sum(info.assumed_fps for info in entry.infos)

    def refuse(self, entry: Entry | dict[str, Any]) -> None:
        """Counts a line of the quarantine file; entries of samples are passed over."""
        if isinstance(entry, dict):
            by_reason = self.refused.setdefault(entry["file"], {})
            by_reason[entry["reason"]] = by_reason.get(entry["reason"], 0) + 1

    def as_json(self) -> dict[str, Any]:
        return {"samples": self.samples, **self.__dict__}


@dataclass(frozen=True)
class ConversionOptions:
    """Settings of a conversion."""

    media_root: Path | None
    """Folder of the media; None: no record refers to a file."""
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
    datasets: list[str] | None = None
    """Data sets of an index among the inputs; None: all."""
    part: Part | None = None
    """Verify only this part of the records, and write no shards; see :mod:`data_tools.parts`."""

    @property
    def root(self) -> Path | None:
        """The media root with links resolved."""
        return self.media_root.resolve() if self.media_root else None

    def planned(self) -> dict[str, Any]:
        """The options that determine the output."""
        names = (
            "val_fraction",
            "samples_per_shard",
            "bytes_per_shard",
            "max_pixels",
            "duplicate_ids",
            "format",
        )
        return {name: getattr(self, name) for name in names}


def convert(
    inputs: list[Path], options: ConversionOptions, progress: Callable[[str], None] | None = None
) -> DataReport:
    """Converts conversation files into one data set, or continues an interrupted conversion of
    the same files.

    Args:
        inputs: files of records, folders of them, or an index; their samples follow each other.
        progress: receives a line of text now and then; None: nothing is shown.

    Raises:
        ConvertError: the options are impossible, the output folder holds something else, the disk is full, or
            a worker process died.
        ShardError: a medium changed while it was converted.
        ReadError: an input is not JSON.
    """
    sources = check_inputs(inputs, options)
    start = time.monotonic()
    planned = options.planned()
    if any(source.columns or source.tags or source.format for source in sources):
        planned["index"] = [source.plan() for source in sources]
    try:
        plan = make_plan([source.path for source in sources], options.root, **planned)
    except OSError as error:
        raise ConvertError(
            f"--input {error.filename} cannot be read ({error.strerror}); make it readable for this user"
        ) from error
    part = options.part
    try:
        space = Workspace(options.out, plan, options.force, part.name if part else "")
    except ResumeError as error:
        raise ConvertError(str(error)) from error
    except OSError as error:
        raise ConvertError(
            f"--out {options.out} cannot be written ({error.strerror}); give a folder that this user"
            " may write to"
        ) from error

    try:
        if space.complete:
            report = DataReport.read(options.out / "report.json")
            report.was_complete = True
            return report
        if part is None:
            report = _convert(sources, options, space, progress)
        else:
            _remember(inputs, options, space)
            report = _convert_part(sources, options, part, space, progress)
    except (OSError, sqlite3.Error) as error:
        raise ConvertError(
            f"{error}; nothing is lost: fix this and start again with the same arguments"
        ) from error
    finally:
        space.close()

    report.seconds = round(time.monotonic() - start, 3)
    return report


ARGUMENTS = "arguments.json"


def _remember(inputs: list[Path], options: ConversionOptions, space: Workspace) -> None:
    """Notes the arguments for the process that writes the shards."""
    arguments = {
        # Links stay links: those of a hub's cache lead to files whose names lack the suffix.
        "inputs": [os.path.abspath(path) for path in inputs],
        "media_root": str(options.root or ""),
        "datasets": options.datasets,
        "options": options.planned(),
    }
    space.write_once(ARGUMENTS, json.dumps(arguments).encode())


def finished(out: Path) -> DataReport | None:
    """The report of a complete data set; None if there is none in the folder."""
    try:
        complete = (out / ".nv-meta" / RECORD).exists()
        return DataReport.read(out / "report.json") if complete else None
    except FileNotFoundError:
        return None


def remembered(out: Path, workers: int) -> tuple[list[Path], ConversionOptions]:
    """The inputs and options with which parts were converted in a folder.

    Raises:
        ConvertError: there is no part, or one is not complete.
    """
    work = out / WORK
    try:
        arguments = json.loads((work / ARGUMENTS).read_text())
        missing = missing_parts(work)
    except FileNotFoundError as error:
        raise ConvertError(f"{out} holds no parts of `megatron-vl data convert --shard`") from error

    if missing:
        raise ConvertError(
            f"{out}: the parts {missing} are not complete; run `megatron-vl data convert --shard` for "
            "them again. Without --shard, it does all that is missing itself"
        )

    options = ConversionOptions(
        Path(arguments["media_root"]) if arguments["media_root"] else None,
        out,
        workers,
        datasets=arguments["datasets"],
        **arguments["options"],
    )
    return [Path(path) for path in arguments["inputs"]], options


def _convert_part(
    sources: list[Source],
    options: ConversionOptions,
    part: Part,
    space: Workspace,
    progress: Callable[[str], None] | None,
) -> DataReport:
    """Verifies the records of a part. The report counts only these, whether now or in an earlier run."""
    meter = _Meter(sum(source.path.stat().st_size for source in sources), progress)
    report = DataReport()
    journal = part_journal(space.work, part)
    done = {batch for batch, _ in journal.known()}
    root = options.root
    numbers: deque[int] = deque()

    def wanted(first: int, end: int) -> bool:
        return part.wants(first, end, RECORDS_A_TASK)

    def tasks() -> Iterator[tuple[Any, ...]]:
        for number, batch in enumerate(_batches(_records(sources, meter, wanted))):
            if part.has(number) and number not in done:
                numbers.append(number)
                meter.marks.append(meter.read)
                yield batch, root, options, None, None

    with _Pool(options.workers) as pool:
        for result in pool.ordered(_verify, tasks()):
            journal.add(journal_line(numbers.popleft(), _verdicts(result)))
            for entry in result:
                report.records += 1
                report.train += isinstance(entry, Entry)
                report.refuse(entry)
            meter.show(report)
    meter.finish(report)
    if -1 not in done:
        journal.add(journal_line(-1, []))
    journal.close(sync=True)
    return report


def _convert(
    sources: list[Source],
    options: ConversionOptions,
    space: Workspace,
    progress: Callable[[str], None] | None,
) -> DataReport:
    meter = _Meter(sum(source.path.stat().st_size for source in sources), progress)
    report = DataReport()
    journal = Journal(space.work / "journal.jsonl", parse_verdicts)
    known = journal.known()
    parts = PartVerdicts(space.work)
    media = MediaFolder(space.work / "media")
    root = options.root
    partial = space.work / "quarantine.jsonl"

    with (
        _Pool(options.workers) as pool,
        partial.open("w", encoding="utf-8") as quarantine,
        _Duplicates(options.duplicate_ids, space.work / "ids.sqlite") as duplicates,
    ):
        writer = _Writer(pool, root, options, report, space, media)
        batches = meter.mark(_batches(_records(sources, meter)))
        tasks = (
            (batch, root, options, next(known, None) or parts.of(number), media.path(number))
            for number, batch in enumerate(batches)
        )
        for number, result in enumerate(pool.ordered(_verify, tasks)):
            if number >= journal.count:
                journal.add(as_plain(_verdicts(result)))
            held = [entry for entry in result if isinstance(entry, Entry)]
            media.hold(held)
            for entry in map(duplicates.first_or_refusal, result):
                report.records += 1
                if isinstance(entry, Entry):
                    report.add(entry)
                    writer.add(entry)
                else:
                    quarantine.write(json.dumps(entry, ensure_ascii=False) + "\n")
                    report.refuse(entry)
            media.release(held)  # the writer has counted those that it waits for
            meter.show(report, going_on=number < journal.count)

        meter.finish(report)
        writer.finish()

    journal.close()
    durable.put(partial, options.out / "quarantine.jsonl")

    # The time it took is left out, so that the same input gives the same files.
    stored = {name: value for name, value in report.as_json().items() if name not in OF_A_RUN}
    durable.write(options.out / "report.json", (json.dumps(stored, indent=2) + "\n").encode())
    space.finish(
        {s.name: {"samples": s.samples, "bytes": s.bytes, "sha256": s.sha256} for s in writer.index.shards}
    )

    return report


def _verdicts(result: list[Entry | dict[str, Any]]) -> list[list[MediaInfo] | dict[str, Any]]:
    """What a journal keeps of records: the measures of media, or the line of the quarantine file."""
    return [entry.infos if isinstance(entry, Entry) else entry for entry in result]


def check_inputs(inputs: list[Path], options: ConversionOptions) -> list[Source]:
    """The files of the inputs. Raises ConvertError if an argument cannot be used."""
    try:
        sources = expand(inputs, options.datasets)
    except InputError as error:
        raise ConvertError(str(error)) from error

    if options.part is not None and options.force:
        raise ConvertError("--force would delete the work of other parts; remove the folder instead")
    if options.media_root and not options.media_root.is_dir():
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

    return sources


def _everything(first: int, end: int) -> bool:
    return True


def _records(
    sources: list[Source], meter: _Meter, wanted: Callable[[int, int], bool] = _everything
) -> Iterator[tuple[int, str, int, Any, str]]:
    """Yields (index among all records, file, number in the file, record, format or "").

    A record is None if those from its index to before the next are not ``wanted``.
    """
    index = 0
    for name, source in zip(names([source.path for source in sources]), sources, strict=True):

        def here(first: int, end: int, start: int = index) -> bool:
            return wanted(start + first, start + end)

        for number, record in read_records(source.path, meter.advance, here):
            yield index, name, number, source.renamed(record), source.format
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
    batch: list[tuple[int, str, int, Any, str]],
    root: Path | None,
    options: ConversionOptions,
    known: list[Any] | None,
    aside: Path | None,
) -> list[Entry | dict[str, Any]]:
    """Returns samples ready for a shard; for an unusable record, its line of the quarantine file.

    Args:
        known: the verdicts of an earlier run on this batch; None: decode the media now.
        aside: file for media that records hold themselves; None: the samples are not needed later.
    """
    out: list[Entry | dict[str, Any]] = []
    kept = MediaFile(aside) if aside is not None else None
    for i, (index, file, number, record, format) in enumerate(batch):
        source = {"file": file, "record": number}
        verdict = known[i] if known is not None else None
        if isinstance(verdict, dict):
            out.append(verdict)
            continue

        try:
            if isinstance(record, BadLine):
                raise RecordError(record.reason, str(record))
            conversation = read_conversation(record, options.format or format)
            infos = (
                verdict
                if verdict is not None
                else inspect_all(conversation.media, conversation.fields, root, options.max_pixels)
            )
        except RecordError as error:
            out.append(
                {**source, "field": error.field, "reason": error.reason, "detail": _printable(str(error))}
            )
        else:
            references: list[tuple[str, Any]] = []
            if kept is not None:
                references = [
                    (kind, kept.keep(read_media(kind, ref, root)) if is_embedded(ref) else ref)
                    for kind, ref in conversation.media
                ]
            entry = Entry(
                f"{index:09d}",
                conversation.messages,
                references,
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


def inspect_all(
    media: list[tuple[str, str]], fields: list[str], root: Path | None, max_pixels: int
) -> list[MediaInfo]:
    infos = []
    for (kind, reference), where in zip(media, fields, strict=True):
        try:
            infos.append(_inspect(kind, reference, root, max_pixels))
        except RecordError as error:
            error.field = where
            raise
    return infos


def _inspect(kind: str, reference: Any, root: Path | None, max_pixels: int) -> MediaInfo:
    if is_embedded(reference):
        return inspect(kind, reference, read_media(kind, reference, root), max_pixels)
    path = reference
    if not isinstance(reference, Frames):
        path = resolve(reference, root, folder=kind == "video" and may_be_folder(reference))
    return _inspect_file(kind, reference, path, root, max_pixels)


@lru_cache(maxsize=4096)
def _inspect_file(
    kind: str, reference: str | Frames, path: Path | Frames, root: Path | None, max_pixels: int
) -> MediaInfo:
    """Inspects a file; each process decodes a file that many records share only once."""
    return inspect(kind, reference, read_media(kind, reference, root), max_pixels)


# --- In the main process ------------------------------------------------------------------------------------


class _Writer:
    """Distributes samples over train and val and writes their shards, in order.

    Every ``1 / val_fraction``-th sample goes to val. With two or more samples, both splits get at least one:
    the first sample never goes to val, and the last train sample moves to val if val would stay empty.
    """

    def __init__(
        self,
        pool: _Pool,
        root: Path | None,
        options: ConversionOptions,
        report: DataReport,
        space: Workspace,
        media: MediaFolder,
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
        self.media = media
        self.writing: deque[tuple[Future[Shard], list[Entry]]] = deque()

    def add(self, entry: Entry) -> None:
        self.media.hold([entry])
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
        future = self.pool.submit(finish_shard, name, self.number, entries, self.root, self.options.out)
        self.writing.append((future, entries))
        self.number += 1
        while len(self.writing) > 2 * self.options.workers:
            self._collect()

    def _collect(self) -> None:
        future, entries = self.writing.popleft()
        shard = _result(future)
        self.media.release(entries)
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
    # A worker whose parent was killed would wait for its next task indefinitely (it holds both ends of the
    # queue).
    end_with_parent()


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
