"""The rows of a run whose batches are planned from stored sizes (see :mod:`megatron_vl.data.packing.plan`).

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

from megatron_vl.data.packing.plan import AHEAD, MOST_CHOICES, deal, plan_rows
from megatron_vl.data.packing.row import Row
from megatron_vl.data.source.blend import SOURCE, Source
from megatron_vl.data.source.description import META, SIZES, LoaderError
from megatron_vl.data.source.location import location
from megatron_vl.data.source.reading import TolerantReader, reconnect
from megatron_vl.data.source.sample_order import LANES, SampleOrder
from megatron_vl.data.source.sizes import SampleSizes, SizesError, StoredSizes, open_sizes
from megatron_vl.data.source.store_reading import ReadAhead, ServedSamples, StoreReader, serve
from megatron_vl.data.state import StateError
from megatron_vl.signals import shield_loader_worker

Integers = NDArray[np.int64]
PLANNER_ENDED = "the process that plans batches has ended"

OPEN_SHARDS = 16
"""Number of shards of each data set that a process keeps open."""
ROWS_AHEAD = 2
"""Number of rows that a loader process makes before they are asked for."""

LEAST_REFUSED = 10_000
"""Number of unusable samples in a row up to which a run searches on, in a data set of any size."""
MOST_SEARCHED = 1_000_000
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
class Batch:
    """The rows of one step."""

    samples: Integers
    """int64 [4, n], the fields of a :class:`PlannedSample`."""
    row_of: Integers
    """int64 [n], the row of each."""
    count: int
    """Number of rows."""

    def deal(self, ranks: int) -> Batch:
        """The same rows in an order of which each rank takes the next ``count // ranks``."""
        return Batch(self.samples, deal(self.row_of, self.samples[3], self.count, ranks), self.count)

    def rows(self, rank: int = 0, ranks: int = 1) -> list[list[PlannedSample]]:
        """The rows of a rank."""
        share = self.count // ranks
        planned: list[list[PlannedSample]] = [[] for _ in range(share)]
        taken = np.flatnonzero(self.row_of // share == rank)
        for row, sample in zip(self.row_of[taken] % share, self.samples[:, taken].T.tolist(), strict=True):
            planned[row].append(PlannedSample(*sample))
        return planned


class SizedSource:
    """One data set with sizes.

    Args:
        loaded: Energon's data set.
        name: :func:`~megatron_vl.data.source.sizes.text_id` of the run.
        content: id of the content that the run reads.

    Raises:
        SizesError: it has no sizes, or they are of other content or shards.
    """

    def __init__(self, loaded: LoadedDataset, name: str, content: str) -> None:
        dataset = loaded.dataset
        self.path = dataset.path
        self.shards = [(shard.name, shard.count) for shard in dataset.shards]
        meta = location(str(dataset.path)) / META
        self.stored: StoredSizes = open_sizes(meta, name)
        if self.stored.content != content:
            raise SizesError(
                f"{meta / SIZES / name} is of the content {self.stored.content!r}, and the run reads"
                f" {content!r}: let all nodes see the same data set, or run `megatron-vl data index` again"
            )
        self._first = self.stored.numbers(self.shards)
        self._starts = np.cumsum([0, *(count for _, count in self.shards)])
        self._dataset = dataset

    def __len__(self) -> int:
        return int(self._starts[-1])

    def numbers(self, indices: Integers) -> Integers:
        """Where the sizes of samples are stored."""
        shards = np.searchsorted(self._starts, indices, side="right") - 1
        return self._first[shards] + indices - self._starts[shards]

    def shard_sizes(self, first: int, samples: int) -> Integers:
        """Samples of each shard of a subset, int64 [shards].

        Args:
            first: number of samples before the subset.
            samples: number of samples in it.
        """
        sizes = np.diff(np.clip(self._starts, first, first + samples))
        return sizes[sizes > 0]

    def reader(self, timeout: float, take: Callable[[int], bytes]) -> TolerantReader:
        """Reads samples by index. Each process has its own."""
        return open_reader(self._dataset, timeout, take)


def open_reader(dataset: Any, timeout: float, take: Callable[[int], bytes]) -> TolerantReader:
    """Reads samples of one of Energon's data sets by index.

    Args:
        take: gives the bytes of a sample in an object store; a local data set does without.
    """
    if not dataset.path.is_local():
        return TolerantReader(StoreReader(dataset, take), timeout)
    reader = ShardInfosITarReader(
        dataset.path, dataset.shards, sample_filter=dataset.sample_filter, itar_cache_size=OPEN_SHARDS
    )
    return TolerantReader(reader, timeout)


class BatchPlanner:
    """Plans one batch after the other.

    Args:
        sizes: gives tokens and patches int64 [n] of samples of one data set: ``sizes(source, indices)``.
        least_ahead: smallest number of samples to choose from beyond those that fill a step.
        pack: off puts one sample into a row.
    """

    def __init__(
        self,
        order: SampleOrder,
        sizes: Callable[[int, Integers], tuple[Integers, Integers]],
        rows: int,
        seq_len: int,
        max_patches: int,
        *,
        least_ahead: int = 64,
        pack: bool = True,
    ) -> None:
        self.order, self.sizes = order, sizes
        self.rows, self.seq_len, self.max_patches = rows, seq_len, max_patches
        self.least_ahead, self.pack = least_ahead, pack
        self._gone: dict[str, int] = {}
        """Draws from data sets that the blend had before, should they come back."""
        self._aside: dict[str, list[int]] = {}
        """Draws that waited when their data set left the blend or got the weight 0, the oldest first."""
        # Samples that were drawn and wait, the oldest first: data set, number of the draw, and what follows.
        self._waiting = np.zeros((5, 0), np.int64)

    def next(self) -> Batch:
        """The next batch.

        Raises:
            LoaderError: no sample can be used.
        """
        unusable = self._draw()
        waiting = self._waiting
        if self.pack:
            row_of = plan_rows(waiting[3], waiting[4], self.rows, self.seq_len, self.max_patches)
        else:
            row_of = np.where(np.arange(waiting.shape[1]) < self.rows, np.arange(waiting.shape[1]), -1)

        taken = row_of >= 0
        self._waiting = np.compress(~taken, waiting, axis=1)
        samples = np.concatenate([np.compress(taken, waiting, axis=1), unusable], axis=1)
        counted = np.arange(unusable.shape[1]) % self.rows
        return Batch(samples[[0, 2, 3, 4]], np.concatenate([row_of[taken], counted]), self.rows)

    def _draw(self) -> Integers:
        """Draws until there are enough samples to choose from. Returns those that cannot be used."""
        refused = [self._waiting[:, :0]]
        search = _Search(self.seq_len, self.max_patches)
        most = min(max(LEAST_REFUSED, 2 * sum(self.order.sizes)), MOST_SEARCHED)
        while missing := self._missing():
            fresh = self._sized(*self.order.draw(missing))
            usable = search.usable(fresh[3], fresh[4])
            if search.in_a_row > most:
                raise LoaderError(search.message())
            if not usable.all():
                fresh[3:, ~usable] = 0
                refused.append(fresh[:, ~usable])
                fresh = fresh[:, usable]
            self._waiting = np.concatenate([self._waiting, fresh], axis=1)
        return np.concatenate(refused, axis=1)

    def _missing(self) -> int:
        """How many samples to draw next; 0 if enough wait."""
        waiting, least = self._waiting.shape[1], max(self.rows, 64)
        if not self.pack:
            return least if waiting < self.rows else 0

        # Samples that fill a step: so many of the oldest, or an estimate from their mean.
        tokens, step = np.cumsum(self._waiting[3]), self.rows * self.seq_len
        first = int(np.searchsorted(tokens, step)) + 1
        if first > waiting:
            first = -(-step * waiting // max(int(tokens[-1]), 1)) if waiting else 1
        ahead = max(self.least_ahead, min(first // AHEAD, MOST_CHOICES * self.rows))
        missing = first + ahead - waiting
        # An estimate from few samples may be far too high.
        return max(least, min(missing, waiting)) if missing > 0 else 0

    def _sized(self, sources: Integers, numbers: Integers) -> Integers:
        indices = self.order.indices(sources, numbers)
        sizes = np.zeros((2, len(sources)), np.int64)
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            of_source = np.flatnonzero(sources == source)
            sizes[:, of_source] = self.sizes(source, indices[of_source])
        return np.stack([sources, numbers, indices, *sizes])

    def state(self) -> dict[str, Any]:
        """What the next batches follow from. It grows with the rows of a step, about 100 bytes for each."""
        drawn = self._gone | dict(zip(self.order.keys, self.order.drawn, strict=True))
        aside = {key: list(numbers) for key, numbers in self._aside.items()}
        return {
            "keys": list(self.order.keys),
            "drawn": drawn,
            "total": self.order.total,
            "waiting": self._waiting[:2].copy(),
            "aside": aside,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues after the batch at which a state was taken.

        Data sets that are new begin at their start. If nothing is drawn from a data set any more, its samples
        that wait are put aside. If it comes back, they are the first of those that wait.

        Raises:
            StateError: the state is damaged.
        """
        try:
            keys, drawn, aside = list(state["keys"]), dict(state["drawn"]), dict(state["aside"])
            sources, numbers = state["waiting"].astype(np.int64)
            if len(sources) and min(sources.min(), numbers.min()) < 0:
                raise ValueError("a negative number")
            moved = np.array([self._place_of(key) for key in keys], np.int64)[sources]
            for number, key in enumerate(keys):
                if self._place_of(key) < 0 and (left := numbers[sources == number].tolist()):
                    aside[key] = [*aside.get(key, ()), *left]
            back = [
                np.array([(place, number) for number in aside.pop(key, ())], np.int64).reshape(-1, 2).T
                for place, key in enumerate(self.order.keys)
                if self.order.weights[place] > 0
            ]
            waiting = np.concatenate([*back, np.stack([moved, numbers])[:, moved >= 0]], axis=1)
            total, taken = int(state["total"]), [int(drawn.pop(key, 0)) for key in self.order.keys]
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            raise StateError(
                "the loader state is damaged: it does not say which samples were drawn and wait"
            ) from error
        self.order.total, self.order.drawn = total, taken
        self._gone, self._aside = drawn, aside
        self._waiting = self._sized(waiting[0], waiting[1])

    def _place_of(self, key: str) -> int:
        """Number of a data set in the blend; -1 if nothing is drawn from it."""
        place = self.order.keys.index(key) if key in self.order.keys else -1
        return place if place >= 0 and self.order.weights[place] > 0 else -1


class _Search:
    """Tells which samples can be used, and what is known of those that cannot, since the last that can."""

    def __init__(self, seq_len: int, max_patches: int) -> None:
        self.limits = {"tokens": ("data.seq_len", seq_len), "patches": ("data.max_patches", max_patches)}
        self.in_a_row = 0
        self._smallest: dict[str, int] = {}

    def usable(self, tokens: Integers, patches: Integers) -> NDArray[np.bool_]:
        """Whether each of the next samples can be used, bool [n]."""
        usable = tokens > 0
        sizes = {"tokens": tokens, "patches": patches}
        large = {unit: sizes[unit] > limit for unit, (_, limit) in self.limits.items() if limit}
        for each in large.values():
            usable &= ~each
        if usable.any():
            self.in_a_row = 0
            self._smallest.clear()
            return usable

        self.in_a_row += len(tokens)
        for unit, each in large.items():
            if each.any():
                least = int(sizes[unit][each].min())
                self._smallest[unit] = min(least, self._smallest.get(unit, least))
        return usable

    def message(self) -> str:
        """A message that says why nothing can be used."""
        limits = " or ".join(f"{name} {limit}" for name, limit in self.limits.values() if limit)
        reason = (
            f"{self.in_a_row} samples in a row cannot be used: they have no tokens, or more than {limits}"
        )
        if not self._smallest:
            return reason
        smallest = " and ".join(
            f"the smallest above {self.limits[unit][0]} has {size} {unit}"
            for unit, size in self._smallest.items()
        )
        fields = " and ".join(self.limits[unit][0] for unit in self._smallest)
        return f"{reason}. Of these, {smallest}: raise {fields}, or lower data.max_pixels if pictures fill it"


class Planning:
    """What each process needs to plan the batches of a run and to read its rows.

    Args:
        datasets: Energon's data sets.
        name: :func:`~megatron_vl.data.source.sizes.text_id` of the run.
        blend: the sources that are these data sets, in the same order.
        encoder: a :class:`~megatron_vl.data.loader.RowEncoder`.
        rows_per_step: of all ranks.
    """

    def __init__(
        self,
        datasets: Sequence[LoadedDataset],
        blend: Sequence[Source],
        name: str,
        encoder: Any,
        rows_per_step: int,
    ) -> None:
        self.datasets, self.encoder, self.rows_per_step = list(datasets), encoder, rows_per_step
        self.blend = list(blend)
        self.sources = [
            SizedSource(loaded, name, source.content)
            for loaded, source in zip(self.datasets, self.blend, strict=True)
        ]
        self.state: dict[str, Any] | None = None
        """Where the run stood; None: it begins."""

    def read_ahead(self, ranks: int) -> ReadAhead:
        """What a rank reads its samples in object stores with."""
        data = self.encoder.data
        drawn = sum(source.share > 0 for source in self.blend)
        lanes = LANES if data.shuffle else 1
        return ReadAhead([one.dataset for one in self.datasets], data.shuffle_block, drawn * lanes, ranks)

    def readers(self, take: Callable[[int, int], bytes]) -> list[TolerantReader]:
        """A reader of each source.

        Args:
            take: gives the bytes of a sample in an object store, by source and index.
        """
        timeout = self.encoder.data.sample_timeout_s
        return [source.reader(timeout, partial(take, number)) for number, source in enumerate(self.sources)]

    def planner(self) -> BatchPlanner:
        data, encoder = self.encoder.data, self.encoder
        counted = SampleSizes(encoder.chat, encoder.settings)

        def sizes(source: int, indices: Integers) -> tuple[Integers, Integers]:
            sized = self.sources[source]
            return counted.of(sized.stored, sized.numbers(indices))

        order = SampleOrder(
            [source.samples for source in self.blend],
            [source.share for source in self.blend],
            data.seed,
            shuffled=data.shuffle,
            keys=[source.key for source in self.blend],
            firsts=[source.first for source in self.blend],
            a_pass=[source.a_pass for source in self.blend],
            shards=[
                sized.shard_sizes(source.first, source.samples)
                for sized, source in zip(self.sources, self.blend, strict=True)
            ],
            block=data.shuffle_block,
        )
        planner = BatchPlanner(
            order,
            sizes,
            self.rows_per_step,
            data.seq_len,
            data.max_patches,
            least_ahead=data.packing_buffer,
            pack=data.pack,
        )
        if self.state is not None:
            planner.restore(self.state)
        return planner


@dataclass(frozen=True)
class PlannedRow:
    """A row as a loader process sends it."""

    row: Row
    state: dict[str, Any] | None
    """The planner's state after the step, with the last row of the first rank in it."""


@dataclass(frozen=True)
class StepShare:
    """What one process of a rank makes of a step."""

    rows: list[list[PlannedSample]]
    state: dict[str, Any] | None
    """The planner's state after the step, for the process that makes the first rank's last row."""


def plan_shares(
    planning: Planning, rank: int, ranks: int, workers: int, ahead: ReadAhead
) -> Iterator[list[StepShare]]:
    """For each step, the shares of all processes of a rank, which make its rows in turn.

    Args:
        ahead: begins to read the samples of the step.

    Raises:
        LoaderError: no sample can be used.
    """
    planner = planning.planner()
    first = 0  # the process that makes the step's first row
    while True:
        batch = planner.next().deal(ranks)
        rows = batch.rows(rank, ranks)
        if ahead:
            ahead.expect((sample.source, sample.index) for row in rows for sample in row)
        after = (first + len(rows)) % workers
        shares = []
        for worker in range(workers):
            is_last = (worker + 1) % workers == after
            # All ranks have the same state, and the first one saves it.
            state = planner.state() if is_last and rank == 0 else None
            shares.append(StepShare(rows[(worker - first) % workers :: workers], state))
        yield shares
        first = after


def start_planner(
    planning: Planning, rank: int, ranks: int, workers: int
) -> tuple[BaseProcess, list[Connection]]:
    """Starts the process that plans and reads ahead, and gives the connections of the loader processes to it:
    one for each to its shares, then one for each to its samples in object stores.

    Fork the loader processes next, and close the connections then: each process learns that another has
    ended from its connection, which must be open nowhere else.
    """
    context = get_context("fork")
    pairs = [context.Pipe() for _ in range(2 * workers)]
    of_planner, of_workers = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    process = context.Process(
        target=_plan_ahead, args=(planning, rank, ranks, of_planner, of_workers), daemon=True
    )
    process.start()
    for connection in of_planner:
        connection.close()
    return process, of_workers


def _plan_ahead(
    planning: Planning, rank: int, ranks: int, of_planner: list[Connection], of_workers: list[Connection]
) -> None:
    """Sends each loader process its shares, two steps before the slowest needs them at most."""
    _settle_after_fork()
    for connection in of_workers:
        connection.close()
    reconnect(planning.datasets)
    ahead = planning.read_ahead(ranks)
    workers = len(of_planner) // 2
    to_workers = of_planner[:workers]
    for connection in of_planner[workers:]:
        serve(ahead, connection)

    with suppress(EOFError, ConnectionError):  # the loader was closed
        try:
            for step, shares in enumerate(plan_shares(planning, rank, ranks, workers, ahead)):
                for connection, share in zip(to_workers, shares, strict=True):
                    connection.send(share)
                if step:
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
            raise RuntimeError(PLANNER_ENDED) from error
        if isinstance(share, LoaderError):
            raise share
        yield share
        with suppress(ConnectionError):  # the planner has ended, which the next share says
            planner.send(None)


def _settle_after_fork() -> None:
    """What a process of the loader does first."""
    shield_loader_worker()
    gc.collect()
    gc.freeze()  # the forked pages stay shared


class ProcessRows(IterableDataset):
    """The rows that one process of a rank makes.

    Args:
        take: gives the bytes of a sample in an object store, by source and index.
    """

    def __init__(
        self, planning: Planning, shares: Iterator[StepShare], take: Callable[[int, int], bytes]
    ) -> None:
        self.planning, self.shares, self.take = planning, shares, take

    def __iter__(self) -> Iterator[PlannedRow]:
        planning = self.planning
        if get_worker_info() is not None:
            _settle_after_fork()

        encoder = planning.encoder.for_process()
        readers = planning.readers(self.take)
        for share in self.shares:
            for number, samples in enumerate(share.rows, start=1):
                state = share.state if number == len(share.rows) else None
                yield PlannedRow(make_row(encoder, readers, samples), state)


def make_row(encoder: Any, readers: Sequence[TolerantReader], samples: Sequence[PlannedSample]) -> Row:
    """Reads, encodes and decodes the samples of a row.

    A sample whose size differs from the stored one is left out, counted and listed. The row becomes shorter,
    and may be empty, but stays the same row for all ranks.
    """
    chosen = []
    for sample in samples:
        crude = readers[sample.source][sample.index]
        if crude is None:
            continue  # the data set's description excludes it
        crude["__subflavors__"] = {SOURCE: sample.source}
        encoded = encoder.preencode_sample(encoder.cook(crude))
        if not encoded.refused and encoded.size != (sample.tokens, sample.patches):
            stored = f"{sample.tokens} tokens and {sample.patches} patches"
            encoded.refused = (
                "size differs from the index",
                f"it has {encoded.size[0]} tokens and {encoded.size[1]} patches, and {stored} by the sizes in"
                f" {META}; delete the folder sizes there and run `megatron-vl data index`",
            )
        chosen.append(encoded)
    return encoder.row_of(chosen, samples[0].source if samples else 0)


def _same(value: Any) -> Any:
    return value


def open_processes(datasets: Sequence[IterableDataset]) -> list[Any]:
    """An iterator over each of these, in a process for each."""
    iterators = []
    for dataset in datasets:
        # One loader for each process, since torch takes rows from all processes of a loader in turn.
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=1,
            prefetch_factor=ROWS_AHEAD,
            multiprocessing_context="fork",
            worker_init_fn=gc_init_worker,
            collate_fn=_same,
            generator=torch.Generator(),  # torch would draw from this process's random numbers
        )
        iterators.append(iter(loader))
    return iterators


class PlannedRankRows:
    """The planned rows of a data-parallel rank, from processes or, without any, from here.

    Args:
        workers: number of processes; 0: read in this process.
        start: rows that the run had taken before.
    """

    def __init__(self, planning: Planning, rank: int, ranks: int, workers: int, start: int) -> None:
        self.share, self.rows_per_step = planning.rows_per_step // ranks, planning.rows_per_step
        self.start, self.taken = start, 0
        self.state = planning.state
        """The planner's state after the last whole step."""
        self._planner: BaseProcess | None = None
        if not workers:
            ahead = planning.read_ahead(ranks)
            shares = (step[0] for step in plan_shares(planning, rank, ranks, 1, ahead))
            self._iterators = [iter(ProcessRows(planning, shares, ahead.take))]
            return
        self._planner, connections = start_planner(planning, rank, ranks, workers)
        self._iterators = open_processes(
            [
                ProcessRows(planning, _received_shares(plans), ServedSamples(samples, PLANNER_ENDED).take)
                for plans, samples in zip(connections[:workers], connections[workers:], strict=True)
            ]
        )
        for connection in connections:
            connection.close()

    def __next__(self) -> Row:
        made = next(self._iterators[self.taken % len(self._iterators)])
        self.taken += 1
        if made.state is not None:
            self.state = made.state
        return made.row

    @property
    def rows(self) -> int:
        """Rows that the run has taken on all ranks.

        Raises:
            StateError: this rank has not taken all rows of a step.
        """
        steps, left = divmod(self.taken, self.share)
        if left:
            raise StateError("a loader's state can be saved only between steps")
        return self.start + steps * self.rows_per_step

    def close(self) -> None:
        """Ends the processes."""
        for iterator in self._iterators:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        self._iterators = []
        if self._planner is not None:
            self._planner.kill()
            self._planner.join()
            self._planner = None
