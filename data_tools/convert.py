"""Converts files of conversations and documents into WebDataset shards prepared for Energon.

Records are read as a stream. Worker processes decode and measure their media, and store each usable record
as members of a tar, in a file for each batch. The main process appends them to shards in the order of the
input, and worker processes index the shards, so the result does not depend on the number of workers.
Unusable records are listed in ``quarantine.jsonl`` and counted by reason: the number of samples plus refused
records always equals the number of records read.

All of it happens in ``OUT.partial``, which becomes ``OUT`` at the end. A killed conversion starts again.
"""

import hashlib
import json
import sqlite3
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import batched
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.grids import CLIP_LIMITS, clip_frames
from megatron_vl.data.sample.images import DEFAULT_MAX_PIXELS
from megatron_vl.data.sample.medium import MediaInfo, UnusableError, inspect_medium, stored_video_info
from megatron_vl.data.source.location import PART_NAME, part_name
from megatron_vl.system import durable_files
from megatron_vl.system.errors import DISK_REMEDIES, is_machine_fault
from megatron_vl.system.partial_folder import open_partial_folder
from megatron_vl.system.progress_bar import progress
from megatron_vl.weights.trained_media import read_json_object

from .formats import FORMATS, Conversation, RecordError, read_conversation
from .formats.conversation import record_identity
from .formats.objects import check_boxes
from .input_files import InputFile, find_input_files, input_names, with_columns
from .media import MediaRoots, is_embedded, read_media
from .records import ConvertError, UnreadableRecord, read_records
from .shards import CONVERSION_FILE, MEDIA_NAMES_FILE, METADATA_DIR, ShardWriter, StoredSample, store_sample
from .worker_pool import WorkerPool

RECORDS_PER_BATCH = 16
RECORDS_PER_BLOCK = 256
"""Records that stay together when the work is divided into parts: a part then reads few row groups of a
table that it does not need."""
MAX_IGNORED_KEYS = 100
FACT_OPTIONS = (
    *("val_fraction", "samples_per_shard", "bytes_per_shard", "max_pixels", "duplicate_ids", "format"),
    *("columns", "missing_markers", "caption_prompt"),
)
"""Options that determine the output."""


MAX_LATEST = 1 << 20
"""Ids that wait, in a dictionary, to be sorted into the array."""
WARNED_COUNT = 10**8
PLACE_BITS = 40
"""Bits of a place that count records; the upper ones are the number of the file."""
QUARANTINE_FILE = "quarantine.jsonl"
"""In a data set's folder: the records that were refused, one a line."""


@dataclass
class DataReport:
    records: int = 0
    train: int = 0
    val: int = 0
    images: int = 0
    videos: int = 0
    bytes: int = 0
    shards: int = 0
    refused: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Number of refused records by input file and reason."""
    ignored: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """How often a key without effect occurs in the samples, by location (``records``, ``turns``, ``content
    parts``, ``listed media``) and key. At each location, keys beyond the first 100 are counted together."""
    answer_media: int = 0
    """Images and videos in the assistant's turns; the model sees them but is not trained on them."""
    unsaid_boxes: int = 0
    """The assistant's turns with boxes whose frame of reference is not said. They are trained on as text."""
    unfinished_turns: int = 0
    """Turns after the last answer or call of their conversation, which are left out."""
    assumed_fps: int = 0
    """Videos whose frame rate neither the record nor the file gives."""
    first_images: int = 0
    """Images that are the first of an animation or of several pages."""

    @property
    def samples(self) -> int:
        return self.train + self.val

    @property
    def quarantined_records(self) -> int:
        return self.records - self.samples

    def count_sample(self, sample: StoredSample) -> None:
        for key_location, written_key in sample.ignored_keys:
            key = _escape_invalid_unicode(written_key)
            counts = self.ignored[key_location]
            counts[key if key in counts or len(counts) < MAX_IGNORED_KEYS else "other keys"] += 1
        for name, count in sample.counts.items():
            setattr(self, name, getattr(self, name) + count)
        for info in sample.media_infos:
            self.images += info.kind == "image"
            self.videos += info.kind == "video"
            self.assumed_fps += info.assumed_fps
            self.first_images += info.has_more_images

    def as_json(self) -> dict[str, Any]:
        return {"samples": self.samples, **self.__dict__}


