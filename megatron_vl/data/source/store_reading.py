"""Reads samples from shards in an object store before they are needed, with several requests at a time.

Energon 7.4.1 copies a shard of up to 512 MB into memory to read one sample of it, and asks for its index
twice each time. Here a request names the bytes of one sample, or of a block of samples that are drawn at
about the same time (:class:`megatron_vl.data.source.sample_order.BlockOrder`). One process of a rank reads
what the rows of the next steps need (:class:`ReadAhead`), so that no block is read twice, and gives the
rank's loader processes their samples (:class:`StoreSamples`).
"""

from __future__ import annotations

import errno
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

import numpy as np
from fsspec.spec import AbstractBufferedFile
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.itar import ITAR_SUFFIX, ITarFile, ITarSamplePointer
from multistorageclient.types import Range
from numpy.typing import NDArray

from megatron_vl.data.source.dataset_description import METADATA_DIR, DatasetDescription
from megatron_vl.data.source.location import LoaderError, location_size_bytes
from megatron_vl.data.source.pair_reader import PairReader, TarShard, shard_place
from megatron_vl.data.source.tar_list import SPANS_FILE, TARS_FILE, read_tar_list
from megatron_vl.system.errors import retry_machine_faults
from megatron_vl.system.signals import shield_loader_worker

READING_ENDED_TEXT = "the process that reads from the object store has ended"
MAX_REQUESTS = 16
"""Largest number of concurrent requests for samples that are not needed yet."""
MAX_BLOCK_BYTES = 16 << 20
"""Largest number of bytes that one request reads for a block. Larger blocks are read sample by sample."""
MAX_KEPT_BYTES = 512 << 20
"""Largest number of bytes of samples that a rank keeps, without those of requests that are under way."""
MAX_BLOCK_RANKS = 4
"""Largest number of ranks that read whole blocks. Among more ranks, each would use too few samples of a
block."""
PAGE_SIZE = 1024
"""Number of a shard's offsets, of 8 bytes each, that are read together."""
SPAN_BYTES = 16
WINDOW_BYTES = 1 << 20
"""Bytes of an object that are read ahead. What lies between two such windows is skipped."""
MAX_PAGES = 1024
"""Largest number of pages of offsets that are kept."""


