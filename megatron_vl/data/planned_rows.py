"""The rows of a run whose batches are planned from stored sizes.

Every rank plans all batches, and all ranks plan the same. Torch's DataLoader runs the processes: one plans
ahead (:class:`PlannedSteps`), the others make the rows (:class:`RowDataset`), and the plan is their sampler.
Without loader processes, batches are planned when they are needed.
"""

import gc
import io
import itertools
import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils.signal_handling import _remove_worker_pids

from megatron_vl.data.packing.batch_planner import BatchPlanner, PlannedSample
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.row_encoder import RowEncoder, cook_sample
from megatron_vl.data.source.blend import BlendSource
from megatron_vl.data.source.dataset_description import METADATA_DIR
from megatron_vl.data.source.energon_datasets import SizedSource, SplitShards, open_sample_reader
from megatron_vl.data.source.location import LoaderError
from megatron_vl.data.source.sample_order import LANES, SampleOrder
from megatron_vl.data.source.sample_sizes import SampleSizeCounter
from megatron_vl.data.source.store_reading import ReadAhead, StoreSamples
from megatron_vl.data.source.tolerant_reader import TolerantReader
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.system.signals import shield_loader_worker

SHUFFLE_BLOCK = 16
"""Successive samples of a shard that are drawn at about the same time: storage sees few large reads."""
PACKING_BUFFER = 64
"""Smallest number of samples among which the packer chooses."""
ALIGNMENT = 64
"""Tensors begin at multiples of this in shared memory, in bytes."""
SHARED_MEMORY_ADVICE = "`docker run --shm-size=16g` or `--ipc=host`"
PREFETCHED = 2
"""Number of rows that a loader process makes at least, and of steps that are planned, before they are asked
for."""


