"""The streams of a data set (see :mod:`megatron_vl.data.order`), and the processes that read them.

A stream is an Energon data set for one of as many "ranks" as there are streams. Energon then divides the
samples among the streams, shuffles each with its own seed, and saves the state of each.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.energon import WorkerConfig
from megatron.energon.cache import NoCachePool
from megatron.energon.edataclass import edataclass
from megatron.energon.epathlib import EPath
from megatron.energon.errors import reraise_exception
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.wrappers.gc_dataset import gc_init_worker
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from megatron_vl.data.blend import Source, starts_of
from megatron_vl.data.changed_blend import carried, fits
from megatron_vl.data.order import Deal
from megatron_vl.data.row import Row
from megatron_vl.data.state import StateError
from megatron_vl.signals import shield_loader_worker

log = logging.getLogger(__name__)

_END = object()
ROWS_AHEAD = 2
"""Number of rows that a loader process makes before they are asked for."""


def stream_config(stream: int, streams: int, seed: int) -> WorkerConfig:
    """Energon's view of a stream: the only worker of a rank."""
    return WorkerConfig(
        rank=stream,
        world_size=streams,
        num_workers=1,
        seed_offset=seed,
        # An error that is not ours ends the run. Energon's default would print it and continue.
        global_error_handler=reraise_exception,
    )


@dataclass
class StreamState:
    """The position of a stream, as JSON-like values of Energon (see :mod:`megatron_vl.data.state`)."""

    rows: int
    """Number of rows that it has made."""
    dataset: Any
    """Energon's state after these rows; None: at the start."""
    drawn: tuple[str, ...] = ()
    """What the sources in this state are known by, in order (:attr:`Source.key`)."""
    parked: dict[str, Any] = field(default_factory=dict)
    """Where sources stand of which nothing is drawn any more, by the same."""


class Stream:
    """One stream of rows.

    Args:
        dataset: Energon's data set, which makes rows.
        encoder: the :class:`~megatron_vl.data.loader.RowEncoder` inside ``dataset``, of this stream alone.
        state: where it begins, with the sources in ``drawn``.
        drawn: what its sources are known by, in order.
    """

    def __init__(self, dataset: Any, encoder: Any, state: StreamState | None, drawn: tuple[str, ...]) -> None:
        self.dataset, self.encoder = dataset, encoder
        self.rows = 0
        self.drawn = drawn
        self.parked: dict[str, Any] = {}
        if state is not None:
            self.rows, self.parked = state.rows, state.parked
            if state.dataset is not None:
                dataset.restore_state(state.dataset)
        self._iterator: Iterator[Any] | None = None

    def take(self, number: int) -> Row | None:
        """Row ``number`` of the stream; rows before it are passed over. None: the stream has ended."""
        if number < self.rows:
            raise StateError(f"row {number} of a stream was asked for, which already stands at {self.rows}")
        self.encoder.decodes = False
        while self.rows < number:
            if self._next() is _END:
                return None
        self.encoder.decodes = True
        row = self._next()
        return None if row is _END else row

    def state(self) -> StreamState:
        return StreamState(self.rows, self.dataset.save_state(), self.drawn, self.parked)

    def _next(self) -> Any:
        config = self.dataset.worker_config
        config.worker_activate(self.rows, cache_pool=_NO_CACHE)
        try:
            if self._iterator is None:
                self._iterator = iter(self.dataset)
            row = next(self._iterator, _END)
        finally:
            config.worker_deactivate()
        self.rows += row is not _END
        return row


_NO_CACHE = NoCachePool()


SOURCE = "megatron_vl/source"
"""Field of a sample's subflavors: the number of its source in the blend."""


@edataclass
class PlacedDataset(LoadedDataset):
    """A data set of Energon, and which of its samples each stream gets."""

    rotation: int
    """The first of the streams that get a sample more than others."""


