"""Writes the sizes of all samples of a data set, from which a run plans its batches.

Only the text of the samples is read and tokenized. The files are those that
:mod:`megatron_vl.data.source.sample_sizes` describes; a killed process leaves none of them.
"""

import fcntl
import json
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from megatron.energon.errors import FatalSampleError
from numpy.typing import NDArray

from megatron_vl.config import DataConfig
from megatron_vl.data.row_encoder import RawSample, RowEncoder, checked_json_bytes, refusal_of_error
from megatron_vl.data.sample.boxes import FRAMES, SampleObjects
from megatron_vl.data.sample.chat import ChatError
from megatron_vl.data.sample.documents import encode_document
from megatron_vl.data.sample.medium import stored_media_grid, stored_video_info
from megatron_vl.data.sample.parts import ExchangeStart
from megatron_vl.data.sample.written_numbers import read_number
from megatron_vl.data.source.dataset_description import (
    METADATA_DIR,
    SIZES_DIR,
    DatasetDescription,
    read_description,
)
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_sizes import (
    COORDINATE,
    EXCHANGE_DTYPE,
    MEDIUM_DTYPE,
    OPTIONAL_ARRAYS,
    SAMPLE_DTYPE,
    SHARDS_FILE,
    MediumFields,
    compute_tokenization_id,
    has_stored_sizes,
    list_all_datasets,
)
from megatron_vl.spec.families import ModelSpec
from megatron_vl.system import durable_files
from megatron_vl.system.errors import is_machine_fault
from megatron_vl.system.progress_bar import progress

from .sample_sources import SampleReader, SampleSource
from .worker_pool import run_tasks

ARRAY_DTYPES: dict[str, np.dtype[Any]] = {
    "samples": SAMPLE_DTYPE,
    "media": MEDIUM_DTYPE,
    "documents": np.dtype("?"),
    "text_before": np.dtype("<u4"),
    "limits": np.dtype("u1"),
    "limits_end": np.dtype("<u8"),
    "exchanges": EXCHANGE_DTYPE,
    "exchange_ends": np.dtype("<u8"),
}
"""The files of sizes, without ``.npy``."""


@dataclass(frozen=True)
class IndexResult:
    """What was done for one data set."""

    path: Path
    seconds: float
    """0 if the sizes existed before."""
    samples: int = 0
    unusable: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    media: int = 0
    bytes: int = 0


def index_datasets(
    data_config: DataConfig, spec: ModelSpec, hf_dir: str | Path, num_workers: int = 1
) -> list[IndexResult]:
    """Writes the sizes of a data set, or of all data sets that a description names. Existing sizes stay.

    Raises:
        LoaderError: there is no data set, it is not on a local disk, its shards cannot be read, or its folder
            cannot be written.
        ChatError, PixelError, FileNotFoundError: the tokenizer, template or processor cannot be used.
    """
    sizes_name = compute_tokenization_id(hf_dir, spec, data_config)
    encoder = RowEncoder(data_config, spec, hf_dir)
    datasets = list_all_datasets(read_description(data_config.path))
    for dataset in datasets:
        if not isinstance(dataset.path, Path):
            raise LoaderError(
                f"{dataset.path} is in an object store; index the local folder, then copy {METADATA_DIR} too"
            )
    return [_index_dataset(dataset, sizes_name, encoder, num_workers) for dataset in datasets]


def _index_dataset(
    dataset: DatasetDescription, sizes_name: str, encoder: RowEncoder, num_workers: int
) -> IndexResult:
    assert isinstance(dataset.path, Path)
    sizes_dir = dataset.path / METADATA_DIR / SIZES_DIR / sizes_name
    start_time = time.monotonic()
    try:
        if has_stored_sizes(dataset, sizes_name):
            return _index_result(sizes_dir, 0.0)
        durable_files.make_dirs(sizes_dir.parent)
        with _one_at_a_time(sizes_dir):
            # Whoever had the lock before may have written them.
            if not has_stored_sizes(dataset, sizes_name):
                _write_sizes(dataset, sizes_dir, encoder, num_workers)
    except OSError as error:
        if not has_stored_sizes(dataset, sizes_name):
            raise LoaderError(f"{sizes_dir} cannot be written ({error}); fix this and start again") from error
    return _index_result(sizes_dir, time.monotonic() - start_time)


