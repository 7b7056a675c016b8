"""Ends all ranks within seconds, with one message, when one rank fails.

A rank fails if it raises an error, dies, or hangs. :mod:`megatron_vl.parallel.heartbeat` detects the last
two.

If one rank fails, for example because of its replica's data or its part of a checkpoint, the others wait for
it in collectives. Over NCCL, they wait for half an hour, until the watchdog's timeout; over gloo, they report
that a connection was closed. So a rank that fails writes its message to the key-value store of the process
group before it ends. On every other rank, a thread waits for that key, prints the message and ends the
process, whatever the main thread is doing. Only the first message is used, because later failures usually
follow from the first one.

Steps do not become slower: the threads wait inside the store's server and do not poll. Each rank holds one
more connection to that server (2 instead of 1, for any number of ranks). The time from the failure to the end
of the last rank is the store's round trip, plus at most ``_PEER_TIMEOUT_S`` for ranks that no longer
answer, plus at most ``_WRITERS_TIMEOUT_S`` while a checkpoint is being written. No rank ends before all have
written, because launchers end the remaining ranks as soon as one has ended. No rank waits for a rank that is
dead or stopped. The ranks of the same node kill a stopped rank. A rank that ends kills its loaders and
exports.

The store lives in rank 0 or in the launcher's process. If that process is killed, no rank can write a
message: the threads see the connection close, and each ends its process with its own message.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.parallel.heartbeat import HeartbeatMonitor, RunFailure
from megatron_vl.system import host_memory, progress
from megatron_vl.system.errors import TRACEBACK_VARIABLE, describe_error, follows_lost_rank, traceback_helps
from megatron_vl.system.processes import kill_descendants

_PEER_TIMEOUT_S = 5.0
"""Seconds that a rank waits for the others to read a message or to reach the orderly end, and for the message
of a lost peer."""
_STORE_TIMEOUT_S = 5.0
"""Seconds in which a diagnosis must reach the store. After that, a rank ends without the others."""
_WRITERS_TIMEOUT_S = 60.0
"""Seconds that an ending rank waits for threads that write a checkpoint, on all ranks."""


class _FailureWatcher:
    """A thread of this rank that waits for the failure of another rank."""

    def __init__(self, number: int, timeout_s: float) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.store_key = f"megatron_vl/failure/{number}"
        # The thread needs a separate connection, because the main thread may be waiting in its own for a lost
        # rank. Both are opened at the start: connecting to a server that has ended blocks until a timeout.
        self.store = default_store().clone()
        self.exit_lock = threading.RLock()
        self.orderly_end = threading.Event()
        self.reported_failure: RunFailure | None = None
        self.first_failure: RunFailure | None = None
        self.watch_thread = threading.Thread(target=self._watch_store, name="failures", daemon=True)
        self.watch_thread.start()
        self.monitor = HeartbeatMonitor(self.store_key, timeout_s, self._publish_diagnosis)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        return self.first_failure.silent if self.first_failure is not None else ()

    def publish_failure(self, store: Any, failure: RunFailure) -> RunFailure:
        """Publishes a failure unless another was published earlier. Returns the first one."""
        own_text = json.dumps(dataclasses.asdict(failure))
        first_failure = RunFailure.from_json(store.compare_set(self.store_key, "", own_text))
        self.first_failure = first_failure if first_failure.message else None
        return first_failure

    def wait_for_failure(self, store: Any, wait_s: float) -> RunFailure | None:
        """The first failure; None after ``wait_s`` seconds. Raises RuntimeError if the store has ended."""
        import torch.distributed as dist

        try:
            store.wait([self.store_key], timedelta(seconds=wait_s))
        except dist.DistStoreError:
            return None
        return RunFailure.from_json(store.get(self.store_key))

    def _watch_store(self) -> None:
        failure = None
        try:
            while failure is None:
                failure = self.wait_for_failure(self.store, 3600)
        except RuntimeError:
            if self.orderly_end.wait(_PEER_TIMEOUT_S):
                return  # the host of the store has ended in an orderly way before this rank
            failure = self.failure_without_store()
        if failure.message:  # otherwise, it is an orderly end
            self._end_with(failure, self.store)

    def failure_without_store(self) -> RunFailure:
        """The failure to report if the process that keeps the store (rank 0 or the launcher) is gone."""
        store_lost = (
            "the process that keeps the store of all ranks"
            f" ({os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: rank 0, or the launcher) is"
            " gone. It was killed, or its node is lost; start again to continue from the latest checkpoint"
        )
        if (diagnosis := self.monitor.diagnosis) is None:
            return RunFailure(self.rank, store_lost, progress.describe_progress())
        return dataclasses.replace(diagnosis, message=f"{diagnosis.message}; {store_lost}")

    def _publish_diagnosis(self, diagnosis: RunFailure) -> None:
        """Publishes a diagnosis of the heartbeat monitor, so that all ranks end with it.

        It uses a separate connection, because other threads may be waiting in both existing ones. If the
        store does not answer, because it lived in the rank that is dead or stopped, this rank ends without
        the others.
        """
        is_published = threading.Event()

        def publish_in_thread() -> None:
            with contextlib.suppress(Exception):
                self.publish_failure(default_store().clone(), diagnosis)
                is_published.set()

        threading.Thread(target=publish_in_thread, name="diagnosis", daemon=True).start()
        if not is_published.wait(_STORE_TIMEOUT_S) and not self.orderly_end.is_set():
            self._end_with(self.failure_without_store(), store=None)
        # Otherwise, the thread that waits for failures ends this process.

    def _end_with(self, failure: RunFailure, store: Any) -> None:
        """Ends this process with the message of a failure, unless the main thread is already ending it."""
        self.first_failure = failure
        if self.exit_lock.acquire(blocking=False):
            print_failure_once(failure)
            self.exit_process(store)

    def wait_for_ranks(self, store: Any, meeting_point: str, wait_s: float) -> bool:
        """Waits until all ranks have called this method with the same ``meeting_point``.

        Returns whether they did so in time. It does not wait for dead or stopped ranks, and it returns False
        if the store has ended.
        """
        arrivals_key = f"{self.store_key}/{meeting_point}"
        all_arrived_key = f"{arrivals_key}/all"
        try:
            if store.add(arrivals_key, 1) == self.world_size - len(self.lost_ranks):
                store.set(all_arrived_key, "1")
            store.wait([all_arrived_key], timedelta(seconds=wait_s))
        except RuntimeError:
            return False
        return True

    def exit_process(self, store: Any) -> None:
        """Ends the process without running destructors of communicators, whose peers may be gone.

        Args:
            store: the store; None if it is gone. Then this rank does not wait for others.
        """
        deadline = time.monotonic() + _WRITERS_TIMEOUT_S
        all_seen = store is not None and self.wait_for_ranks(store, "seen", _PEER_TIMEOUT_S)
        processes = self.first_failure.processes if self.first_failure is not None else ()
        others = [process for process in processes if process != self.monitor.rank_process]
        if self.lost_ranks:
            for process in others:
                process.kill_tree()

        for thread in {*threading.enumerate()} - {threading.main_thread(), threading.current_thread()}:
            if not thread.daemon:
                _join_thread(thread, deadline)
        if all_seen:
            self.wait_for_ranks(store, "done", max(_PEER_TIMEOUT_S, deadline - time.monotonic()))
        else:
            for process in others:  # a process that hangs may not be able to end itself
                process.kill_tree()
        sys.stdout.flush()
        sys.stderr.flush()
        kill_descendants()  # loaders and exports; a stopped child would otherwise remain
        os._exit(1)


def _join_thread(thread: threading.Thread, deadline: float) -> None:
    """Waits for the end of a thread. ``join`` alone would refuse a thread that is just being started."""
    while time.monotonic() < deadline:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
            return
        except RuntimeError:  # enumerate() has it already, and it does not run yet
            time.sleep(0.001)


_watcher: _FailureWatcher | None = None
_single_rank_monitor: HeartbeatMonitor | None = None
_watchers_started = 0


def watch_ranks(timeout_s: float = 0.0) -> None:
    """From now on, the failure of any rank ends this one. Call it on all ranks, after the group was made.

    Args:
        timeout_s: seconds in which some rank must make progress (``failures.timeout_s``); 0: no limit. The
            death of a rank is detected in any case.
    """
    global _watcher, _single_rank_monitor, _watchers_started
    import torch.distributed as dist

    if dist.get_world_size() == 1 and timeout_s:
        _single_rank_monitor = HeartbeatMonitor("", timeout_s, _end_single_rank)
    if dist.get_world_size() > 1 and _watcher is None:
        _watchers_started += 1
        _watcher = _FailureWatcher(_watchers_started, timeout_s)


def _end_single_rank(diagnosis: RunFailure) -> None:
    _print_main_stack()
    print_failure_once(diagnosis)
    kill_descendants()
    os._exit(1)


def stop_single_rank_monitor() -> None:
    """Ends the watch of a run of one rank, whether or not the run failed."""
    global _single_rank_monitor
    if _single_rank_monitor is not None:
        _single_rank_monitor.end_event.set()
    _single_rank_monitor = None


def stop_watching() -> None:
    """Ends the threads of all ranks in an orderly way. Call it on all ranks after a barrier."""
    global _watcher
    if _watcher is None:
        return
    _watcher.orderly_end.set()
    with contextlib.suppress(RuntimeError):  # the rank that hosts the store has ended before this one
        _watcher.publish_failure(default_store(), RunFailure(_watcher.rank, ""))
        # The end of the rank that hosts the store would look like its death to the others.
        _watcher.wait_for_ranks(default_store(), "stopped", _PEER_TIMEOUT_S)
    _watcher.monitor.end_event.set()
    _watcher.watch_thread.join(_PEER_TIMEOUT_S)
    _watcher = None


def report_failure(error: Exception) -> RunFailure:
    """Publishes this rank's error. Returns the failure to print: the first one of any rank.

    The caller prints it and then calls :func:`exit_after_failure`. A second call returns the result of the
    first one. If the error usually follows from the end of another rank, this function waits for that rank's
    failure.
    """
    own_failure = RunFailure(
        int(os.environ.get("RANK", "0")),
        describe_error(error),
        progress.describe_progress(),
        has_traceback_hint=traceback_helps(error),
    )
    if (watcher := _watcher) is None:
        return own_failure
    if watcher.reported_failure is not None:
        return watcher.reported_failure

    if follows_lost_rank(error) and first_failure_message() is None:
        # The store may have ended with the rank that kept it.
        watcher.monitor.diagnosis_ready.wait(_PEER_TIMEOUT_S)
    watcher.exit_lock.acquire()  # does not return if the thread is already ending the process
    try:
        first_failure = watcher.publish_failure(default_store(), own_failure)
    except RuntimeError:
        first_failure = watcher.failure_without_store() if watcher.monitor.diagnosis else own_failure
        watcher.first_failure = first_failure
    # The first message is empty if other ranks have reached the orderly end.
    watcher.reported_failure = first_failure if first_failure.message else own_failure
    return watcher.reported_failure


def lost_ranks() -> tuple[int, ...]:
    return _watcher.lost_ranks if _watcher is not None else ()


def first_failure_message() -> str | None:
    """Why the first rank failed; None if this does not become known within seconds."""
    if _watcher is None:
        return None
    try:
        failure = _watcher.wait_for_failure(default_store(), _PEER_TIMEOUT_S)
    except RuntimeError:
        return None
    return failure.message if failure else None


def exit_after_failure() -> None:
    """Ends this process with exit code 1 once the other ranks know why. Returns only if there are none."""
    if _watcher is not None:
        _watcher.exit_process(default_store())


def print_failure_once(failure: RunFailure) -> None:
    """Prints why the training ends. Of the ranks of a node, only the first one with this message prints it.

    The rank that hangs also prints the stack of its main thread.
    """
    if failure.is_hanging and _watcher is not None and failure.rank == _watcher.rank:
        _print_main_stack()
    if _is_printed_already(failure):
        return

    position_text = f" ({failure.position_text})" if failure.position_text else ""
    memory_text = f". {host_memory.KILL_ADVICE}" if failure.has_died else ""
    shows_hint = failure.has_traceback_hint and not os.environ.get(TRACEBACK_VARIABLE)
    traceback_hint = f"\n({TRACEBACK_VARIABLE}=1 shows where)" if shows_hint else ""
    print(
        f"megatron_vl.train: rank {failure.rank}{position_text}:"
        f" {failure.message}{memory_text}{traceback_hint}",
        file=sys.stderr,
        flush=True,
    )


def _is_printed_already(failure: RunFailure) -> bool:
    """Whether another rank of this node has printed the message. From now on, it counts as printed."""
    if not (error_file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return False

    # Without the store, the messages of ranks about lost ranks differ in numbers.
    text = f"ranks {failure.silent}" if failure.silent else failure.message.partition("\n")[0]
    message_hash = hashlib.sha256(text.encode()).hexdigest()[:16]
    try:
        # torchrun makes a folder for this start, which contains one folder for each rank.
        (Path(error_file).parent.parent / f"printed_{message_hash}").open("x").close()
    except FileExistsError:
        return True
    except OSError:
        pass  # it is better to print the message twice than not at all
    return False


def _print_main_stack() -> None:
    print("the stack of the main thread of the rank that hangs:", file=sys.stderr)
    traceback.print_stack(sys._current_frames().get(threading.main_thread().ident or 0))
    sys.stderr.flush()