class ReadAhead:
    """Reads the samples of a process from object stores.

    Args:
        datasets: Energon's data sets. Those on a local disk are left out.
        block_size: number of samples of a block, as for
            :class:`megatron_vl.data.source.sample_order.BlockOrder`.
        block_count: number of blocks that are in use at a time.
        rank_count: number of ranks that read the same data sets together.
    """

    def __init__(self, datasets: Sequence[Any], block_size: int, block_count: int, rank_count: int) -> None:
        self._shards = [
            None if has_local_shards(dataset) else StoreShards(dataset, block_size) for dataset in datasets
        ]
        self._block_count = block_count
        self._reads_blocks = rank_count <= MAX_BLOCK_RANKS
        self._lock = threading.Lock()
        self._expected: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Samples that were not requested yet: data set and index."""
        self._requests: OrderedDict[_Request, None] = OrderedDict()
        """All requests that are kept. Those that were used last come last."""
        self._request_of_sample: dict[tuple[int, int], _Request] = {}
        self._running_requests = self._kept_bytes = self._expect_calls = 0

    def __bool__(self) -> bool:
        """Whether any data set is in a store."""
        return any(self._shards)

    def expect(self, samples: Iterable[tuple[int, int]]) -> None:
        """Announces the samples that are read after those of the last call, in this order.

        Args:
            samples: number of the data set and index in it, for each sample.
        """
        with self._lock:
            self._expect_calls += 1
            self._expected.update((sample, None) for sample in samples if self._shards[sample[0]])
            self._start_requests()

    def take(self, source: int, index: int) -> bytes:
        """Waits for the bytes of a sample and returns them. They are not kept any longer.

        Raises:
            FileNotFoundError: the shard or its index is missing.
            OSError: the store does not give them.
        """
        while True:
            with self._lock:
                request = self._find_or_start_request(source, index)
            request.is_done.wait()

            with self._lock:
                if request.error is not None:
                    raise request.error
                if (content := request.samples.pop(index, None)) is not None:
                    del self._request_of_sample[source, index]
                    self._kept_bytes -= len(content)
                if not request.samples:
                    self._forget(request)
                self._start_requests()
            if content is not None:
                return content

    def _find_or_start_request(self, source: int, index: int) -> _Request:
        """The request that reads a sample. A new one reads the whole block if the block is used soon."""
        self._expected.pop((source, index), None)
        if (request := self._request_of_sample.get((source, index))) is None:
            shards = self._shards[source]
            assert shards is not None
            blocks_fit = shards.mean_bytes * shards.block_size * self._block_count <= MAX_KEPT_BYTES
            reads_block = self._reads_blocks and blocks_fit
            indices = shards.block_of(index) if reads_block else range(index, index + 1)
            request = _Request(source, index, indices)
            for block_index in indices:
                self._request_of_sample.setdefault((source, block_index), request)
            self._running_requests += 1
            threading.Thread(target=self._fetch, args=(request, shards), daemon=True).start()

        request.last_use = self._expect_calls
        self._requests[request] = None
        self._requests.move_to_end(request)
        return request

    def _fetch(self, request: _Request, shards: StoreShards) -> None:
        try:
            samples = shards.fetch(request.indices, request.index, MAX_BLOCK_BYTES)
        except BaseException as error:  # raised again where the sample is taken
            request.error, samples = error, {}

        with self._lock:
            self._running_requests -= 1
            for index in request.indices:
                if self._request_of_sample.get((request.source, index)) is not request:
                    continue  # another request reads it
                if index in samples:
                    request.samples[index] = samples[index]
                else:
                    del self._request_of_sample[request.source, index]
            self._kept_bytes += request.kept_bytes
            if not request.samples:
                self._forget(request)
            self._start_requests()
        request.is_done.set()

    def _start_requests(self) -> None:
        """Requests expected samples while there is room."""
        while self._expected and self._running_requests < MAX_REQUESTS and self._has_room():
            self._find_or_start_request(*next(iter(self._expected)))

    def _has_room(self) -> bool:
        """Whether more may be kept. Drops requests that the last three calls of :meth:`expect` did not
        use."""
        while self._kept_bytes > MAX_KEPT_BYTES:
            oldest_request = next(iter(self._requests))
            if oldest_request.last_use > self._expect_calls - 3 or not oldest_request.is_done.is_set():
                return False
            self._forget(oldest_request)
        return True

    def _forget(self, request: _Request) -> None:
        if request in self._requests:
            del self._requests[request]
            self._kept_bytes -= request.kept_bytes
        for index in request.samples:
            del self._request_of_sample[request.source, index]
        request.samples = {}


@dataclass(eq=False)
class _Request:
    """Samples of a shard that are read together."""

    source: int
    index: int
    indices: range
    samples: dict[int, bytes] = field(default_factory=dict)
    """The samples that were read and not taken yet."""
    error: BaseException | None = None
    is_done: threading.Event = field(default_factory=threading.Event)
    last_use: int = 0
    """The number of calls of :meth:`ReadAhead.expect` at its last use."""

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self.samples.values()))


class StoreShards:
    """The shards of a data set in an object store.

    Args:
        dataset: Energon's data set.
        block_size: number of successive samples in a block of a shard.
    """

    def __init__(self, dataset: Any, block_size: int) -> None:
        self.block_size = block_size
        self.mean_bytes = 0.0
        """Mean number of bytes of the samples that were read last."""
        self._shards = dataset.shards
        self._shard_starts = np.cumsum([0, *(shard.count for shard in dataset.shards)]).tolist()
        self._read_page = lru_cache(MAX_PAGES)(self._read_offsets)

    def block_of(self, index: int) -> range:
        """The indices of the samples in the block of a sample."""
        shard, index_in_shard = shard_place(self._shard_starts, index)
        first_index = index - index_in_shard % self.block_size
        return range(first_index, min(first_index + self.block_size, self._shard_starts[shard + 1]))

    def fetch(self, indices: range, index: int, max_bytes: int) -> dict[int, bytes]:
        """Reads successive samples of a shard.

        Args:
            indices: the indices of the samples.
            index: the only sample to read if all of them have more than ``max_bytes`` bytes.

        Raises:
            FileNotFoundError: the shard or its index is missing.
            OSError: the store does not give them.
        """
        shard, index_in_shard = shard_place(self._shard_starts, indices[0])
        spans = self._read_spans(shard, index_in_shard, index_in_shard + len(indices))
        mean_bytes = (spans[-1][1] - spans[0][0]) / len(indices)
        self.mean_bytes += 0.1 * (mean_bytes - self.mean_bytes) if self.mean_bytes else mean_bytes
        if spans[-1][1] - spans[0][0] > max_bytes:
            position = index - indices[0]
            indices, spans = range(index, index + 1), spans[position : position + 1]

        block_start = spans[0][0]
        content = _read_bytes(self._shards[shard].path, block_start, spans[-1][1])
        return {
            sample_index: content[start - block_start : end - block_start]
            for sample_index, (start, end) in zip(indices, spans, strict=True)
        }

    def _read_spans(self, shard: int, first_sample: int, end_sample: int) -> list[tuple[int, int]]:
        """The first byte of each of some samples of a shard, and the byte after it."""
        if isinstance(self._shards[shard], TarShard):
            return list(map(tuple, self._shards[shard].spans[first_sample:end_sample].tolist()))
        page, first = divmod(first_sample, PAGE_SIZE)
        offsets = self._read_page(shard, page)
        return list(pairwise(offsets[first : first + end_sample - first_sample + 1].tolist()))

    def _read_offsets(self, shard: int, page: int) -> NDArray[np.uint64]:
        """The offsets of a page, and of the samples after it that are in a block with its last one."""
        last_offset = min((page + 1) * PAGE_SIZE + self.block_size, self._shards[shard].count)
        path = self._shards[shard].path.with_suffix(ITAR_SUFFIX)
        return np.frombuffer(_read_bytes(path, 8 * page * PAGE_SIZE, 8 * (last_offset + 1)), "<u8")


def read_tar_shards(dataset: DatasetDescription) -> dict[str, TarShard]:
    """The tars of an indexed data set by name; none for a converted one. A list of spans in a store is copied
    into memory, as the sizes are."""
    metadata_dir = dataset.path / METADATA_DIR
    if (tar_list := read_tar_list(metadata_dir)) is None:
        return {}
    spans_path: Any = metadata_dir / SPANS_FILE
    counts = [dataset.samples_by_shard.get(name, 0) for name in tar_list.stamps]
    if location_size_bytes(spans_path) != SPAN_BYTES * sum(counts):
        raise LoaderError(f"{spans_path} does not fit {TARS_FILE}; run `megatron-vl data index --input`")
    spans = (
        np.memmap(spans_path, "<u8", "r")
        if isinstance(spans_path, Path)
        else np.frombuffer(spans_path.read_bytes(), "<u8")
    )
    root, spans_of_tars = EPath(tar_list.root), np.split(spans.reshape(-1, 2), np.cumsum(counts))
    return {
        name: TarShard(name=name, path=root / name, count=len(each), fields=tar_list.fields, spans=each)
        for name, each in zip(tar_list.stamps, spans_of_tars, strict=False)
    }


def has_local_shards(dataset: Any) -> bool:
    """Whether a data set's shards lie on a local disk. Its description may lie elsewhere."""
    return bool(dataset.shards[0].path.is_local())


