"""Reads samples from shards that may have changed since conversion.

Energon 7.4.1 reads tar files inside a generator that does not handle errors: one missing file ends the epoch
of a worker. Here every index of the data set yields a sample or a description of what is wrong with it, so
that the order of samples and saved states stay valid.
"""

from __future__ import annotations

import copy
import errno
import queue
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

from megatron.energon.epathlib import EPath
from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.itar import CachedItarOffsetReader
from megatron.energon.flavors.webdataset.itar_reader import ShardInfosITarReader
from megatron.energon.metadataset.loader_interface import LoadedDataset

BROKEN = "__broken__"
"""Field of a crude sample that could not be read; its value is (reason, detail)."""
CRC_FIELD = b', "crc32": '


class StalledError(Exception):
    """A file system that does not answer."""


class TolerantReader:
    """Wraps an Energon reader. If reading fails, it returns a crude sample with the field :data:`BROKEN`.

    Args:
        timeout: seconds to wait for a sample; 0: without end.
    """

    def __init__(self, reader: Any, timeout: float = 0.0) -> None:
        self.reader = reader
        self.timeout = timeout
        self.thread: _ReadingThread | None = None
        self.stalled: dict[str, _ReadingThread] = {}
        """The threads that still wait for a shard."""

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        try:
            return self._with_files_to_spare(index)
        except FatalSampleError:
            raise
        except StalledError as error:
            reason = "reading takes too long"
            detail = str(error)
        except FileNotFoundError as error:
            reason = "shard missing"
            detail = f"{error.filename or error} does not exist"
        except OSError as error:
            # A handle that failed once may keep failing (for instance
            # after a network file system was down): reopen it.
            self.reader.close()
            reason = "shard unreadable"
            detail = str(error)
        except Exception as error:  # tarfile, struct and Energon raise all kinds of errors on a damaged tar
            reason = "shard damaged"
            detail = f"{type(error).__name__}: {error}"

        shard, number = self._place(index)
        return {
            "__key__": f"{shard}[{number}]",
            "__shard__": shard,
            "__restore_key__": ("Webdataset", index),
            "__sources__": (),
            BROKEN: (reason, f"sample {number} of {shard}: {detail}"),
        }

    def _with_files_to_spare(self, index: int) -> dict[str, Any] | None:
        """Reads a sample. If this process or machine may open no more files, it first closes its own.

        Raises:
            FatalSampleError: no file can be opened even then. That is no fault of the sample.
        """
        for has_closed in (False, True):
            try:
                return self._read(index) if self.timeout else self.reader[index]
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                if has_closed:
                    raise FatalSampleError(
                        f"{error.strerror} ({error.filename}): raise the limit of open files (`ulimit -n`)"
                        " where the run is started, or lower data.num_workers"
                    ) from error
                self._close()
        raise AssertionError  # the second turn returns or raises

    def _close(self) -> None:
        """Closes the files that are kept open."""
        self.reader.close()
        if isinstance(self.reader, ShardInfosITarReader):
            offsets = self.reader.cached_offset_reader.tar_index_reader_cache
            for entry in offsets.values():
                entry.tar_index_reader.close()
            offsets.clear()
        self.reader = _reopened(self.reader)
        if self.thread is not None:
            self.thread.tasks.put(-1)
            self.thread = None

    def _read(self, index: int) -> dict[str, Any] | None:
        """Reads in a thread, because nothing else can give up a read that does not return."""
        shard, _ = self._place(index)
        waiting = self.stalled.get(shard)
        if waiting is not None and waiting.busy:
            raise StalledError("an earlier read of the shard has not returned yet")
        self.stalled.pop(shard, None)

        if self.thread is None:
            self.thread = _ReadingThread(self.reader)
        try:
            return self.thread.read(index, self.timeout)
        except StalledError:
            # The thread keeps its reader; the next read has its own.
            self.stalled[shard], self.thread = self.thread, None
            self.reader = _reopened(self.reader)
            raise

    def _place(self, index: int) -> tuple[str, int]:
        """The shard, and the sample's number in it, counted from 0."""
        if not isinstance(self.reader, ShardInfosITarReader):
            return "data set", index
        starts = self.reader.shard_count_cumsum
        shard = min(bisect_right(starts, index) - 1, len(self.reader.shard_infos) - 1)
        return self.reader.shard_infos[shard].name, index - starts[shard]


def _reopened(reader: Any) -> Any:
    """A reader of the same files with handles of its own."""
    fresh = copy.copy(reader)
    fresh.itar_files_cache = {}
    if isinstance(reader, ShardInfosITarReader):
        fresh.cached_offset_reader = CachedItarOffsetReader(cache_size=reader.itar_cache_size)
    return fresh


class _ReadingThread:
    """Reads samples one by one. It does not keep the process from ending."""

    def __init__(self, reader: Any) -> None:
        self.reader = reader
        self.tasks: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.busy = False
        threading.Thread(target=self._work, daemon=True, name="read samples").start()

    def read(self, index: int, timeout: float) -> Any:
        """Raises what the reader raises, or :class:`StalledError`."""
        self.busy = True
        self.tasks.put(index)
        try:
            result = self.results.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.tasks.put(-1)  # ends the thread if the read ever returns
            raise StalledError(f"it took longer than data.sample_timeout_s {timeout:g}") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _work(self) -> None:
        while (index := self.tasks.get()) >= 0:
            try:
                result = self.reader[index]
            except BaseException as error:  # raised again by the thread that asked
                result = error
            self.busy = False
            self.results.put(result)


def reconnect(datasets: Iterable[LoadedDataset]) -> None:
    """Gives a forked process connections of its own to object stores.

    Two processes that share one would read each other's answers.
    """
    for loaded in datasets:
        for path in (loaded.dataset.path, *(shard.path for shard in loaded.dataset.shards)):
            if not path.is_local():
                path.fs = EPath(str(path)).fs


def with_crc(text: bytes) -> bytes:
    """Adds the CRC-32 of the bytes of a non-empty JSON object to it as its last field."""
    return text[:-1] + CRC_FIELD + str(zlib.crc32(text)).encode() + b"}"


def crc_differs(text: bytes) -> bool:
    """Whether a text written by :func:`with_crc` has changed; False for a text without CRC-32."""
    body, mark, number = text.rpartition(CRC_FIELD)
    if not mark or not number[:-1].isdigit():
        return False
    return zlib.crc32(body + b"}") != int(number[:-1])
