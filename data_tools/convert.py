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
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from megatron_vl import durable_files
from megatron_vl.data.sample.pixels import DEFAULT_MAX_PIXELS
from megatron_vl.errors import UserError, is_machine_fault
from megatron_vl.journal import JsonLinesJournal
from megatron_vl.processes import end_with_parent

from .embedded_media import EmbeddedMediaFile, EmbeddedMediaFolder, is_embedded
from .formats import FORMATS, Conversation, RecordError, read_conversation
from .formats.conversation import record_identity
from .formats.frame_sequence import FrameSequence, may_be_frame_folder
from .input_files import InputError, InputFile, find_input_files
from .media import MediaInfo, inspect_medium, read_media, resolve_reference
from .record_ids import RecordIdTable
from .records import UnreadableRecord, all_wanted, read_records
from .resume import (
    CONVERSION_FILE,
    ConversionWorkspace,
    ResumeError,
    input_names,
    make_plan,
    parse_verdicts,
)
from .shards import WORK_FOLDER, ConvertedSample, IndexWriter, WrittenShard, finish_shard
from .work_parts import PartVerdicts, WorkPart, describe_missing_parts, part_journal

RECORDS_PER_BATCH = 16
MAX_IGNORED_KEYS = 100
OTHER_KEYS = "other keys"


class ConvertError(UserError, ValueError):
    """A conversion that cannot start or continue; the message says what to do."""


RUN_DEPENDENT_FIELDS = ("seconds", "was_complete")
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
    """Videos whose frame rate neither the record nor the file gives."""
    first_images: int = 0
    """Images that are the first of an animation or of several pages."""
    seconds: float = 0.0
    was_complete: bool = False
    """Whether an earlier conversion had written everything."""

    @classmethod
    def read_report(cls, report_path: Path) -> DataReport:
        """Reads the report of a complete data set."""
        report_fields = json.loads(report_path.read_text())
        return cls(**{name: value for name, value in report_fields.items() if name != "samples"})

    @property
    def samples(self) -> int:
        return self.train + self.val

    @property
    def quarantined_records(self) -> int:
        """Number of records that could not be used."""
        return self.records - self.samples

    def count_sample(self, sample: ConvertedSample) -> None:
        """Counts the keys without effect in a sample."""
        for key_location, written_key in sample.conversation.ignored_keys:
            key = _escape_invalid_unicode(written_key)
            counts = self.ignored.setdefault(key_location, {})
            key = key if key in counts or len(counts) < MAX_IGNORED_KEYS else OTHER_KEYS
            counts[key] = counts.get(key, 0) + 1
        self.answer_media += sample.conversation.answer_media
        self.assumed_fps += sum(info.assumed_fps for info in sample.media_infos)
        self.first_images += sum(info.has_more_images for info in sample.media_infos)

    def count_outcome(self, outcome: ConvertedSample | dict[str, Any]) -> None:
        """Counts a record: a sample, or a line of the quarantine file."""
        self.records += 1
        if isinstance(outcome, ConvertedSample):
            self.count_sample(outcome)
        else:
            by_reason = self.refused.setdefault(outcome["file"], {})
            by_reason[outcome["reason"]] = by_reason.get(outcome["reason"], 0) + 1

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
    max_pixels: int = DEFAULT_MAX_PIXELS
    """Largest picture or video frame; larger ones are refused by their header, before decoding."""
    format: str = ""
    """Name of the format (:data:`data_tools.formats.FORMATS`) of all records; empty: each record's own."""
    duplicate_ids: Literal["refuse", "keep"] = "refuse"
    """What to do with a record whose ``id`` occurred in an earlier usable record."""
    force: bool = False
    """Delete what an earlier conversion left in ``out``."""
    datasets: list[str] | None = None
    """Data sets of an index among the inputs; None: all."""
    part: WorkPart | None = None
    """Verify only this part of the records, and write no shards; see :mod:`data_tools.work_parts`."""

    @cached_property
    def root(self) -> Path | None:
        """The media root with links resolved."""
        return self.media_root.resolve() if self.media_root else None

    def planned(self) -> dict[str, Any]:
        """The options that determine the output."""
        option_names = (
            "val_fraction",
            "samples_per_shard",
            "bytes_per_shard",
            "max_pixels",
            "duplicate_ids",
            "format",
        )
        return {name: getattr(self, name) for name in option_names}