class StoreFile(AbstractBufferedFile):
    """An object as a file, which is read by ranges."""

    def __init__(self, path: EPath) -> None:
        super().__init__(None, str(path), block_size=WINDOW_BYTES, size=int(path.size()))
        self._location = path

    def _fetch_range(self, start: int, end: int) -> bytes:
        return retry_machine_faults(lambda: _read_bytes(self._location, start, end), self.path)


def _read_bytes(path: EPath, start: int, end: int) -> bytes:
    """Raises errors that will not pass (HTTP 403, 404, 416) by name, and others as EIO, which is retried."""
    try:
        return bytes(path.fs.read(str(path.internal_path), byte_range=Range(offset=start, size=end - start)))
    except FileNotFoundError as error:
        raise FileNotFoundError(str(path)) from error
    except PermissionError as error:
        advice = "check the credentials of the profile in the file that MSC_CONFIG names"
        raise FatalSampleError(f"{path} cannot be read: {error}; {advice}") from error
    except Exception as error:  # the client raises its own errors and those of each provider
        if "status_code: 416" in str(error):
            raise OSError(errno.EINVAL, "the object ends before these bytes", str(path)) from error
        raise OSError(errno.EIO, str(error), str(path)) from error


class StoreReader(PairReader):
    """Energon's reader, for samples whose bytes are read elsewhere.

    Args:
        dataset: Energon's data set.
        take: returns the bytes of a sample.
    """

    def __init__(self, dataset: Any, take: Callable[[int], bytes]) -> None:
        super().__init__(dataset.path, dataset.shards)
        self._take, self._content = take, b""

    def __getitem__(self, index: int) -> Any:
        self._content = self._take(index)
        tar_file_id = self.shard_tar_file_idxs[shard_place(self.shard_count_cumsum, index)[0]]
        return self._get_item_by_sample_pointer(
            ITarSamplePointer(tar_file_id=tar_file_id, byte_offset=0, byte_size=len(self._content)), index
        )

    @contextmanager
    def _open_itarfile(self, tar_file_id: int) -> Iterator[ITarFile]:
        """The sample that was taken last, as a file."""
        with ITarFile.open(fileobj=io.BytesIO(self._content), mode="r:") as tar_file:
            yield tar_file


