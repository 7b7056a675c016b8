"""The data sets that a run reads, and single samples of them.

A sample's text can be read alone. It comes with the sizes of the sample's media, so that nothing is decoded.
"""

import itertools
import json
import sqlite3
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_vl.config import DataConfig
from megatron_vl.data.row_encoder import RawSample, RowEncoder, cook_sample
from megatron_vl.data.source.blend import read_blend_sources
from megatron_vl.data.source.dataset_description import METADATA_DIR, DatasetDescription, read_description
from megatron_vl.data.source.energon_datasets import SplitShards, open_sample_reader
from megatron_vl.data.source.location import DataPath, LoaderError, Location
from megatron_vl.data.source.pair_reader import shard_place
from megatron_vl.data.source.store_reading import StoreShards
from megatron_vl.spec.families import ModelSpec

from .shards import MEDIA_NAMES_FILE

TEXT_MEMBER = "json"
"""Part of a sample that is read; of the others only the names are."""


@dataclass(frozen=True)
class SampleSource:
    """One data set that a run reads, as a list of samples in the order of its shards."""

    name: str
    """Unique in the blend, as in the log of a run."""
    dataset: DatasetDescription
    split: str
    share: float

    @cached_property
    def shard_names(self) -> list[str]:
        return self.dataset.shards_by_split.get(self.split) or []

    @cached_property
    def shard_starts(self) -> list[int]:
        """Number of samples before each shard, and at last the number of all."""
        shard_sizes = [self.dataset.samples_by_shard[name] for name in self.shard_names]
        return list(itertools.accumulate(shard_sizes, initial=0))

    def __len__(self) -> int:
        return self.shard_starts[-1]

    def shard_position(self, sample_index: int) -> tuple[str, int]:
        """The shard of a sample, and the sample's number in it."""
        shard_number, sample_position = shard_place(self.shard_starts, sample_index)
        return self.shard_names[shard_number], sample_position

    def find_sample(self, sample_key: str) -> int | None:
        """The index of a sample by its key, or by ``SHARD[i]``; None if it is not in this split."""
        shard_name, bracket, sample_position = sample_key.rpartition("[")
        position_text = sample_position.removesuffix("]")
        if bracket and position_text.isdigit() and shard_name in self.shard_names:
            return self._index_in_source(shard_name, int(position_text))

        index_path = self.dataset.path / METADATA_DIR / "index.sqlite"
        try:
            with sqlite3.connect(f"file:{Path(index_path).resolve()}?mode=ro", uri=True) as index_database:
                sample_rows = index_database.execute(
                    "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?", (sample_key,)
                ).fetchall()
        except sqlite3.Error as error:
            raise LoaderError(
                f"{index_path} cannot be read ({error}); give the sample as SHARD[N]"
            ) from error

        # A key may occur in several shards, of which this split may have only one.
        all_shard_names = list(self.dataset.samples_by_shard)
        found = (
            self._index_in_source(all_shard_names[shard_number], position)
            for shard_number, position in sample_rows
            if shard_number < len(all_shard_names)
        )
        return next((sample_index for sample_index in found if sample_index is not None), None)

    def _index_in_source(self, shard_name: str, sample_position: int) -> int | None:
        if shard_name not in self.shard_names:
            return None
        shard_number = self.shard_names.index(shard_name)
        index = self.shard_starts[shard_number] + sample_position
        return index if index < self.shard_starts[shard_number + 1] else None


def read_sources(data_path: DataPath | Location, split: str) -> list[SampleSource]:
    """The data sets that a run reads for a split, with their shares.

    Raises:
        LoaderError: as
            :func:`~megatron_vl.data.source.dataset_description.read_description`; or the split is empty.
    """
    description = read_description(data_path)
    sized_sources = read_blend_sources(description.split_facts(split).dataset_identity, description.path.name)

    drawn_sources = []
    split_datasets = description.split_parts(split)
    for blend_source, (dataset, split_name) in zip(sized_sources, split_datasets, strict=True):
        if share := blend_source.sample_share:
            drawn_sources += _sources_of_parts(
                SampleSource(blend_source.source_name, dataset, split_name, share)
            )

    if not sum(source.shard_starts[-1] for source in drawn_sources):
        raise LoaderError(f"{data_path}: the split {split!r} is empty")
    return drawn_sources


def _sources_of_parts(source: SampleSource) -> list[SampleSource]:
    """A source for each data set of a folder of parts; the source itself if it is one data set."""
    if not source.dataset.parts:
        return [source]
    parts = [part for part in source.dataset.parts if part.shards_by_split.get(source.split)]
    named = [SampleSource(f"{source.name}/{part.path.name}", part, source.split, 0.0) for part in parts]
    return [replace(part, share=source.share * len(part) / len(source)) for part in named if len(part)]


def list_splits(data_path: DataPath | Location) -> list[str]:
    """The splits of a data set that have shards, or those of a metadataset."""
    description = read_description(data_path)
    if isinstance(description, DatasetDescription):
        return [name for name, shards in description.shards_by_split.items() if shards]
    return list(description.mixtures)


def original_media_names(dataset_dir: Location, sample_key: str) -> list[str]:
    """The names of a sample's media before the conversion; empty if they are not recorded."""
    line_start = json.dumps([sample_key])[:-1].encode() + b","
    with suppress(OSError), (dataset_dir / MEDIA_NAMES_FILE).open("rb") as names_file:
        line = next((line for line in names_file if line.startswith(line_start)), b'["", []]')
        return list(json.loads(line)[1])
    return []


class SampleReader:
    """Reads samples of one source by index, as the loader does: what cannot be read is marked, not raised."""

    def __init__(self, sample_source: SampleSource) -> None:
        dataset = SplitShards(sample_source.dataset, sample_source.split)
        self.member_names: list[str] = []
        stored_shards = StoreShards(dataset, block_size=1)
        self.tolerant_reader = open_sample_reader(
            dataset, lambda i: stored_shards.fetch(range(i, i + 1), i, sys.maxsize)[i], self._is_member_wanted
        )
        self.reads_media = False

    def _is_member_wanted(self, member_name: str) -> bool:
        self.member_names.append(member_name)
        return self.reads_media or member_name == TEXT_MEMBER

    def read_sample(self, sample_index: int, *, with_media: bool) -> RawSample:
        """A sample. Without ``with_media``, its media are named but empty."""
        self.member_names.clear()
        self.reads_media = with_media
        sample = cook_sample(self.tolerant_reader[sample_index])
        if not with_media:
            sample.media_bytes |= {name: b"" for name in self.member_names if name != TEXT_MEMBER}
        return sample

    def close(self) -> None:
        self.tolerant_reader.shard_reader.close()


def open_encoder(data_config: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> RowEncoder:
    """The loader's encoder, which does not log unusable samples.

    Raises:
        ChatError, PixelError, FileNotFoundError: the tokenizer, template or processor cannot be used.
    """
    return _QuietEncoder(data_config, spec, hf_dir)


class _QuietEncoder(RowEncoder):
    """Its caller counts unusable samples."""

    def _log_bad_sample(self, sample: RawSample, reason: str, detail: str) -> None:
        pass