def convert_dataset(
    input_paths: list[Path], options: ConversionOptions, show_progress: Callable[[str], None] | None = None
) -> DataReport:
    """Converts files, folders of them, or an index into one data set, or continues to do so.

    Returns:
        The results of the whole data set, including what an earlier attempt converted.

    Raises:
        ConvertError: an option is impossible, the output folder holds something else, the disk is full, or a
            worker process died.
        ShardError, ReadError: a medium changed while it was converted, or an input is not JSON.
    """
    # Arguments are checked before the output folder is touched.
    input_files = check_inputs(input_paths, options)
    start_time = time.monotonic()
    workspace = _open_workspace(input_files, options)
    try:
        if workspace.is_complete:  # the same command was given again
            return replace(DataReport.read_report(options.out / "report.json"), was_complete=True)

        meter = _ProgressMeter(sum(source.path.stat().st_size for source in input_files), show_progress)
        if options.part is None:
            report = _convert_records(input_files, options, workspace, meter)
        else:
            # The node that writes the shards later is started with the folder only.
            _write_arguments(input_paths, options, workspace)
            report = _verify_part(input_files, options, options.part, workspace, meter)
    except (OSError, sqlite3.Error) as error:
        raise ConvertError(f"{error}; nothing is lost: {RESTART_ADVICE}") from error
    finally:
        workspace.close()

    report.seconds = round(time.monotonic() - start_time, 3)
    return report


def _open_workspace(input_files: list[InputFile], options: ConversionOptions) -> ConversionWorkspace:
    """The output folder. A conversion continues there only under an equal plan."""
    # The plan is everything that determines the output.
    planned_options = options.planned()
    if any(source.field_by_column or source.role_tags or source.format_name for source in input_files):
        planned_options["index"] = [source.index_plan() for source in input_files]
    try:
        conversion_plan = make_plan([source.path for source in input_files], options.root, **planned_options)
    except OSError as error:
        raise ConvertError(
            f"--input {error.filename} cannot be read ({error.strerror}); make it readable for this user"
        ) from error

    part_name = options.part.name if options.part else ""
    try:
        return ConversionWorkspace(options.out, conversion_plan, options.force, part_name)
    except ResumeError as error:
        raise ConvertError(str(error)) from error
    except OSError as error:
        raise ConvertError(
            f"--out {options.out} cannot be written ({error.strerror}); give a folder that this user"
            " may write to"
        ) from error


ARGUMENTS_FILE = "arguments.json"
RESTART_ADVICE = "fix this and start again with the same arguments"


def _write_arguments(
    input_paths: list[Path], options: ConversionOptions, workspace: ConversionWorkspace
) -> None:
    """Notes the arguments for the process that writes the shards."""
    part_arguments = {
        # Links stay links: those of a hub's cache lead to files whose names lack the suffix.
        "inputs": [os.path.abspath(path) for path in input_paths],
        "media_root": str(options.root or ""),
        "datasets": options.datasets,
        "options": options.planned(),
    }
    workspace.write_once(ARGUMENTS_FILE, json.dumps(part_arguments).encode())


def finished_report(dataset_dir: Path) -> DataReport | None:
    """The report of a complete data set; None if there is none in the folder."""
    try:
        is_complete = (dataset_dir / ".nv-meta" / CONVERSION_FILE).exists()
        return DataReport.read_report(dataset_dir / "report.json") if is_complete else None
    except FileNotFoundError:
        return None


