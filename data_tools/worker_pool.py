"""Worker processes, whose results come in the order of their tasks."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Self

from megatron_vl.system.errors import UserError
from megatron_vl.system.processes import end_with_parent


class WorkerPool:
    """Worker processes; with one worker, this process does the work itself.

    Raises:
        UserError: a process died.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self.executor: ProcessPoolExecutor | None = None
        self.processes: dict[int | None, Any] = {}

    def __enter__(self) -> Self:
        if self.num_workers > 1:
            # fork: workers share what is imported here and start at once; no threads have been started yet.
            self.executor = ProcessPoolExecutor(
                self.num_workers, multiprocessing.get_context("fork"), initializer=_start_worker
            )
        return self

    def __exit__(self, error_type: object, error: BaseException | None, *_: object) -> None:
        if self.executor is not None:
            if error is not None:  # a task may take minutes, and workers ignore Ctrl-C
                for process in self.processes.values():
                    process.terminate()
            self.executor.shutdown(wait=True, cancel_futures=True)
        if isinstance(error, BrokenProcessPool):
            raise UserError(
                f"{self._dead_worker()} died (out of memory, or a media file crashed its decoder);"
                " try --workers 1"
            ) from error

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if self.executor is not None:
            future = self.executor.submit(function, *arguments)
            # They start one after the other.
            if len(self.processes) < self.num_workers:
                self.processes |= {one.pid: one for one in multiprocessing.active_children()}
            return future
        finished_future: Future[Any] = Future()
        finished_future.set_result(function(*arguments))
        return finished_future

    def results_in_order(
        self, function: Callable[..., Any], task_arguments: Iterable[tuple[Any, ...]]
    ) -> Iterator[Any]:
        """Yields the results in the order of the tasks. At most four tasks for each worker are pending."""
        pending_futures: deque[Future[Any]] = deque()
        for arguments in task_arguments:
            pending_futures.append(self.submit(function, *arguments))
            if len(pending_futures) >= 4 * self.num_workers:
                yield pending_futures.popleft().result()
        while pending_futures:
            yield pending_futures.popleft().result()

    def _dead_worker(self) -> str:
        """The process that died first: the pool ends the others by SIGTERM."""
        for process in self.processes.values():
            process.join(5)
            if process.exitcode not in (0, None, -signal.SIGTERM):
                code = -process.exitcode
                cause = signal.Signals(code).name if code > 0 else f"exit code {process.exitcode}"
                return f"worker process {process.pid} ({cause})"
        return "a worker process"


def _start_worker() -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process stops the workers
    # A worker holds both ends of the queue, so it would wait for a task forever if its parent were killed.
    end_with_parent()


_task_function: list[Callable[[int], Any]] = []
"""Set before the worker processes are forked, so that none gets a tokenizer through a pipe."""


def _run_task(number: int) -> Any:
    return _task_function[0](number)


def run_tasks(function: Callable[[int], Any], num_tasks: int, num_workers: int) -> Iterator[Any]:
    """The results of a function for each number of a task, in order, from forked processes."""
    # Forked processes would not survive the tokenizer's own threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _task_function[:] = [function]
    try:
        with WorkerPool(min(num_workers, num_tasks)) as pool:
            yield from pool.results_in_order(_run_task, zip(range(num_tasks)))
    finally:
        _task_function.clear()  # it holds tokenizer and readers