@contextmanager
def _one_at_a_time(sizes_dir: Path) -> Iterator[None]:
    """Lets one process after the other into the context, if the file system has locks.

    Otherwise, all write the same sizes, each into a folder of its own.
    """
    lock_path = sizes_dir.with_name(f".{sizes_dir.name}.lock")
    with lock_path.open("ab") as lock_file:
        with suppress(OSError):
            fcntl.lockf(lock_file, fcntl.LOCK_EX)
            for stale_dir in sizes_dir.parent.glob(f"{sizes_dir.name}-*{durable_files.PARTIAL_SUFFIX}"):
                shutil.rmtree(stale_dir, ignore_errors=True)
        yield
    lock_path.unlink(missing_ok=True)


def _write_sizes(dataset: DatasetDescription, sizes_dir: Path, encoder: RowEncoder, num_workers: int) -> None:
    """Measures all samples, and puts their sizes in place of those of an earlier content."""
    partial_dir = Path(tempfile.mkdtemp(durable_files.PARTIAL_SUFFIX, f"{sizes_dir.name}-", sizes_dir.parent))
    try:
        partial_dir.chmod(0o755)
        _measure_shards(dataset, encoder, num_workers, partial_dir)
        durable_files.fsync_tree(partial_dir)
        shutil.rmtree(sizes_dir, ignore_errors=True)
        durable_files.rename_path(partial_dir, sizes_dir)
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)


def _index_result(sizes_dir: Path, seconds: float) -> IndexResult:
    samples, media = (np.load(sizes_dir / f"{part}.npy", mmap_mode="r") for part in ("samples", "media"))
    shards = json.loads((sizes_dir / SHARDS_FILE).read_text())["shards"].values()
    return IndexResult(
        sizes_dir.parents[2],
        round(seconds, 3),
        samples=len(samples),
        unusable=int((samples["tokens"] == 0).sum()),
        reasons=sum((Counter(shard["unusable"]) for shard in shards), Counter[str]()),
        media=int((media["frames"] != COORDINATE).sum()),
        bytes=sum(file.stat().st_size for file in sizes_dir.iterdir()),
    )


# --- One shard after the other ------------------------------------------------------------------------------


STORAGE_REASONS = ("shard missing", "shard unreadable")
"""Reasons for which a sample cannot be read that are the storage's and not the sample's."""


def _measure_shards(
    dataset: DatasetDescription, encoder: RowEncoder, num_workers: int, partial_dir: Path
) -> None:
    # Where the samples of each shard are, in order. A shard of two splits has one place.
    places_by_shard: dict[str, tuple[SampleSource, range]] = {}
    for split in [split for split, shards in dataset.shards_by_split.items() if shards]:
        source = SampleSource(split, dataset, split, 1.0)
        for name, (start, end) in zip(source.shard_names, pairwise(source.shard_starts), strict=True):
            places_by_shard.setdefault(name, (source, range(start, end)))
    places = list(places_by_shard.values())
    # Each process has one for each split: to make one takes as long as its split has shards.
    readers: dict[str, SampleReader] = {}

    def measure_shard(shard_number: int) -> ShardSizes:
        source, sample_indices = places[shard_number]
        if source.split not in readers:
            readers[source.split] = SampleReader(source)
        return measure_samples(encoder, (_read_sample(readers[source.split], i) for i in sample_indices))

    try:
        with progress(len(places), "shards", f"measuring the samples of {dataset.path}") as show_progress:
            sizes = zip(places_by_shard, run_tasks(measure_shard, len(places), num_workers), strict=True)
            write_sizes(partial_dir, sizes, lambda: dataset.content_id, show_progress)
    finally:
        for reader in readers.values():
            reader.close()


class ShardSizes(NamedTuple):
    arrays: dict[str, NDArray[Any]]
    """One for each of :data:`ARRAY_DTYPES`. ``media_end``, ``limits_end`` and ``exchange_ends`` count from
    the beginning of the shard."""
    facts: dict[str, Any]