def read_part_arguments(dataset_dir: Path, num_workers: int) -> tuple[list[Path], ConversionOptions]:
    """The inputs and options with which parts were converted in a folder.

    Raises:
        ConvertError: there is no part, or one is not complete.
    """
    work_dir = dataset_dir / WORK_FOLDER
    try:
        part_arguments = json.loads((work_dir / ARGUMENTS_FILE).read_text())
        missing_part_names = describe_missing_parts(work_dir)
    except FileNotFoundError as error:
        raise ConvertError(f"{dataset_dir} holds no parts of `megatron-vl data convert --shard`") from error

    if missing_part_names:
        raise ConvertError(
            f"{dataset_dir}: the parts {missing_part_names} are not complete; run `megatron-vl data "
            "convert --shard` for them again. Without --shard, it does all that is missing itself"
        )

    options = ConversionOptions(
        Path(part_arguments["media_root"]) if part_arguments["media_root"] else None,
        dataset_dir,
        num_workers,
        datasets=part_arguments["datasets"],
        **part_arguments["options"],
    )
    return [Path(path) for path in part_arguments["inputs"]], options


def _verify_part(
    input_files: list[InputFile],
    options: ConversionOptions,
    work_part: WorkPart,
    workspace: ConversionWorkspace,
    meter: _ProgressMeter,
) -> DataReport:
    """Verifies the records of a part. The report counts only these, whether now or in an earlier run."""
    report = DataReport()
    journal = part_journal(workspace.work_dir, work_part)
    finished_batches = {batch for batch, _ in journal.known_entries()}
    pending_batches: deque[int] = deque()
    is_wanted = partial(work_part.overlaps_records, batch_size=RECORDS_PER_BATCH)

    def pending_tasks() -> Iterator[tuple[Any, ...]]:
        numbered_records = _numbered_records(input_files, meter, is_wanted)
        for batch_number, record_batch in enumerate(_record_batches(numbered_records)):
            if work_part.owns_batch(batch_number) and batch_number not in finished_batches:
                pending_batches.append(batch_number)
                meter.batch_end_bytes.append(meter.bytes_read)
                yield record_batch, options, None, None

    with _WorkerPool(options.workers) as pool:
        for outcomes in pool.results_in_order(_verify_batch, pending_tasks()):
            journal.append_entry({"batch": pending_batches.popleft(), "verdicts": _batch_verdicts(outcomes)})
            for outcome in outcomes:
                if isinstance(outcome, ConvertedSample):
                    report.records += 1
                    report.train += 1
                else:
                    report.count_outcome(outcome)
            meter.finish_batch(report)
    meter.show_final_progress(report)
    _check_input_sizes(input_files, workspace)
    if -1 not in finished_batches:  # batch -1 marks the part as complete
        journal.append_entry({"batch": -1, "verdicts": []})
    journal.close(sync_to_disk=True)
    return report


def _convert_records(
    input_files: list[InputFile],
    options: ConversionOptions,
    workspace: ConversionWorkspace,
    meter: _ProgressMeter,
) -> DataReport:
    """Converts all records: workers verify them and write shards, this process orders the samples."""
    report = DataReport()
    # This file is written anew by each attempt: it follows from the verdicts.
    quarantine_partial = workspace.work_dir / "quarantine.jsonl"
    with (
        _WorkerPool(options.workers) as pool,
        quarantine_partial.open("w", encoding="utf-8") as quarantine_file,
        closing(RecordIdTable(workspace.work_dir / "ids.sqlite")) as seen_ids,
    ):
        embedded_media = EmbeddedMediaFolder(workspace.work_dir / "media")
        shard_writer = _ShardWriter(pool, options, report, workspace, embedded_media)
        for outcomes, is_known in _verified_batches(input_files, options, workspace, meter, shard_writer):
            # References are held here until the shard writer has counted those it waits for.
            samples = [outcome for outcome in outcomes if isinstance(outcome, ConvertedSample)]
            embedded_media.add_references(samples)
            for outcome in outcomes:
                if options.duplicate_ids == "refuse":
                    outcome = _first_or_refusal(outcome, seen_ids)
                report.count_outcome(outcome)
                if isinstance(outcome, ConvertedSample):
                    shard_writer.add_sample(outcome)
                else:
                    quarantine_file.write(json.dumps(outcome, ensure_ascii=False) + "\n")
            embedded_media.release_references(samples)
            meter.finish_batch(report, is_resuming=is_known)
        meter.show_final_progress(report)
        shard_writer.finish_splits()
    _check_input_sizes(input_files, workspace)
    durable_files.publish_file(quarantine_partial, options.out / "quarantine.jsonl")
    _publish_dataset(report, shard_writer.index_writer.written_shards, workspace)
    return report


