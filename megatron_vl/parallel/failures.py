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
of the last rank is the store's round trip, plus at most ``_ALL_SEEN_TIMEOUT_S`` for ranks that no longer
answer, plus at most ``_WRITERS_TIMEOUT_S`` while a checkpoint is being written. No rank ends before all have
written, because launchers end the remaining ranks as soon as one has ended. No rank waits for a rank that is
dead or stopped. The ranks of the same node kill a stopped rank. A rank that ends kills its loaders and
exports.

The store lives in rank 0 or in the launcher's process. If that process is killed, no rank can write a
message: the threads see the connection close, and each ends its process with its own message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.parallel.heartbeat import HeartbeatMonitor, RankProcess, RunFailure
from megatron_vl.system import host_memory, progress
from megatron_vl.system.errors import TRACEBACK_VARIABLE, describe_error, follows_lost_rank, traceback_helps
from megatron_vl.system.processes import kill_descendants

_ALL_SEEN_TIMEOUT_S = 5.0
"""Seconds that an ending rank waits for all others to read the message, because the store may end with it."""
_WRITERS_TIMEOUT_S = 60.0
"""Seconds that an ending rank waits for threads that write a checkpoint, on all ranks."""
_ORDERLY_END_TIMEOUT_S = 5.0
"""Seconds that a rank which lost the store waits for its main thread to reach the orderly end."""
_STORE_TIMEOUT_S = 5.0
"""Seconds in which a diagnosis must reach the store. After that, a rank ends without the others."""
_CAUSE_TIMEOUT_S = 5.0
"""Seconds that a rank which lost a peer waits for the peer's message."""


class _FailureWatcher:
    """A thread of this rank that waits for the failure of another rank."""

    def __init__(self, watcher_number: int, timeout_s: float) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.store_key = f"megatron_vl/failure/{watcher_number}"
        # The thread needs a separate connection, because the main thread may be waiting in its own for a lost
        # rank. Both are opened at the start: connecting to a server that has ended blocks until a timeout.
        self.store = default_store().clone()
        self.exit_lock = threading.RLock()
        self.orderly_end = threading.Event()
        """Set when this rank has reached the orderly end."""
        self.reported_failure: RunFailure | None = None
        """The result of :func:`report_failure`."""
        self.first_failure: RunFailure | None = None
        """The first failure of any rank, once this rank knows it."""
        self.watch_thread = threading.Thread(target=self._watch_store, name="failures", daemon=True)
        self.watch_thread.start()
        self.heartbeat_monitor = HeartbeatMonitor(self.store_key, timeout_s, self._publish_diagnosis)

    def publish_failure(self, store: Any, failure: RunFailure) -> RunFailure:
        """Publishes a failure unless another was published earlier. Returns the first one."""
        first_failure = _parse_failure(store.compare_set(self.store_key, "", json.dumps(asdict(failure))))
        self.first_failure = first_failure if first_failure.message else None
        return first_failure

    def wait_for_failure(self, store: Any, wait_s: float) -> RunFailure | None:
        """The first failure; None after ``wait_s`` seconds. Raises RuntimeError if the store has ended."""
        import torch.distributed as dist

        try:
            store.wait([self.store_key], timedelta(seconds=wait_s))
        except dist.DistStoreError:
            return None
        return _parse_failure(store.get(self.store_key))

    def _watch_store(self) -> None:
        run_failure = None
        try:
            while run_failure is None:
                run_failure = self.wait_for_failure(self.store, 3600)
        except RuntimeError:
            if self.orderly_end.wait(_ORDERLY_END_TIMEOUT_S):
                return  # the host of the store has ended in an orderly way before this rank
            run_failure = self._failure_without_store()
        self.first_failure = run_failure if run_failure.message else None
        if not run_failure.message or not self.exit_lock.acquire(blocking=False):
            return  # an orderly end, or the main thread is already ending the process
        print_failure_once(run_failure)
        self.exit_process(self.store)

    def _failure_without_store(self) -> RunFailure:
        """The failure to report if the process that keeps the store (rank 0 or the launcher) is gone."""
        diagnosis = self.heartbeat_monitor.diagnosis
        if diagnosis is None:
            return RunFailure(self.rank, _store_lost_message(), progress.describe_progress())
        return dataclasses.replace(diagnosis, message=f"{diagnosis.message}; {_store_lost_message()}")

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

        threading.Thread(target=publish_in_thread, name="verdict", daemon=True).start()
        if is_published.wait(_STORE_TIMEOUT_S) or self.orderly_end.is_set():
            return  # the thread that waits for failures ends this process
        self.first_failure = self._failure_without_store()
        if self.exit_lock.acquire(blocking=False):
            print_failure_once(self.first_failure)
            self.exit_process(None)

    def wait_for_ranks(self, store: Any, meeting_point: str, wait_s: float) -> bool:
        """Waits until all ranks have called this method with the same ``meeting_point``.

        Returns whether they did so in time. It does not wait for dead or stopped ranks, and it returns False
        if the store has ended.
        """
        arrivals_key = f"{self.store_key}/{meeting_point}"
        all_arrived_key = f"{arrivals_key}/all"
        silent_ranks = self.first_failure.silent if self.first_failure else ()
        try:
            if store.add(arrivals_key, 1) == self.world_size - len(silent_ranks):
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
        all_seen = store is not None and self.wait_for_ranks(store, "seen", _ALL_SEEN_TIMEOUT_S)
        first_failure = self.first_failure
        if first_failure is not None and first_failure.silent:
            self._kill_processes(first_failure.processes)

        awaited_threads = {*threading.enumerate()} - {threading.main_thread(), threading.current_thread()}
        for other_thread in awaited_threads:
            if not other_thread.daemon:
                _join_thread(other_thread, deadline)
        if all_seen:
            self.wait_for_ranks(store, "done", max(_ALL_SEEN_TIMEOUT_S, deadline - time.monotonic()))

        if first_failure is not None and not all_seen:
            # A process that hangs may not be able to end itself.
            self._kill_processes(first_failure.processes)
        sys.stdout.flush()
        sys.stderr.flush()
        kill_descendants()  # loaders and exports; a stopped child would otherwise remain
        os._exit(1)

    def _kill_processes(self, rank_processes: tuple[RankProcess, ...]) -> None:
        for rank_process in rank_processes:
            if rank_process != self.heartbeat_monitor.rank_process:
                rank_process.kill_tree()


