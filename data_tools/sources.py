"""The data sets that a run reads, and single samples of them.

A sample's text can be read alone: the sizes of its pictures are stored there, so that nothing is decoded.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron_vl.config import DataConfig
from megatron_vl.data.loader import EncodedSample, RawSample, RowEncoder, cook
from megatron_vl.data.source.bad_samples import BadSampleMeter, details_by_reason
from megatron_vl.data.source.blend import sources_of
from megatron_vl.data.source.description import META, DataSet, LoaderError, read_description
from megatron_vl.data.source.location import Location, location
from megatron_vl.data.source.reading import TolerantReader
from megatron_vl.data.source.sizes import read_by
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec

TEXT = "json"
"""Part of a sample that is read; of the others only the names are."""


class SourceError(UserError, ValueError):
    """A sample or a source that is not there. The message says what there is."""


@dataclass(frozen=True)
class Source:
    """One data set that a run reads, as a list of samples in the order of its shards."""

    name: str
    """Unique in the blend, as in the log of a run."""
    data: DataSet
    split: str
    share: float
    """Share of the samples that training draws from it."""
    first: int
    """Index of the first sample that is drawn; 0 unless the metadataset takes a subset."""
    size: int
    """Number of samples that are drawn."""

    @staticmethod
    def whole(data: DataSet, split: str) -> Source:
        """All samples of a split."""
        return Source(
            split, data, split, 1.0, 0, sum(data.counts.get(name, 0) for name in data.splits[split])
        )

    @cached_property
    def shards(self) -> list[str]:
        return self.data.splits.get(self.split) or []

    @cached_property
    def starts(self) -> list[int]:
        """Number of samples before each shard, and at last the number of all."""
        try:
            return [0, *itertools.accumulate(self.data.counts[name] for name in self.shards)]
        except KeyError as error:
            raise LoaderError(
                f"{self.data.path}: {META}/.info.json does not count the samples of {error.args[0]};"
                " convert the data again"
            ) from error

    def __len__(self) -> int:
        return self.size

    @property
    def indices(self) -> range:
        """The indices of the samples in the data set."""
        return range(self.first, self.first + self.size)

    def place(self, index: int) -> tuple[str, int]:
        """The shard of a sample, and its number there."""
        shard = bisect_right(self.starts, index) - 1
        return self.shards[shard], index - self.starts[shard]

    def find(self, key: str) -> int | None:
        """The index of a sample by its key, or by ``SHARD[i]``; None if it is not in this split or subset."""
        shard, bracket, number = key.rpartition("[")
        if bracket and number.endswith("]") and number[:-1].isdigit() and shard in self.shards:
            return self._index(shard, int(number[:-1]))

        if not isinstance(self.data.path, Path):
            raise SourceError(f"{self.data.path} is not on a disk of this machine; give the sample's --index")
        file = self.data.path / META / "index.sqlite"
        try:
            with sqlite3.connect(f"file:{file.resolve()}?mode=ro", uri=True) as index:
                found = index.execute(
                    "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?", (key,)
                ).fetchall()
        except sqlite3.Error as error:
            raise SourceError(
                f"{file} cannot be read ({error}); give the sample's --index instead"
            ) from error
        names = list(self.data.counts)
        places = (self._index(names[tar], number) for tar, number in found if tar < len(names))
        return next((place for place in places if place is not None), None)

    def _index(self, shard: str, number: int) -> int | None:
        if shard not in self.shards:
            return None
        at = self.shards.index(shard)
        index = self.starts[at] + number
        return index if index < self.starts[at + 1] and index in self.indices else None


def sources(path: Location, split: str) -> list[Source]:
    """The data sets that a run reads for a split, with their shares.

    Raises:
        LoaderError, DescriptionError: as :func:`~megatron_vl.data.source.description.read_description`; or
            the split is empty.
    """
    description = read_description(path)
    blend = sources_of(description.facts(split).identity, path.name)
    found = [
        Source(known.name, data, part, known.share, known.first, known.samples)
        for known, (data, part) in zip(blend, read_by(description, split), strict=True)
        if known.share
    ]
    if not sum(source.starts[-1] for source in found):
        raise LoaderError(f"{path}: the split {split!r} is empty")
    return found


class Reader:
    """Reads samples of one source by index, as the loader does: what cannot be read is marked, not raised.

    Args:
        timeout: ``data.sample_timeout_s``.
    """

    def __init__(self, source: Source, timeout: float = 0.0) -> None:
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
        from megatron.energon.flavors.webdataset.structs import ShardInfo

        folder = EPath(source.data.path)
        counts = source.data.counts
        shards = [ShardInfo(name=name, path=folder / name, count=counts[name]) for name in source.shards]
        excluded = set(source.data.excluded)
        self.names: list[str] = []
        # Energon names a sample SHARD/KEY there.
        self.reader = ShardInfosITarReader(
            folder, shards, self._wanted, sample_filter=lambda name: name not in excluded
        )
        self.tolerant = TolerantReader(self.reader, timeout)
        self.whole = False

    def _wanted(self, part: str) -> bool:
        self.names.append(part)
        return self.whole or part == TEXT

    def read(self, index: int, *, whole: bool) -> RawSample | None:
        """A sample; None if the data set's description excludes it.

        Args:
            whole: read the media too; otherwise they are there by name, and empty.
        """
        self.names.clear()
        self.whole = whole
        crude = self.tolerant[index]
        if crude is None:
            return None
        sample = cook(crude)
        if not whole:
            sample.members |= {name: b"" for name in self.names if name != TEXT}
        return sample

    def close(self) -> None:
        self.reader.close()


def open_encoder(data: DataConfig, spec: ModelSpec, hf_dir: str | Path) -> RowEncoder:
    """The loader's encoder, which neither logs nor stops at unusable samples.

    Raises:
        ChatError, PixelError, FileNotFoundError: the tokenizer, template or processor cannot be used.
    """
    encoder = _QuietEncoder(data, spec, hf_dir)
    encoder.most_refused = 1 << 62
    return encoder


class _QuietEncoder(RowEncoder):
    """Its caller counts unusable samples."""

    def _log(self, sample: RawSample | EncodedSample, reason: str, detail: str) -> None:
        pass


def left_out_of_some(encoder: RowEncoder, samples: int) -> dict[str, BadSampleMeter]:
    """How many of some random samples of each source a run would leave out, by reason.

    Args:
        samples: number to read, over all sources, but at least two of each.
    """
    meters = {}
    found = sources(location(encoder.data.path), "train")
    for source in found:
        own = encoder.for_process()
        reader = Reader(source, encoder.data.sample_timeout_s)
        count = min(len(source), max(2, samples // len(found)))
        drawn = (reader.read(i, whole=False) for i in random.Random(0).sample(source.indices, count))
        rows, _ = own.select_rows([own.preencode_sample(sample) for sample in drawn if sample], last=True)
        reader.close()
        meters[source.name] = meter = BadSampleMeter(1.0, minimum=1)
        listed = (sample.as_json() for sample in own.dropped_samples)
        meter.add(sum(map(len, rows)), own.dropped, details_by_reason(listed))
    return meters
