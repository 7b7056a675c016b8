"""Reads samples from shards in an object store before they are needed, with several requests at a time.

Energon 7.4.1 copies a shard of up to 512 MB into memory to read one sample of it, and asks for its index twice
for each sample. Here a request names the bytes of one sample, or of a block of samples that are drawn at about
the same time (:class:`megatron_vl.data.source.sample_order.BlockOrder`). A process knows the samples of its next
rows, so that requests run while it decodes.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.itar import ITAR_SUFFIX, ITarFile, ITarSamplePointer
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from multistorageclient.types import Range
from numpy.typing import NDArray

REQUESTS = 8
"""Number of requests that a process makes at a time before their samples are needed."""
MOST_BYTES = 128 << 20
"""Bytes of samples that a process keeps, beside those of the requests that run."""
MOST_PROCESSES = 4
"""Number of processes up to which each reads whole blocks. Beyond, a process would use too few samples of one."""
PAGE = 1024
"""Number of a shard's offsets that are read together, 8 bytes each."""
MOST_PAGES = 1024


class ReadAhead:
    """What a process reads from object stores. All its readers share it.

    Args:
        processes: number of processes that read the same data set together.
        blocks: number of blocks that are in use at a time.
    """

    def __init__(self, processes: int, blocks: int) -> None:
        self.processes, self.blocks = processes, blocks
        self._lock = threading.Lock()
        self._expected: deque[tuple[StoreReader, int]] = deque()
        """Samples that nothing was requested for yet."""
        self._requests: dict[_Request, None] = {}
        """All that are kept; those that were used last come last."""
        self._of_sample: dict[tuple[object, int], _Request] = {}
        self._mean_bytes: dict[object, float] = {}
        self._running = 0
        self._bytes = 0
        self._turn = 0

    def expect(self, samples: Iterable[tuple[Any, int]]) -> None:
        """Says which samples are read after those of the last call, in this order.

        Args:
            samples: reader and index of each. Readers of local files read nothing ahead.
        """
        with self._lock:
            self._turn += 1
            self._expected += [(reader, index) for reader, index in samples if isinstance(reader, StoreReader)]
            self._go_on()

    def take(self, reader: StoreReader, index: int) -> bytes:
        """The bytes of a sample, which are not kept any longer. Waits for them.

        Raises:
            FileNotFoundError: the shard or its index is missing.
            OSError: the store does not give them.
        """
        while True:
            with self._lock:
                request = self._of_sample.get((reader.key, index)) or self._start(reader, index)
                self._use(request)
            request.done.wait()

            with self._lock:
                if request.error is not None:
                    raise request.error
                content = request.samples.pop(index, None)
                if content is not None:
                    del self._of_sample[reader.key, index]
                    request.size -= len(content)
                    self._bytes -= len(content)
                if not request.samples:
                    self._forget(request)
                self._go_on()
            if content is not None:
                return content

    def _start(self, reader: StoreReader, index: int) -> _Request:
        """Requests a sample, with its block if that is used soon and not too large."""
        block = self._mean_bytes.get(reader.key, 0.0) * reader.block * self.blocks
        covers = self.processes <= MOST_PROCESSES and block <= MOST_BYTES
        request = _Request(reader, index, reader.block_of(index) if covers else range(index, index + 1))
        for each in request.indices:
            self._of_sample.setdefault((reader.key, each), request)
        self._requests[request] = None
        self._running += 1
        threading.Thread(target=self._fetch, args=(request,), daemon=True, name="read ahead").start()
        return request

    def _fetch(self, request: _Request) -> None:
        reader = request.reader
        try:
            samples = reader.fetch(request.indices, request.index, MOST_BYTES // REQUESTS)
        except BaseException as error:  # raised again where the sample is taken
            request.error, samples = error, {}

        with self._lock:
            self._running -= 1
            # What another request has, or what would be too much, is not kept.
            request.samples = {
                index: content
                for index, content in samples.items()
                if self._of_sample.get((reader.key, index)) is request
            }
            request.size = sum(map(len, request.samples.values()))
            self._bytes += request.size
            for index in request.indices:
                if index not in request.samples and self._of_sample.get((reader.key, index)) is request:
                    del self._of_sample[reader.key, index]
            if samples:
                mean = sum(map(len, samples.values())) / len(samples)
                self._mean_bytes[reader.key] = 0.9 * self._mean_bytes.get(reader.key, mean) + 0.1 * mean
            else:
                self._forget(request)
            self._go_on()
        request.done.set()

    def _go_on(self) -> None:
        """Requests what is expected, as long as there is room."""
        while self._expected and self._running < REQUESTS and self._has_room():
            reader, index = self._expected.popleft()
            self._use(self._of_sample.get((reader.key, index)) or self._start(reader, index))

    def _has_room(self) -> bool:
        """Whether more may be kept. Drops what no sample of the last two calls of :meth:`expect` was in."""
        while self._bytes > MOST_BYTES:
            oldest = next(iter(self._requests))
            if oldest.turn > self._turn - 2 or not oldest.done.is_set():
                return False
            self._forget(oldest)
        return True

    def _use(self, request: _Request) -> None:
        request.turn = self._turn
        if request in self._requests:
            self._requests.pop(request)
            self._requests[request] = None

    def _forget(self, request: _Request) -> None:
        if request in self._requests:
            del self._requests[request]
            self._bytes -= request.size
        for index in request.samples:
            self._of_sample.pop((request.reader.key, index), None)
        request.samples = {}


class _Request:
    """Samples of a shard that are read together."""

    def __init__(self, reader: StoreReader, index: int, indices: range) -> None:
        self.reader, self.index, self.indices = reader, index, indices
        self.samples: dict[int, bytes] = {}
        """Those that were read and not taken yet."""
        self.size = 0
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.turn = 0


class StoreReader(ShardInfosITarReader):
    """Energon's reader, for shards in an object store.

    Args:
        dataset: Energon's data set.
        block: samples of a block, as for :class:`megatron_vl.data.source.sample_order.BlockOrder`.
    """

    def __init__(self, dataset: Any, ahead: ReadAhead, block: int) -> None:
        super().__init__(dataset.path, dataset.shards, sample_filter=dataset.sample_filter)
        self.ahead, self.block = ahead, block
        self.key = object()
        """The same for copies of the reader."""
        self._pages: OrderedDict[tuple[int, int], NDArray[np.uint64]] = OrderedDict()
        self._content = b""

    def __getitem__(self, index: int) -> Any:
        shard, _ = self._located(index)
        self._content = self.ahead.take(self, index)
        pointer = ITarSamplePointer(
            tar_file_id=self.shard_tar_file_idxs[shard], byte_offset=0, byte_size=len(self._content)
        )
        return self._get_item_by_sample_pointer(pointer, index)

    @contextmanager
    def _open_itarfile(self, tar_file_id: int) -> Iterator[ITarFile]:
        """The sample that was taken last, as a file."""
        with ITarFile.open(fileobj=io.BytesIO(self._content), mode="r:") as file:
            yield file

    def block_of(self, index: int) -> range:
        """The indices of the samples in the block of a sample."""
        shard, number = self._located(index)
        first = index - number % self.block
        return range(first, min(first + self.block, self.shard_count_cumsum[shard + 1]))

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
        path = self.shard_infos[shard].path
        offsets = self._offsets(shard, number, number + len(indices))
        if offsets[-1] - offsets[0] > most:
            at = index - indices[0]
            indices, offsets = range(index, index + 1), offsets[at : at + 2]
        content = _read(path, offsets[0], offsets[-1])
        ends = [offset - offsets[0] for offset in offsets]
        return {each: content[ends[i] : ends[i + 1]] for i, each in enumerate(indices)}

    def _offsets(self, shard: int, first: int, end: int) -> list[int]:
        """Where samples of a shard begin, and where the last one ends, in bytes."""
        page = first // PAGE
        offsets = self._pages.get((shard, page))
        if offsets is None or page * PAGE + len(offsets) <= end:
            path = self.shard_infos[shard].path.with_suffix(ITAR_SUFFIX)
            last = max(end, min((page + 1) * PAGE, self.shard_infos[shard].count))
            offsets = np.frombuffer(_read(path, 8 * page * PAGE, 8 * (last + 1)), "<u8")
            self._pages[shard, page] = offsets
            if len(self._pages) > MOST_PAGES:
                self._pages.popitem(last=False)
        return [int(offset) for offset in offsets[first - page * PAGE : end - page * PAGE + 1]]

    def _located(self, index: int) -> tuple[int, int]:
        """The shard of a sample, and its number in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"Index out of bounds: {index}")
        shard = bisect_right(self.shard_count_cumsum, index) - 1
        return shard, index - self.shard_count_cumsum[shard]


def _read(path: EPath, start: int, end: int) -> bytes:
    try:
        content = path.fs.read(str(path.internal_path), byte_range=Range(offset=start, size=end - start))
    except FileNotFoundError as error:
        raise FileNotFoundError(str(path)) from error
    except Exception as error:  # the client raises errors of its own and of each provider
        raise OSError(f"{path}: {error}") from error
    return bytes(content)
