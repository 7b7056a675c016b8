"""Draws samples of a prepared data set at random and measures them as a run would read them.

Only the text of a drawn sample is read: the sizes of its pictures are stored there, so nothing is decoded and
a data set of any size takes the same time. Rows are then made of the drawn samples by the loader's own
packing.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sqlite3
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_vl.config import DataConfig
from megatron_vl.data.bad_samples import BadSampleMeter, details_by_reason
from megatron_vl.data.blend import sources_of
from megatron_vl.data.description import (
    META,
    DataSet,
    Description,
    LoaderError,
    read_description,
)
from megatron_vl.data.loader import EncodedSample, RawSample, RowEncoder, cook
from megatron_vl.data.location import Location, location
from megatron_vl.data.packing import fill_row
from megatron_vl.data.reading import TolerantReader
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.positions import GridTHW

from .estimates import Estimate, Stratum, share

TEXT = "json"
"""Part of a sample that is read; of the others only the names are."""
LEAST_ROWS = 64
MOST_ROWS = 4000
AT_ONCE = 64
"""Samples between two looks at the clock."""


class SurveyError(UserError, ValueError):
    """A sample or a source that is not there. The message says what there is."""


# --- Sources ------------------------------------------------------------------------------------------------


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
            raise SurveyError(f"{self.data.path} is not on a disk of this machine; give the sample's --index")
        file = self.data.path / META / "index.sqlite"
        try:
            with sqlite3.connect(f"file:{file.resolve()}?mode=ro", uri=True) as index:
                found = index.execute(
                    "SELECT tar_file_id, sample_index FROM samples WHERE sample_key = ?", (key,)
                ).fetchall()
        except sqlite3.Error as error:
            raise SurveyError(
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
        LoaderError, DescriptionError: as :func:`~megatron_vl.data.description.read_description`; or the split
            is empty.
    """
    description = read_description(path)
    blend = sources_of(description.facts(split).identity, path.name)
    leaves = list(_leaves(description, split))
    found = [
        Source(known.name, data, part, known.share, known.first, known.samples)
        for known, (data, part) in zip(blend, leaves, strict=True)
        if known.share
    ]
    if not sum(source.starts[-1] for source in found):
        raise LoaderError(f"{path}: the split {split!r} is empty")
    return found


def _leaves(description: Description, split: str) -> Iterator[tuple[DataSet, str]]:
    """The data sets of a split, each with the split that is read of it; in the order of a blend's sources."""
    if isinstance(description, DataSet):
        yield description, split
        return
    for inner, part in description.parts(split):
        yield from _leaves(inner, part)


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
    """A survey counts unusable samples itself."""

    def _log(self, sample: RawSample | EncodedSample, reason: str, detail: str) -> None:
        pass


# --- Drawing ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """One drawn sample: what a run would count of it."""

    source: int
    index: int
    key: str
    record: str
    """Input file and record that it was converted from."""
    tokens: int = 0
    learnt: int = 0
    turns: int = 0
    """The assistant's turns."""
    grids: tuple[GridTHW, ...] = ()
    refused: tuple[str, str] | None = None
    """Reason and detail if the loader would leave it out."""
    refused_size: int = 0
    """Tokens or patches if it is left out for their number."""

    @property
    def patches(self) -> int:
        return sum(grid.patches for grid in self.grids)

    @property
    def pictures(self) -> int:
        return sum(grid.kind == "image" for grid in self.grids)

    @property
    def videos(self) -> int:
        return sum(grid.kind == "video" for grid in self.grids)


@dataclass(frozen=True)
class SurveyRow:
    """One packed row of drawn samples."""

    samples: tuple[Drawn, ...]

    def total(self, of: Callable[[Drawn], float]) -> float:
        return sum(map(of, self.samples))


SAMPLE_QUANTITIES: dict[str, Callable[[Drawn], float]] = {
    "tokens": lambda sample: sample.tokens,
    "learnt tokens": lambda sample: sample.learnt,
    "patches": lambda sample: sample.patches,
    "pictures": lambda sample: sample.pictures,
    "videos": lambda sample: sample.videos,
    "turns": lambda sample: sample.turns,
}
"""What is counted of each sample; turns are the assistant's."""


