"""The shards of a split, with the stored sizes of their samples and readers of single samples."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.structs import ShardInfo
from numpy.typing import NDArray

from megatron_vl.data.source.blend import BlendSource, read_blend_sources
from megatron_vl.data.source.dataset_description import (
    METADATA_DIR,
    SIZES_DIR,
    DatasetDescription,
    SplitFacts,
    join_content_ids,
    read_dataset,
)
from megatron_vl.data.source.location import LoaderError, resolve_location
from megatron_vl.data.source.sample_sizes import SampleSizeCounter, StoredSizes, open_stored_sizes
from megatron_vl.data.source.store_reading import StoreReader, has_local_shards, read_tar_shards
from megatron_vl.data.source.tolerant_reader import ShardReader, TolerantReader

Integers = NDArray[np.int64]
MAX_OPEN_SHARDS = 16
"""Number of shards of each data set that a process keeps open."""


class SplitShards:
    """The shards of a split of a data set, as Energon's readers take them. The parts of a folder are one."""

    def __init__(self, description: DatasetDescription, split_name: str) -> None:
        self.description, self.split_name = description, split_name
        self.path = EPath(description.path)
        tars = {}
        for part in description.parts or (description,):
            prefix = f"{part.path.name}/" if description.parts else ""
            for name, tar in read_tar_shards(part).items():
                tars[prefix + name] = replace(tar, name=prefix + name)
        self.shards: list[Any] = [
            tars.get(name)
            or ShardInfo(name=name, path=self.path / name, count=description.samples_by_shard[name])
            for name in description.shards_by_split[split_name]
        ]


def load_datasets(split_facts: SplitFacts) -> tuple[tuple[BlendSource, ...], list[SplitShards]]:
    """The sources of a split, and the shards of each source."""
    first_path, _ = split_facts.datasets[0]
    blend_sources = read_blend_sources(split_facts.dataset_identity, resolve_location(first_path).name)
    # Another rank has checked them.
    described = [
        (read_dataset(resolve_location(path), checks_shards=False), split)
        for path, split in split_facts.datasets
    ]
    return blend_sources, [SplitShards(description, split) for description, split in described]


class SizedSource:
    """The shards of a split and the stored sizes of their samples.

    Args:
        tokenization_id: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        content_id: id of the content that the run reads.

    Raises:
        LoaderError: the data set has no sizes, or its sizes belong to other content or other shards.
    """

    def __init__(self, dataset: SplitShards, tokenization_id: str, content_id: str) -> None:
        self._stored_sizes: list[StoredSizes] = []
        """The sizes of each part; one if there are no parts."""
        part_of_shard: list[int] = []
        first_numbers = []
        for part_index, part in enumerate(dataset.description.parts or (dataset.description,)):
            metadata_dir = part.path / METADATA_DIR
            part_sizes = open_stored_sizes(metadata_dir, tokenization_id)
            names = part.shards_by_split.get(dataset.split_name, [])
            first_numbers.append(
                part_sizes.first_sample_numbers([(name, part.samples_by_shard[name]) for name in names])
            )
            part_of_shard += [part_index] * len(names)
            self._stored_sizes.append(part_sizes)
        if join_content_ids([sizes.content_id for sizes in self._stored_sizes]) != content_id:
            raise LoaderError(
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
        return (
            self._first_numbers[shard_indices] + sample_indices - self._shard_starts[shard_indices],
            self._part_of_shard[shard_indices],
        )


def open_sample_reader(
    dataset: SplitShards, take: Callable[[int], bytes], part_filter: Callable[[str], bool] | None = None
) -> TolerantReader:
    """Reads samples of a split by index.

    Args:
        take: gives the bytes of a sample in an object store; a local data set does without.
        part_filter: says of each file of a sample whether a local data set reads it; None: all.
    """
    if not has_local_shards(dataset):
        return TolerantReader(StoreReader(dataset, take))
    return TolerantReader(
        ShardReader(dataset.path, dataset.shards, part_filter, itar_cache_size=MAX_OPEN_SHARDS)
    )