def _verified_batches(
    input_files: list[InputFile],
    options: ConversionOptions,
    workspace: ConversionWorkspace,
    meter: _ProgressMeter,
    shard_writer: _ShardWriter,
) -> Iterator[tuple[list[ConvertedSample | dict[str, Any]], bool]]:
    """Yields (samples and lines of the quarantine file, whether an earlier run verified it) of each batch."""
    journal = JsonLinesJournal(workspace.work_dir / "journal.jsonl", parse_verdicts)
    known_verdicts = journal.known_entries()
    part_verdicts = PartVerdicts(workspace.work_dir)

    def verify_tasks() -> Iterator[tuple[Any, ...]]:
        for batch_number, record_batch in enumerate(_record_batches(_numbered_records(input_files, meter))):
            meter.batch_end_bytes.append(meter.bytes_read)
            # Verdicts of an earlier attempt, or of a part, spare the decoding of the media.
            verdicts = next(known_verdicts, None) or part_verdicts.verdicts_of_batch(batch_number)
            yield record_batch, options, verdicts, shard_writer.embedded_media.batch_path(batch_number)

    all_outcomes = shard_writer.worker_pool.results_in_order(_verify_batch, verify_tasks())
    for batch_number, outcomes in enumerate(all_outcomes):
        is_known = batch_number < journal.num_known
        if not is_known:
            journal.append_entry(_batch_verdicts(outcomes))
        yield outcomes, is_known
    journal.close()


def _check_input_sizes(input_files: list[InputFile], workspace: ConversionWorkspace) -> None:
    """Raises ConvertError if an input has grown or shrunk since the conversion's plan was made."""
    for input_file, planned_input in zip(input_files, workspace.plan["inputs"], strict=True):
        if (current_size := input_file.path.stat().st_size) != planned_input["bytes"]:
            raise ConvertError(
                f"{input_file.path} had {planned_input['bytes']} bytes at the start and now has"
                f" {current_size}: something writes to it. Wait until it is complete, then start over with"
                " --force"
            )


def _publish_dataset(
    report: DataReport, written_shards: list[WrittenShard], workspace: ConversionWorkspace
) -> None:
    """Writes the report, and makes the data set appear."""
    # The time it took is left out, so that the same input gives the same files.
    report_fields = report.as_json()
    for field_name in RUN_DEPENDENT_FIELDS:
        del report_fields[field_name]
    report_json = json.dumps(report_fields, indent=2) + "\n"
    durable_files.write_file(workspace.dataset_dir / "report.json", report_json.encode())

    shard_records = {}
    for shard in written_shards:
        shard_records[shard.name] = {
            "samples": shard.num_samples,
            "bytes": shard.size_bytes,
            "sha256": shard.sha256,
        }
    workspace.publish_dataset(shard_records)


def _batch_verdicts(
    outcomes: list[ConvertedSample | dict[str, Any]],
) -> list[list[MediaInfo] | dict[str, Any]]:
    """What a journal keeps of records: the measures of media, or the line of the quarantine file."""
    return [entry.media_infos if isinstance(entry, ConvertedSample) else entry for entry in outcomes]


