"""What a data set holds, counted over all samples from their sizes in the index.

Nothing is read of the samples themselves. How many rows they fill is the one number that is not a sum: the
loader's own packing makes rows of them in random order, of a large data set of as many as
:data:`MOST_PACKED`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_vl.config import DataConfig
from megatron_vl.data.loader import RowEncoder
from megatron_vl.data.packing.fill import fill_row
from megatron_vl.data.source.bad_samples import LIMITS, TOO_LONG, TOO_MANY_PATCHES, BadSampleMeter
from megatron_vl.data.source.description import META, read_description
from megatron_vl.data.source.location import location
from megatron_vl.data.source.sizes import SampleSizes, SizesError, open_sizes, text_id, why_no_sizes
from megatron_vl.words import counted

from .sources import Source, sources

MOST_PACKED = 10_000
QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}
PASSES = (1, 2, 3)
"""Numbers of passes whose steps are shown."""
QUANTITIES = ("tokens", "patches", "pictures", "videos")
"""What is known of each sample."""
NOT_ENCODED = "excluded, or not encoded"
"""Reason of samples without tokens for which the index has none."""

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class SourceSizes:
    """The sizes of all samples of one source."""

    source: Source
    sizes: dict[str, Integers]
    """int64 [n] of each of :data:`QUANTITIES`, in the order of ``source.indices``. A sample without tokens
    cannot be used."""
    turns: int | None
    """The assistant's turns in all samples; None if the source is a part of a data set's split."""
    left_out: dict[str, NDArray[np.bool_]]
    """The samples that a run leaves out, bool [n]: those without tokens under "", others by reason."""
    meter: BadSampleMeter
    """Counts the usable samples, and the others by reason."""

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """bool [n]: the samples that a run reads."""
        return ~np.logical_or.reduce(list(self.left_out.values()))


@dataclass(frozen=True)
class Statistics:
    """The sizes of all samples of a split, and rows made of them."""

    data: DataConfig
    sources: list[SourceSizes]

    @property
    def samples(self) -> int:
        return sum(len(one.source) for one in self.sources)

    @property
    def usable(self) -> int:
        return sum(one.meter.used for one in self.sources)

    def left_out(self) -> Counter[str]:
        """How many samples a run leaves out, by reason."""
        return sum((one.meter.reasons for one in self.sources), Counter())

    def of_samples(self, name: str) -> tuple[Integers, NDArray[np.float64]]:
        """One of :data:`QUANTITIES` of the usable samples, and how often training draws each: [n] both."""
        values = [one.sizes[name][one.usable] for one in self.sources]
        weights = np.repeat(
            [one.source.share / len(one.source) for one in self.sources], list(map(len, values))
        )
        return np.concatenate(values), weights / weights.sum()

    @cached_property
    def of_rows(self) -> dict[str, NDArray[np.float64]]:
        """Share of the tokens that are no padding, samples and patches of packed rows: float64 [rows].

        Raises:
            SizesError: no sample can be used.
        """
        if not self.usable:
            raise SizesError(f"{self.data.path}: no sample can be used: {dict(self.left_out())}")
        rows = [np.array(row).sum(0) for row in _packed(self.sources, self.data)]
        tokens, patches, samples = np.array(rows, np.float64).T
        return {"fill": tokens / self.data.seq_len, "samples": samples, "patches": patches}

    def one_pass(self, global_batch_size: int) -> dict[str, Any]:
        """Rows that hold as many samples as the data set has, drawn by the sources' shares, and the steps of
        one and more such passes: all tokens divided by those of a packed row."""
        of_row = self.of_rows["fill"].mean() * self.data.seq_len if self.data.pack else 1
        mean = 0.0
        for one in self.sources:
            size = one.sizes["tokens"][one.usable].sum() if self.data.pack else one.usable.sum()
            mean += one.source.share * size / len(one.source)
        rows = math.ceil(self.samples * mean / of_row - 1e-6)
        steps = {str(passes): math.ceil(passes * rows / global_batch_size) for passes in PASSES}
        return {"rows": rows, "global_batch_size": global_batch_size, "steps": steps}


def statistics(
    encoder: RowEncoder,
    hf_dir: str | Path,
    split: str = "train",
    progress: Callable[[str], None] | None = None,
) -> Statistics:
    """Counts a split.

    Args:
        encoder: as :func:`~.sources.open_encoder` makes it; it has the data set and the settings of a run.

    Raises:
        SizesError: a data set has no sizes for this tokenizer and chat template; the message names the
            command that writes them.
        LoaderError, DescriptionError: as :func:`~.sources.sources`.
    """
    data = encoder.data
    path = location(data.path)
    drawn = sources(path, split)
    if why := why_no_sizes(read_description(path), hf_dir, data, split):
        raise SizesError(why)
    name = text_id(hf_dir, encoder.spec, data)
    known = SampleSizes(encoder.chat, encoder.settings)
    return Statistics(data, [_sizes_of(source, name, known, data, progress) for source in drawn])


def _sizes_of(
    source: Source, name: str, known: SampleSizes, data: DataConfig, progress: Callable[[str], None] | None
) -> SourceSizes:
    stored = open_sizes(source.data.path / META, name)
    bounds = list(pairwise(source.starts))
    begins = stored.numbers(
        [(shard, end - start) for shard, (start, end) in zip(source.shards, bounds, strict=True)]
    )
    columns: list[tuple[Integers, ...]] = [(np.zeros(0, np.int64),) * len(QUANTITIES)]
    last = source.first + source.size
    for number, (begin, (start, end)) in enumerate(zip(begins.tolist(), bounds, strict=True), start=1):
        own = np.arange(max(start, source.first), min(end, last), dtype=np.int64)
        if len(own):
            columns.append(_of_shard(known, stored, own - start + begin))
        if progress and number % 1000 == 0:
            progress(f"{source.name}: {number} of {len(bounds)} shards")
    sizes = dict(zip(QUANTITIES, map(np.concatenate, zip(*columns, strict=True)), strict=True))

    whole = source.size == source.starts[-1]
    facts = [stored.shards[shard] for shard in source.shards] if whole else []
    turns = sum(one["turns"] for one in facts) if whole else None
    too_long = sizes["tokens"] > data.seq_len
    too_large = ~too_long & (sizes["patches"] > (data.max_patches or math.inf))
    left_out = {"": sizes["tokens"] == 0, TOO_LONG: too_long, TOO_MANY_PATCHES: too_large}

    reasons = sum((Counter(one["unusable"]) for one in facts), Counter[str]())
    reasons[NOT_ENCODED] = int(left_out[""].sum()) - reasons.total()
    details = {}
    for reason, (unit, _) in LIMITS.items():
        if count := int(left_out[reason].sum()):
            reasons[reason] = count
            details[reason] = {"size": int(sizes[unit][left_out[reason]].max()), "data_sets": []}
    meter = BadSampleMeter(1.0, minimum=1)
    meter.add(source.size - reasons.total(), +reasons, details)
    return SourceSizes(source, sizes, turns, left_out, meter)


def _of_shard(known: SampleSizes, stored: Any, numbers: Integers) -> tuple[Integers, ...]:
    """:data:`QUANTITIES` of successive stored samples."""
    begins, ends = stored.media_of(numbers)
    first = begins[0]
    videos = np.append(0, np.cumsum(stored.media["frames"][first : ends[-1]] > 0))
    of_sample = videos[ends - first] - videos[begins - first]
    return *known.of(stored, numbers), ends - begins - of_sample, of_sample


def _packed(held: Sequence[SourceSizes], data: DataConfig) -> Iterator[list[tuple[int, int, int]]]:
    """Rows of samples in random order, each source as often as training draws from it: tokens, patches and 1
    of each sample."""
    chance = np.random.default_rng(0)
    most = min(MOST_PACKED, sum(len(one.source) for one in held))
    drawn = []
    for one in held:
        tokens, patches = one.sizes["tokens"][one.usable], one.sizes["patches"][one.usable]
        share = one.source.share * len(tokens) / len(one.source)
        # A source with fewer samples is repeated, as in training.
        own = np.resize(chance.permutation(len(tokens)), max(1, round(most * share)) if len(tokens) else 0)
        drawn.append(np.stack([tokens, patches, np.ones_like(tokens)], axis=1)[own])
    waiting = chance.permutation(np.concatenate(drawn)).tolist()

    buffer = data.packing_buffer if data.pack else 1
    while waiting:
        sizes = [(tokens, patches) for tokens, patches, _ in waiting[:buffer]]
        chosen = fill_row(sizes, data.seq_len, data.max_patches)
        yield [waiting[i] for i in chosen]
        for i in reversed(chosen):
            del waiting[i]


def distribution(values: NDArray[Any], weights: NDArray[np.float64] | None = None) -> dict[str, float]:
    """Mean, smallest and largest value, and those that the shares :data:`QUANTILES` do not exceed.

    Args:
        weights: of the values; they add up to 1. Left out: all are equal.
    """
    each = np.full(len(values), 1 / len(values)) if weights is None else weights
    order = values.argsort(kind="stable")
    reached = each[order].cumsum()
    at = np.searchsorted(reached, np.array(list(QUANTILES.values())) - 1e-9).clip(max=len(values) - 1)
    quantiles = dict(zip(QUANTILES, values[order][at].tolist(), strict=True))
    ends = {"smallest": values.min().item(), "largest": values.max().item()}
    return {"mean": round(float(values @ each), 6), **quantiles, **ends}


def pass_in_words(facts: dict[str, Any]) -> str:
    """``one pass over the data is about 120 rows, 15 steps at global_batch_size 8 (2 passes: 30, 3: 45)``.

    Args:
        facts: what :meth:`Statistics.one_pass` gives.
    """
    once, twice, thrice = facts["steps"].values()
    return (
        f"one pass over the data is about {counted(f'{facts["rows"]:,}', 'row')},"
        f" {counted(f'{once:,}', 'step')} at global_batch_size {facts['global_batch_size']}"
        f" (2 passes: {twice:,}, 3: {thrice:,})"
    )
