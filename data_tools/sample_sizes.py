"""Writes the sizes of all samples of a data set, from which a run plans its batches.

Only the text of the samples is read and tokenized. The result of each shard goes into a file of its own, so
that a killed run continues and several nodes can share the work; at the end, they are joined into the files
that :mod:`megatron_vl.data.source.sample_sizes` describes.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from megatron.energon.errors import FatalSampleError
from numpy.typing import NDArray

from megatron_vl import durable_files
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import RawSample, RowEncoder, stored_media_grid, stored_video_info
from megatron_vl.data.sample.chat import ChatError, ChatTemplateError
from megatron_vl.data.source.bad_samples import NOT_IN_CHAT_TEMPLATE
from megatron_vl.data.source.dataset_description import (
    METADATA_DIR,
    SIZES_DIR,
    DatasetDescription,
    read_description,
)
from megatron_vl.data.source.sample_sizes import (
    MEDIUM_DTYPE,
    SAMPLE_DTYPE,
    SHARDS_FILE,
    MediumFields,
    compute_tokenization_id,
    has_stored_sizes,
    list_all_datasets,
)
from megatron_vl.errors import UserError, is_machine_fault
from megatron_vl.processes import end_with_parent
from megatron_vl.spec.families import ModelSpec

from .resume import exclusive_access
from .sample_sources import SampleReader, SampleSource
from .work_parts import WorkPart

ProgressCallback = Callable[[str], None]


class SizesWriteError(UserError, ValueError):
    """Sizes that cannot be written. The message says why."""


@dataclass(frozen=True)
class IndexResult:
    """What was done for one data set."""

    path: Path
    seconds: float
    """0 if the sizes existed before."""
    shards_left: int = 0
    """Shards of other parts that nobody has measured yet. If there are any, there are no sizes to count."""
    samples: int = 0
    unusable: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many samples are unusable for each reason."""
    media: int = 0
    bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        return {**self.__dict__, "path": str(self.path)}


def index_datasets(
    data_config: DataConfig,
    spec: ModelSpec,
    hf_dir: str | Path,
    num_workers: int = 1,
    show_progress: ProgressCallback | None = None,
    work_part: WorkPart | None = None,
) -> list[IndexResult]:
    """Writes the sizes of a data set, or of all data sets of a metadataset. Existing sizes stay.

    Args:
        work_part: measure only every ``work_part.num_parts``-th shard; None: all. Whoever measures the last
            shard joins the results of all.

    Raises:
        SizesWriteError: a data set is not on a local disk, its shards cannot be read, or its folder cannot be
            written.
        LoaderError, DescriptionError: there is no data set.
        ChatError, PixelError, FileNotFoundError: the tokenizer, template or processor cannot be used.
    """
    sizes_name = compute_tokenization_id(hf_dir, spec, data_config)
    encoder = RowEncoder(data_config, spec, hf_dir)

    index_results: list[IndexResult] = []
    for dataset in _local_datasets(data_config):
        index_results.append(
            _index_dataset(dataset, sizes_name, encoder, num_workers, show_progress, work_part)
        )
    return index_results


def _local_datasets(data_config: DataConfig) -> list[DatasetDescription]:
    datasets = list_all_datasets(read_description(data_config.path))
    for dataset in datasets:
        if not isinstance(dataset.path, Path):
            raise SizesWriteError(
                f"{dataset.path} is in an object store; index the local folder, then copy {METADATA_DIR} too"
            )
    return datasets


def _index_dataset(
    dataset: DatasetDescription,
    sizes_name: str,
    encoder: RowEncoder,
    num_workers: int,
    show_progress: ProgressCallback | None,
    work_part: WorkPart | None,
) -> IndexResult:
    sizes_dir = _sizes_dir(dataset, sizes_name)
    if has_stored_sizes(dataset, sizes_name):
        return _index_result(sizes_dir, 0.0)

    start_time = time.monotonic()
    with _open_work_dir(dataset, sizes_name) as work_dir:
        tasks = _shard_tasks(dataset, encoder, work_dir)
        own_tasks = tasks[work_part.index :: work_part.num_parts] if work_part else tasks
        _measure_shards(own_tasks, f"shards of {dataset.path}", num_workers, show_progress)
        shards_left = sum(not task.result_path.is_file() for task in tasks)
        if shards_left and not has_stored_sizes(dataset, sizes_name):
            return IndexResult(dataset.path, round(time.monotonic() - start_time, 3), shards_left)

        # Two that finish at once would otherwise remove each other's results as those of an earlier content.
        # The lock file goes with the folder: whoever waits for it then finds the sizes.
        with exclusive_access(work_dir / "lock", needs_locks=False):
            if not has_stored_sizes(dataset, sizes_name):
                _publish_sizes(sizes_dir, work_dir, tasks, dataset.content_id)
        # After the lock file is closed: NFS keeps an open file, and its folder, under another name.
        shutil.rmtree(work_dir, ignore_errors=True)
    return _index_result(sizes_dir, time.monotonic() - start_time)


