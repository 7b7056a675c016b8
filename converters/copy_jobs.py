"""Copies tensors from a source to files, a few megabytes at a time, in several threads.

Memory is limited to a small constant times :data:`~megatron_vl.weights.tensor_files.CHUNK_BYTES` times the
number of workers, and does not depend on the size of the model: regions of mapped files are read, and files
are filled in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_vl.weights.tensor_files import MatrixRegion, TensorWriter, row_regions


@dataclass(frozen=True)
class CopyJob:
    """The job to write one tensor to one file."""

    tensor_writer: TensorWriter
    tensor_name: str
    """The tensor's name in the file."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    read_region: Callable[[MatrixRegion], Tensor]
    """Returns a region of the tensor as a matrix."""
    next_job: CopyJob | None = None
    """A tensor that can be read after this one. The same worker writes it."""

    @property
    def byte_count(self) -> int:
        """Bytes of this job and the next one."""
        own_bytes = math.prod(self.shape) * self.dtype.itemsize
        return own_bytes + (self.next_job.byte_count if self.next_job else 0)


def return_freed_memory() -> None:
    """Makes glibc return freed chunks to the system at once, for the rest of this process.

    By default, it keeps freed memory up to a limit that grows with the freed sizes: 20 MB per thread.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # not glibc
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


class _StoppedError(Exception):
    """Raised in a worker whose work is no longer needed."""


CopyTask = CopyJob | Callable[[], None]
"""A tensor to write, or a check of a tensor before it is read."""


def order_with_checks(
    jobs_by_tensor: Mapping[str, Sequence[CopyJob]], check_tensor: Callable[[str], None], worker_count: int
) -> list[CopyTask]:
    """Orders jobs by the tensor that they read, and puts the check of each tensor a few tensors earlier.

    A job checks its tensor itself if no one has. The workers would wait for each other if all of them started
    with jobs of one tensor, so the check of a tensor runs ``worker_count`` tensors ahead of its jobs.
    """
    tensor_names = list(jobs_by_tensor)
    ordered_tasks = list[CopyTask]()
    ordered_tasks += [partial(check_tensor, tensor_name) for tensor_name in tensor_names[:worker_count]]
    for i, tensor_name in enumerate(tensor_names):
        if i + worker_count < len(tensor_names):
            ordered_tasks.append(partial(check_tensor, tensor_names[i + worker_count]))
        ordered_tasks += jobs_by_tensor[tensor_name]
    return ordered_tasks


def run_copy_tasks(
    copy_tasks: Sequence[CopyTask],
    worker_count: int,
    advance: Callable[[int], None],
    digests: dict[tuple[str, str], str] | None,
) -> None:
    """Runs all tasks in ``worker_count`` threads. The first failure stops all of them and is raised.

    Args:
        advance: called with the bytes of each piece that is written.
        digests: takes the SHA-256 of each written tensor by (file, tensor); None: they are not computed.
    """
    return_freed_memory()
    stop_event = threading.Event()

    def read_chunks(copy_job: CopyJob) -> Iterator[Tensor]:
        # FP8 is computed in float32, from whole blocks of 128 rows.
        is_fp8 = copy_job.dtype.itemsize == 1
        itemsize = 4 if is_fp8 else copy_job.dtype.itemsize
        for region in row_regions(copy_job.shape, itemsize, rows_multiple=128 if is_fp8 else 1):
            if stop_event.is_set():
                raise _StoppedError
            chunk = copy_job.read_region(region)
            yield chunk
            advance(chunk.numel() * copy_job.dtype.itemsize)

    def run_task(copy_task: CopyTask) -> None:
        if not isinstance(copy_task, CopyJob):
            copy_task()
            return
        job: CopyJob | None = copy_task
        while job:
            writer, name = job.tensor_writer, job.tensor_name
            digest = writer.write_tensor(name, read_chunks(job), hashes=digests is not None)
            if digests is not None:
                digests[writer.path.name, name] = digest
            job = job.next_job

    with ThreadPoolExecutor(max(1, worker_count)) as thread_pool:
        task_futures = [thread_pool.submit(run_task, task) for task in copy_tasks]
        try:
            for future in as_completed(task_futures):
                future.result()
        except BaseException:  # including an interrupt from the keyboard
            # Their output is removed: running tasks stop at their next region, and no other one starts.
            stop_event.set()
            thread_pool.shutdown(cancel_futures=True)
            raise