class StoreSamples:
    """The samples of a rank in object stores, for all processes of its loader.

    Args:
        datasets: Energon's data sets.
        read_ahead: what reads their samples.
        has_processes: whether several processes take samples. Then one more process reads for all of them, so
            that no block is read twice. Fork the others afterwards.
    """

    def __init__(self, datasets: Sequence[Any], read_ahead: ReadAhead, *, has_processes: bool) -> None:
        self._read_ahead: Any = read_ahead
        self._manager: BaseManager | None = None
        if has_processes and read_ahead:

            class ReadingManager(BaseManager):
                """Its process has the only ReadAhead that is used."""

            def prepare_process() -> None:
                shield_loader_worker()
                reconnect_stores(datasets)

            ReadingManager.register("read_ahead", lambda: read_ahead, exposed=("expect", "take"))
            self._manager = ReadingManager(ctx=get_context("fork"))
            self._manager.start(prepare_process)
            self._read_ahead = self._manager.read_ahead()  # type: ignore[attr-defined]

    def expect(self, samples: list[tuple[int, int]]) -> None:
        """As :meth:`ReadAhead.expect`. Raises FatalSampleError if the process that reads has ended."""
        with _explain_end():
            self._read_ahead.expect(samples)

    def take(self, source: int, index: int) -> bytes:
        """As :meth:`ReadAhead.take`. Raises FatalSampleError if the process that reads has ended."""
        with _explain_end():
            return bytes(self._read_ahead.take(source, index))

    def close(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()


@contextmanager
def _explain_end() -> Iterator[None]:
    try:
        yield
    except (ConnectionError, EOFError) as error:  # those of stores are plain OSErrors
        raise FatalSampleError(READING_ENDED_TEXT) from error


def reconnect_stores(datasets: Sequence[Any]) -> None:
    """Opens new connections to object stores in a forked process.

    Two processes with one connection would read each other's answers.
    """
    for dataset in datasets:
        for path in (dataset.path, *(shard.path for shard in dataset.shards)):
            if not path.is_local():
                path.fs = EPath(str(path)).fs