def _sizes_dir(dataset: DatasetDescription, sizes_name: str) -> Path:
    assert isinstance(dataset.path, Path)
    return dataset.path / METADATA_DIR / SIZES_DIR / sizes_name


@contextmanager
def _open_work_dir(dataset: DatasetDescription, sizes_name: str) -> Iterator[Path]:
    """The folder of the shards' results; those of another content are not continued.

    Several processes may work in it, on one machine or several: each writes files of its own and renames them
    when they are whole. Whoever is first with the sizes removes the folder, and the others find them done.

    Raises:
        SizesWriteError: something in it cannot be written.
    """
    sizes_dir = _sizes_dir(dataset, sizes_name)
    work_dir = sizes_dir.with_name(f"{sizes_dir.name}-{dataset.content_id[:8]}{durable_files.PARTIAL_SUFFIX}")
    try:
        durable_files.make_dirs(work_dir)
        yield work_dir
    except OSError as error:
        if not has_stored_sizes(dataset, sizes_name):
            raise SizesWriteError(
                f"{sizes_dir} cannot be written ({error}); nothing is lost: fix this and start again"
            ) from error
        shutil.rmtree(work_dir, ignore_errors=True)


def _publish_sizes(sizes_dir: Path, work_dir: Path, tasks: Sequence[_ShardTask], content_id: str) -> None:
    """Joins the results of all shards, and puts them in place of those of an earlier content."""
    # A name of its own: a process that was killed here may have had the same id and host.
    joined_dir = Path(tempfile.mkdtemp(dir=work_dir, prefix="joined-"))
    joined_dir.chmod(0o755)
    _join_shards(joined_dir, tasks, content_id)
    durable_files.fsync_tree(joined_dir)
    shutil.rmtree(sizes_dir, ignore_errors=True)
    durable_files.rename_path(joined_dir, sizes_dir)


def _index_result(sizes_dir: Path, seconds: float) -> IndexResult:
    samples, media = (np.load(sizes_dir / f"{part}.npy", mmap_mode="r") for part in ("samples", "media"))
    total_bytes = sum(file.stat().st_size for file in sizes_dir.iterdir())
    num_unusable = int((samples["tokens"] == 0).sum())
    shards = json.loads((sizes_dir / SHARDS_FILE).read_text())["shards"].values()
    reasons = sum((Counter(shard["unusable"]) for shard in shards), Counter[str]())
    return IndexResult(
        sizes_dir.parents[2],
        round(seconds, 3),
        samples=len(samples),
        unusable=num_unusable,
        reasons=reasons,
        media=len(media),
        bytes=total_bytes,
    )


# --- One shard after the other ------------------------------------------------------------------------------


@dataclass
class _ShardTask:
    sample_source: SampleSource
    shard_index: int
    encoder: RowEncoder
    work_dir: Path

    @cached_property
    def result_path(self) -> Path:
        """The file of its results. Its name says of what: between two starts, shards may be excluded."""
        shard_text = f"{self.sample_source.dataset.content_id} {self.name} {self.num_samples}"
        return self.work_dir / f"{hashlib.sha256(shard_text.encode()).hexdigest()[:32]}.npz"

    @property
    def name(self) -> str:
        return self.sample_source.shard_names[self.shard_index]

    @property
    def num_samples(self) -> int:
        return (
            self.sample_source.shard_starts[self.shard_index + 1]
            - self.sample_source.shard_starts[self.shard_index]
        )


_current_tasks: list[_ShardTask] = []
"""What is measured now. Set before the worker processes are forked, so that none gets a tokenizer through a
pipe."""
_split_readers: dict[str, SampleReader] = {}
"""The reader of each split in this process. To make one takes as long as its split has shards."""
STORAGE_REASONS = ("reading takes too long", "shard missing", "shard unreadable")
"""Reasons for which a sample cannot be read that are the storage's and not the sample's."""


