"""The rows of a run whose batches are planned from stored sizes (see
:mod:`megatron_vl.data.packing.plan_rows`).

Every rank plans all batches, and all ranks plan the same. Torch's DataLoader runs the processes: one plans
ahead (:class:`PlannedSteps`), the others make the rows (:class:`RowDataset`), and the plan is their sampler.
Without loader processes, batches are planned when they are needed. The state consists of the samples that
were drawn but not used yet, by number. It does not depend on ranks or processes.
"""

from __future__ import annotations

import gc
import pickle
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.structs import ShardInfo
from megatron.energon.metadataset.loader_interface import LoadedDataset
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from megatron_vl.data.packing.plan_rows import (
    CHOICES_PER_ROW,
    LOOKAHEAD_FACTOR,
    assign_rows_to_ranks,
    plan_rows,
)
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.blend import BlendSource
from megatron_vl.data.source.dataset_description import (
    METADATA_DIR,
    SIZES_DIR,
    LoaderError,
    join_content_ids,
)
from megatron_vl.data.source.location import resolve_location
from megatron_vl.data.source.sample_order import LANES, SampleOrder
from megatron_vl.data.source.sample_sizes import SampleSizeCounter, SizesError, StoredSizes, open_stored_sizes
from megatron_vl.data.source.store_reading import ReadAhead, StoreReader, StoreSamples
from megatron_vl.data.source.tolerant_reader import ShardReader, TolerantReader
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.system.signals import shield_loader_worker

SHUFFLE_BLOCK = 16
"""Successive samples of a shard that are drawn at about the same time: storage sees few large reads."""
PACKING_BUFFER = 64
"""Smallest number of samples among which the packer chooses."""

Integers = NDArray[np.int64]

MAX_OPEN_SHARDS = 16
"""Number of shards of each data set that a process keeps open."""
SHARED_MEMORY_ADVICE = "`docker run --shm-size=16g` or `--ipc=host`"
PREFETCHED = 2
"""Number of rows that a loader process makes, and of steps that are planned, before they are asked for."""

MIN_SEARCHED = 10_000
"""A search for usable samples of a blend does not end before this many consecutive unusable ones, because a
source with a small weight is drawn from rarely."""
MAX_SEARCHED = 1_000_000
"""A search for usable samples ends after this many consecutive unusable ones at the latest. It ends earlier
once every sample was drawn twice."""


class PlannedSample(NamedTuple):
    """One planned sample."""

    source: int
    index: int  # type: ignore[assignment]  # tuple has a method of this name
    """Number of the sample in its data set."""
    tokens: int
    """Number of its tokens. A sample with 0 tokens cannot be used and is read only to be counted."""
    patches: int


