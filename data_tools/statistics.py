"""What a data set holds, counted over all samples from their sizes in the index. They are not read."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_vl.config import DataConfig
from megatron_vl.data.row_encoder import RowEncoder
from megatron_vl.data.source.bad_samples import TOO_LONG, TOO_MANY_PATCHES, BadSampleMeter
from megatron_vl.data.source.dataset_description import METADATA_DIR, read_description
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_sizes import (
    COORDINATE,
    SampleSizeCounter,
    compute_tokenization_id,
    missing_sizes_advice,
    open_stored_sizes,
)
from megatron_vl.system.plurals import pluralize

from .sample_sources import SampleSource, read_sources

QUANTILES = {"p5": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}
SAMPLE_QUANTITIES = ("tokens", "patches", "images", "videos")

IntegerArray = NDArray[np.int64]


@dataclass(frozen=True)
class SourceSizes:
    source: SampleSource
    sizes: dict[str, IntegerArray]
    """Quantity of :data:`SAMPLE_QUANTITIES` -> int64 [n], in the order of the source. A sample that cannot be
    used has no tokens."""
    assistant_turns: int
    left_out_masks: dict[str, NDArray[np.bool_]]
    """The samples that a run leaves out, bool [n]: those without tokens under "", others by reason."""
    left_out: Counter[str]
    """Number of samples that a run leaves out, by reason."""
    cut_samples: dict[int, IntegerArray]
    """Samples that are cut, by their place in the source: tokens and patches of each part that a run
    reads, int64 [parts, 2]. Their ``sizes`` are the sums of these."""
    lost_exchanges: list[int]
    """Tokens of each exchange of these that does not fit into a row."""

    @cached_property
    def usable_mask(self) -> NDArray[np.bool_]:
        return ~np.logical_or.reduce(list(self.left_out_masks.values()))

    @property
    def num_usable(self) -> int:
        return int(self.usable_mask.sum())


@dataclass(frozen=True)
class DatasetStatistics:
    data_config: DataConfig
    sources: list[SourceSizes]

    @property
    def num_samples(self) -> int:
        return sum(len(source_sizes.source) for source_sizes in self.sources)

    @property
    def num_usable(self) -> int:
        return sum(source_sizes.num_usable for source_sizes in self.sources)

    def left_out_reasons(self) -> Counter[str]:
        return sum((source_sizes.left_out for source_sizes in self.sources), Counter())

    def token_counts(self) -> dict[str, Any]:
        """The tokens that each rule keeps or leaves out, over all sources."""
        parts = [sizes for each in self.sources for sizes in each.cut_samples.values()]
        lost = [tokens for each in self.sources for tokens in each.lost_exchanges]
        cut = {
            "samples": len(parts),
            "parts": sum(map(len, parts)),
            "tokens": sum(int(sizes[:, 0].sum()) for sizes in parts),
            "lost_exchanges": len(lost),
            "lost_tokens": sum(lost),
        }
        left_out_tokens: Counter[str] = Counter()
        for each in self.sources:
            for reason, mask in each.left_out_masks.items():
                left_out_tokens[reason] += int(each.sizes["tokens"][mask].sum())
        whole_tokens = sum(int(each.sizes["tokens"][each.usable_mask].sum()) for each in self.sources)
        return {"whole": whole_tokens - cut["tokens"], "cut": cut, "left_out": dict(+left_out_tokens)}

    def check_usable(self) -> None:
        if not self.num_usable:
            refusals = BadSampleMeter(1.0)
            longest = max(int(each.sizes["tokens"].max(initial=0)) for each in self.sources)
            refusals.add_counts(0, self.left_out_reasons(), {TOO_LONG: {"size": longest, "data_sets": []}})
            raise LoaderError(
                f"no sample of {self.data_config.path} can be used ({refusals.counts_by_reason()})."
                f" {refusals.advice_text()}"
            )

    def sample_quantity(self, quantity_name: str) -> tuple[IntegerArray, NDArray[np.float64]]:
        """One of :data:`SAMPLE_QUANTITIES` of the usable samples.

        Returns:
            int64 [n], and float64 [n]: the probability that training draws the sample next.
        """
        values = [each.sizes[quantity_name][each.usable_mask] for each in self.sources]
        sample_weights = [each.source.share / len(each.source) for each in self.sources]
        weights = np.repeat(sample_weights, list(map(len, values)))
        return np.concatenate(values), weights / weights.sum()

    def pass_facts(self, global_batch_size: int) -> dict[str, Any]:
        """The number of rows of one pass.

        A pass draws as many samples as the data set has, by the sources' shares. Packed rows are nearly full,
        so their number is that of its tokens, or patches, divided by those of a row.

        Raises:
            LoaderError: no sample can be used.
        """
        self.check_usable()
        limits = {"tokens": self.data_config.seq_len, "patches": self.data_config.max_patches or math.inf}
        rows_by_limit = dict.fromkeys(limits, 0.0)
        for each in self.sources:
            draws = self.num_samples * each.source.share / len(each.source)
            rows_alone = each.num_usable - len(each.cut_samples) + sum(map(len, each.cut_samples.values()))
            for name, limit in limits.items():
                size = each.sizes[name][each.usable_mask].sum() / limit
                rows_by_limit[name] += draws * (size if self.data_config.pack else rows_alone)
        return {"rows": math.ceil(max(rows_by_limit.values()) - 1e-6), "global_batch_size": global_batch_size}


def count_statistics(encoder: RowEncoder, hf_dir: str | Path, split: str = "train") -> DatasetStatistics:
    """Counts a split.

    Args:
        encoder: the result of :func:`~data_tools.sample_sources.open_encoder`. It has the data set and the
            settings of a run.

    Raises:
        LoaderError: a data set has no sizes for this tokenizer and chat template; or as
            :func:`~data_tools.sample_sources.read_sources`.
    """
    data_config = encoder.data_config
    drawn_sources = read_sources(data_config.path, split)
    if missing_reason := missing_sizes_advice(read_description(data_config.path), hf_dir, data_config, split):
        raise LoaderError(missing_reason)
    sizes_name = compute_tokenization_id(hf_dir, encoder.spec, data_config)
    sample_sizes = SampleSizeCounter(encoder.chat_encoder, encoder.pixel_settings)

    sizes = [_source_sizes(source, sizes_name, sample_sizes, data_config) for source in drawn_sources]
    return DatasetStatistics(data_config, sizes)


def _source_sizes(
    source: SampleSource, sizes_name: str, sample_sizes: SampleSizeCounter, data_config: DataConfig
) -> SourceSizes:
    stored_sizes = open_stored_sizes(source.dataset.path / METADATA_DIR, sizes_name)
    shard_bounds = list(pairwise(source.shard_starts))
    shard_sizes = [end - start for start, end in shard_bounds]
    begins = stored_sizes.first_sample_numbers(list(zip(source.shard_names, shard_sizes, strict=True)))

    columns: list[tuple[IntegerArray, ...]] = [(np.zeros(0, np.int64),) * len(SAMPLE_QUANTITIES)]
    number_arrays = [np.zeros(0, np.int64)]
    for begin, (start, end) in zip(begins.tolist(), shard_bounds, strict=True):
        if start < end:
            sample_numbers = np.arange(begin, begin + end - start, dtype=np.int64)
            number_arrays.append(sample_numbers)
            columns.append(_shard_quantities(sample_sizes, stored_sizes, sample_numbers))
    sizes = dict(zip(SAMPLE_QUANTITIES, map(np.concatenate, zip(*columns, strict=True)), strict=True))

    shard_facts = [stored_sizes.shard_facts[shard] for shard in source.shard_names]
    assistant_turns = sum(facts["turns"] for facts in shard_facts)
    too_long = sizes["tokens"] > data_config.seq_len
    too_large = ~too_long & (sizes["patches"] > (data_config.max_patches or math.inf))
    cut_samples, lost_exchanges = {}, []
    if data_config.too_long == "cut":
        all_numbers = np.concatenate(number_arrays)
        limits = (data_config.seq_len, data_config.max_patches)
        for place in np.flatnonzero(too_long | too_large).tolist():
            if cut := sample_sizes.cut_sample(stored_sizes, all_numbers[place], *limits):
                parts = np.array(cut, np.int64)
                fits = (parts <= (data_config.seq_len, data_config.max_patches or math.inf)).all(axis=1)
                cut_samples[place] = parts[fits]
                lost_exchanges += parts[~fits, 0].tolist()
                sizes["tokens"][place], sizes["patches"][place] = parts[fits].sum(axis=0)
                too_long[place] = too_large[place] = False
    left_out_masks = {"": sizes["tokens"] == 0, TOO_LONG: too_long, TOO_MANY_PATCHES: too_large}

    reasons = sum((Counter(facts["unusable"]) for facts in shard_facts), Counter[str]())
    reasons += Counter({reason: int(left_out_masks[reason].sum()) for reason in (TOO_LONG, TOO_MANY_PATCHES)})
    return SourceSizes(source, sizes, assistant_turns, left_out_masks, reasons, cut_samples, lost_exchanges)


def _shard_quantities(
    sample_sizes: SampleSizeCounter, stored_sizes: Any, sample_numbers: IntegerArray
) -> tuple[IntegerArray, ...]:
    """:data:`SAMPLE_QUANTITIES` of successive stored samples."""
    media_begins, media_ends = stored_sizes.media_ranges(sample_numbers)
    frames = stored_sizes.medium_records["frames"][media_begins[0] : media_ends[-1]]

    def count(is_counted: NDArray[np.bool_]) -> IntegerArray:
        counts = np.append(0, np.cumsum(is_counted))
        return counts[media_ends - media_begins[0]] - counts[media_begins - media_begins[0]]

    tokens_and_patches = sample_sizes.count_samples(stored_sizes, sample_numbers)
    return *tokens_and_patches, count(frames == 0), count((frames > 0) & (frames != COORDINATE))


def describe_values(values: NDArray[Any], weight_of_value: NDArray[np.float64]) -> dict[str, float]:
    """Mean, smallest and largest value, and those that the shares :data:`QUANTILES` do not exceed.

    Args:
        weight_of_value: weight of each value; they add up to 1.
    """
    order = values.argsort(kind="stable")
    quantile_indices = np.searchsorted(
        weight_of_value[order].cumsum(), np.array(list(QUANTILES.values())) - 1e-9
    ).clip(max=len(values) - 1)
    quantiles = dict(zip(QUANTILES, values[order][quantile_indices].tolist(), strict=True))
    extreme_values = {"smallest": values.min().item(), "largest": values.max().item()}
    return {"mean": round(float(values @ weight_of_value), 6), **quantiles, **extreme_values}


def describe_pass(pass_facts: dict[str, Any], *, fills_rows: bool = False) -> str:
    """``one pass over the data is about 120 rows, 15 steps at global_batch_size 8``.

    Args:
        pass_facts: the result of :meth:`DatasetStatistics.pass_facts`.
        fills_rows: whether samples repeat to fill a step, as they do if ``steps`` and not ``epochs`` are set.
    """
    rows, step_rows = pass_facts["rows"], pass_facts["global_batch_size"]
    rows_text = f"one pass over the data is about {pluralize(f'{rows:,}', 'row')}"
    if fills_rows and 0 < rows < step_rows:
        return f"{rows_text}; a step of {step_rows} rows reads the data about {step_rows / rows:.1f} times"

    steps = math.ceil(rows / step_rows)
    return f"{rows_text}, {pluralize(f'{steps:,}', 'step')} at global_batch_size {step_rows}"