def check_inputs(input_paths: list[Path], options: ConversionOptions) -> list[InputFile]:
    """The files of the inputs. Raises ConvertError if an argument cannot be used."""
    try:
        input_files = find_input_files(input_paths, options.datasets)
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

    positive_options = {
        "--workers": options.workers,
        "--samples-per-shard": options.samples_per_shard,
        "--shard-mb": options.bytes_per_shard,
        "--max-megapixels": options.max_pixels,
    }
    if invalid_options := [name for name, value in positive_options.items() if value < 1]:
        raise ConvertError(f"{' and '.join(invalid_options)} must be positive")

    return input_files


def _numbered_records(
    input_files: list[InputFile], meter: _ProgressMeter, is_wanted: Callable[[int, int], bool] = all_wanted
) -> Iterator[tuple[int, str, int, Any, str]]:
    """Yields (index among all records, file, number in the file, record, format or "") of each record.

    Args:
        is_wanted: whether a record with an index from the first argument to before the second is of use.
            None may take the place of a record that is not.
    """
    record_index = 0
    file_names = input_names([input_file.path for input_file in input_files])
    for file_name, input_file in zip(file_names, input_files, strict=True):

        def is_wanted_here(first_record: int, end_record: int, file_start: int = record_index) -> bool:
            return is_wanted(file_start + first_record, file_start + end_record)

        for record_number, record in read_records(input_file.path, meter.add_bytes_read, is_wanted_here):
            yield (
                record_index,
                file_name,
                record_number,
                input_file.rename_fields(record),
                input_file.format_name,
            )
            record_index += 1


def _first_or_refusal(
    outcome: ConvertedSample | dict[str, Any], seen_ids: RecordIdTable
) -> ConvertedSample | dict[str, Any]:
    """Returns ``outcome``, or the line of the quarantine file for a sample whose id occurred before."""
    if not isinstance(outcome, ConvertedSample) or not outcome.conversation.record_identity:
        return outcome

    record_identity = outcome.conversation.record_identity
    current_location = (outcome.record_source["file"], outcome.record_source["record"])
    first_location = seen_ids.first_occurrence(record_identity, *current_location)
    if first_location == current_location:
        return outcome
    error = duplicate_id_error(record_identity, *first_location)
    return _quarantine_entry(outcome.record_source, record_identity, error)


def duplicate_id_error(record_identity: str, first_file: str, first_record: int) -> RecordError:
    """The error of a usable record whose id is that of an earlier one."""
    detail = (
        f"{_shorten_text(record_identity)} is also the id of record {first_record} of {first_file};"
        " --duplicate-ids keep accepts both"
    )
    return RecordError("duplicate id", detail, "id")


def _record_batches(records: Iterator[Any]) -> Iterator[list[Any]]:
    while record_batch := list(islice(records, RECORDS_PER_BATCH)):
        yield record_batch


# --- In the worker processes --------------------------------------------------------------------------------


def _verify_batch(
    record_batch: list[tuple[int, str, int, Any, str]],
    options: ConversionOptions,
    known_verdicts: list[Any] | None,
    embedded_media_path: Path | None,
) -> list[ConvertedSample | dict[str, Any]]:
    """Returns samples ready for a shard; for an unusable record, its line of the quarantine file.

    Args:
        known_verdicts: those of an earlier run; None: decode the media now.
        embedded_media_path: file for media within records; None: the samples are not needed later.
    """
    outcomes: list[ConvertedSample | dict[str, Any]] = []
    embedded_media_file = EmbeddedMediaFile(embedded_media_path) if embedded_media_path else None
    verdicts = known_verdicts or [None] * len(record_batch)
    for numbered_record, verdict in zip(record_batch, verdicts, strict=True):
        if isinstance(verdict, dict):
            outcomes.append(verdict)
            continue
        record_index, file_name, record_number, record, record_format = numbered_record
        record_source = {"file": file_name, "record": record_number}
        try:
            conversation, media_infos = read_record(record, options, record_format, verdict)
        except RecordError as error:
            id_value = record.get("id") if isinstance(record, dict) else None
            outcomes.append(_quarantine_entry(record_source, record_identity(id_value), error))
        except Exception as error:
            if isinstance(error, OSError) or not is_machine_fault(error):
                raise
            raise ConvertError(
                f"{file_name}: record {record_number}: {type(error).__name__}: {error}; nothing is lost: free"
                " memory or lower --workers, and start again with the same arguments"
            ) from error
        else:
            references = _stored_references(conversation, embedded_media_file, options.root)
            stored_conversation = replace(conversation, media_references=references)
            outcomes.append(
                ConvertedSample(f"{record_index:09d}", stored_conversation, media_infos, record_source)
            )
    return outcomes