@dataclass(frozen=True)
class ConversionOptions:
    """Settings of a conversion; the help of ``data convert`` says what they do."""

    media_root: Path | tuple[Path, ...] | None
    """None: no record refers to a file."""
    out: Path
    follow_links: bool = False
    workers: int = 1
    val_fraction: float = 0.0
    samples_per_shard: int = 1000
    bytes_per_shard: int = 256 << 20
    max_pixels: int = DEFAULT_MAX_PIXELS
    """Largest image or video frame; larger ones are refused by their header, before decoding."""
    format: str = ""
    """Name of the format (:data:`data_tools.formats.FORMATS`) of all records; empty: each record's own."""
    columns: str = ""
    """As :func:`~data_tools.input_files.parse_columns` reads it; empty: the fields of the format."""
    missing_markers: Literal["first", "refuse"] = "refuse"
    caption_prompt: str = ""
    duplicate_ids: Literal["refuse", "keep"] = "refuse"
    """What to do with a record whose ``id`` occurred in an earlier usable record of the same part."""
    part: tuple[int, int] = (0, 1)
    """(i, n): convert only the i-th of n parts of the records, into the folder :attr:`dataset_dir`."""

    @cached_property
    def roots(self) -> MediaRoots:
        folders = self.media_root if isinstance(self.media_root, tuple) else (self.media_root,)
        return MediaRoots(tuple(folder.resolve() for folder in folders if folder), self.follow_links)

    @property
    def dataset_dir(self) -> Path:
        """The folder of the data set; that of a part lies in ``out``."""
        index, num_parts = self.part
        return self.out if num_parts == 1 else self.out / part_name(index, num_parts)

    def is_wanted(self, first_record: int, end_record: int) -> bool:
        """Whether one of the records from ``first_record`` to before ``end_record`` belongs to the part."""
        index, num_parts = self.part
        blocks = range(first_record // RECORDS_PER_BLOCK, (end_record - 1) // RECORDS_PER_BLOCK + 1)
        return len(blocks) >= num_parts or any(block % num_parts == index for block in blocks)

    def output_facts(self, input_files: list[InputFile]) -> dict[str, Any]:
        """What determines the output, as JSON values: the options, and names and sizes of the inputs."""
        paths = [file.path for file in input_files]
        names = zip(input_names(paths), paths, strict=True)
        inputs = [{"name": name, "bytes": path.stat().st_size} for name, path in names]
        return {"options": {name: getattr(self, name) for name in FACT_OPTIONS}, "inputs": inputs}


class RecordIds:
    """The ids so far: a sorted array of 128-bit hashes, and the place of each, 24 bytes together.

    Among 1e8 ids, the probability that two different ones have one hash is about 1e-23.
    """

    def __init__(self) -> None:
        self._hashes = np.zeros(0, "S16")
        self._places = np.zeros(0, np.int64)
        self._latest: dict[bytes, int] = {}
        self._file_names: list[str] = []

    def first_occurrence(self, record_identity: str, file_name: str, record_number: int) -> tuple[str, int]:
        """Returns the file and number of the first record with this id: the given record if the id is new."""
        # A string from JSON may contain single surrogates, which UTF-8 cannot encode.
        digest = hashlib.blake2b(record_identity.encode(errors="surrogatepass"), digest_size=16).digest()
        digest = digest.rstrip(b"\0")  # as numpy reads it from the array
        if not self._file_names or self._file_names[-1] != file_name:
            self._file_names.append(file_name)

        position = int(self._hashes.searchsorted(digest))
        if position < len(self._hashes) and self._hashes[position] == digest:
            place = int(self._places[position])
        else:
            place = self._latest.setdefault(digest, (len(self._file_names) - 1) << PLACE_BITS | record_number)
            if len(self._latest) == MAX_LATEST:
                self._sort_latest()
        return self._file_names[place >> PLACE_BITS], place & (1 << PLACE_BITS) - 1

    def _sort_latest(self) -> None:
        new_hashes = np.array(list(self._latest), "S16")
        order = new_hashes.argsort()
        positions = self._hashes.searchsorted(new_hashes[order])
        new_places = np.fromiter(self._latest.values(), np.int64, len(order))
        self._places = np.insert(self._places, positions, new_places[order])
        self._hashes = np.insert(self._hashes, positions, new_hashes[order])
        self._latest.clear()
        count = len(self._hashes)
        if count >= WARNED_COUNT > count - len(order):
            print(
                f"{count:,} ids so far take {48 * count / 1e9:.1f} GB of memory; --duplicate-ids keep needs"
                " none, and --part divides them",
                file=sys.stderr,
            )


def convert_dataset(input_paths: list[Path], options: ConversionOptions) -> DataReport:
    """Converts files, or folders of them, into one data set.

    Raises:
        ConvertError: an option is impossible, the output folder exists, an input is not JSON, there are too
            many shards, or a worker process died.
        OSError: the folder cannot be written, or its disk is full.
    """
    input_files = check_inputs(input_paths, options)
    try:
        output_facts = options.output_facts(input_files)
        if options.part[1] > 1:
            _check_other_parts(options, output_facts)
        with open_partial_folder(options.dataset_dir, _check_is_empty, lambda _: True) as partial_dir:
            report, shard_records = _convert_records(input_files, options, partial_dir)
            if options.output_facts(input_files)["inputs"] != output_facts["inputs"]:
                raise ConvertError(
                    "an input has changed its size: something writes to it. Wait until it is complete, and"
                    " start again"
                )
            if not report.records:
                part_text = f" in part {options.part[0]}/{options.part[1]}" if options.part[1] > 1 else ""
                raise ConvertError(f"the inputs hold no record{part_text}")
            if options.val_fraction and report.samples == 1:
                raise ConvertError(
                    "1 sample is too few for a validation split; give more, or leave out --val-fraction"
                )
            conversion = {"plan": output_facts, "shards": shard_records}
            (partial_dir / "report.json").write_text(json.dumps(report.as_json(), indent=2) + "\n")
            (partial_dir / METADATA_DIR / CONVERSION_FILE).write_text(json.dumps(conversion, indent=2) + "\n")
    except (OSError, sqlite3.Error) as error:  # Energon's index is a database
        if isinstance(error, OSError) and error.errno in DISK_REMEDIES:
            error.filename = error.filename or str(options.dataset_dir)  # a write to a full disk names none
            raise
        is_taken = isinstance(error, FileExistsError) and not error.errno  # a message of open_partial_folder
        advice = "" if is_taken else ". Fix this and start again with the same arguments"
        folder_text = "" if is_taken or getattr(error, "filename", None) else f"{options.dataset_dir}: "
        raise ConvertError(f"{folder_text}{error}{advice}") from error
    return report


def _check_is_empty(dataset_dir: Path) -> None:
    """Raises FileExistsError unless a folder is a data set without a sample, which the next one replaces."""
    if read_json_object(dataset_dir / "report.json").get("samples") != 0:
        raise FileExistsError(f"--out {dataset_dir} exists; remove it, or give another --out")


def _check_other_parts(options: ConversionOptions, output_facts: dict[str, Any]) -> None:
    """Raises ConvertError if the parts in the output folder are not of the same conversion."""
    advice = "remove it, or give another --out"
    for path in sorted(options.out.glob("*")):
        if path.name.endswith(durable_files.PARTIAL_SUFFIX):
            continue
        name_match = PART_NAME.fullmatch(path.name)
        if name_match is None or int(name_match[2]) != options.part[1]:
            raise ConvertError(
                f"--out {options.out} holds {path.name}, which is none of {options.part[1]} parts; {advice}"
            )
        if json.loads((path / METADATA_DIR / CONVERSION_FILE).read_text())["plan"] != output_facts:
            raise ConvertError(f"{path} was converted from other input or with other arguments; {advice}")


def first_refusal(dataset_dir: Path) -> str:
    with (dataset_dir / QUARANTINE_FILE).open(encoding="utf-8") as lines:
        entry = json.loads(next(lines))
    return f"record {entry['record']}, {entry['reason']}: {entry['detail']}"


def check_inputs(input_paths: list[Path], options: ConversionOptions) -> list[InputFile]:
    """The files of the inputs. Raises ConvertError if an argument cannot be used."""
    found_files = find_input_files(input_paths)
    input_files = with_columns(found_files, options.columns) if options.columns else found_files
    for folder in options.roots.folders:
        if not folder.is_dir():
            raise ConvertError(f"--media-root {folder} is not a folder")
    if not 0 <= options.val_fraction < 1:
        raise ConvertError(f"--val-fraction {options.val_fraction} must be at least 0 and below 1")
    if options.format and options.format not in FORMATS:
        raise ConvertError(f"--format {options.format} is unknown; valid: {', '.join(FORMATS)}")
    if options.workers < 1:
        raise ConvertError("--workers must be positive")
    return input_files


def _convert_records(
    input_files: list[InputFile], options: ConversionOptions, dataset_dir: Path
) -> tuple[DataReport, dict[str, Any]]:
    """Converts all records: workers store samples and index shards, this process orders the samples."""
    report = DataReport()
    seen_ids = RecordIds()
    bytes_read = bytes_shown = 0
    spool_dir = dataset_dir / "spool"
    spool_dir.mkdir()

    def count_bytes(num_bytes: int) -> None:
        nonlocal bytes_read
        bytes_read += num_bytes

    batches = batched(_numbered_records(input_files, options, count_bytes), RECORDS_PER_BATCH)
    tasks = ((batch, options, spool_dir / str(number)) for number, batch in enumerate(batches))
    total_bytes = sum(source.path.stat().st_size for source in input_files)
    with (
        WorkerPool(options.workers) as pool,
        (dataset_dir / QUARANTINE_FILE).open("w", encoding="utf-8") as quarantine_file,
        (dataset_dir / MEDIA_NAMES_FILE).open("w", encoding="utf-8") as names_file,
        progress(total_bytes, "bytes", "converting") as show_progress,
    ):
        shard_writer = ShardWriter(
            dataset_dir,
            pool.submit,
            options.val_fraction,
            options.samples_per_shard,
            options.bytes_per_shard,
            max_pending=2 * options.workers,
        )
        for spool_path, outcomes in pool.results_in_order(_store_batch, tasks):
            with spool_path.open("rb") as spool_file:
                for outcome in outcomes:
                    if isinstance(outcome, StoredSample) and options.duplicate_ids == "refuse":
                        outcome = _first_or_refusal(outcome, seen_ids)
                    report.records += 1
                    if isinstance(outcome, StoredSample):
                        report.count_sample(outcome)
                        shard_writer.add_sample(outcome, spool_file)
                        if any(outcome.media_names):
                            names_file.write(json.dumps([outcome.key, outcome.media_names]) + "\n")
                    else:
                        report.refused[outcome["file"]][outcome["reason"]] += 1
                        quarantine_file.write(json.dumps(outcome, ensure_ascii=False) + "\n")
            spool_path.unlink()
            num_refused = report.records - sum(shard_writer.num_samples.values())
            show_progress(
                bytes_read - bytes_shown, f"{report.records:,} records, {num_refused:,} quarantined"
            )
            bytes_shown = bytes_read
        shards = shard_writer.finish()
    spool_dir.rmdir()
    report.train, report.val = shard_writer.num_samples["train"], shard_writer.num_samples["val"]
    report.shards, report.bytes = len(shards), sum(shard.size_bytes for shard in shards)
    return report, {
        shard.name: {"samples": shard.num_samples, "bytes": shard.size_bytes, "sha256": shard.sha256}
        for shard in shards
    }


def _numbered_records(
    input_files: list[InputFile], options: ConversionOptions, on_bytes: Callable[[int], None]
) -> Iterator[tuple[int, str, int, Any, str]]:
    """Yields (index among all records, file, number in it, record, format or "") of a part's records."""
    record_index = 0
    for file_name, input_file in zip(
        input_names([file.path for file in input_files]), input_files, strict=True
    ):

        def is_wanted(first_record: int, end_record: int, file_start: int = record_index) -> bool:
            return options.is_wanted(file_start + first_record, file_start + end_record)

        for record_number, record in read_records(input_file.path, on_bytes, is_wanted):
            if options.is_wanted(record_index, record_index + 1):
                record = input_file.rename_fields(record)
                yield record_index, file_name, record_number, record, input_file.format_name
            record_index += 1


def _first_or_refusal(sample: StoredSample, seen_ids: RecordIds) -> StoredSample | dict[str, Any]:
    """Returns the sample, or the line of the quarantine file if its id occurred before."""
    if not sample.record_identity:
        return sample
    location = (sample.record_source["file"], sample.record_source["record"])
    first_file, first_record = seen_ids.first_occurrence(sample.record_identity, *location)
    if (first_file, first_record) == location:
        return sample
    detail = (
        f"{_shorten_text(sample.record_identity)} is also the id of record {first_record} of {first_file};"
        " --duplicate-ids keep accepts both"
    )
    error = RecordError("duplicate id", detail, "id")
    return _quarantine_entry(sample.record_source, sample.record_identity, error)


# --- In the worker processes --------------------------------------------------------------------------------


def _store_batch(
    record_batch: tuple[tuple[int, str, int, Any, str], ...], options: ConversionOptions, spool_path: Path
) -> tuple[Path, list[StoredSample | dict[str, Any]]]:
    """Writes the samples of a batch to a file. An unusable record gives its line of the quarantine file."""
    outcomes: list[StoredSample | dict[str, Any]] = []
    with spool_path.open("wb") as spool_file:
        for record_index, file_name, record_number, record, record_format in record_batch:
            record_source = {"file": file_name, "record": record_number}
            try:
                conversation, media = read_record(record, options, record_format)
            except RecordError as error:
                id_value = record.get("id") if isinstance(record, dict) else None
                outcomes.append(_quarantine_entry(record_source, record_identity(id_value), error))
            except Exception as error:
                if isinstance(error, OSError) or not is_machine_fault(error):
                    raise
                raise ConvertError(
                    f"{file_name}: record {record_number}: {type(error).__name__}: {error}; free memory or"
                    " lower --workers, and start again"
                ) from error
            else:
                outcomes.append(
                    store_sample(f"{record_index:09d}", conversation, media, record_source, spool_file)
                )
    return spool_path, outcomes


def read_record(
    record: Any, options: ConversionOptions, record_format: str
) -> tuple[Conversation, list[tuple[MediaInfo, bytes]]]:
    """Reads a record, and reads and measures its media.

    Args:
        record_format: the format that an index gives; empty: none.

    Raises:
        RecordError: it cannot be used. Its ``field_path`` is the location in the record.
    """
    if isinstance(record, UnreadableRecord):
        raise RecordError(record.reason, record.detail)
    conversation = read_conversation(
        record, options.format or record_format, options.missing_markers, options.caption_prompt
    )
    media = []
    for (kind, reference), field_path, limits in zip(
        conversation.media_references, conversation.field_paths, conversation.media_limits, strict=True
    ):
        try:
            media_bytes = read_media(reference, options.roots)
            info = _inspect_once(kind, reference, media_bytes, options)
            if not limits.keys().isdisjoint(CLIP_LIMITS):
                clip_frames(stored_video_info(info.loader_record("") | {"limits": limits}))
            media.append((info, media_bytes))
        except PixelError as error:
            raise RecordError("clip outside of its video", str(error), field_path) from error
        except UnusableError as error:
            raise RecordError(error.reason, str(error), field_path) from error
    check_boxes(conversation.objects, [info for info, _ in media], conversation.media_limits)
    return conversation, media


_inspected_files: dict[Any, MediaInfo] = {}
"""Files that this process has decoded, by reference and checksum: many records may share one."""


def _inspect_once(
    media_kind: str, reference: Any, media_bytes: bytes, options: ConversionOptions
) -> MediaInfo:
    arguments = (media_kind, reference, media_bytes, options.max_pixels)
    if is_embedded(reference):
        return inspect_medium(*arguments)
    file_key = (options, media_kind, reference, len(media_bytes), zlib.crc32(media_bytes))
    if file_key not in _inspected_files:
        if len(_inspected_files) == 4096:
            _inspected_files.clear()
        _inspected_files[file_key] = inspect_medium(*arguments)
    return _inspected_files[file_key]


def _quarantine_entry(source: dict[str, Any], record_identity: str, error: RecordError) -> dict[str, Any]:
    """The line of the quarantine file of an unusable record. Its id is empty if the record has none."""
    return {
        **source,
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
