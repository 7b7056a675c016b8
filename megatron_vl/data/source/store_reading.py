"""Reads samples from shards in an object store before they are needed, with several requests at a time.

Energon 7.4.1 copies a shard of up to 512 MB into memory to read one sample of it, and asks for its index
twice each time. Here a request names the bytes of one sample, or of a block of samples that are drawn at
about the same time (:class:`megatron_vl.data.source.sample_order.BlockOrder`). One process of a rank reads
what the rows of the next steps need (:class:`ReadAhead`), so that no block is read twice, and gives the
rank's loader processes their samples (:func:`serve`, :class:`ServedSamples`).
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.itar import ITAR_SUFFIX, ITarFile, ITarSamplePointer
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from multistorageclient.types import Range
from numpy.typing import NDArray

REQUESTS = 16
"""Number of requests that are made at a time before their samples are needed."""
LARGEST = 16 << 20
"""Bytes up to which a block is read with one request. A larger one is read sample by sample."""
MOST_BYTES = 512 << 20
"""Bytes of samples that a rank keeps, beside those of the requests that run."""
MOST_RANKS = 4
"""Number of ranks up to which each reads whole blocks. Beyond, a rank would use too few samples of one."""
PAGE = 1024
"""Number of a shard's offsets that are read together, 8 bytes each."""
MOST_PAGES = 1024