def read_record(
    record: Any, options: ConversionOptions, record_format: str, known_infos: list[MediaInfo] | None = None
) -> tuple[Conversation, list[MediaInfo]]:
    """Reads a record and measures its media. Raises RecordError if it cannot be used.

    Args:
        record_format: the format that an index gives; empty: none.
        known_infos: the measures of the media of an earlier run; None: decode them now.
    """
    if isinstance(record, UnreadableRecord):
        raise RecordError(record.reason, str(record))
    conversation = read_conversation(record, options.format or record_format)
    return conversation, _inspect_all_media(conversation, options) if known_infos is None else known_infos


def _stored_references(
    conversation: Conversation, embedded_media_file: EmbeddedMediaFile | None, media_root: Path | None
) -> list[tuple[str, Any]]:
    """The references of a sample's media; none if the sample is not needed later."""
    if embedded_media_file is None:
        return []
    references = []
    for media_kind, reference in conversation.media_references:
        # Media inside records would wait in memory for their shard, so they go to the disk now.
        if is_embedded(reference):
            reference = embedded_media_file.append_medium(read_media(media_kind, reference, media_root))
        references.append((media_kind, reference))
    return references


def _quarantine_entry(
    record_source: dict[str, Any], record_identity: str, error: RecordError
) -> dict[str, Any]:
    """The line of the quarantine file of an unusable record. Its id is empty if the record has none."""
    return {
        **record_source,
        "id": _shorten_text(record_identity.partition(": ")[2]),
        "field": error.field_path,
        "reason": error.reason,
        "detail": _escape_invalid_unicode(str(error)),
    }


def _shorten_text(text: str) -> str:
    return _escape_invalid_unicode(text if len(text) <= 100 else f"{text[:97]}...")


def _escape_invalid_unicode(detail: str) -> str:
    """Replaces invalid Unicode, which names in a record may contain, but text about them must not."""
    return detail.encode(errors="backslashreplace").decode()


def _inspect_all_media(conversation: Conversation, options: ConversionOptions) -> list[MediaInfo]:
    """Decodes and measures the media of a record.

    Raises:
        RecordError: a medium cannot be used. Its ``field_path`` is the medium's location in the record.
    """
    media_infos = []
    located_media = zip(conversation.media_references, conversation.field_paths, strict=True)
    for (media_kind, reference), field_path in located_media:
        try:
            media_infos.append(_inspect_reference(media_kind, reference, options.root, options.max_pixels))
        except RecordError as error:
            error.field_path = field_path
            raise
    return media_infos


def _inspect_reference(
    media_kind: str, reference: Any, media_root: Path | None, max_pixels: int
) -> MediaInfo:
    if is_embedded(reference):
        media_bytes = read_media(media_kind, reference, media_root)
        return inspect_medium(media_kind, reference, media_bytes, max_pixels)

    media_path = reference
    if not isinstance(reference, FrameSequence):
        allow_folder = media_kind == "video" and may_be_frame_folder(reference)
        media_path = resolve_reference(reference, media_root, allow_folder=allow_folder)
    return _inspect_file(media_kind, reference, media_path, media_root, max_pixels)


@lru_cache(maxsize=4096)
def _inspect_file(
    media_kind: str,
    reference: str | FrameSequence,
    media_path: Path | FrameSequence,
    media_root: Path | None,
    max_pixels: int,
) -> MediaInfo:
    """Inspects a file; each process decodes a file that many records share only once."""
    return inspect_medium(media_kind, reference, read_media(media_kind, reference, media_root), max_pixels)


