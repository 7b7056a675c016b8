"""Reads samples from shards that may have changed since conversion.

Energon 7.4.1 reads tar files inside a generator that does not handle errors: one missing file ends the epoch
of a worker. Here every index of the data set yields a sample or a description of what is wrong with it, so
that the order of samples and saved states stay valid.
"""

import copy
import errno
import queue
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.energon.errors import FatalSampleError
from megatron.energon.flavors.webdataset.itar import CachedItarOffsetReader, ITarFile

from megatron_vl.data.sample.deadline import SAMPLE_TIMEOUT_S
from megatron_vl.data.source.pair_reader import PairReader, shard_place
from megatron_vl.system.errors import is_machine_fault, retry_machine_faults

BROKEN_FIELD = "__broken__"
"""Field of a crude sample that could not be read; its value is (reason, detail)."""
CRC_FIELD = b', "crc32": '


class ShardReader(PairReader):
    """Energon's reader for shards that are read for a long time and may be damaged.

    An open ``TarFile`` keeps a description of each member that it has read, about 1 kB for each sample.
    Here it forgets them.
    """

    def _get_itarfile_cached(self, tar_file_id: int) -> ITarFile:
        """Opens a file without the Multi-Storage Client, whose metrics cost a third of the time of a read."""
        if tar_file_id not in self.itar_files_cache:
            self.itar_files_cache[tar_file_id] = ITarFile.open(
                fileobj=open(self.tar_filepaths[tar_file_id].internal_path, "rb"),  # noqa: SIM115
                mode="r:",
            )
        return super()._get_itarfile_cached(tar_file_id)

    @contextmanager
    def _open_itarfile(self, tar_file_id: int) -> Iterator[ITarFile]:
        with super()._open_itarfile(tar_file_id) as tar_file:
            try:
                yield tar_file
            except MemoryError as error:
                # A damaged header can claim any size, which is no lack of memory.
                shard_bytes = self.tar_filepaths[tar_file_id].size()
                if any(member.size > shard_bytes for member in tar_file.members):
                    raise ValueError("a member is larger than its shard") from error
                raise
            finally:
                tar_file.members.clear()


class StalledReadError(Exception):
    """A file system that does not answer."""