def _join_thread(joined_thread: threading.Thread, deadline: float) -> None:
    """Waits for the end of a thread. ``join`` alone would refuse a thread that is just being started."""
    while time.monotonic() < deadline:
        try:
            joined_thread.join(max(0.0, deadline - time.monotonic()))
            return
        except RuntimeError:  # enumerate() has it already, and it does not run yet
            time.sleep(0.001)


def _store_lost_message() -> str:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the process that keeps the store of all ranks ({address}: rank 0, or the launcher) is gone. It was"
        " killed, or its node is lost; start again to continue from the latest checkpoint"
    )


def _parse_failure(failure_json: bytes) -> RunFailure:
    fields = json.loads(failure_json)
    fields["silent"] = tuple(fields["silent"])
    fields["processes"] = tuple(RankProcess(**process) for process in fields["processes"])
    return RunFailure(**fields)


_failure_watcher: _FailureWatcher | None = None
_single_rank_monitor: HeartbeatMonitor | None = None
"""The monitor of a run of one rank, which has no other ranks to notify."""
_watchers_started = 0


def watch_ranks(timeout_s: float = 0.0) -> None:
    """From now on, the failure of any rank ends this one. Call it on all ranks, after the group was made.

    Args:
        timeout_s: seconds in which some rank must make progress (``failures.timeout_s``); 0: no limit. The
            death of a rank is detected in any case.
    """
    global _failure_watcher, _single_rank_monitor, _watchers_started
    import torch.distributed as dist

    if dist.get_world_size() == 1 and timeout_s:
        _single_rank_monitor = HeartbeatMonitor("", timeout_s, _end_single_rank)
    if dist.get_world_size() > 1 and _failure_watcher is None:
        _watchers_started += 1
        _failure_watcher = _FailureWatcher(_watchers_started, timeout_s)


def _end_single_rank(diagnosis: RunFailure) -> None:
    _print_main_stack()
    print_failure_once(diagnosis)
    kill_descendants()
    os._exit(1)


def stop_single_rank_monitor() -> None:
    """Ends the watch of a run of one rank, whether or not the run failed."""
    global _single_rank_monitor
    if _single_rank_monitor is not None:
        _single_rank_monitor.stop_monitor()
    _single_rank_monitor = None