# --- In the main process ------------------------------------------------------------------------------------


class _ShardWriter:
    """Distributes samples over train and val and writes their shards, in order.

    Every ``1 / val_fraction``-th sample goes to val. With two or more samples, both splits get at least one:
    the first sample never goes to val, and the last train sample moves to val if val would stay empty.
    """

    def __init__(
        self,
        pool: _WorkerPool,
        options: ConversionOptions,
        report: DataReport,
        workspace: ConversionWorkspace,
        embedded_media: EmbeddedMediaFolder,
    ) -> None:
        self.worker_pool = pool
        self.options = options
        self.report = report
        self.index_writer = IndexWriter(workspace.meta_dir)
        self.open_samples: dict[str, list[ConvertedSample]] = {"train": [], "val": []}
        self.open_bytes = {"train": 0, "val": 0}
        self.shard_counts: Counter[str] = Counter()
        self.samples_seen = self.shard_number = 0
        self.embedded_media = embedded_media
        self.pending_shards: deque[tuple[Future[WrittenShard], list[ConvertedSample]]] = deque()

    def add_sample(self, sample: ConvertedSample) -> None:
        """Puts the next sample of the input into its split."""
        self.embedded_media.add_references([sample])
        # A sample goes to val when the number of val samples that are due passes the next integer.
        val_before = int(self.samples_seen * self.options.val_fraction + 1e-9)
        self.samples_seen += 1
        val_after = int(self.samples_seen * self.options.val_fraction + 1e-9)
        self._append_sample("val" if val_after > val_before else "train", sample)

    def _append_sample(self, split_name: str, sample: ConvertedSample) -> None:
        # A full shard is written when the next sample arrives; the last one stays here until the end.
        open_samples = self.open_samples[split_name]
        is_full = (
            len(open_samples) >= self.options.samples_per_shard
            or self.open_bytes[split_name] + sample.media_bytes > self.options.bytes_per_shard
        )
        if open_samples and is_full:
            self._flush_split(split_name)
        self.open_samples[split_name].append(sample)
        self.open_bytes[split_name] += sample.media_bytes
        setattr(self.report, split_name, getattr(self.report, split_name) + 1)

    def _flush_split(self, split_name: str) -> None:
        shard_samples = self.open_samples[split_name]
        self.open_samples[split_name] = []
        self.open_bytes[split_name] = 0
        if not shard_samples:
            return

        for sample in shard_samples:
            self.report.images += sum(info.kind == "image" for info in sample.media_infos)
            self.report.videos += sum(info.kind == "video" for info in sample.media_infos)

        shard_name = f"{split_name}-{self.shard_counts[split_name]:06d}.tar"
        self.shard_counts[split_name] += 1
        shard_future = self.worker_pool.submit(
            finish_shard, shard_name, self.shard_number, shard_samples, self.options.root, self.options.out
        )
        self.pending_shards.append((shard_future, shard_samples))
        self.shard_number += 1
        while len(self.pending_shards) > 2 * self.options.workers:
            self._collect_shard()

    def _collect_shard(self) -> None:
        """Waits for the oldest pending shard, and adds it to the index."""
        shard_future, shard_samples = self.pending_shards.popleft()
        shard = _worker_result(shard_future)
        self.embedded_media.release_references(shard_samples)
        self.index_writer.add_shard(shard)
        self.report.shards += 1
        self.report.bytes += shard.size_bytes

    def finish_splits(self) -> None:
        """Writes the last shards of both splits, and the index."""
        if self.options.val_fraction > 0 and not self.report.val and self.report.train > 1:
            moved_sample = self.open_samples["train"].pop()
            self.report.train -= 1
            self._append_sample("val", moved_sample)
        for split_name in self.open_samples:
            self._flush_split(split_name)
        while self.pending_shards:
            self._collect_shard()
        self.index_writer.finish()


