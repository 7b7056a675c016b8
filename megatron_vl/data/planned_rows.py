"""The rows of a run whose batches are planned from stored sizes (see :mod:`megatron_vl.data.packing.plan_rows`).

Every rank plans all batches alike. Its planner is a process that works ahead, and hands each loader process
the rows that this one makes; without loader processes, batches are planned when they are needed. What a run
has drawn but not used yet is the whole state: some samples by number, which do not depend on ranks or
processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers.gc_dataset import gc_init_worker
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_vl.data.packing.plan_rows import LOOKAHEAD_FACTOR, MOST_CHOICES, assign_rows_to_ranks, plan_rows
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.source.blend import SOURCE_FIELD, BlendSource
from megatron_vl.data.source.dataset_description import METADATA_DIR, SIZES_DIR, LoaderError
from megatron_vl.data.source.location import resolve_location
from megatron_vl.data.source.sample_order import LANES, SampleOrder
from megatron_vl.data.source.sample_sizes import SampleSizeCounter, SizesError, StoredSizes, open_stored_sizes
from megatron_vl.data.source.store_reading import ReadAhead, ServedSamples, StoreReader, serve
from megatron_vl.data.source.tolerant_reader import TolerantReader, reconnect_stores
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.signals import shield_loader_worker

Integers = NDArray[np.int64]
PLANNER_ENDED_TEXT = "the process that plans batches has ended"

MAX_OPEN_SHARDS = 16
"""Number of shards of each data set that a process keeps open."""
PREFETCHED_ROWS = 2
"""Number of rows that a loader process makes before they are asked for."""

MIN_SEARCHED = 10_000
"""Number of unusable samples in a row up to which a run searches on, in a data set of any size."""
MAX_SEARCHED = 1_000_000
"""Number of unusable samples in a row after which a search ends. Before that, it ends once every sample was
drawn twice."""


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One planned sample."""

    source: int
    index: int
    """Number of the sample in its data set."""
    tokens: int
    """0: it cannot be used. It is read only so that it is counted."""
    patches: int