def stop_watching() -> None:
    """Ends the threads of all ranks in an orderly way. Call it on all ranks after a barrier."""
    global _failure_watcher
    if _failure_watcher is None:
        return

    _failure_watcher.orderly_end.set()
    try:
        _failure_watcher.publish_failure(default_store(), RunFailure(_failure_watcher.rank, ""))
    except RuntimeError:
        pass  # the rank that hosts the store has ended before this one
    else:
        # The end of the rank that hosts the store would look like its death to the others.
        _failure_watcher.wait_for_ranks(default_store(), "stopped", _ALL_SEEN_TIMEOUT_S)
    _failure_watcher.heartbeat_monitor.stop_monitor()
    _failure_watcher.watch_thread.join(_ALL_SEEN_TIMEOUT_S)
    _failure_watcher = None


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
    if _failure_watcher is None:
        return own_failure
    if _failure_watcher.reported_failure is not None:
        return _failure_watcher.reported_failure

    if follows_lost_rank(error) and first_failure_message(_CAUSE_TIMEOUT_S) is None:
        # The store may have ended with the rank that kept it.
        _failure_watcher.heartbeat_monitor.diagnosis_ready.wait(_CAUSE_TIMEOUT_S)
    _failure_watcher.exit_lock.acquire()  # does not return if the thread is already ending the process
    try:
        first_failure = _failure_watcher.publish_failure(default_store(), own_failure)
    except RuntimeError:
        first_failure = own_failure
        if _failure_watcher.heartbeat_monitor.diagnosis is not None:
            first_failure = _failure_watcher._failure_without_store()
        _failure_watcher.first_failure = first_failure
    # The first message is empty if other ranks have reached the orderly end.
    _failure_watcher.reported_failure = first_failure if first_failure.message else own_failure
    return _failure_watcher.reported_failure


def lost_ranks() -> tuple[int, ...]:
    """The ranks that are known to be dead or stopped."""
    first_failure = _failure_watcher.first_failure if _failure_watcher is not None else None
    return first_failure.silent if first_failure is not None else ()


def first_failure_message(wait_s: float = _ALL_SEEN_TIMEOUT_S) -> str | None:
    """Why the first rank failed; None if this does not become known within ``wait_s`` seconds."""
    if _failure_watcher is None:
        return None
    try:
        run_failure = _failure_watcher.wait_for_failure(default_store(), wait_s)
    except RuntimeError:
        return None
    return run_failure.message if run_failure else None


def exit_after_failure() -> None:
    """Ends this process with exit code 1 once the other ranks know why. Returns only if there are none."""
    if _failure_watcher is not None:
        _failure_watcher.exit_process(default_store())


def print_failure_once(run_failure: RunFailure) -> None:
    """Prints why the training ends. Of the ranks of a node, only the first one with this message prints it.

    The rank that hangs also prints the stack of its main thread.
    """
    if run_failure.is_hanging and _failure_watcher is not None and run_failure.rank == _failure_watcher.rank:
        _print_main_stack()
    if _is_printed_already(run_failure):
        return

    position_text = f" ({run_failure.position_text})" if run_failure.position_text else ""
    is_local = any(process.is_local() for process in run_failure.processes)
    memory_text = f". {host_memory.explain_kill(is_local)}" if run_failure.has_died else ""
    traceback_hint = ""
    if run_failure.has_traceback_hint and not os.environ.get(TRACEBACK_VARIABLE):
        traceback_hint = f"\n({TRACEBACK_VARIABLE}=1 shows where)"
    print(
        f"megatron_vl.train: rank {run_failure.rank}{position_text}:"
        f" {run_failure.message}{memory_text}{traceback_hint}",
        file=sys.stderr,
        flush=True,
    )


def _is_printed_already(run_failure: RunFailure) -> bool:
    """Whether another rank of this node has printed the message. From now on, it counts as printed."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return False

    first_line = run_failure.message.partition("\n")[0]
    if run_failure.has_died or run_failure.silent:
        # Without the store, the messages of ranks differ in numbers.
        first_line = f"ranks {run_failure.silent}"
    message_hash = hashlib.sha256(first_line.encode()).hexdigest()[:16]
    try:
        # torchrun makes a folder for this start, which contains one folder for each rank.
        (Path(error_file).parent.parent / f"told_{message_hash}").open("x").close()
    except FileExistsError:
        return True
    except OSError:
        pass  # it is better to print the message twice than not at all
    return False


def _print_main_stack() -> None:
    """Prints the stack of this rank's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None:
        main_stack = traceback.extract_stack(frame)
        own_frames = [stack_frame for stack_frame in main_stack[:-2] if "megatron_vl" in stack_frame.filename]
        lines = "".join(traceback.format_list([*own_frames, *main_stack[-2:]]))
        print(f"the stack of the main thread of the rank that hangs:\n{lines}", file=sys.stderr, flush=True)
