"""Energon's data sets of a split, with the stored sizes of their samples and readers of single samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.metadataset import load_dataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from numpy.typing import NDArray

from megatron_vl.data.source.blend import BlendSource, read_blend_sources
from megatron_vl.data.source.dataset_description import METADATA_DIR, SIZES_DIR, SplitFacts, join_content_ids
from megatron_vl.data.source.location import part_folders, resolve_location
from megatron_vl.data.source.sample_sizes import SampleSizeCounter, SizesError, StoredSizes, open_stored_sizes
from megatron_vl.data.source.store_reading import StoreReader, has_local_shards, read_tar_shards
from megatron_vl.data.source.tolerant_reader import ShardReader, TolerantReader

Integers = NDArray[np.int64]
MAX_OPEN_SHARDS = 16
"""Number of shards of each data set that a process keeps open."""


def load_datasets(split_facts: SplitFacts) -> tuple[tuple[BlendSource, ...], list[LoadedDataset]]:
    """The sources of a split, and Energon's data set of each source."""
    first_path, _ = split_facts.datasets[0]
    blend_sources = read_blend_sources(split_facts.dataset_identity, resolve_location(first_path).name)
    return blend_sources, [_load_dataset(*dataset) for dataset in split_facts.datasets]


def _load_dataset(dataset_path: str, split_name: str) -> LoadedDataset:
    """Energon's data set, or those of the parts of a folder as one."""
    single_worker = WorkerConfig(rank=0, world_size=1, num_workers=0)
    parts = []
    for folder in part_folders(resolve_location(dataset_path)) or [dataset_path]:
        loaded_split = load_dataset(str(folder)).get_datasets(
            training=False, split_part=split_name, worker_config=single_worker, decoder=None
        )
        parts.append(loaded_split.datasets[0].dataset)
        if tar_shards := read_tar_shards(resolve_location(str(folder))):
            parts[-1].shards = [tar_shards[shard.name] for shard in parts[-1].shards]
    if len(parts) == 1:
        return loaded_split.datasets[0]
    return LoadedDataset(dataset=JoinedDataset(EPath(dataset_path), parts))


class JoinedDataset:
    """Energon's data sets of the parts of a folder, as one. The name of a shard begins with its part's."""

    def __init__(self, path: EPath, parts: list[Any]) -> None:
        self.path, self.parts = path, parts
        self.shards = []
        for part in parts:
            for shard in part.shards:
                name = f"{part.path.name}/{shard.name}"
                self.shards.append(replace(shard, name=name))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def sample_filter(self, sample_name: str) -> bool:
        part_name, _, name = sample_name.partition("/")
        part_filter = next(part.sample_filter for part in self.parts if part.path.name == part_name)
        return part_filter is None or bool(part_filter(name))


class SizedSource:
    """One data set and the stored sizes of its samples.

    Args:
        dataset: Energon's data set.
        tokenization_id: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        content_id: id of the content that the run reads.

    Raises:
        SizesError: the data set has no sizes, or its sizes belong to other content or other shards.
    """

    def __init__(self, dataset: Any, tokenization_id: str, content_id: str) -> None:
        self._stored_sizes: list[StoredSizes] = []
        """The sizes of each part; one if there are no parts."""
        part_of_shard: list[int] = []
        first_numbers = []
        for part_index, part in enumerate(getattr(dataset, "parts", [dataset])):
            metadata_dir = resolve_location(str(part.path)) / METADATA_DIR
            part_sizes = open_stored_sizes(metadata_dir, tokenization_id, part.sample_excludes)
            first_numbers.append(
                part_sizes.first_sample_numbers([(shard.name, shard.count) for shard in part.shards])
            )
            part_of_shard += [part_index] * len(part.shards)
            self._stored_sizes.append(part_sizes)
        if join_content_ids([sizes.content_id for sizes in self._stored_sizes]) != content_id:
            raise SizesError(
                f"{metadata_dir / SIZES_DIR / tokenization_id} is of the content"
                f" {self._stored_sizes[-1].content_id!r}, and the run reads {content_id!r}: let all nodes see"
                " the same data set, or run `megatron-vl data index` again"
            )
        self._first_numbers = np.concatenate(first_numbers)
        self._part_of_shard = np.array(part_of_shard, np.int64)
        self.shard_sizes = np.array([shard.count for shard in dataset.shards], np.int64)
        """Number of samples of each shard, int64 [shards]."""
        self._shard_starts = np.append(0, np.cumsum(self.shard_sizes))

    def count_samples(
        self, size_counter: SampleSizeCounter, sample_indices: Integers
    ) -> tuple[Integers, Integers]:
        """Tokens and patches of samples, int64 [n] each."""
        size_numbers, parts = self._size_numbers(sample_indices)
        if len(self._stored_sizes) == 1:
            return size_counter.count_samples(self._stored_sizes[0], size_numbers)
        sample_sizes = np.zeros((2, len(sample_indices)), np.int64)
        for part in np.unique(parts).tolist():
            is_of_part = parts == part
            sample_sizes[:, is_of_part] = size_counter.count_samples(
                self._stored_sizes[part], size_numbers[is_of_part]
            )
        return sample_sizes[0], sample_sizes[1]

    def cut_sample(
        self, size_counter: SampleSizeCounter, sample_index: int, seq_len: int, max_patches: int
    ) -> list[tuple[int, int]]:
        """Tokens and patches of each part of a sample, as :meth:`SampleSizeCounter.cut_sample`."""
        [size_number], [part] = self._size_numbers(np.array([sample_index]))
        return size_counter.cut_sample(self._stored_sizes[part], int(size_number), seq_len, max_patches)

    def _size_numbers(self, sample_indices: Integers) -> tuple[Integers, Integers]:
        """The numbers of samples in the stored sizes of their parts, and these parts, int64 [n] each."""
        shard_indices = np.searchsorted(self._shard_starts, sample_indices, side="right") - 1
        size_numbers = self._first_numbers[shard_indices] + sample_indices - self._shard_starts[shard_indices]
        return size_numbers, self._part_of_shard[shard_indices]


def open_sample_reader(
    dataset: Any, take: Callable[[int], bytes], part_filter: Callable[[str], bool] | None = None
) -> TolerantReader:
    """Reads samples of one of Energon's data sets by index.

    Args:
        take: gives the bytes of a sample in an object store; a local data set does without.
        part_filter: says of each file of a sample whether a local data set reads it; None: all.
    """
    if not has_local_shards(dataset):
        return TolerantReader(StoreReader(dataset, take))
    options = {"sample_filter": dataset.sample_filter, "itar_cache_size": MAX_OPEN_SHARDS}
    return TolerantReader(ShardReader(dataset.path, dataset.shards, part_filter, **options))