@dataclass(frozen=True)
class PlannedBatch:
    """The rows of one step."""

    sample_table: Integers
    """int64 [4, n], the fields of a :class:`PlannedSample`."""
    row_of_sample: Integers
    """int64 [n], the row of each."""
    row_count: int
    """Number of rows."""

    def assign_to_ranks(self, rank_count: int) -> PlannedBatch:
        """The same rows in an order of which each rank takes the next ``count // ranks``."""
        return PlannedBatch(
            self.sample_table,
            assign_rows_to_ranks(self.row_of_sample, self.sample_table[3], self.row_count, rank_count),
            self.row_count,
        )

    def rows_of_rank(self, rank: int = 0, rank_count: int = 1) -> list[list[PlannedSample]]:
        """The rows of a rank."""
        rows_per_rank = self.row_count // rank_count
        planned: list[list[PlannedSample]] = [[] for _ in range(rows_per_rank)]
        taken_samples = np.flatnonzero(self.row_of_sample // rows_per_rank == rank)
        for row, sample in zip(
            self.row_of_sample[taken_samples] % rows_per_rank,
            self.sample_table[:, taken_samples].T.tolist(),
            strict=True,
        ):
            planned[row].append(PlannedSample(*sample))
        return planned


class SizedSource:
    """One data set with sizes.

    Args:
        loaded: Energon's data set.
        name: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        content: id of the content that the run reads.

    Raises:
        SizesError: it has no sizes, or they are of other content or shards.
    """

    def __init__(self, loaded_dataset: LoadedDataset, tokenization_id: str, content_id: str) -> None:
        dataset = loaded_dataset.dataset
        self.dataset_path = dataset.path
        self.shard_counts = [(shard.name, shard.count) for shard in dataset.shards]
        metadata_dir = resolve_location(str(dataset.path)) / METADATA_DIR
        self.stored_sizes: StoredSizes = open_stored_sizes(metadata_dir, tokenization_id)
        if self.stored_sizes.content_id != content_id:
            raise SizesError(
                f"{metadata_dir / SIZES_DIR / tokenization_id} is of the content {self.stored_sizes.content_id!r}, and the run reads"
                f" {content_id!r}: let all nodes see the same data set, or run `megatron-vl data index` again"
            )
        self._first_numbers = self.stored_sizes.first_sample_numbers(self.shard_counts)
        self._shard_starts = np.cumsum([0, *(count for _, count in self.shard_counts)])
        self._dataset = dataset

    def __len__(self) -> int:
        return int(self._shard_starts[-1])

    def size_numbers(self, sample_indices: Integers) -> Integers:
        """Where the sizes of samples are stored."""
        shards = np.searchsorted(self._shard_starts, sample_indices, side="right") - 1
        return self._first_numbers[shards] + sample_indices - self._shard_starts[shards]

    def shard_sizes(self, first: int, samples: int) -> Integers:
        """Samples of each shard of a subset, int64 [shards].

        Args:
            first: number of samples before the subset.
            samples: number of samples in it.
        """
        sizes = np.diff(np.clip(self._shard_starts, first, first + samples))
        return sizes[sizes > 0]

    def open_reader(self, timeout_seconds: float, take: Callable[[int], bytes]) -> TolerantReader:
        """Reads samples by index. Each process has its own."""
        return open_sample_reader(self._dataset, timeout_seconds, take)


def open_sample_reader(dataset: Any, timeout_seconds: float, take: Callable[[int], bytes]) -> TolerantReader:
    """Reads samples of one of Energon's data sets by index.

    Args:
        take: gives the bytes of a sample in an object store; a local data set does without.
    """
    if not dataset.path.is_local():
        return TolerantReader(StoreReader(dataset, take), timeout_seconds)
    reader = ShardInfosITarReader(
        dataset.path, dataset.shards, sample_filter=dataset.sample_filter, itar_cache_size=MAX_OPEN_SHARDS
    )
    return TolerantReader(reader, timeout_seconds)


class BatchPlanner:
    """Plans one batch after the other.

    Args:
        lookup_sizes: gives tokens and patches int64 [n] of samples of one data set: ``sizes(source, indices)``.
        least_ahead: smallest number of samples to choose from beyond those that fill a step.
        packs_samples: off puts one sample into a row.
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
    ) -> None:
        self.sample_order, self.lookup_sizes = sample_order, lookup_sizes
        self.rows_per_step, self.seq_len, self.max_patches = rows_per_step, seq_len, max_patches
        self.least_ahead, self.packs_samples = least_ahead, packs_samples
        self._draws_of_removed: dict[str, int] = {}
        """Draws from data sets that the blend had before, should they come back."""
        self._draws_set_aside: dict[str, list[int]] = {}
        """Draws that waited when their data set left the blend or got the weight 0, the oldest first."""
        # Samples that were drawn and wait, the oldest first: data set, number of the draw, and what follows.
        self._waiting_samples = np.zeros((5, 0), np.int64)

    def next_batch(self) -> PlannedBatch:
        """The next batch.

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
            row_of_sample = np.where(
                np.arange(waiting_samples.shape[1]) < self.rows_per_step,
                np.arange(waiting_samples.shape[1]),
                -1,
            )

        is_taken = row_of_sample >= 0
        self._waiting_samples = np.compress(~is_taken, waiting_samples, axis=1)
        batch_samples = np.concatenate(
            [np.compress(is_taken, waiting_samples, axis=1), unusable_samples], axis=1
        )
        counted = np.arange(unusable_samples.shape[1]) % self.rows_per_step
        return PlannedBatch(
            batch_samples[[0, 2, 3, 4]],
            np.concatenate([row_of_sample[is_taken], counted]),
            self.rows_per_step,
        )

    def _draw_samples(self) -> Integers:
        """Draws until there are enough samples to choose from. Returns those that cannot be used."""
        unusable_chunks = [self._waiting_samples[:, :0]]
        usable_search = _UsableSampleSearch(self.seq_len, self.max_patches)
        max_refused = min(max(MIN_SEARCHED, 2 * sum(self.sample_order.sample_counts)), MAX_SEARCHED)
        while missing := self._missing():
            drawn_samples = self._with_sizes(*self.sample_order.draw_samples(missing))
            is_usable = usable_search.find_usable(drawn_samples[3], drawn_samples[4])
            if usable_search.consecutive_unusable > max_refused:
                raise LoaderError(usable_search.message())
            if not is_usable.all():
                drawn_samples[3:, ~is_usable] = 0
                unusable_chunks.append(drawn_samples[:, ~is_usable])
                drawn_samples = drawn_samples[:, is_usable]
            self._waiting_samples = np.concatenate([self._waiting_samples, drawn_samples], axis=1)
        return np.concatenate(unusable_chunks, axis=1)

    def _missing(self) -> int:
        """How many samples to draw next; 0 if enough wait."""
        waiting, least = self._waiting_samples.shape[1], max(self.rows_per_step, 64)
        if not self.packs_samples:
            return least if waiting < self.rows_per_step else 0

        # Samples that fill a step: so many of the oldest, or an estimate from their mean.
        tokens, step = np.cumsum(self._waiting_samples[3]), self.rows_per_step * self.seq_len
        first = int(np.searchsorted(tokens, step)) + 1
        if first > waiting:
            first = -(-step * waiting // max(int(tokens[-1]), 1)) if waiting else 1
        ahead = max(self.least_ahead, min(first // LOOKAHEAD_FACTOR, MOST_CHOICES * self.rows_per_step))
        missing = first + ahead - waiting
        # An estimate from few samples may be far too high.
        return max(least, min(missing, waiting)) if missing > 0 else 0

    def _with_sizes(self, source_indices: Integers, draw_numbers: Integers) -> Integers:
        sample_indices = self.sample_order.sample_indices(source_indices, draw_numbers)
        sizes = np.zeros((2, len(source_indices)), np.int64)
        for source in np.flatnonzero(np.bincount(source_indices)).tolist():
            of_source = np.flatnonzero(source_indices == source)
            sizes[:, of_source] = self.lookup_sizes(source, sample_indices[of_source])
        return np.stack([source_indices, draw_numbers, sample_indices, *sizes])

    def planner_state(self) -> dict[str, Any]:
        """What the next batches follow from. It grows with the rows of a step, about 100 bytes for each."""
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

        Data sets that are new begin at their start. If nothing is drawn from a data set any more, its samples
        that wait are put aside. If it comes back, they are the first of those that wait.

        Raises:
            LoaderStateError: the state is damaged.
        """
        try:
            saved_keys, draw_counts, draws_set_aside = (
                list(saved_state["keys"]),
                dict(saved_state["drawn"]),
                dict(saved_state["aside"]),
            )
            source_indices, draw_numbers = saved_state["waiting"].astype(np.int64)
            if len(source_indices) and min(source_indices.min(), draw_numbers.min()) < 0:
                raise ValueError("a negative number")
            current_indices = np.array(
                [self._source_index(source_key) for source_key in saved_keys], np.int64
            )[source_indices]
            for saved_index, source_key in enumerate(saved_keys):
                if self._source_index(source_key) < 0 and (
                    waiting_draws := draw_numbers[source_indices == saved_index].tolist()
                ):
                    draws_set_aside[source_key] = [*draws_set_aside.get(source_key, ()), *waiting_draws]
            returning_draws = [
                np.array(
                    [(place, saved_index) for saved_index in draws_set_aside.pop(source_key, ())], np.int64
                )
                .reshape(-1, 2)
                .T
                for place, source_key in enumerate(self.sample_order.source_keys)
                if self.sample_order.source_weights[place] > 0
            ]
            waiting_draws_table = np.concatenate(
                [*returning_draws, np.stack([current_indices, draw_numbers])[:, current_indices >= 0]], axis=1
            )
            total_draws, current_draws = (
                int(saved_state["total"]),
                [int(draw_counts.pop(source_key, 0)) for source_key in self.sample_order.source_keys],
            )
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise LoaderStateError(
                "the loader state is damaged: it does not say which samples were drawn and wait"
            ) from error
        self.sample_order.total_draws, self.sample_order.draw_counts = total_draws, current_draws
        self._draws_of_removed, self._draws_set_aside = draw_counts, draws_set_aside
        self._waiting_samples = self._with_sizes(waiting_draws_table[0], waiting_draws_table[1])

    def _source_index(self, source_key: str) -> int:
        """Number of a data set in the blend; -1 if nothing is drawn from it."""
        source_index = (
            self.sample_order.source_keys.index(source_key)
            if source_key in self.sample_order.source_keys
            else -1
        )
        return (
            source_index if source_index >= 0 and self.sample_order.source_weights[source_index] > 0 else -1
        )


class _UsableSampleSearch:
    """Tells which samples can be used, and what is known of those that cannot, since the last that can."""

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
        oversized_by_unit = {
            size_unit: sizes_by_unit[size_unit] > limit
            for size_unit, (_, limit) in self.limit_by_unit.items()
            if limit
        }
        for is_oversized in oversized_by_unit.values():
            usable &= ~is_oversized
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
        limits = " or ".join(f"{name} {limit}" for name, limit in self.limit_by_unit.values() if limit)
        reason = f"{self.consecutive_unusable} samples in a row cannot be used: they have no tokens, or more than {limits}"
        if not self._smallest_oversized:
            return reason
        smallest = " and ".join(
            f"the smallest above {self.limit_by_unit[unit][0]} has {size} {unit}"
            for unit, size in self._smallest_oversized.items()
        )
        fields = " and ".join(self.limit_by_unit[unit][0] for unit in self._smallest_oversized)
        return f"{reason}. Of these, {smallest}: raise {fields}, or lower data.max_pixels if pictures fill it"


class PlanningContext:
    """What each process needs to plan the batches of a run and to read its rows.

    Args:
        loaded_datasets: Energon's data sets.
        name: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        blend_sources: the sources that are these data sets, in the same order.
        row_encoder: a :class:`~megatron_vl.data.loader.RowEncoder`.
        rows_per_step: of all ranks.
    """

    def __init__(
        self,
        loaded_datasets: Sequence[LoadedDataset],
        blend_sources: Sequence[BlendSource],
        tokenization_id: str,
        row_encoder: Any,
        rows_per_step: int,
    ) -> None:
        self.loaded_datasets, self.row_encoder, self.rows_per_step = (
            list(loaded_datasets),
            row_encoder,
            rows_per_step,
        )
        self.blend_sources = list(blend_sources)
        self.sized_sources = [
            SizedSource(loaded, tokenization_id, source.content_id)
            for loaded, source in zip(self.loaded_datasets, self.blend_sources, strict=True)
        ]
        self.planner_state: dict[str, Any] | None = None
        """Where the run stood; None: it begins."""

    def read_ahead(self, ranks: int) -> ReadAhead:
        """What a rank reads its samples in object stores with."""
        data = self.row_encoder.data_config
        drawn = sum(source.sample_share > 0 for source in self.blend_sources)
        lanes = LANES if data.shuffle else 1
        return ReadAhead(
            [one.dataset for one in self.loaded_datasets], data.shuffle_block, drawn * lanes, ranks
        )

    def readers(self, take: Callable[[int, int], bytes]) -> list[TolerantReader]:
        """A reader of each source.

        Args:
            take: gives the bytes of a sample in an object store, by source and index.
        """
        timeout = self.row_encoder.data_config.sample_timeout_s
        return [
            source.open_reader(timeout, partial(take, number))
            for number, source in enumerate(self.sized_sources)
        ]

    def make_planner(self) -> BatchPlanner:
        data_config, row_encoder = self.row_encoder.data_config, self.row_encoder
        sample_sizes = SampleSizeCounter(row_encoder.chat_encoder, row_encoder.pixel_settings)

        def sizes(source_index: int, sample_indices: Integers) -> tuple[Integers, Integers]:
            sized = self.sized_sources[source_index]
            return sample_sizes.count_samples(sized.stored_sizes, sized.size_numbers(sample_indices))

        sample_order = SampleOrder(
            [source.sample_count for source in self.blend_sources],
            [source.sample_share for source in self.blend_sources],
            data_config.seed,
            is_shuffled=data_config.shuffle,
            source_keys=[source.source_key for source in self.blend_sources],
            first_indices=[source.first_sample for source in self.blend_sources],
            draws_per_pass=[source.draws_per_pass for source in self.blend_sources],
            shards=[
                sized.shard_sizes(source.first_sample, source.sample_count)
                for sized, source in zip(self.sized_sources, self.blend_sources, strict=True)
            ],
            block=data_config.shuffle_block,
        )
        batch_planner = BatchPlanner(
            sample_order,
            sizes,
            self.rows_per_step,
            data_config.seq_len,
            data_config.max_patches,
            least_ahead=data_config.packing_buffer,
            packs_samples=data_config.pack,
        )
        if self.planner_state is not None:
            batch_planner.restore_state(self.planner_state)
        return batch_planner


@dataclass(frozen=True)
class PlannedRow:
    """A row as a loader process sends it."""

    packed_row: TrainingRow
    planner_state: dict[str, Any] | None
    """The planner's state after the step, with the last row of the first rank in it."""


@dataclass(frozen=True)
class StepShare:
    """What one process of a rank makes of a step."""

    rows: list[list[PlannedSample]]
    state: dict[str, Any] | None
    """The planner's state after the step, for the process that makes the first rank's last row."""


def plan_shares(
    planning: PlanningContext, rank: int, ranks: int, workers: int, ahead: ReadAhead
) -> Iterator[list[StepShare]]:
    """For each step, the shares of all processes of a rank, which make its rows in turn.

    Args:
        ahead: begins to read the samples of the step.

    Raises:
        LoaderError: no sample can be used.
    """
    planner = planning.make_planner()
    first = 0  # the process that makes the step's first row
    while True:
        batch = planner.next_batch().assign_to_ranks(ranks)
        rows = batch.rows_of_rank(rank, ranks)
        if ahead:
            ahead.expect((sample.source, sample.index) for row in rows for sample in row)
        after = (first + len(rows)) % workers
        shares = []
        for worker in range(workers):
            is_last = (worker + 1) % workers == after
            # All ranks have the same state, and the first one saves it.
            state = planner.planner_state() if is_last and rank == 0 else None
            shares.append(StepShare(rows[(worker - first) % workers :: workers], state))
        yield shares
        first = after


def start_planner(
    planning_context: PlanningContext, rank: int, rank_count: int, worker_count: int
) -> tuple[BaseProcess, list[Connection]]:
    """Starts the process that plans and reads ahead, and gives the connections of the loader processes to it:
    one for each to its shares, then one for each to its samples in object stores.

    Fork the loader processes next, and close the connections then: each process learns that another has
    ended from its connection, which must be open nowhere else.
    """
    fork_context = get_context("fork")
    connection_pairs = [fork_context.Pipe() for _ in range(2 * worker_count)]
    planner_connections, worker_connections = (
        [ours for ours, _ in connection_pairs],
        [theirs for _, theirs in connection_pairs],
    )
    planner_process = fork_context.Process(
        target=_plan_ahead,
        args=(planning_context, rank, rank_count, planner_connections, worker_connections),
        daemon=True,
    )
    planner_process.start()
    for connection in planner_connections:
        connection.close()
    return planner_process, worker_connections


def _plan_ahead(
    planning_context: PlanningContext,
    rank: int,
    rank_count: int,
    of_planner: list[Connection],
    worker_connections: list[Connection],
) -> None:
    """Sends each loader process its shares, two steps before the slowest needs them at most."""
    _prepare_forked_process()
    for connection in worker_connections:
        connection.close()
    reconnect_stores(planning_context.loaded_datasets)
    ahead = planning_context.read_ahead(rank_count)
    workers = len(of_planner) // 2
    to_workers = of_planner[:workers]
    for connection in of_planner[workers:]:
        serve(ahead, connection)

    with suppress(EOFError, ConnectionError):  # the loader was closed
        try:
            for step_index, shares in enumerate(
                plan_shares(planning_context, rank, rank_count, workers, ahead)
            ):
                for connection, share in zip(to_workers, shares, strict=True):
                    connection.send(share)
                if step_index:
                    for connection in to_workers:
                        connection.recv()
        except LoaderError as error:
            for connection in to_workers:
                connection.send(error)
            while True:  # rows of earlier steps may still need samples
                to_workers[0].recv()


def _received_shares(planner: Connection) -> Iterator[StepShare]:
    """The shares of one loader process."""
    while True:
        try:
            share = planner.recv()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(PLANNER_ENDED_TEXT) from error
        if isinstance(share, LoaderError):
            raise share
        yield share
        with suppress(ConnectionError):  # the planner has ended, which the next share says
            planner.send(None)


def _prepare_forked_process() -> None:
    """What a process of the loader does first."""
    shield_loader_worker()
    gc.collect()
    gc.freeze()  # the forked pages stay shared


class WorkerRowDataset(IterableDataset):
    """The rows that one process of a rank makes.

    Args:
        take: gives the bytes of a sample in an object store, by source and index.
    """

    def __init__(
        self,
        planning_context: PlanningContext,
        shares: Iterator[StepShare],
        take: Callable[[int, int], bytes],
    ) -> None:
        self.planning_context, self.shares, self.take = planning_context, shares, take

    def __iter__(self) -> Iterator[PlannedRow]:
        planning_context = self.planning_context
        if get_worker_info() is not None:
            _prepare_forked_process()

        row_encoder = planning_context.row_encoder.copy_for_process()
        sample_readers = planning_context.readers(self.take)
        for share in self.shares:
            for number, samples in enumerate(share.rows, start=1):
                state = share.state if number == len(share.rows) else None
                yield PlannedRow(read_planned_row(row_encoder, sample_readers, samples), state)


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
        crude_sample["__subflavors__"] = {SOURCE_FIELD: sample.source}
        encoded_sample = row_encoder.preencode_sample(row_encoder.cook(crude_sample))
        if not encoded_sample.refused and encoded_sample.token_and_patch_count != (
            sample.tokens,
            sample.patches,
        ):
            stored_size_text = f"{sample.tokens} tokens and {sample.patches} patches"
            encoded_sample.refused = (
                "size differs from the index",
                f"it has {encoded_sample.token_and_patch_count[0]} tokens and {encoded_sample.token_and_patch_count[1]} patches, and {stored_size_text} by the sizes in"
                f" {METADATA_DIR}; delete the folder sizes there and run `megatron-vl data index`",
            )
        encoded_samples.append(encoded_sample)
    return row_encoder.make_row(encoded_samples, samples[0].source if samples else 0)


def _identity_collate(value: Any) -> Any:
    return value


def start_worker_iterators(datasets: Sequence[IterableDataset]) -> list[Any]:
    """An iterator over each of these, in a process for each."""
    worker_iterators = []
    for dataset in datasets:
        # One loader for each process, since torch takes rows from all processes of a loader in turn.
        worker_loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=1,
            prefetch_factor=PREFETCHED_ROWS,
            multiprocessing_context="fork",
            worker_init_fn=gc_init_worker,
            collate_fn=_identity_collate,
            generator=torch.Generator(),  # torch would draw from this process's random numbers
        )
        worker_iterators.append(iter(worker_loader))
    return worker_iterators


class PlannedRankRows:
    """The planned rows of a data-parallel rank, from processes or, without any, from here.

    Args:
        workers: number of processes; 0: read in this process.
        start_row: rows that the run had taken before.
    """

    def __init__(
        self, planning_context: PlanningContext, rank: int, rank_count: int, worker_count: int, start_row: int
    ) -> None:
        self.rows_per_rank, self.rows_per_step = (
            planning_context.rows_per_step // rank_count,
            planning_context.rows_per_step,
        )
        self.start_row, self.taken_rows = start_row, 0
        self.planner_state = planning_context.planner_state
        """The planner's state after the last whole step."""
        self._planner_process: BaseProcess | None = None
        if not worker_count:
            ahead = planning_context.read_ahead(rank_count)
            shares = (step[0] for step in plan_shares(planning_context, rank, rank_count, 1, ahead))
            self._worker_iterators = [iter(WorkerRowDataset(planning_context, shares, ahead.take))]
            return
        self._planner_process, worker_connections = start_planner(
            planning_context, rank, rank_count, worker_count
        )
        self._worker_iterators = start_worker_iterators(
            [
                WorkerRowDataset(
                    planning_context, _received_shares(plans), ServedSamples(samples, PLANNER_ENDED_TEXT).take
                )
                for plans, samples in zip(
                    worker_connections[:worker_count], worker_connections[worker_count:], strict=True
                )
            ]
        )
        for connection in worker_connections:
            connection.close()

    def __next__(self) -> TrainingRow:
        planned_row = next(self._worker_iterators[self.taken_rows % len(self._worker_iterators)])
        self.taken_rows += 1
        if planned_row.planner_state is not None:
            self.planner_state = planned_row.planner_state
        return planned_row.packed_row

    @property
    def total_rows_taken(self) -> int:
        """Rows that the run has taken on all ranks.

        Raises:
            LoaderStateError: this rank has not taken all rows of a step.
        """
        steps, extra_rows = divmod(self.taken_rows, self.rows_per_rank)
        if extra_rows:
            raise LoaderStateError("a loader's state can be saved only between steps")
        return self.start_row + steps * self.rows_per_step

    def close(self) -> None:
        """Ends the processes."""
        for worker_iterator in self._worker_iterators:
            if hasattr(worker_iterator, "_shutdown_workers"):
                worker_iterator._shutdown_workers()
        self._worker_iterators = []
        if self._planner_process is not None:
            self._planner_process.kill()
            self._planner_process.join()
            self._planner_process = None