def _shard_tasks(dataset: DatasetDescription, encoder: RowEncoder, work_dir: Path) -> list[_ShardTask]:
    """One task for each shard, in order. A shard of two splits has one."""
    task_by_shard: dict[str, _ShardTask] = {}
    for split, split_shards in dataset.shards_by_split.items():
        if not split_shards:
            continue
        source = SampleSource.whole_split(dataset, split)
        for shard_index, shard_name in enumerate(source.shard_names):
            task = _ShardTask(source, shard_index, encoder, work_dir)
            task_by_shard.setdefault(shard_name, task)
    return list(task_by_shard.values())


def _measure_shards(
    tasks: Sequence[_ShardTask], tasks_text: str, num_workers: int, show_progress: ProgressCallback | None
) -> None:
    """Writes the files that are missing."""
    _current_tasks[:] = [task for task in tasks if not task.result_path.is_file()]
    num_missing = len(_current_tasks)
    start_time = time.monotonic()

    try:
        for num_done, _ in enumerate(_run_tasks(num_missing, num_workers), start=1):
            if show_progress:
                seconds_left = (time.monotonic() - start_time) * (num_missing / num_done - 1)
                show_progress(f"{num_done} of {num_missing} {tasks_text}, {seconds_left:.0f} s left")
    finally:
        for split_reader in _split_readers.values():
            split_reader.close()
        _split_readers.clear()
        _current_tasks.clear()


def _run_tasks(num_tasks: int, num_workers: int) -> Iterator[None]:
    if num_workers <= 1 or num_tasks <= 1:
        yield from map(_measure_shard, range(num_tasks))
        return
    # Forked processes would not survive the tokenizer's own threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    context = multiprocessing.get_context("fork")
    # A worker whose parent was killed would wait for its next shard for ever.
    with ProcessPoolExecutor(num_workers, context, initializer=end_with_parent) as process_pool:
        yield from process_pool.map(_measure_shard, range(num_tasks))


def _measure_shard(task_number: int) -> None:
    task = _current_tasks[task_number]
    if task.result_path.is_file():  # another process was faster
        return
    sample_source = task.sample_source
    split_reader = _split_readers.get(sample_source.split)
    if split_reader is None:
        split_reader = SampleReader(sample_source)
        _split_readers[sample_source.split] = split_reader

    sample_rows = []
    media_arrays = [np.zeros(0, MEDIUM_DTYPE)]
    unusable_reasons = []
    media_count = all_turns = 0
    first_index = sample_source.shard_starts[task.shard_index]
    for sample_index in range(first_index, first_index + task.num_samples):
        text_tokens, assistant_turns, sample_media, unusable_reason = measure_sample(
            task.encoder, _read_sample(split_reader, sample_index)
        )
        all_turns += assistant_turns
        if unusable_reason:
            unusable_reasons.append(unusable_reason)
        media_arrays.append(sample_media)
        media_count += len(sample_media)
        sample_rows.append((text_tokens, media_count))

    process_suffix = f"{socket.gethostname()}-{os.getpid()}"  # no other process takes it
    partial_path = task.result_path.with_name(
        f"{task.result_path.stem}-{process_suffix}{durable_files.PARTIAL_SUFFIX}"
    )
    with partial_path.open("wb") as partial_file:
        np.savez(
            partial_file,
            samples=np.array(sample_rows, SAMPLE_DTYPE),
            media=np.concatenate(media_arrays),
            turns=all_turns,
            unusable=np.array(unusable_reasons, str),
        )
    durable_files.publish_file(partial_path, task.result_path)


def _read_sample(split_reader: SampleReader, sample_index: int) -> RawSample | None:
    """A sample. Raises :class:`SizesWriteError` if the storage fails: the sample itself may be whole."""
    try:
        sample = split_reader.read_sample(sample_index, with_media=False)
    except FatalSampleError as error:
        raise SizesWriteError(f"{error}; then start `megatron-vl data index` again") from error
    if sample is not None and sample.read_failure and sample.read_failure[0] in STORAGE_REASONS:
        raise SizesWriteError(
            f"{sample.read_failure[0]}: {sample.read_failure[1]}. Start "
            "`megatron-vl data index` again when the storage answers: it continues"
        )
    return sample