class PlanningContext:
    """What each process needs to plan the batches of a run and to read its rows.

    Args:
        datasets: the shards of each source.
        blend_sources: these sources, in the same order.
        tokenization_id: :func:`~megatron_vl.data.source.sample_sizes.compute_tokenization_id` of the run.
        rows_per_step: number of rows of a step, on all ranks.
        epochs: number of passes over the data; 0: they never end.
    """

    def __init__(
        self,
        datasets: Sequence[SplitShards],
        blend_sources: Sequence[BlendSource],
        tokenization_id: str,
        row_encoder: RowEncoder,
        rows_per_step: int,
        epochs: int,
    ) -> None:
        self.epochs = epochs
        self.datasets = list(datasets)
        self.blend_sources = list(blend_sources)
        self.row_encoder, self.rows_per_step = row_encoder, rows_per_step
        self.sized_sources = [
            SizedSource(dataset, tokenization_id, source.content_id)
            for dataset, source in zip(self.datasets, self.blend_sources, strict=True)
        ]
        self.planner_state: dict[str, Any] | None = None
        """The state from which planning continues; None: the run begins."""

    def make_planner(self) -> BatchPlanner:
        """A planner that continues at ``planner_state``."""
        data_config, row_encoder = self.row_encoder.data_config, self.row_encoder
        size_counter = SampleSizeCounter(row_encoder.chat_encoder, row_encoder.pixel_settings)
        sources = self.blend_sources
        sample_order = SampleOrder(
            [source.sample_count for source in sources],
            [source.sample_share for source in sources],
            data_config.seed,
            is_shuffled=data_config.shuffle,
            source_keys=[source.source_key for source in sources],
            draws_per_pass=[source.draws_per_pass for source in sources],
            shard_sizes=[sized_source.shard_sizes for sized_source in self.sized_sources],
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

        def cut_sample(source: int, index: int) -> list[tuple[int, int]]:
            return self.sized_sources[source].cut_sample(
                size_counter, index, data_config.seq_len, data_config.max_patches
            )

        planner = BatchPlanner(
            sample_order,
            lambda source, indices: self.sized_sources[source].count_samples(size_counter, indices),
            self.rows_per_step,
            data_config.seq_len,
            data_config.max_patches,
            least_ahead=PACKING_BUFFER,
            packs_samples=data_config.pack,
            draw_limit=draw_limit,
            cut_sample=None if data_config.too_long == "drop" else cut_sample,
        )
        if self.planner_state is not None:
            planner.restore_state(self.planner_state)
        return planner


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
        num_ranks: int,
        expect: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        self.planning_context, self.expect = planning_context, expect
        self.rank, self.num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[PlannedStep]:
        planner = self.planning_context.make_planner()
        while not planner.is_at_end:
            # Every rank plans the whole batch and takes its rows of it, so that no rank waits for another.
            rows = (
                planner.next_batch().assign_to_ranks(self.num_ranks).rows_of_rank(self.rank, self.num_ranks)
            )
            self.expect([(sample.source, sample.index) for row in rows for sample in row])
            yield rows, None if self.rank else planner.planner_state()


class RowDataset(Dataset[bytes | TrainingRow]):
    """Makes rows: ``row_dataset[samples]`` is the row of planned samples, pickled if a process made it.

    Args:
        take: returns the bytes of a sample in an object store, by source and index.
    """

    def __init__(self, planning_context: PlanningContext, take: Callable[[int, int], bytes]) -> None:
        self.planning_context, self.take = planning_context, take

    @cached_property
    def _readers(self) -> list[TolerantReader]:
        """Those of this process."""
        return [
            open_sample_reader(dataset, partial(self.take, source_index))
            for source_index, dataset in enumerate(self.planning_context.datasets)
        ]

    def __getitem__(self, samples: list[PlannedSample]) -> bytes | TrainingRow:
        row = read_planned_row(self.planning_context.row_encoder, self._readers, samples)
        if get_worker_info() is None:
            return row
        # Torch would do so in a thread, and drop the row if it fails.
        with explain_shared_memory():
            return dump_row(row)


class _RowPickler(pickle.Pickler):
    """Pickles tensors as arrays, whose memory is left out of the stream."""

    def reducer_override(self, value: Any) -> Any:
        return (torch.from_numpy, (value.numpy(),)) if isinstance(value, Tensor) else NotImplemented


def dump_row(row: TrainingRow) -> bytes:
    """Pickles a row for another process, with all of its tensors in one piece of shared memory.

    The receiver asks the sender for each piece, which answers only when it has Python's lock: for the eleven
    tensors of eight rows, 66 ms of each 3.3 s of a 3B on one H200.
    """
    stream = io.BytesIO()
    arrays: list[pickle.PickleBuffer] = []
    _RowPickler(stream, protocol=5, buffer_callback=arrays.append).dump(row)
    pieces = [array.raw() for array in arrays]
    *starts, end = itertools.accumulate(
        (-(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in pieces), initial=0
    )
    bounds = [(start, start + piece.nbytes) for start, piece in zip(starts, pieces, strict=True)]
    shared = torch.empty(end, dtype=torch.uint8).share_memory_()
    memory = memoryview(shared.numpy())
    for piece, (start, stop) in zip(pieces, bounds, strict=True):
        memory[start:stop] = piece
    return bytes(ForkingPickler.dumps((stream.getvalue(), shared, bounds)))


def load_row(pickled_row: bytes) -> TrainingRow:
    """The row of :func:`dump_row`, in the memory that its process shares."""
    stream, shared, bounds = pickle.loads(pickled_row)
    memory = memoryview(shared.numpy())
    return pickle.loads(stream, buffers=[memory[start:stop] for start, stop in bounds])


def start_loader(dataset: Any, sampler: Any, worker_count: int, prefetched: int = PREFETCHED) -> Any:
    """Torch's iterator over a data set, with processes that work ahead.

    Args:
        sampler: yields the arguments of ``dataset``; None for an iterable data set.
        worker_count: 0: no processes.
        prefetched: number of items that each process makes before they are asked for.
    """
    with explain_shared_memory(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more processes than cores
        torch_loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=worker_count,
            prefetch_factor=prefetched if worker_count else None,
            multiprocessing_context="fork" if worker_count else None,
            worker_init_fn=_prepare_process,
            collate_fn=lambda item: item,
            generator=torch.Generator(),  # torch would draw from this process's random numbers
        )
        return iter(torch_loader)


def _prepare_process(_: int) -> None:
    """Prepares a new process of the loader.

    Garbage collection leaves out what the process inherits. So the forked pages stay shared, and the next
    full collection waits for a quarter of the process's own objects, and not of the inherited ones too.
    """
    shield_loader_worker()
    gc.freeze()
    gc.collect()  # So that the next full collection is measured against the few objects after the freeze.


def read_planned_row(
    row_encoder: RowEncoder, readers: Sequence[TolerantReader], samples: Sequence[PlannedSample]
) -> TrainingRow:
    """Reads, encodes and decodes the samples of a row.

    A sample whose size differs from the stored one is left out, counted and listed. The row becomes shorter,
    and may be empty, but stays the same row for all ranks.
    """
    # One kind of work after the other finds its code and tables in the processor's caches.
    crude_samples = [readers[planned.source][planned.index] for planned in samples]
    encoded_samples = []
    for planned, crude_sample in zip(samples, crude_samples, strict=True):
        sample = row_encoder.preencode_sample(cook_sample(crude_sample, planned.source))
        if planned.part < max(1, len(sample.parts)):
            sample = row_encoder.sample_part(sample, planned.part)

        # A larger sample might not fit into the row, and the other ranks count on the planned size.
        tokens, patches = sample.token_and_patch_count
        if not sample.refused and (tokens, patches) != (planned.tokens, planned.patches):
            sample.refused = (
                "size differs from the index",
                f"it has {tokens} tokens and {patches} patches, and {planned.tokens} tokens and"
                f" {planned.patches} patches by the sizes in {METADATA_DIR}; delete the folder sizes there"
                " and run `megatron-vl data index`",
            )
        encoded_samples.append(sample)
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
        self, planning_context: PlanningContext, rank: int, num_ranks: int, worker_count: int, start_row: int
    ) -> None:
        self.rows_per_step = planning_context.rows_per_step
        self.rows_per_rank = self.rows_per_step // num_ranks
        self.start_row = start_row
        self.taken_rows = 0
        self.planner_state = planning_context.planner_state
        """The planner's state after the last whole step."""
        self._later_states: deque[dict[str, Any] | None] = deque()
        """The states after the steps that are not taken yet."""
        drawn_sources = sum(source.sample_share > 0 for source in planning_context.blend_sources)
        block_count = drawn_sources * (LANES if planning_context.row_encoder.data_config.shuffle else 1)
        self._store_samples = StoreSamples(
            planning_context.datasets,
            ReadAhead(planning_context.datasets, SHUFFLE_BLOCK, block_count, num_ranks),
            has_processes=worker_count > 0,
        )
        planned_steps = PlannedSteps(planning_context, rank, num_ranks, self._store_samples.expect)
        # A single process plans, because the next plan begins where the last one ends.
        self._rows: Any = None
        self._planned_steps = start_loader(planned_steps, None, min(worker_count, 1))
        try:
            # A step takes all of its rows at once. With fewer made ahead, it waited for the others: 300 ms of
            # each 3.5 s of a 3B, 8 rows of 8192 tokens a step on one H200.
            self._rows = start_loader(
                RowDataset(planning_context, self._store_samples.take),
                self._samples_of_rows(),
                worker_count,
                max(PREFETCHED, -(-self.rows_per_rank // max(worker_count, 1))),
            )
        except BaseException:
            self.close()
            raise

    def _samples_of_rows(self) -> Iterator[list[PlannedSample]]:
        for rows, planner_state in self._planned_steps:
            self._later_states.append(planner_state)
            yield from rows

    def __next__(self) -> TrainingRow:
        try:
            row = next(self._rows)
            if isinstance(row, bytes):
                row = load_row(row)
        except (OSError, EOFError) as error:
            # A process that is killed after it sent a row no longer serves the row's shared memory.
            if ended := _ended_processes(self._rows):
                raise RuntimeError(f"DataLoader worker (pid(s) {ended}) exited unexpectedly") from error
            raise
        self.taken_rows += 1
        # Rows are made ahead. The state goes on with the last row of a step, so a save sees the right one.
        if self.taken_rows % self.rows_per_rank == 0:
            self.planner_state = self._later_states.popleft()
        return row

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
        for iterator in (self._rows, self._planned_steps):
            if not getattr(iterator, "_shutdown", True):  # it has processes, which the end of the data ends
                _end_processes(iterator)
        self._store_samples.close()


def _ended_processes(iterator: Any) -> str:
    processes = getattr(iterator, "_workers", [])
    for process in processes:
        process.join(timeout=0.1)  # the kernel may still be about to end it
    return ", ".join(str(process.pid) for process in processes if not process.is_alive())


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
