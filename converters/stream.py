"""Copies tensors from a source to files, a few megabytes at a time, in several threads, and shows progress.

Memory is limited to a small constant times :data:`~megatron_vl.weights.tensor_files.CHUNK_BYTES` times the
number of workers, and does not depend on the size of the model: regions of mapped files are read, and files
are filled in place.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import TextIO

import torch
from torch import Tensor

from megatron_vl.weights.tensor_files import Region, TensorWriter, matrix_shape, row_regions


class Progress:
    """Shows bytes, rate and time left on stderr.

    On a terminal, the line is redrawn. Otherwise, a line is printed every 30 seconds.
    """

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        self._what = what
        self._total = total
        self._done = 0
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._interval = 0.2 if self._terminal else 30.0
        self._start = self._shown = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            if now - self._shown >= self._interval:
                self._shown = now
                self._show(now - self._start)

    def _show(self, elapsed: float) -> None:
        rate = self._done / elapsed
        left = (self._total - self._done) / rate if rate else 0.0
        text = (
            f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB "
            f"({100 * self._done / max(1, self._total):.0f} %), {rate / 1e9:.2f} GB/s, {left:.0f} s left"
        )
        self._stream.write(f"\r{text}\033[K" if self._terminal else text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._terminal:
            self._stream.write("\r\033[K")
            self._stream.flush()


@dataclass(frozen=True)
class CopyJob:
    """The job to write one tensor to one file."""

    writer: TensorWriter
    name: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Region], Tensor]
    """Returns a region of the tensor as a matrix."""

    @property
    def bytes(self) -> int:
        return self.size(self.dtype, self.shape)

    @staticmethod
    def size(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Size of a tensor in bytes."""
        rows, cols = matrix_shape(shape)
        return rows * cols * dtype.itemsize


def default_workers() -> int:
    """The number of useful workers. Hashing takes most of the time, and eight workers saturate the disk."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


def give_back_freed_chunks() -> None:
    """Makes glibc return freed chunks to the system at once, for the rest of this process.

    By default, glibc keeps freed memory up to a limit that grows with the freed sizes. Chunks of 4 MB, and
    slightly smaller ones, left 20 MB per thread unused (183 MB in all for 8 workers on stacks of experts,
    against 63 MB with a fixed limit, at the same speed).
    """
    try:
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    except (OSError, AttributeError, TypeError):
        pass  # not glibc


class _Stopped(Exception):
    """Raised in a worker whose work is no longer needed."""


Task = CopyJob | Callable[[], None]
"""A tensor to write, or a check of a tensor before it is read."""


def verified_ahead(
    jobs: Mapping[str, Sequence[CopyJob]], check: Callable[[str], None], workers: int
) -> list[Task]:
    """Orders jobs by the tensor that they read, and puts the check of each tensor a few tensors earlier.

    If a tensor is unchecked, a job checks it first. Earlier checks keep workers from waiting for each other.
    """
    names = list(jobs)
    tasks = list[Task]()
    ahead = names[workers:]
    tasks += [partial(check, name) for name in names[:workers]]
    for i, name in enumerate(names):
        tasks += [partial(check, other) for other in ahead[i : i + 1]]
        tasks += jobs[name]
    return tasks


def run_jobs(
    tasks: Sequence[Task], workers: int, progress: Progress, record: Callable[[str, str, str], None]
) -> None:
    """Runs all tasks in ``workers`` threads. The first failure stops all of them and is raised.

    Args:
        record: called with the file, the name and the SHA-256 of each written tensor.
    """
    give_back_freed_chunks()
    stop = threading.Event()

    def chunks(job: CopyJob) -> Iterator[Tensor]:
        for region in row_regions(job.shape, job.dtype.itemsize):
            if stop.is_set():
                raise _Stopped
            data = job.read(region)
            yield data
            progress.add(data.numel() * job.dtype.itemsize)

    def work(task: Task) -> None:
        try:
            if isinstance(task, CopyJob):
                digest = task.writer.write(task.name, chunks(task))
                record(task.writer.path.name, task.name, digest)
            else:
                task()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = [pool.submit(work, task) for task in tasks]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # including an interrupt from the keyboard
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
    for error in errors:
        if not isinstance(error, _Stopped):
            raise error