def measure_sample(encoder: RowEncoder, sample: RawSample | None) -> tuple[int, int, NDArray[np.void], str]:
    """Measures a sample without decoding its media.

    Args:
        sample: None: the data set's description excludes it.

    Returns:
        The number of tokens of its text, the number of the assistant's turns, its media as
        :data:`MEDIUM_DTYPE`, and why it cannot be used. If there is such a reason, all else is 0 or empty.

    Raises:
        SizesWriteError: files or memory fail, which says nothing about the sample.
    """
    no_media = np.zeros(0, MEDIUM_DTYPE)
    try:
        if sample is None or sample.read_failure:
            return 0, 0, no_media, sample.read_failure[0] if sample and sample.read_failure else ""
        sample_record = json.loads(sample.json_bytes or b"")
        media_rows = np.array([_medium_row(item) for item in sample_record["media"]], MEDIUM_DTYPE)
        media_grids = [stored_media_grid(item, encoder.pixel_settings) for item in sample_record["media"]]
        token_ids, _ = encoder.chat_encoder.encode(
            sample_record["messages"], media_grids, sample_record.get("tools", ())
        )
    except ChatTemplateError:
        return 0, 0, no_media, NOT_IN_CHAT_TEMPLATE
    except Exception as error:  # a sample from outside may cause any error; a run counts and lists it
        root_cause = error.__cause__ or error if isinstance(error, ChatError) else error
        if isinstance(root_cause, OSError) or is_machine_fault(root_cause):
            raise SizesWriteError(
                f"sample {sample.key if sample else ''}: {type(root_cause).__name__}: {root_cause}. Start"
                " `megatron-vl data index` again when the machine has the files and the memory: it continues"
            ) from error
        return 0, 0, no_media, "cannot be encoded"
    assistant_turns = sum(message.get("role") == "assistant" for message in sample_record["messages"])
    return (
        len(token_ids) - sum(map(encoder.chat_encoder.media_token_count, media_grids)),
        assistant_turns,
        media_rows,
        "",
    )


def _medium_row(item: dict[str, Any]) -> MediumFields:
    height, width = item["height"], item["width"]
    if item["kind"] == "image":
        return height, width, 0, 0.0, 0
    video_info = stored_video_info(item)
    return height, width, video_info.frame_count, video_info.fps, int(video_info.sampling == "whole")


def _read_shard_facts(tasks: Sequence[_ShardTask]) -> tuple[list[int], dict[str, dict[str, Any]]]:
    """Returns the number of media of each shard, and the facts of each shard by its name."""
    media_counts = []
    shards = {}
    for task in tasks:
        with np.load(task.result_path) as shard_arrays:
            if len(shard_arrays["samples"]) != task.num_samples:
                raise SizesWriteError(
                    f"{task.result_path} does not hold {task.num_samples} samples of {task.name}; delete"
                    f" {task.result_path.parent}"
                )
            media_counts.append(len(shard_arrays["media"]))
            reasons = Counter(shard_arrays["unusable"].tolist())
            assistant_turns = int(shard_arrays["turns"])
            shards[task.name] = {"samples": task.num_samples, "turns": assistant_turns, "unusable": reasons}
    return media_counts, shards


def _join_shards(joined_dir: Path, tasks: Sequence[_ShardTask], dataset_uuid: str) -> None:
    """Joins the files of the shards."""
    media_counts, shards = _read_shard_facts(tasks)
    all_samples = np.lib.format.open_memmap(
        joined_dir / "samples.npy",
        mode="w+",
        dtype=SAMPLE_DTYPE,
        shape=(sum(task.num_samples for task in tasks),),
    )
    all_media = np.lib.format.open_memmap(
        joined_dir / "media.npy", mode="w+", dtype=MEDIUM_DTYPE, shape=(sum(media_counts),)
    )
    sample_offset = media_offset = 0
    for task, media_count in zip(tasks, media_counts, strict=True):
        with np.load(task.result_path) as shard_arrays:
            shard_samples = shard_arrays["samples"]
            shard_samples["media_end"] += media_offset
            all_samples[sample_offset : sample_offset + len(shard_samples)] = shard_samples
            all_media[media_offset : media_offset + media_count] = shard_arrays["media"]
        sample_offset, media_offset = sample_offset + len(shard_samples), media_offset + media_count
    all_samples.flush()
    all_media.flush()
    durable_files.write_file(
        joined_dir / SHARDS_FILE, json.dumps({"content": dataset_uuid, "shards": shards}).encode()
    )