class Sources:
    """The data sets that a loader reads, from which each process builds the streams that it reads.

    Lists of shards are built once and shared by all streams and, after a fork, by all processes.

    Args:
        datasets: Energon's data sets with their weights.
        build: makes Energon's data set of rows from copies of these for one stream.
        blend: the sources that are these data sets, in the same order.
        skipped: whether nothing is read of sources with a share of 0.
    """

    def __init__(
        self,
        datasets: list[LoadedDataset],
        build: Callable[[list[LoadedDataset], WorkerConfig, Any], Any],
        blend: tuple[Source, ...],
        skipped: bool = False,
    ) -> None:
        self.datasets, self.build, self.blend = datasets, build, blend
        if [len(loaded.dataset) for loaded in datasets] != [source.length for source in blend]:
            raise RuntimeError(f"Energon reads other data sets than {[source.name for source in blend]}")
        for i, loaded in enumerate(datasets):
            loaded.dataset.subflavors = {**(loaded.dataset.subflavors or {}), SOURCE: i}
        self.drawn = [i for i, source in enumerate(blend) if source.share or not skipped]
        self.starts = list(starts_of(blend).values())
        """For each source, how many samples came before it in the blend in which it began. This decides how
        streams divide its samples."""

    @property
    def samples(self) -> int:
        """Number of samples of the sources that are drawn."""
        return sum(self.blend[i].samples for i in self.drawn)

    def empty_streams(self, streams: int) -> int:
        """How many of ``streams`` streams would have no sample of any source.

        Of each source, streams get equally many samples and, from its rotation on, one more while they last.
        """
        filled: set[int] = set()
        for i in self.drawn:
            count = min(self.blend[i].samples, streams)
            filled.update((self.starts[i] + sample) % streams for sample in range(count))
        return streams - len(filled)

    def reconnect(self) -> None:
        """Gives a forked process connections of its own to object stores."""
        reconnect(self.datasets)

    def stream(self, number: int, streams: int, seed: int, encoder: Any, state: StreamState | None) -> Stream:
        """Builds one of ``streams`` streams.

        Args:
            encoder: a :class:`~megatron_vl.data.loader.RowEncoder`; the stream gets a copy.
        """
        config = stream_config(number, streams, seed)
        copies = []
        for i in self.drawn:
            loaded = self.datasets[i]
            dataset = copy.copy(loaded.dataset)
            dataset.worker_config = config
            copies.append(
                PlacedDataset(
                    dataset=dataset,
                    weight=loaded.weight,
                    repetitions=loaded.repetitions,
                    aux=loaded.aux,
                    rotation=self.starts[i] % streams,
                )
            )

        own = encoder.for_stream()
        dataset = self.build(copies, config, own)
        drawn = tuple(self.blend[i].key for i in self.drawn)
        if state is not None and state.dataset is not None:
            state = _under(state, dataset, drawn, encoder.packing_buffer)

        return Stream(dataset, own, state, drawn)


def _under(state: StreamState, dataset: Any, drawn: tuple[str, ...], room: int) -> StreamState:
    """The state of a stream for the sources that its data set has now.

    Args:
        room: number of samples that the packing buffer holds.
    """
    if state.drawn == drawn and fits(dataset, state.dataset):
        return state
    config = dataset.worker_config
    config.worker_activate(state.rows, cache_pool=_NO_CACHE)
    try:
        fresh = dataset.save_state()
    finally:
        config.worker_deactivate()
    moved, parked = carried(state.dataset, state.drawn, fresh, drawn, state.parked, room)
    return StreamState(state.rows, moved, drawn, parked)


def reconnect(datasets: Iterable[LoadedDataset]) -> None:
    """Gives a forked process connections of its own to object stores.

    Two processes that share one would read each other's answers.
    """
    for loaded in datasets:
        for path in (loaded.dataset.path, *(shard.path for shard in loaded.dataset.shards)):
            if not path.is_local():
                path.fs = EPath(str(path)).fs


@dataclass(frozen=True)
class Made:
    """A row as a loader process sends it."""

    stream: int
    number: int
    row: Row | None
    """None: the stream has ended."""
    state: bytes | None
    """The stream's state after the row, pickled by the process itself; None without processes."""


class StreamRows(IterableDataset):
    """The rows that one process of a rank makes, in the order in which the rank takes them.

    Args:
        worker: number of the process.
        workers: number of processes of the rank.
        states: where each stream begins; a missing one begins at its start.
    """

    def __init__(
        self,
        sources: Sources,
        encoder: Any,
        deal: Deal,
        rank: int,
        worker: int,
        workers: int,
        seed: int,
        states: dict[int, StreamState],
    ) -> None:
        self.sources, self.encoder, self.deal, self.seed, self.states = sources, encoder, deal, seed, states
        self.rank, self.worker, self.workers = rank, worker, workers
        self.streams: dict[int, Stream] = {}

    def __iter__(self) -> Iterator[Made]:
        in_process = get_worker_info() is not None
        if in_process:
            shield_loader_worker()
            self.sources.reconnect()
            gc.collect()
            gc.freeze()  # the forked pages stay shared

        readers = self.deal.workers_of(self.rank, self.workers)
        going = {stream for stream, workers in readers.items() if self.worker in workers}
        for turn in self.deal.turns(self.rank, self.workers):
            if not going:
                return
            if turn.worker != self.worker or turn.stream not in going:
                continue
            stream = self._stream(turn.stream)
            row = stream.take(turn.number)
            if row is None:
                going.discard(turn.stream)
            state = pickle.dumps(stream.state()) if in_process and row is not None else None
            yield Made(turn.stream, turn.number, row, state)

    def _stream(self, number: int) -> Stream:
        if number not in self.streams:
            self.streams[number] = self.sources.stream(
                number, self.deal.order.streams, self.seed, self.encoder, self.states.get(number)
            )
        return self.streams[number]