class _WorkerPool:
    """Worker processes; with one worker, this process does the work itself."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> _WorkerPool:
        if self.num_workers > 1:
            # fork: workers share what is imported here and start at once; no threads have been started yet.
            self.executor = ProcessPoolExecutor(
                self.num_workers, multiprocessing.get_context("fork"), initializer=_start_worker
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self.executor is not None:
            return self.executor.submit(function, *arguments)
        finished_future: Future[Any] = Future()
        finished_future.set_result(function(*arguments))
        return finished_future

    def results_in_order(
        self, function: Callable[..., Any], task_arguments: Iterator[tuple[Any, ...]]
    ) -> Iterator[Any]:
        """Yields the results in the order of the tasks. At most four tasks for each worker are pending."""
        pending_futures: deque[Future[Any]] = deque()
        for arguments in task_arguments:
            pending_futures.append(self.submit(function, *arguments))
            if len(pending_futures) >= 4 * self.num_workers:
                yield _worker_result(pending_futures.popleft())
        while pending_futures:
            yield _worker_result(pending_futures.popleft())


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    # A worker holds both ends of the queue, so it would wait for a task forever if its parent were killed.
    end_with_parent()


def _worker_result(worker_future: Future[Any]) -> Any:
    try:
        return worker_future.result()
    except BrokenProcessPool as error:
        raise ConvertError(
            "a worker process died (out of memory, or a media file crashed its decoder); try --workers 1"
        ) from error


class _ProgressMeter:
    """Shows how many input bytes are converted, with the rate of this run and the time left."""

    def __init__(self, total_bytes: int, show_progress: Callable[[str], None] | None) -> None:
        self.total_bytes = total_bytes
        self.write_line = show_progress
        self.bytes_read = 0
        self.bytes_done = 0
        self.start_time = self.last_shown_time = time.monotonic()
        self.resumed_bytes = self.resumed_records = 0
        self.interval_seconds = 1.0 if sys.stderr.isatty() else 10.0
        self.batch_end_bytes: deque[int] = deque()
        """Bytes read when each pending batch was complete, because reading is ahead of the work."""
        self.is_silent = True

    def add_bytes_read(self, byte_count: int) -> None:
        self.bytes_read += byte_count

    def finish_batch(self, report: DataReport, is_resuming: bool = False) -> None:
        """Counts one more finished batch.

        Args:
            is_resuming: whether the verdicts on the records so far are those of an earlier run. The rate
                leaves them out.
        """
        self.bytes_done = self.batch_end_bytes.popleft()
        current_time = time.monotonic()
        if is_resuming:
            self.start_time = current_time
            self.resumed_bytes = self.bytes_done
            self.resumed_records = report.records
        if current_time - self.last_shown_time >= self.interval_seconds:
            self._show_progress(report, current_time, is_resuming)

    def show_final_progress(self, report: DataReport) -> None:
        """Shows the final figures if lines were shown before."""
        self.bytes_done = self.total_bytes
        if not self.is_silent:
            self._show_progress(report, time.monotonic(), False)

    def _show_progress(self, report: DataReport, current_time: float, is_resuming: bool) -> None:
        if self.write_line is None:
            return
        self.last_shown_time = current_time
        self.is_silent = False
        progress_line = (
            f"{min(self.bytes_done / max(self.total_bytes, 1), 1.0):4.0%}  {report.records} records, "
            f"{report.quarantined_records} quarantined"
        )
        if is_resuming:
            self.write_line(f"{progress_line}; reading what an earlier run did")
            return

        elapsed_seconds = current_time - self.start_time
        bytes_left = max(self.total_bytes - self.bytes_done, 0)
        seconds_left = elapsed_seconds * bytes_left / max(self.bytes_done - self.resumed_bytes, 1)
        records_per_second = (report.records - self.resumed_records) / max(elapsed_seconds, 1e-9)
        self.write_line(f"{progress_line}, {records_per_second:.0f} records/s, {seconds_left:.0f} s left")


def default_workers() -> int:
    """Default number of processes: the available cores, at most 8."""
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
