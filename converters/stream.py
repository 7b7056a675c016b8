"""Moving tensors from a source to files, a few megabytes at a time, several at once, with progress.

Memory is bounded by :data:`~megatron_vl.weights.CHUNK_BYTES` times a small constant times the number of workers,
whatever the size of the model: windows of mapped files are read, and files are filled in place.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from megatron_vl.tensor_files import TensorWriter, WeightsError, Window, matrix_shape, row_windows


class Progress:
    """Bytes done, rate and time left on stderr: redrawn on a terminal, a plain line every 30 seconds elsewhere."""

    def __init__(self, what: str, total: int, stream: TextIO | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
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
class Job:
    """One tensor of one file. ``read`` gives a window of it as a matrix."""

    writer: TensorWriter
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Window], Tensor]

    @property
    def bytes(self) -> int:
        rows, cols = matrix_shape(self.shape)
        return rows * cols * self.dtype.itemsize


def default_workers() -> int:
    """Workers that a machine is good for: hashing takes most of the time, the disk is full at eight."""
    return max(1, min(8, len(os.sched_getaffinity(0))))


class _Stopped(Exception):
    """Raised in a worker whose work is no longer wanted."""


def run_jobs(jobs: Sequence[Job], workers: int, progress: Progress) -> list[str]:
    """Writes all tensors with ``workers`` threads. Returns the SHA-256 of each, in order; the first failure stops all."""
    stop = threading.Event()

    def chunks(job: Job) -> Iterator[Tensor]:
        for window in row_windows(job.shape, job.dtype.itemsize):
            if stop.is_set():
                raise _Stopped
            data = job.read(window)
            yield data
            progress.add(data.numel() * job.dtype.itemsize)

    def work(job: Job) -> str:
        try:
            return job.writer.write(job.name, chunks(job))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, workers)) as pool:
        futures = [pool.submit(work, job) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:  # interrupted from the keyboard
            stop.set()
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    errors = [error for future in futures if not future.cancelled() and (error := future.exception())]
    for error in errors:
        if not isinstance(error, _Stopped):
            raise error
    return [future.result() for future in futures]


@contextmanager
def writing(folder: Path, headers: dict[str, bytes]) -> Iterator[dict[str, TensorWriter]]:
    """Opens a file for each header; they are put in place together at the end, or all removed on a failure."""
    folder.mkdir(parents=True, exist_ok=True)
    writers: dict[str, TensorWriter] = {}
    try:
        for name, header in headers.items():
            writers[name] = TensorWriter(folder / name, header)
        _check_space(folder, sum(writer.size for writer in writers.values()))
        yield writers
    except BaseException:
        for writer in writers.values():
            writer.abort()
        raise
    for writer in writers.values():
        writer.commit()


def _check_space(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < size:
        raise WeightsError(f"{folder}: {size / 1e9:.1f} GB will be written, but the disk has {free / 1e9:.1f} GB free")