def _same(value: Any) -> Any:
    return value


def open_processes(parts: Sequence[IterableDataset]) -> list[Any]:
    """An iterator over each part, which a process of its own makes."""
    found = []
    for part in parts:
        # One loader for each process, since torch takes rows from all processes of a loader in turn.
        loader = DataLoader(
            part,
            batch_size=None,
            num_workers=1,
            prefetch_factor=ROWS_AHEAD,
            multiprocessing_context="fork",
            worker_init_fn=gc_init_worker,
            collate_fn=_same,
            generator=torch.Generator(),  # torch would draw from this process's random numbers
        )
        found.append(iter(loader))
    return found


class RankRows:
    """The rows of a data-parallel rank, from processes that read its streams or, without any, from here.

    Args:
        workers: number of processes; 0: read in this process.
        states: where streams begin.
    """

    def __init__(
        self,
        sources: Sources,
        encoder: Any,
        deal: Deal,
        rank: int,
        workers: int,
        seed: int,
        states: dict[int, StreamState],
    ) -> None:
        self.deal, self.rank = deal, rank
        self.states = dict(states)
        self.taken = 0
        parts = max(workers, 1)
        self._turns = deal.turns(rank, parts)
        self._going = set(deal.streams_of(rank))
        self._sent: dict[int, bytes] = {}
        self._local = None
        self._iterators: list[Any] = []
        rows = [StreamRows(sources, encoder, deal, rank, i, parts, seed, states) for i in range(parts)]
        if not workers:
            self._local = rows[0]
            self._iterators = [iter(rows[0])]
            return
        self._iterators = open_processes(rows)

    def __next__(self) -> Row:
        while self._going:
            turn = next(self._turns)
            if turn.stream not in self._going:
                continue
            made = next(self._iterators[turn.worker])
            if (made.stream, made.number) != (turn.stream, turn.number):
                raise RuntimeError(f"row {turn} was asked for, {made.stream}, {made.number} came")
            if made.row is None:
                self._going.discard(turn.stream)
                continue
            self.taken += 1
            if made.state is not None:
                self._sent[made.stream] = made.state
            return made.row
        raise StopIteration

    @property
    def rows(self) -> int:
        """Rows that the run has taken on all ranks.

        Raises:
            StateError: this rank has not taken all rows of a step.
        """
        steps, left = divmod(self.taken, self.deal.share)
        if left:
            raise StateError("a loader's state can be saved only between steps")
        return self.deal.start + steps * self.deal.rows_per_step

    def kept(self) -> dict[int, StreamState]:
        """The states of the streams that this rank saves. A stream without rows so far has none."""
        rows = self.rows
        found = {}
        for stream in self.deal.kept_by(self.rank, rows):
            state = self._state(stream)
            wanted = self.deal.order.taken(stream, rows)
            if state is None:
                if wanted:
                    raise StateError(f"stream {stream} has made {wanted} rows, but its state is not here")
                continue
            if state.rows > wanted:
                raise StateError(f"stream {stream} stands at row {state.rows} instead of {wanted}")
            found[stream] = state
        return found

    def _state(self, stream: int) -> StreamState | None:
        if stream in self._sent:
            return pickle.loads(self._sent[stream])  # made by our own process
        if self._local is not None and stream in self._local.streams:
            return self._local.streams[stream].state()
        return self.states.get(stream)

    def close(self) -> None:
        """Ends the processes."""
        for iterator in self._iterators:
            if hasattr(iterator, "_shutdown_workers"):
                iterator._shutdown_workers()
        self._iterators = []


def share_readers(dataset: Any, first: dict[str, Any]) -> None:
    """Lets the tar readers within ``dataset`` use the lists of shards of the first reader of the same data.

    Energon builds these lists for each reader: some hundred bytes for each shard.

    Args:
        first: the first reader by folder; filled here.
    """
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        for reader in dataset.join_readers:
            known = first.setdefault(str(reader.base_path), reader)
            if known.shard_infos is reader.shard_infos:
                for name in ("shard_count_cumsum", "shard_tar_file_idxs", "tar_filenames", "tar_filepaths"):
                    setattr(reader, name, getattr(known, name))
    for inner in getattr(dataset, "datasets", ()):
        share_readers(inner, first)