@dataclass(frozen=True)
class PlannedBatch:
    """The rows of one step."""

    sample_table: Integers
    """int64 [4, n], the fields of a :class:`PlannedSample` for each sample."""
    row_of_sample: Integers
    """int64 [n], the row of each sample."""
    row_count: int

    def assign_to_ranks(self, rank_count: int) -> PlannedBatch:
        """The same rows, sorted by rank: each rank takes the next ``row_count // rank_count`` rows."""
        return PlannedBatch(
            self.sample_table,
            assign_rows_to_ranks(self.row_of_sample, self.sample_table[3], self.row_count, rank_count),
            self.row_count,
        )

    def rows_of_rank(self, rank: int = 0, rank_count: int = 1) -> list[list[PlannedSample]]:
        """The rows of a rank, after :meth:`assign_to_ranks`."""
        rows_per_rank = self.row_count // rank_count
        rank_rows: list[list[PlannedSample]] = [[] for _ in range(rows_per_rank)]
        rank_samples = np.flatnonzero(self.row_of_sample // rows_per_rank == rank)
        row_indices = self.row_of_sample[rank_samples] % rows_per_rank
        for row_index, fields in zip(row_indices, self.sample_table[:, rank_samples].T.tolist(), strict=True):
            rank_rows[row_index].append(PlannedSample(*fields))
        return rank_rows


class JoinedDataset:
    """Energon's data sets of the parts of a folder, as one. The name of a shard begins with its part's."""

    def __init__(self, path: EPath, parts: list[Any]) -> None:
        self.path, self.parts = path, parts
        self.shards = []
        for part in parts:
            for shard in part.shards:
                name = f"{part.path.name}/{shard.name}"
                self.shards.append(ShardInfo(name=name, path=shard.path, count=shard.count))

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def sample_filter(self, sample_name: str) -> bool:
        part_name, _, name = sample_name.partition("/")
        part_filter = next(part.sample_filter for part in self.parts if part.path.name == part_name)
        return part_filter is None or bool(part_filter(name))


class SizedSource:
    """One data set and the stored sizes of its samples.

    Args:
        loaded_dataset: Energon's data set.
        tokenization_id: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        content_id: id of the content that the run reads.

    Raises:
        SizesError: the data set has no sizes, or its sizes belong to other content or other shards.
    """

    def __init__(self, loaded_dataset: LoadedDataset, tokenization_id: str, content_id: str) -> None:
        dataset: Any = loaded_dataset.dataset
        self._stored_sizes: list[StoredSizes] = []
        """The sizes of each part; one if there are no parts."""
        part_of_shard: list[int] = []
        first_numbers = []
        for part_index, part in enumerate(getattr(dataset, "parts", [dataset])):
            metadata_dir = resolve_location(str(part.path)) / METADATA_DIR
            part_sizes = open_stored_sizes(metadata_dir, tokenization_id)
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
        self._shard_starts = np.cumsum([0, *(shard.count for shard in dataset.shards)])

    def __len__(self) -> int:
        return int(self._shard_starts[-1])

    def count_samples(
        self, size_counter: SampleSizeCounter, sample_indices: Integers
    ) -> tuple[Integers, Integers]:
        """Tokens and patches of samples, int64 [n] each."""
        shard_indices = np.searchsorted(self._shard_starts, sample_indices, side="right") - 1
        size_numbers = self._first_numbers[shard_indices] + sample_indices - self._shard_starts[shard_indices]
        if len(self._stored_sizes) == 1:
            return size_counter.count_samples(self._stored_sizes[0], size_numbers)

        parts = self._part_of_shard[shard_indices]
        sample_sizes = np.zeros((2, len(sample_indices)), np.int64)
        for part in np.unique(parts).tolist():
            is_of_part = parts == part
            sample_sizes[:, is_of_part] = size_counter.count_samples(
                self._stored_sizes[part], size_numbers[is_of_part]
            )
        return sample_sizes[0], sample_sizes[1]

    def shard_sizes(self, first_sample: int, sample_count: int) -> Integers:
        """Number of samples of each shard of a subset, int64 [shards].

        Args:
            first_sample: number of samples before the subset.
            sample_count: number of samples in it.
        """
        subset_starts = np.clip(self._shard_starts, first_sample, first_sample + sample_count)
        shard_sizes = np.diff(subset_starts)
        return shard_sizes[shard_sizes > 0]


def open_sample_reader(dataset: Any, take: Callable[[int], bytes]) -> TolerantReader:
    """Reads samples of one of Energon's data sets by index.

    Args:
        take: gives the bytes of a sample in an object store; a local data set does without.
    """
    if not dataset.path.is_local():
        return TolerantReader(StoreReader(dataset, take))
    reader = ShardReader(
        dataset.path, dataset.shards, sample_filter=dataset.sample_filter, itar_cache_size=MAX_OPEN_SHARDS
    )
    return TolerantReader(reader)


class BatchPlanner:
    """Plans one batch after the other.

    Args:
        lookup_sizes: ``lookup_sizes(source_index, sample_indices)`` returns the tokens and patches, int64 [n]
            each, of samples of one data set.
        rows_per_step: number of rows of a batch, on all ranks.
        seq_len, max_patches: largest number of tokens and patches in a row; 0 patches: no limit.
        least_ahead: smallest number of samples to choose from beyond those that fill a step.
        packs_samples: whether several samples may share a row.
        draw_limit: number of draws after which the data end; None: they never do.
    """

    def __init__(
        self,
        sample_order: SampleOrder,
        lookup_sizes: Callable[[int, Integers], tuple[Integers, Integers]],
        rows_per_step: int,
        seq_len: int,
        max_patches: int,
        *,
        least_ahead: int = 64,
        packs_samples: bool = True,
        draw_limit: int | None = None,
    ) -> None:
        self.draw_limit = draw_limit
        self.sample_order, self.lookup_sizes = sample_order, lookup_sizes
        self.rows_per_step, self.seq_len, self.max_patches = rows_per_step, seq_len, max_patches
        self.least_ahead, self.packs_samples = least_ahead, packs_samples
        self._draws_of_removed: dict[str, int] = {}
        """Number of draws from each data set that the blend no longer has. It may come back."""
        self._draws_set_aside: dict[str, list[int]] = {}
        """Samples drawn but unused when their data set was removed, oldest first."""
        self._waiting_samples = np.zeros((5, 0), np.int64)
        """Samples that were drawn and wait, the oldest first, as :meth:`_with_sizes` returns them."""

    @property
    def is_at_end(self) -> bool:
        """Whether every sample was planned, as often as ``draw_limit`` allows."""
        return self._draws_left() == 0 and not self._waiting_samples.size

    def _draws_left(self) -> int:
        if self.draw_limit is None:
            return sys.maxsize
        return max(0, self.draw_limit - self.sample_order.total_draws)

    def next_batch(self) -> PlannedBatch:
        """Plans the rows of the next step. At the end of the data, rows may be empty.

        Raises:
            LoaderError: no sample can be used.
        """
        unusable_samples = self._draw_samples()
        waiting_samples = self._waiting_samples
        if self.packs_samples:
            row_of_sample = plan_rows(
                waiting_samples[3], waiting_samples[4], self.rows_per_step, self.seq_len, self.max_patches
            )
        else:
            sample_numbers = np.arange(waiting_samples.shape[1])
            row_of_sample = np.where(sample_numbers < self.rows_per_step, sample_numbers, -1)

        # The samples that are not taken wait for the next step.
        is_taken = row_of_sample >= 0
        taken_samples = np.compress(is_taken, waiting_samples, axis=1)
        self._waiting_samples = np.compress(~is_taken, waiting_samples, axis=1)

        # Unusable samples come with some row, so that a loader process reads, counts and logs them.
        row_of_unusable = np.arange(unusable_samples.shape[1]) % self.rows_per_step
        batch_samples = np.concatenate([taken_samples, unusable_samples], axis=1)
        return PlannedBatch(
            batch_samples[[0, 2, 3, 4]],
            np.concatenate([row_of_sample[is_taken], row_of_unusable]),
            self.rows_per_step,
        )

    def _draw_samples(self) -> Integers:
        """Draws until there are enough samples to choose from. Returns those that cannot be used."""
        unusable_chunks = [self._waiting_samples[:, :0]]
        usable_search = _UsableSampleSearch(self.seq_len, self.max_patches)
        sample_counts = self.sample_order.sample_counts
        min_searched = MIN_SEARCHED if len(sample_counts) > 1 else 0
        max_refused = min(max(min_searched, 2 * sum(sample_counts)), MAX_SEARCHED)
        while draw_count := min(self._next_draw_count(), self._draws_left()):
            drawn_samples = self._with_sizes(*self.sample_order.draw_samples(draw_count))
            is_usable = usable_search.find_usable(drawn_samples[3], drawn_samples[4])
            if usable_search.consecutive_unusable > max_refused:
                raise LoaderError(usable_search.message())
            if not is_usable.all():
                drawn_samples[3:, ~is_usable] = 0
                unusable_chunks.append(drawn_samples[:, ~is_usable])
                drawn_samples = drawn_samples[:, is_usable]
            self._waiting_samples = np.concatenate([self._waiting_samples, drawn_samples], axis=1)
        return np.concatenate(unusable_chunks, axis=1)

    def _next_draw_count(self) -> int:
        """How many samples to draw next; 0 if enough wait."""
        waiting_count = self._waiting_samples.shape[1]
        least_draws = max(self.rows_per_step, 64)
        if not self.packs_samples:
            return least_draws if waiting_count < self.rows_per_step else 0

        # The number of the oldest samples that fill a step. If too few wait, their mean size gives an
        # estimate.
        cumulative_tokens = np.cumsum(self._waiting_samples[3])
        tokens_per_step = self.rows_per_step * self.seq_len
        filling_count = int(np.searchsorted(cumulative_tokens, tokens_per_step)) + 1
        if filling_count > waiting_count:
            filling_count = 1
            if waiting_count:
                filling_count = -(-tokens_per_step * waiting_count // max(int(cumulative_tokens[-1]), 1))

        most_ahead = CHOICES_PER_ROW * self.rows_per_step
        ahead_count = max(self.least_ahead, min(filling_count // LOOKAHEAD_FACTOR, most_ahead))
        missing_count = filling_count + ahead_count - waiting_count
        # An estimate from few samples may be far too high, so the number that waits at most doubles.
        return max(least_draws, min(missing_count, waiting_count)) if missing_count > 0 else 0

    def _with_sizes(self, source_indices: Integers, draw_numbers: Integers) -> Integers:
        """Drawn samples with their sizes, int64 [5, n].

        The rows are the data set, the number of the draw from it, the sample's index in it, tokens and
        patches.
        """
        sample_indices = self.sample_order.sample_indices(source_indices, draw_numbers)
        sample_sizes = np.zeros((2, len(source_indices)), np.int64)
        for source_index in np.flatnonzero(np.bincount(source_indices)).tolist():
            positions = np.flatnonzero(source_indices == source_index)
            sample_sizes[:, positions] = self.lookup_sizes(source_index, sample_indices[positions])
        return np.stack([source_indices, draw_numbers, sample_indices, *sample_sizes])

    def planner_state(self) -> dict[str, Any]:
        """The state from which planning continues, about 100 bytes for each row of a step."""
        draw_counts = self._draws_of_removed | dict(
            zip(self.sample_order.source_keys, self.sample_order.draw_counts, strict=True)
        )
        draws_set_aside = {key: list(numbers) for key, numbers in self._draws_set_aside.items()}
        return {
            "keys": list(self.sample_order.source_keys),
            "drawn": draw_counts,
            "total": self.sample_order.total_draws,
            "waiting": self._waiting_samples[:2].copy(),
            "aside": draws_set_aside,
        }

    def restore_state(self, saved_state: dict[str, Any]) -> None:
        """Continues after the batch at which a state was taken.

        A new data set begins at its start. If nothing is drawn from a data set any more, its waiting samples
        are set aside. If it comes back, they are the first to be used.

        Raises:
            LoaderStateError: the state is damaged.
        """
        try:
            draw_counts = dict(saved_state["drawn"])
            draws_set_aside = dict(saved_state["aside"])
            source_indices, draw_numbers = self._restore_waiting(saved_state, draws_set_aside)
            total_draws = int(saved_state["total"])
            current_draws = []
            for source_key in self.sample_order.source_keys:
                current_draws.append(int(draw_counts.pop(source_key, 0)))
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise LoaderStateError(
                "the loader state is damaged: it does not say which samples were drawn and wait"
            ) from error

        self.sample_order.total_draws = total_draws
        self.sample_order.draw_counts = current_draws
        self._draws_of_removed = draw_counts
        self._draws_set_aside = draws_set_aside
        self._waiting_samples = self._with_sizes(source_indices, draw_numbers)

    def _restore_waiting(
        self, saved_state: dict[str, Any], draws_set_aside: dict[str, list[int]]
    ) -> Integers:
        """The data sets and numbers of the draws that wait, int64 [2, n]. Draws are set aside or come back.

        Args:
            draws_set_aside: as in the state; changed here.
        """
        saved_indices, draw_numbers = saved_state["waiting"].astype(np.int64)
        if len(saved_indices) and min(saved_indices.min(), draw_numbers.min()) < 0:
            raise ValueError("a negative number")

        # Data sets may have other places in the blend now, or have left it.
        saved_keys = list(saved_state["keys"])
        index_of_saved = np.array([self._source_index(key) for key in saved_keys], np.int64)
        current_indices = index_of_saved[saved_indices]
        for saved_index, source_key in enumerate(saved_keys):
            waiting_draws = draw_numbers[saved_indices == saved_index].tolist()
            if index_of_saved[saved_index] < 0 and waiting_draws:
                draws_set_aside[source_key] = [*draws_set_aside.get(source_key, ()), *waiting_draws]

        # What was set aside comes first, then what waits.
        waiting_tables = []
        for source_index, source_key in enumerate(self.sample_order.source_keys):
            if self.sample_order.source_weights[source_index] > 0:
                returning_draws = np.array(draws_set_aside.pop(source_key, ()), np.int64)
                waiting_tables.append(
                    np.stack([np.full_like(returning_draws, source_index), returning_draws])
                )
        waiting_tables.append(np.stack([current_indices, draw_numbers])[:, current_indices >= 0])
        return np.concatenate(waiting_tables, axis=1)

    def _source_index(self, source_key: str) -> int:
        """Number of a data set in the blend; -1 if nothing is drawn from it."""
        if source_key not in self.sample_order.source_keys:
            return -1
        source_index = self.sample_order.source_keys.index(source_key)
        return source_index if self.sample_order.source_weights[source_index] > 0 else -1


class _UsableSampleSearch:
    """Finds the usable samples among drawn ones, and remembers the unusable ones since the last usable
    one."""

    def __init__(self, seq_len: int, max_patches: int) -> None:
        self.limit_by_unit = {
            "tokens": ("data.seq_len", seq_len),
            "patches": ("data.max_patches", max_patches),
        }
        self.consecutive_unusable = 0
        self._smallest_oversized: dict[str, int] = {}

    def find_usable(self, token_counts: Integers, patch_counts: Integers) -> NDArray[np.bool_]:
        """Whether each of the next samples can be used, bool [n]."""
        usable = token_counts > 0
        sizes_by_unit = {"tokens": token_counts, "patches": patch_counts}
        oversized_by_unit = {}
        for size_unit, (_, limit) in self.limit_by_unit.items():
            if limit:
                oversized_by_unit[size_unit] = sizes_by_unit[size_unit] > limit
                usable &= ~oversized_by_unit[size_unit]

        if usable.any():
            self.consecutive_unusable = 0
            self._smallest_oversized.clear()
            return usable

        self.consecutive_unusable += len(token_counts)
        for size_unit, is_oversized in oversized_by_unit.items():
            if is_oversized.any():
                smallest_size = int(sizes_by_unit[size_unit][is_oversized].min())
                self._smallest_oversized[size_unit] = min(
                    smallest_size, self._smallest_oversized.get(size_unit, smallest_size)
                )
        return usable

    def message(self) -> str:
        """A message that says why nothing can be used."""
        limits_text = " or ".join(f"{name} {limit}" for name, limit in self.limit_by_unit.values() if limit)
        reason = (
            f"{self.consecutive_unusable} samples in a row cannot be used: they have no tokens, or more than"
            f" {limits_text}"
        )
        if not self._smallest_oversized:
            return reason

        field_names = []
        smallest_texts = []
        for unit, size in self._smallest_oversized.items():
            field_name, _ = self.limit_by_unit[unit]
            field_names.append(field_name)
            smallest_texts.append(f"the smallest above {field_name} has {size} {unit}")
        advice = f"raise {' and '.join(field_names)}, or lower data.max_pixels if pictures fill it"
        return f"{reason}. Of these, {' and '.join(smallest_texts)}: {advice}"


class PlanningContext:
    """What each process needs to plan the batches of a run and to read its rows.

    Args:
        loaded_datasets: Energon's data sets.
        blend_sources: the sources of the blend that these data sets belong to, in the same order.
        tokenization_id: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        row_encoder: a :class:`~megatron_vl.data.loader.RowEncoder`.
        rows_per_step: number of rows of a step, on all ranks.
        epochs: number of passes over the data; 0: they never end.
    """

    def __init__(
        self,
        loaded_datasets: Sequence[LoadedDataset],
        blend_sources: Sequence[BlendSource],
        tokenization_id: str,
        row_encoder: Any,
        rows_per_step: int,
        epochs: int = 0,
    ) -> None:
        self.epochs = epochs
        self.loaded_datasets = list(loaded_datasets)
        self.row_encoder = row_encoder
        self.rows_per_step = rows_per_step
        self.blend_sources = list(blend_sources)
        self.sized_sources = [
            SizedSource(loaded, tokenization_id, source.content_id)
            for loaded, source in zip(self.loaded_datasets, self.blend_sources, strict=True)
        ]
        self.planner_state: dict[str, Any] | None = None
        """The state from which planning continues; None: the run begins."""

    def read_ahead(self, rank_count: int) -> ReadAhead:
        """Makes what reads a rank's samples from object stores before they are needed."""
        data_config = self.row_encoder.data_config
        drawn_sources = sum(source.sample_share > 0 for source in self.blend_sources)
        blocks_in_use = drawn_sources * (LANES if data_config.shuffle else 1)
        datasets = [loaded.dataset for loaded in self.loaded_datasets]
        return ReadAhead(datasets, SHUFFLE_BLOCK, blocks_in_use, rank_count)

    def sample_readers(self, take: Callable[[int, int], bytes]) -> list[TolerantReader]:
        """A reader of each source. Each process has its own.

        Args:
            take: returns the bytes of a sample in an object store, by source and index.
        """
        return [
            open_sample_reader(loaded.dataset, partial(take, source_index))
            for source_index, loaded in enumerate(self.loaded_datasets)
        ]

    def make_planner(self) -> BatchPlanner:
        """A planner that continues at ``planner_state``."""
        data_config, row_encoder = self.row_encoder.data_config, self.row_encoder
        size_counter = SampleSizeCounter(row_encoder.chat_encoder, row_encoder.pixel_settings)

        def lookup_sizes(source_index: int, sample_indices: Integers) -> tuple[Integers, Integers]:
            return self.sized_sources[source_index].count_samples(size_counter, sample_indices)

        shard_sizes = []
        for sized_source, source in zip(self.sized_sources, self.blend_sources, strict=True):
            shard_sizes.append(sized_source.shard_sizes(source.first_sample, source.sample_count))
        sample_order = SampleOrder(
            [source.sample_count for source in self.blend_sources],
            [source.sample_share for source in self.blend_sources],
            data_config.seed,
            is_shuffled=data_config.shuffle,
            source_keys=[source.source_key for source in self.blend_sources],
            first_indices=[source.first_sample for source in self.blend_sources],
            draws_per_pass=[source.draws_per_pass for source in self.blend_sources],
            shard_sizes=shard_sizes,
            block_size=SHUFFLE_BLOCK,
        )
        draw_limit = None
        if self.epochs:
            if sample_order.pass_size is None:
                raise LoaderError(
                    "a blend by weights has no passes: give steps instead of epochs, or repetitions"
                    " (blend_epochized) instead of weights"
                )
            draw_limit = self.epochs * sample_order.pass_size

        batch_planner = BatchPlanner(
            sample_order,
            lookup_sizes,
            self.rows_per_step,
            data_config.seq_len,
            data_config.max_patches,
            least_ahead=PACKING_BUFFER,
            packs_samples=data_config.pack,
            draw_limit=draw_limit,
        )
        if self.planner_state is not None:
            batch_planner.restore_state(self.planner_state)
        return batch_planner


type PlannedStep = tuple[list[list[PlannedSample]], dict[str, Any] | None]
"""The rows of one rank in a step, and the planner's state after the step (on the first rank only)."""


class PlannedSteps(IterableDataset[PlannedStep]):
    """The steps of a rank.

    Args:
        expect: announces the samples of a step, by source and index, before they are read.

    Raises:
        LoaderError: no sample can be used.
    """

    def __init__(
        self,
        planning_context: PlanningContext,
        rank: int,
        rank_count: int,
        expect: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        self.planning_context, self.expect = planning_context, expect
        self.rank, self.rank_count = rank, rank_count

    def __iter__(self) -> Iterator[PlannedStep]:
        batch_planner = self.planning_context.make_planner()
        while not batch_planner.is_at_end:
            # Every rank plans the whole batch and takes its rows of it, so that no rank waits for another.
            planned_batch = batch_planner.next_batch().assign_to_ranks(self.rank_count)
            rows = planned_batch.rows_of_rank(self.rank, self.rank_count)
            self.expect([(sample.source, sample.index) for row in rows for sample in row])
            yield rows, None if self.rank else batch_planner.planner_state()


@dataclass(frozen=True)
class PickledRow:
    """A row whose tensors are in shared memory. Whoever unpickles it gets the row."""

    row_bytes: bytes

    def __reduce__(self) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
        return pickle.loads, (self.row_bytes,)


class RowDataset(Dataset[PickledRow | TrainingRow]):
    """Makes rows: ``row_dataset[samples]`` is the row of planned samples.

    Args:
        take: returns the bytes of a sample in an object store, by source and index.
    """

    def __init__(self, planning_context: PlanningContext, take: Callable[[int, int], bytes]) -> None:
        self.planning_context, self.take = planning_context, take

    @cached_property
    def _encoder_and_readers(self) -> tuple[Any, list[TolerantReader]]:
        """What each process has of its own."""
        planning_context = self.planning_context
        return planning_context.row_encoder.copy_for_process(), planning_context.sample_readers(self.take)

    def __getitem__(self, samples: list[PlannedSample]) -> PickledRow | TrainingRow:
        packed_row = read_planned_row(*self._encoder_and_readers, samples)
        if get_worker_info() is None:
            return packed_row
        # Moves the tensors to shared memory. Torch would do so in a thread, and drop the row if it fails.
        with explain_shared_memory():
            return PickledRow(bytes(ForkingPickler.dumps(packed_row)))


def start_loader(dataset: Any, sampler: Any, worker_count: int) -> Any:
    """Torch's iterator over a data set, with processes that work ahead.

    Args:
        sampler: yields the arguments of ``dataset``; None for an iterable data set.
        worker_count: 0: no processes.
    """
    torch_loader = partial(
        DataLoader,
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=worker_count,
        prefetch_factor=PREFETCHED if worker_count else None,
        multiprocessing_context="fork" if worker_count else None,
        worker_init_fn=_prepare_process,
        collate_fn=lambda item: item,
        generator=torch.Generator(),  # torch would draw from this process's random numbers
    )
    with explain_shared_memory(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more processes than cores
        return iter(torch_loader())


def _prepare_process(_: int) -> None:
    """Prepares a new process of the loader.

    Garbage collection leaves out what the process inherits. So the forked pages stay shared, and the next
    full collection waits for a quarter of the process's own objects, and not of the inherited ones too.
    """
    shield_loader_worker()
    gc.freeze()
    gc.collect()  # So that the next full collection is measured against the few objects after the freeze.


def read_planned_row(
    row_encoder: Any, sample_readers: Sequence[TolerantReader], samples: Sequence[PlannedSample]
) -> TrainingRow:
    """Reads, encodes and decodes the samples of a row.

    A sample whose size differs from the stored one is left out, counted and listed. The row becomes shorter,
    and may be empty, but stays the same row for all ranks.
    """
    encoded_samples = []
    for sample in samples:
        crude_sample = sample_readers[sample.source][sample.index]
        if crude_sample is None:
            continue  # the data set's description excludes it
        encoded_sample = row_encoder.preencode_sample(row_encoder.cook(crude_sample, sample.source))

        # A larger sample might not fit into the row, and the other ranks count on the planned size.
        token_count, patch_count = encoded_sample.token_and_patch_count
        if not encoded_sample.refused and (token_count, patch_count) != (sample.tokens, sample.patches):
            encoded_sample.refused = (
                "size differs from the index",
                f"it has {token_count} tokens and {patch_count} patches, and {sample.tokens} tokens and"
                f" {sample.patches} patches by the sizes in {METADATA_DIR}; delete the folder sizes there and"
                " run `megatron-vl data index`",
            )
        encoded_samples.append(encoded_sample)
    return row_encoder.make_row(encoded_samples, samples[0].source if samples else 0)


@contextmanager
def explain_shared_memory() -> Iterator[None]:
    """A context that raises LoaderError if processes cannot share memory."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise LoaderError(
            f"a loader process and its rank cannot share memory ({' '.join(str(error).split())}): enlarge"
            f" /dev/shm ({SHARED_MEMORY_ADVICE}), raise the limit of open files (`ulimit -n`), lower"
            " data.num_workers, or set it to 0"
        ) from error


class PlannedRankRows:
    """Iterator over the planned rows of a data-parallel rank.

    Args:
        worker_count: number of loader processes; 0: rows are made in this process.
        start_row: number of rows that the run had taken on all ranks before.
    """

    def __init__(
        self, planning_context: PlanningContext, rank: int, rank_count: int, worker_count: int, start_row: int
    ) -> None:
        self.rows_per_step = planning_context.rows_per_step
        self.rows_per_rank = self.rows_per_step // rank_count
        self.start_row = start_row
        self.taken_rows = 0
        self.planner_state = planning_context.planner_state
        """The planner's state after the last whole step."""
        self._later_states: deque[dict[str, Any] | None] = deque()
        """The states after the steps that are not taken yet."""
        self._store_samples = StoreSamples(
            [loaded.dataset for loaded in planning_context.loaded_datasets],
            planning_context.read_ahead(rank_count),
            has_processes=worker_count > 0,
        )
        planned_steps = PlannedSteps(planning_context, rank, rank_count, self._store_samples.expect)
        row_dataset = RowDataset(planning_context, self._store_samples.take)
        # A single process plans, because the next plan begins where the last one ends.
        self._rows: Any = None
        self._planned_steps = start_loader(planned_steps, None, min(worker_count, 1))
        try:
            self._rows = start_loader(row_dataset, self._samples_of_rows(), worker_count)
        except BaseException:
            self.close()
            raise

    def _samples_of_rows(self) -> Iterator[list[PlannedSample]]:
        for rows, planner_state in self._planned_steps:
            self._later_states.append(planner_state)
            yield from rows

    def __next__(self) -> TrainingRow:
        try:
            packed_row: TrainingRow = next(self._rows)
        except (OSError, EOFError) as error:
            # A process that is killed after it sent a row no longer serves the row's shared memory.
            if ended := _ended_processes(self._rows):
                raise RuntimeError(
                    f"DataLoader worker (pid(s) {', '.join(map(str, ended))}) exited unexpectedly"
                ) from error
            raise
        self.taken_rows += 1
        # Rows are made ahead. The state goes on with the last row of a step, so a save sees the right one.
        if self.taken_rows % self.rows_per_rank == 0:
            self.planner_state = self._later_states.popleft()
        return packed_row

    @property
    def total_rows_taken(self) -> int:
        """Number of rows that the run has taken on all ranks.

        Raises:
            LoaderStateError: this rank has not taken all rows of a step.
        """
        steps, extra_rows = divmod(self.taken_rows, self.rows_per_rank)
        if extra_rows:
            raise LoaderStateError("a loader's state can be saved only between steps")
        return self.start_row + steps * self.rows_per_step

    def close(self) -> None:
        """Ends the processes."""
        for iterator in (self._rows, self._planned_steps):
            if not getattr(iterator, "_shutdown", True):  # it has processes, which the end of the data ends
                _end_processes(iterator)
        self._store_samples.close()


def _ended_processes(iterator: Any) -> list[int]:
    processes = getattr(iterator, "_workers", [])
    for process in processes:
        process.join(timeout=0.1)  # the kernel may still be about to end it
    return [process.pid for process in processes if not process.is_alive()]


def _end_processes(iterator: Any) -> None:
    """Kills the processes of an iterator. Torch would wait five seconds for each that makes a row."""
    iterator._shutdown = True
    _remove_worker_pids(id(iterator))  # or torch raises an error for each killed process
    iterator._worker_pids_set = False
    for process in iterator._workers:
        process.kill()
    for process, index_queue in zip(iterator._workers, iterator._index_queues, strict=True):
        index_queue.cancel_join_thread()
        process.join(timeout=1)  # one that hangs in a file system does not end