def write_sizes(
    sizes_dir: Path,
    sizes_by_shard: Iterable[tuple[str, ShardSizes]],
    content_id: Callable[[], str],
    show_progress: Callable[[int], None],
) -> None:
    """Writes the sizes of shards one after the other, so that memory holds one shard.

    Args:
        content_id: called after the last shard.
    """
    shards: dict[str, dict[str, Any]] = {}
    totals: Counter[str] = Counter()
    with ExitStack() as open_files:
        append = {
            name: open_files.enter_context(_open_array(sizes_dir / f"{name}.npy", dtype))
            for name, dtype in ARRAY_DTYPES.items()
        }
        for shard_name, (arrays, facts) in sizes_by_shard:
            arrays["samples"]["media_end"] += totals["media"]  # counted on from shard to shard
            arrays["limits_end"] += np.uint64(totals["limits"])
            arrays["exchange_ends"] += np.uint64(totals["exchanges"])
            for name, values in arrays.items():
                append[name](values)
                totals[name] += int(values.sum()) if name == "documents" else len(values)
            shards[shard_name] = facts
            show_progress(1)
    for names in OPTIONAL_ARRAYS:
        for name in names if not totals[names[0]] else ():
            (sizes_dir / f"{name}.npy").unlink()
    (sizes_dir / SHARDS_FILE).write_text(json.dumps({"content": content_id(), "shards": shards}))


@contextmanager
def _open_array(array_path: Path, dtype: np.dtype) -> Iterator[Callable[[NDArray[Any]], None]]:
    """A context with a function that appends to a new ``.npy`` file, whose header has room for any length."""
    length = 0
    with array_path.open("wb") as array_file:

        def write_header() -> None:
            array_file.seek(0)
            facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)}
            np.lib.format.write_array_header_1_0(array_file, facts)

        def append(values: NDArray[Any]) -> None:
            nonlocal length
            array_file.write(values.tobytes())
            length += len(values)

        write_header()
        yield append
        write_header()


class MeasuredSample(NamedTuple):
    """A sample's sizes. If it cannot be used, all but the reason is 0 or empty."""

    text_tokens: int = 0
    assistant_turns: int = 0
    media: NDArray[np.void] = np.zeros(0, MEDIUM_DTYPE)
    unusable_reason: str = ""
    is_cut_document: bool = False
    text_before: NDArray[np.uint32] = np.zeros(0, np.uint32)
    """uint32 [media]: number of tokens of a document's text before each medium."""
    limits: Sequence[bytes] = ()
    """The own limits of each medium as JSON; empty if it has none."""
    exchanges: NDArray[np.void] = np.zeros(0, EXCHANGE_DTYPE)
    """Those of a conversation that has several."""


def measure_samples(encoder: RowEncoder, samples: Iterable[RawSample]) -> ShardSizes:
    """The sizes of the samples of a shard, as :func:`measure_sample` measures each."""
    measured = [measure_sample(encoder, sample) for sample in samples]
    media_ends = np.cumsum([len(each.media) for each in measured], dtype=np.int64).tolist()
    limit_texts = [text for each in measured for text in each.limits]
    arrays = {
        "samples": np.array(
            [(each.text_tokens, end) for each, end in zip(measured, media_ends, strict=True)], SAMPLE_DTYPE
        ),
        "media": np.concatenate([MeasuredSample().media, *(each.media for each in measured)]),
        "documents": np.array([each.is_cut_document for each in measured], np.bool_),
        "text_before": np.concatenate([np.zeros(0, np.uint32), *(each.text_before for each in measured)]),
        "limits": np.frombuffer(b"".join(limit_texts), np.uint8),
        "limits_end": np.cumsum([len(text) for text in limit_texts], dtype=np.uint64),
        "exchanges": np.concatenate([MeasuredSample().exchanges, *(each.exchanges for each in measured)]),
        "exchange_ends": np.cumsum([len(each.exchanges) for each in measured], dtype=np.uint64),
    }
    reasons = Counter(each.unusable_reason for each in measured if each.unusable_reason)
    turns = sum(each.assistant_turns for each in measured)
    return ShardSizes(arrays, {"samples": len(measured), "turns": turns, "unusable": reasons})


def _read_sample(split_reader: SampleReader, sample_index: int) -> RawSample:
    """A sample. Raises :class:`LoaderError` if the storage fails: the sample itself may be whole."""
    try:
        sample = split_reader.read_sample(sample_index, with_media=False)
    except FatalSampleError as error:
        raise LoaderError(f"{error}; then start `megatron-vl data index` again") from error
    if sample.refused and sample.refused[0] in STORAGE_REASONS:
        raise LoaderError(
            f"{sample.refused[0]}: {sample.refused[1]}. Start "
            "`megatron-vl data index` again when the storage answers: it continues"
        )
    return sample