@dataclass
class Survey:
    """The drawn samples of a split, and rows made of them."""

    path: Location
    split: str
    seed: int
    seq_len: int
    sources: list[Source]
    samples: list[Drawn] = field(default_factory=list)
    rows: list[SurveyRow] = field(default_factory=list)
    excluded: int = 0
    """Drawn samples that the data set's description excludes."""
    seconds: float = 0.0
    stopped: bool = False
    """Whether the time was up before all samples were read."""

    @property
    def population(self) -> int:
        return sum(map(len, self.sources))

    @property
    def exact(self) -> bool:
        """Whether every sample was read."""
        return len(self.samples) + self.excluded == self.population

    @cached_property
    def usable(self) -> list[Drawn]:
        return [sample for sample in self.samples if not sample.refused]

    def of_samples(self, quantity: Callable[[Drawn], float]) -> list[Stratum]:
        """A quantity of the usable samples."""
        drawn = Counter(sample.source for sample in self.samples)
        usable = Counter(sample.source for sample in self.usable)
        values: dict[int, list[float]] = {number: [] for number in range(len(self.sources))}
        for sample in self.usable:
            values[sample.source].append(quantity(sample))

        strata = []
        for number, source in enumerate(self.sources):
            kept = usable[number] / drawn[number] if drawn[number] else 0.0
            size = max(len(source) * kept, 1.0) if not self._whole(number) else usable[number]
            strata.append(Stratum(source.share * kept, size or 1, np.array(values[number], np.float64)))
        return strata

    def of_rows(self, quantity: Callable[[SurveyRow], float]) -> list[Stratum]:
        """A quantity of the rows. Training makes rows without end, so these are always a sample."""
        return [Stratum(1.0, math.inf, np.array([quantity(row) for row in self.rows], np.float64))]

    def skipped(self) -> dict[str, Estimate]:
        """The share of the samples that the loader would leave out, by reason."""
        reasons = Counter(sample.refused[0] for sample in self.samples if sample.refused)

        def hits(reason: str) -> list[Stratum]:
            return self.of_drawn(
                float(sample.refused is not None and sample.refused[0] == reason) for sample in self.samples
            )

        return {reason: share(hits(reason)) for reason, _ in reasons.most_common()}

    def left_out(self) -> dict[str, BadSampleMeter]:
        """What a run would count of each source: its samples, and those that it would leave out."""
        meters = {source.name: BadSampleMeter(1.0, minimum=1) for source in self.sources}
        names = list(meters)
        for sample in self.samples:
            meter = meters[names[sample.source]]
            if not sample.refused:
                meter.add(1, {})
                continue
            reason = sample.refused[0]
            known = {"reason": reason, "size": sample.refused_size, "data_set": ""}
            meter.add(0, {reason: 1}, details_by_reason([known]))
        return meters

    def of_drawn(self, values: Iterable[float]) -> list[Stratum]:
        """One number of each drawn sample, those that cannot be used included."""
        own: dict[int, list[float]] = {number: [] for number in range(len(self.sources))}
        for sample, value in zip(self.samples, values, strict=True):
            own[sample.source].append(value)

        strata = []
        for number, source in enumerate(self.sources):
            size = len(own[number]) if self._whole(number) else len(source)
            strata.append(Stratum(source.share, size or 1, np.array(own[number], np.float64)))
        return strata

    def _whole(self, number: int) -> bool:
        """Whether a source was read as a whole."""
        return self.exact or (
            not self.excluded
            and sum(sample.source == number for sample in self.samples) == len(self.sources[number])
        )