class ReadAhead:
    """What a process reads from object stores.

    Args:
        datasets: Energon's data sets. Those on a local disk are left out.
        block: samples of a block, as for :class:`megatron_vl.data.source.sample_order.BlockOrder`.
        blocks: number of blocks that are in use at a time.
        ranks: number of ranks that read the same data sets together.
    """

    def __init__(self, datasets: Sequence[Any], block: int, blocks: int, ranks: int) -> None:
        self._shards = [None if one.path.is_local() else StoreShards(one, block) for one in datasets]
        self._blocks, self._whole = blocks, ranks <= MOST_RANKS
        self._lock = threading.Lock()
        self._expected: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Samples that were not requested yet: data set and index."""
        self._requests: OrderedDict[_Request, None] = OrderedDict()
        """All that are kept; those that were used last come last."""
        self._of_sample: dict[tuple[int, int], _Request] = {}
        self._running, self._bytes = 0, 0
        self._turn = 0

    def __bool__(self) -> bool:
        """Whether any data set is in a store."""
        return any(self._shards)

    def expect(self, samples: Iterable[tuple[int, int]]) -> None:
        """Says which samples are read after those of the last call, in this order.

        Args:
            samples: number of the data set, and index in it.
        """
        with self._lock:
            self._turn += 1
            self._expected.update((sample, None) for sample in samples if self._shards[sample[0]])
            self._go_on()

    def take(self, source: int, index: int) -> bytes:
        """The bytes of a sample, which are not kept any longer. Waits for them.

        Raises:
            FileNotFoundError: the shard or its index is missing.
            OSError: the store does not give them.
        """
        while True:
            with self._lock:
                request = self._request(source, index)
            request.done.wait()

            with self._lock:
                if request.error is not None:
                    raise request.error
                content = request.samples.pop(index, None)
                if content is not None:
                    del self._of_sample[source, index]
                    request.size -= len(content)
                    self._bytes -= len(content)
                if not request.samples:
                    self._forget(request)
                self._go_on()
            if content is not None:
                return content

    def _request(self, source: int, index: int) -> _Request:
        """The request that reads a sample. A new one reads its block too, if that is used soon."""
        self._expected.pop((source, index), None)
        request = self._of_sample.get((source, index))
        if request is None:
            shards = self._shards[source]
            assert shards is not None
            fits = shards.mean_bytes * shards.block * self._blocks <= MOST_BYTES
            indices = shards.block_of(index) if self._whole and fits else range(index, index + 1)
            request = _Request(source, index, indices)
            for each in indices:
                self._of_sample.setdefault((source, each), request)
            self._running += 1
            threading.Thread(target=self._fetch, args=(request, shards), daemon=True).start()

        request.turn = self._turn
        self._requests[request] = None
        self._requests.move_to_end(request)
        return request

    def _fetch(self, request: _Request, shards: StoreShards) -> None:
        try:
            samples = shards.fetch(request.indices, request.index, LARGEST)
        except BaseException as error:  # raised again where the sample is taken
            request.error, samples = error, {}

        with self._lock:
            self._running -= 1
            for index in request.indices:
                if self._of_sample.get((request.source, index)) is not request:
                    continue  # another request reads it
                if index in samples:
                    request.samples[index] = samples[index]
                else:
                    del self._of_sample[request.source, index]
            request.size = sum(map(len, request.samples.values()))
            self._bytes += request.size
            if not request.samples:
                self._forget(request)
            self._go_on()
        request.done.set()

    def _go_on(self) -> None:
        """Requests what is expected, as long as there is room."""
        while self._expected and self._running < REQUESTS and self._has_room():
            self._request(*next(iter(self._expected)))

    def _has_room(self) -> bool:
        """Whether more may be kept. Drops what no sample of the last three calls of :meth:`expect` is in."""
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._requests))
            if oldest.turn > self._turn - 3 or not oldest.done.is_set():
                return False
            self._forget(oldest)
        return True

    def _forget(self, request: _Request) -> None:
        if request in self._requests:
            del self._requests[request]
            self._bytes -= request.size
        for index in request.samples:
            del self._of_sample[request.source, index]
        request.samples = {}


class _Request:
    """Samples of a shard that are read together."""

    def __init__(self, source: int, index: int, indices: range) -> None:
        self.source, self.index, self.indices = source, index, indices
        self.samples: dict[int, bytes] = {}
        """Those that were read and not taken yet."""
        self.size = 0
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.turn = 0


class StoreShards:
    """The shards of a data set in an object store.

    Args:
        dataset: Energon's data set.
        block: number of successive samples in a block of a shard.
    """

    def __init__(self, dataset: Any, block: int) -> None:
        self.block = block
        self.mean_bytes = 0.0
        """Of the samples that were read last."""
        self._shards = dataset.shards
        self._starts = np.cumsum([0, *(shard.count for shard in dataset.shards)]).tolist()
        self._pages: OrderedDict[tuple[int, int], NDArray[np.uint64]] = OrderedDict()

    def block_of(self, index: int) -> range:
        """The indices of the samples in the block of a sample."""
        shard, number = self._located(index)
        first = index - number % self.block
        return range(first, min(first + self.block, self._starts[shard + 1]))

    def fetch(self, indices: range, index: int, most: int) -> dict[int, bytes]:
        """Reads successive samples of a shard.

        Args:
            indices: of the samples.
            index: the one to read alone if all have more bytes than ``most``.

        Raises:
            FileNotFoundError: the shard or its index is missing.
            OSError: the store does not give them.
        """
        shard, number = self._located(indices[0])
        offsets = self._offsets(shard, number, number + len(indices))
        mean = (offsets[-1] - offsets[0]) / len(indices)
        self.mean_bytes += 0.1 * (mean - self.mean_bytes) if self.mean_bytes else mean
        if offsets[-1] - offsets[0] > most:
            at = index - indices[0]
            indices, offsets = range(index, index + 1), offsets[at : at + 2]

        content = _read(self._shards[shard].path, offsets[0], offsets[-1])
        ends = [offset - offsets[0] for offset in offsets]
        return {each: content[ends[i] : ends[i + 1]] for i, each in enumerate(indices)}

    def _offsets(self, shard: int, first: int, end: int) -> list[int]:
        """Where samples of a shard begin, and where the last one ends, in bytes."""
        page = first // PAGE
        offsets = self._pages.get((shard, page))
        if offsets is None or page * PAGE + len(offsets) <= end:
            path = self._shards[shard].path.with_suffix(ITAR_SUFFIX)
            last = max(end, min((page + 1) * PAGE, self._shards[shard].count))
            offsets = np.frombuffer(_read(path, 8 * page * PAGE, 8 * (last + 1)), "<u8")
            self._pages[shard, page] = offsets
            if len(self._pages) > MOST_PAGES:
                self._pages.popitem(last=False)
        return [int(offset) for offset in offsets[first - page * PAGE : end - page * PAGE + 1]]

    def _located(self, index: int) -> tuple[int, int]:
        """The shard of a sample, and its number in it."""
        shard = bisect_right(self._starts, index) - 1
        return shard, index - self._starts[shard]


def _read(path: EPath, start: int, end: int) -> bytes:
    try:
        content = path.fs.read(str(path.internal_path), byte_range=Range(offset=start, size=end - start))
    except FileNotFoundError as error:
        raise FileNotFoundError(str(path)) from error
    except Exception as error:  # the client raises errors of its own and of each provider
        raise OSError(f"{path}: {error}") from error
    return bytes(content)


class StoreReader(ShardInfosITarReader):
    """Energon's reader, for samples whose bytes are read elsewhere.

    Args:
        dataset: Energon's data set.
        take: gives the bytes of a sample.
    """

    def __init__(self, dataset: Any, take: Callable[[int], bytes]) -> None:
        super().__init__(dataset.path, dataset.shards, sample_filter=dataset.sample_filter)
        self._take, self._content = take, b""

    def __getitem__(self, index: int) -> Any:
        self._content = self._take(index)
        shard = self.shard_tar_file_idxs[bisect_right(self.shard_count_cumsum, index) - 1]
        pointer = ITarSamplePointer(tar_file_id=shard, byte_offset=0, byte_size=len(self._content))
        return self._get_item_by_sample_pointer(pointer, index)

    @contextmanager
    def _open_itarfile(self, tar_file_id: int) -> Iterator[ITarFile]:
        """The sample that was taken last, as a file."""
        with ITarFile.open(fileobj=io.BytesIO(self._content), mode="r:") as file:
            yield file


def serve(ahead: ReadAhead, connection: Connection) -> None:
    """Gives another process its samples, in a thread, until that process ends."""
    threading.Thread(target=_serve, args=(ahead, connection), daemon=True, name="give samples").start()


def _serve(ahead: ReadAhead, connection: Connection) -> None:
    lock = threading.Lock()

    def answer(number: int, source: int, index: int) -> None:
        content: bytes | BaseException
        try:
            content = ahead.take(source, index)
        except BaseException as error:  # raised again in the process that asked
            content = error
        with lock, suppress(OSError):
            connection.send((number, content))

    with suppress(EOFError, OSError):
        while True:
            # A sample for which the store gives no answer does not delay the next one.
            threading.Thread(target=answer, args=connection.recv(), daemon=True).start()


class ServedSamples:
    """Samples that another process reads (:func:`serve`).

    Args:
        ended: what to say if that process has ended.
    """

    def __init__(self, connection: Connection, ended: str) -> None:
        self._connection, self._ended = connection, ended
        self._lock = threading.Lock()
        self._numbers = count()
        self._asked: dict[int, Future[Any]] = {}
        self._thread: threading.Thread | None = None

    def take(self, source: int, index: int) -> bytes:
        """As :meth:`ReadAhead.take`.

        Raises:
            FatalSampleError: the process that reads has ended.
        """
        answer: Future[Any] = Future()
        with self._lock:
            if self._thread is None:  # not before the fork
                self._thread = threading.Thread(target=self._receive, daemon=True, name="receive samples")
                self._thread.start()
            number = next(self._numbers)
            self._asked[number] = answer
            try:
                self._connection.send((number, source, index))
            except OSError as error:
                raise FatalSampleError(self._ended) from error
        content = answer.result()
        if isinstance(content, BaseException):
            raise content
        return bytes(content)

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, content = self._connection.recv()
                self._asked.pop(number).set_result(content)
        for answer in list(self._asked.values()):
            answer.set_result(FatalSampleError(self._ended))