def measure_sample(encoder: RowEncoder, sample: RawSample) -> MeasuredSample:
    """Measures a sample without decoding its media.

    Raises:
        LoaderError: files or memory fail, which says nothing about the sample.
    """
    chat_encoder = encoder.chat_encoder
    try:
        record = json.loads(checked_json_bytes(sample), parse_float=read_number)
        media = np.array([_medium_row(item) for item in record["media"]], MEDIUM_DTYPE)
        own_limits = [item.pop("limits", None) for item in record["media"]]
        limits = [json.dumps(each).encode() if each else b"" for each in own_limits]
        # The text is the same without the limits, which a run's settings may contradict.
        grids = [stored_media_grid(item, encoder.pixel_settings) for item in record["media"]]
        objects = SampleObjects(record, grids, chat_encoder.spec.vision)
        sized_boxes = objects.sized_boxes()
        num_digits = sum(len(str(n)) for box in sized_boxes for n in objects.numbers(box))
        limits += [limits[box.get("medium", 0)] for box in sized_boxes for _ in box["box"]]
        text_before = np.zeros(len(limits), np.uint32)
        exchanges = np.zeros(0, EXCHANGE_DTYPE)
        if "document" in record:
            document = objects.written_messages()[0]["content"]
            token_ids, _, spans = encode_document(chat_encoder, document, grids)
            media_tokens = np.array([end - start for start, end in spans], np.int64)
            starts_of_media = np.array([start for start, _ in spans], np.int64)
            text_before[: len(media)] = starts_of_media - (media_tokens.cumsum() - media_tokens)
        else:
            starts: list[ExchangeStart] = []
            token_ids, _ = chat_encoder.encode(
                objects.written_messages(),
                grids,
                record.get("tools", ()),
                template_arguments=record.get("chat_template_kwargs"),
                exchange_starts=None if objects.has_boxes else starts,
            )
            media_tokens = np.cumsum([0, *map(chat_encoder.media_token_count, grids)])
            exchanges = np.array([(start - media_tokens[n], n) for start, n in starts], EXCHANGE_DTYPE)
        media = np.append(media, _coordinate_rows(sized_boxes, media))
    except Exception as error:  # a sample from outside may cause any error; a run counts and lists it
        root_cause = error.__cause__ or error if isinstance(error, ChatError) else error
        if isinstance(root_cause, OSError) or is_machine_fault(root_cause):
            raise LoaderError(
                f"sample {sample.key}: {type(root_cause).__name__}: {root_cause}. Start"
                " `megatron-vl data index` again when the machine has the files and the memory: it continues"
            ) from error
        return MeasuredSample(unusable_reason=refusal_of_error(error).reason)
    text_tokens = len(token_ids) - sum(map(chat_encoder.media_token_count, grids)) - num_digits
    turns = sum(message.get("role") == "assistant" for message in record.get("messages", ()))
    may_be_cut = "document" in record and not objects.has_boxes
    return MeasuredSample(text_tokens, turns, media, "", may_be_cut, text_before, limits, exchanges)


def _coordinate_rows(boxes: Sequence[dict[str, Any]], media: NDArray[np.void]) -> NDArray[np.void]:
    """A row for each coordinate whose digits follow from the limits of a run: that of its image, with
    :data:`COORDINATE` frames, the number in ``fps``, and its frame of reference and axis in ``whole``."""
    rows = media[[box.get("medium", 0) for box in boxes for _ in box["box"]]]
    rows["frames"], rows["fps"] = COORDINATE, [number for box in boxes for number in box["box"]]
    rows["whole"] = [2 * FRAMES.index(box["frame"]) + i % 2 for box in boxes for i in range(len(box["box"]))]
    return rows


def _medium_row(item: dict[str, Any]) -> MediumFields:
    height, width = item["height"], item["width"]
    if item["kind"] == "image":
        return height, width, 0, 0.0, 0
    video_info = stored_video_info(item)
    return height, width, video_info.frame_count, video_info.fps, int(video_info.sampling == "whole")