def survey(
    encoder: RowEncoder,
    *,
    split: str = "train",
    samples: int = 2000,
    seconds: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Survey:
    """Draws samples and makes rows of them.

    Args:
        encoder: as :func:`open_encoder` makes it; it has the data set and the settings of a run.
        samples: number to draw, over all sources; 0, or more than there are: all.
        seconds: stop drawing after that time. Samples are read in random order, so those read until then are
            a random sample too.

    Raises:
        SurveyError: no drawn sample can be used.
        LoaderError, DescriptionError: as :func:`sources` raises them.
    """
    start = time.monotonic()
    data = encoder.data
    place = location(data.path)
    found = Survey(place, split, seed, data.seq_len, sources(place, split))
    readers = [Reader(source, data.sample_timeout_s) for source in found.sources]
    places = draw(found.sources, samples, seed)
    begin = time.monotonic()
    for number, (source, index) in enumerate(places):
        passed = time.monotonic() - begin
        if number and number % AT_ONCE == 0:
            if progress:
                left = min(passed / number * (len(places) - number), seconds - passed)
                progress(f"{number / len(places):4.0%}  {number / passed:.0f} samples/s, {left:.0f} s left")
            if passed > seconds:
                found.stopped = True
                break
        sample = readers[source].read(index, whole=False)
        if sample is None:
            found.excluded += 1
            continue
        found.samples.append(_drawn(encoder, sample, source, index))
    for reader in readers:
        reader.close()

    if not found.usable:
        raise SurveyError(f"{found.path}: {_none_usable(found)}")
    found.rows = list(_rows(found, data, random.Random(seed)))
    found.seconds = time.monotonic() - start
    return found


def draw(held: Sequence[Source], samples: int, seed: int) -> list[tuple[int, int]]:
    """(source, index) of the drawn samples in random order, without repetition.

    Each source gives in proportion to its share of training, but at least two samples, so that its spread can
    be seen.
    """
    chance = random.Random(seed)
    total = sum(map(len, held))
    places: list[tuple[int, int]] = []
    for number, source in enumerate(held):
        wanted = len(source) if not 0 < samples < total else max(2, round(samples * source.share))
        places += [(number, index) for index in chance.sample(source.indices, min(wanted, len(source)))]
    chance.shuffle(places)
    return places


def _drawn(encoder: RowEncoder, sample: RawSample, source: int, index: int) -> Drawn:
    encoded: EncodedSample = encoder.preencode_sample(sample)
    if encoded.refused:
        return Drawn(
            source,
            index,
            sample.__key__,
            encoded.source,
            refused=encoded.refused,
            refused_size=encoded.refused_size,
        )
    messages = json.loads(sample.text or b"")["messages"]
    return Drawn(
        source,
        index,
        sample.__key__,
        encoded.source,
        tokens=len(encoded.token_ids),
        learnt=int(encoded.loss_mask.count_nonzero()),
        turns=sum(message["role"] == "assistant" for message in messages),
        grids=tuple(encoded.grids),
    )


def _none_usable(found: Survey) -> str:
    reasons = Counter(sample.refused for sample in found.samples if sample.refused)
    (reason, detail), _ = reasons.most_common(1)[0] if reasons else (("excluded", "by split.yaml"), 0)
    return f"none of {len(found.samples)} drawn samples can be used, for instance: {reason}: {detail}"


def _rows(found: Survey, data: DataConfig, chance: random.Random) -> Iterator[SurveyRow]:
    """Rows as a loader's worker packs them from a shuffled, repeated data set."""
    stream = _endless(found, chance)
    if not data.pack:
        for sample in itertools.islice(stream, min(max(len(found.usable), LEAST_ROWS), MOST_ROWS)):
            yield SurveyRow((sample,))
        return

    buffer: list[Drawn] = []
    taken = 0
    for number in range(MOST_ROWS):
        if number >= LEAST_ROWS and taken >= len(found.usable):
            return
        buffer += itertools.islice(stream, max(data.packing_buffer, 1) - len(buffer))
        chosen = fill_row([(each.tokens, each.patches) for each in buffer], data.seq_len, data.max_patches)
        yield SurveyRow(tuple(buffer[i] for i in chosen))
        taken += len(chosen)
        inside = set(chosen)
        buffer = [each for i, each in enumerate(buffer) if i not in inside]


def _endless(found: Survey, chance: random.Random) -> Iterator[Drawn]:
    """The usable samples again and again in random order, each source as often as training draws from it."""
    by_source = [[each for each in found.usable if each.source == n] for n in range(len(found.sources))]
    shares = [source.share if held else 0.0 for source, held in zip(found.sources, by_source, strict=True)]
    decks: list[list[Drawn]] = [[] for _ in by_source]
    while True:
        (number,) = chance.choices(range(len(decks)), shares)
        if not decks[number]:
            decks[number] = chance.sample(by_source[number], len(by_source[number]))
        yield decks[number].pop()


def fill(row: SurveyRow, seq_len: int) -> float:
    """Share of a row's tokens that are no padding."""
    return row.total(lambda sample: sample.tokens) / seq_len


def values_of(strata: Sequence[Stratum]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The drawn values of all strata, and the weight of each, which add up to 1."""
    held = [stratum for stratum in strata if len(stratum.values)]
    weights = [np.full(len(s.values), s.share / len(s.values)) for s in held]
    joined = np.concatenate(weights)
    return np.concatenate([stratum.values for stratum in held]), joined / joined.sum()