class TolerantReader:
    """Wraps an Energon reader. A sample that cannot be read comes back with the field :data:`BROKEN_FIELD`.

    Raises:
        FatalSampleError, MemoryError: the storage fails, or memory was too small to read a sample. The sample
            is not to blame.
    """

    def __init__(self, shard_reader: Any) -> None:
        self.shard_reader = shard_reader
        self.reading_thread: _ReadingThread | None = None
        self.stalled_threads: dict[str, _ReadingThread] = {}
        """The threads that still wait for a shard."""

    def __getitem__(self, sample_index: int) -> dict[str, Any]:
        try:
            return self._read_with_retries(sample_index)
        except FatalSampleError:
            raise
        except StalledReadError as error:
            reason, detail = "reading takes too long", str(error)
        except FileNotFoundError as error:
            reason, detail = "shard missing", f"{error.filename or error} does not exist"
        except OSError as error:
            reason, detail = "shard unreadable", str(error)
        except Exception as error:  # tarfile, struct and Energon raise all kinds of errors on a damaged tar
            if is_machine_fault(error):
                raise
            reason, detail = "shard damaged", f"{type(error).__name__}: {error}"

        shard_name, index_in_shard = self._shard_position(sample_index)
        return {
            "__key__": f"{shard_name}[{index_in_shard}]",
            "__shard__": shard_name,
            BROKEN_FIELD: (reason, f"sample {index_in_shard} of {shard_name}: {detail}"),
        }

    def _read_with_retries(self, sample_index: int) -> dict[str, Any]:
        """Reads a sample, and again through new file handles after a fault of the machine.

        Raises:
            FatalSampleError: the fault does not pass. The sample is not to blame.
        """

        def read_once() -> dict[str, Any]:
            try:
                return self._read_with_timeout(sample_index)
            except OSError as error:
                # A handle that failed once may keep failing, for instance after a network file system was
                # down, and without these files there may be few enough.
                if is_machine_fault(error):
                    self._close_files()
                raise

        shard_name, index_in_shard = self._shard_position(sample_index)
        try:
            return retry_machine_faults(read_once, shard_name)
        except OSError as error:
            if not is_machine_fault(error):
                raise
            advice = "fix this and start again: the sample is not left out"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = (
                    "raise the limit of open files (`ulimit -n`) where the run is started, or lower"
                    " data.num_workers"
                )
            raise FatalSampleError(
                f"sample {index_in_shard} of {shard_name} cannot be read: {error.strerror}"
                f" ({error.filename}): {advice}"
            ) from error

    def _close_files(self) -> None:
        self.shard_reader.close()
        for entry in self.shard_reader.cached_offset_reader.tar_index_reader_cache.values():
            entry.tar_index_reader.close()
        self.shard_reader = _reopen_reader(self.shard_reader)
        if self.reading_thread is not None:
            self.reading_thread.task_queue.put(-1)
            self.reading_thread = None

    def _read_with_timeout(self, sample_index: int) -> dict[str, Any]:
        """Reads in a thread, because a read that does not return cannot be ended."""
        shard_name, _ = self._shard_position(sample_index)
        if (stalled_thread := self.stalled_threads.get(shard_name)) is not None and stalled_thread.is_busy:
            raise StalledReadError("an earlier read of the shard has not returned yet")
        self.stalled_threads.pop(shard_name, None)

        if self.reading_thread is None:
            self.reading_thread = _ReadingThread(self.shard_reader)
        try:
            return self.reading_thread.read_sample(sample_index)
        except StalledReadError:
            # The thread keeps its reader. The next read gets another one.
            self.stalled_threads[shard_name] = self.reading_thread
            self.reading_thread = None
            self.shard_reader = _reopen_reader(self.shard_reader)
            raise

    def _shard_position(self, sample_index: int) -> tuple[str, int]:
        """The shard, and the sample's number in it, counted from 0."""
        shard, number = shard_place(self.shard_reader.shard_count_cumsum, sample_index)
        return self.shard_reader.shard_infos[shard].name, number


def _reopen_reader(shard_reader: Any) -> Any:
    """A reader of the same files with separate handles."""
    new_reader = copy.copy(shard_reader)
    new_reader.itar_files_cache = {}
    new_reader.cached_offset_reader = CachedItarOffsetReader(cache_size=shard_reader.itar_cache_size)
    return new_reader


class _ReadingThread:
    """Reads samples one by one. It does not keep the process from ending."""

    def __init__(self, shard_reader: Any) -> None:
        self.shard_reader = shard_reader
        self.task_queue: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.result_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_busy = False
        threading.Thread(target=self._run_reads, daemon=True, name="read samples").start()

    def read_sample(self, sample_index: int) -> Any:
        """Raises what the reader raises, or :class:`StalledReadError`."""
        self.is_busy = True
        self.task_queue.put(sample_index)
        try:
            read_result = self.result_queue.get(timeout=SAMPLE_TIMEOUT_S)
        except queue.Empty:
            self.task_queue.put(-1)  # ends the thread if the read ever returns
            raise StalledReadError(f"it took longer than {SAMPLE_TIMEOUT_S:g} s") from None
        if isinstance(read_result, BaseException):
            raise read_result
        return read_result

    def _run_reads(self) -> None:
        while (index := self.task_queue.get()) >= 0:
            try:
                read_result = self.shard_reader[index]
            except BaseException as error:  # raised again by the thread that asked
                read_result = error
            self.is_busy = False
            self.result_queue.put(read_result)


def append_crc32(json_bytes: bytes) -> bytes:
    """Adds the CRC-32 of the bytes of a non-empty JSON object to it as its last field."""
    return json_bytes[:-1] + CRC_FIELD + str(zlib.crc32(json_bytes)).encode() + b"}"


def is_crc32_wrong(json_bytes: bytes) -> bool:
    """Whether a text written by :func:`append_crc32` has changed; False for a text without CRC-32."""
    json_body, crc_mark, number = json_bytes.rpartition(CRC_FIELD)
    if not crc_mark or not number[:-1].isdigit():
        return False
    return zlib.crc32(json_body + b"}") != int(number[:-1])
