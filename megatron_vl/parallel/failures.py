"""Ends all ranks within seconds, with one message, when one rank fails.

A rank fails if it raises an error, dies, or hangs. :mod:`megatron_vl.parallel.signs_of_life` detects the last
two.

If one rank fails, for example because of its replica's data or its part of a checkpoint, the others wait for
it in collectives. Over NCCL, they wait for half an hour, until the watchdog's timeout; over gloo, they report
that a connection was closed. So a rank that fails writes its message to the key-value store of the process
group before it ends. On every other rank, a thread waits for that key, prints the message and ends the
process, whatever the main thread is doing. Only the first message is used, because later failures usually
follow from the first one.

Steps do not become slower: the threads wait inside the store's server and do not poll. Each rank holds one
more connection to that server (2 instead of 1, for any number of ranks). The time from the failure to the end
of the last rank is the store's round trip, plus at most ``_SEEN_S`` for ranks that no longer answer, plus at
most ``_WRITERS_S`` while a checkpoint is being written. No rank ends before all have written, because
launchers end the remaining ranks as soon as one has ended. No rank waits for a rank that is dead or stopped.
The ranks of the same node kill a stopped rank. A rank that ends kills its loaders and exports.

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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_vl import host_memory, progress
from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.errors import TRACEBACK, describe, follows, traceback_helps
from megatron_vl.parallel.signs_of_life import Process, SignsOfLife, Verdict
from megatron_vl.processes import kill_children

_SEEN_S = 5.0
"""Seconds that an ending rank waits for all others to read the message, because the store may end with it."""
_WRITERS_S = 60.0
"""Seconds that an ending rank waits for threads that write a checkpoint, on all ranks."""
_HOST_S = 5.0
"""Seconds that a rank which lost the store waits for its main thread to reach the orderly end."""
_STORE_S = 5.0
"""Seconds in which a verdict must reach the store. After that, a rank ends without the others."""
_CAUSE_S = 5.0
"""Seconds that a rank which lost a peer waits for the peer's message."""


@dataclass(frozen=True)
class Failure:
    """Why a training run ends."""

    rank: int
    """The rank that failed. The empty message of an orderly end also has a rank."""
    message: str
    hint: bool = False
    """Whether to say how the traceback is shown."""
    where: str = ""
    """The rank's coordinates in the layout, its step, and its phase; empty before the layout is known."""
    silent: tuple[int, ...] = ()
    """Ranks that are dead or stopped."""
    processes: tuple[Process, ...] = ()
    """Processes of the ranks that are dead, are stopped, or hang."""
    died: bool = False
    """Whether the rank ended without a message."""
    hangs: bool = False
    """Whether the rank is alive but makes no progress."""

    @staticmethod
    def of(verdict: Verdict) -> Failure:
        v = verdict
        return Failure(v.rank, v.message, False, v.where, v.silent, v.processes, v.died, v.hangs)


class _Watch:
    """A thread of this rank that waits for the failure of another rank."""

    def __init__(self, number: int, timeout_s: float) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.key = f"megatron_vl/failure/{number}"
        # The thread needs a separate connection, because the main thread may be waiting in its own for a lost
        # rank. Both are opened at the start: connecting to a server that has ended blocks until a timeout.
        self.store = default_store().clone()
        self.leaving = threading.RLock()
        self.orderly = threading.Event()
        """Set when this rank has reached the orderly end."""
        self.reported: Failure | None = None
        """The result of :func:`report`."""
        self.known: Failure | None = None
        """The first failure of any rank, once this rank knows it."""
        self.thread = threading.Thread(target=self._run, name="failures", daemon=True)
        self.thread.start()
        self.life = SignsOfLife(self.key, timeout_s, self._judge)

    def publish(self, store: Any, failure: Failure) -> Failure:
        """Publishes a failure unless another was published earlier. Returns the first one."""
        first = _read(store.compare_set(self.key, "", json.dumps(asdict(failure))))
        self.known = first if first.message else None
        return first

    def wait(self, store: Any, seconds: float) -> Failure | None:
        """Waits for the first failure; None after ``seconds``. Raises RuntimeError if the store has ended."""
        import torch.distributed as dist

        try:
            store.wait([self.key], timedelta(seconds=seconds))
        except dist.DistStoreError:
            return None
        return _read(store.get(self.key))

    def _run(self) -> None:
        failure = None
        try:
            while failure is None:
                failure = self.wait(self.store, 3600)
        except RuntimeError:
            if self.orderly.wait(_HOST_S):
                return  # the host of the store has ended in an orderly way before this rank
            failure = self._without_store()
        self.known = failure if failure.message else None
        if not failure.message or not self.leaving.acquire(blocking=False):
            return  # an orderly end, or the main thread is already ending the process
        tell_once(failure)
        self.leave(self.store)

    def _without_store(self) -> Failure:
        """The failure to report if the process that keeps the store (rank 0 or the launcher) is gone."""
        verdict = self.life.verdict
        if verdict is None:
            return Failure(self.rank, _host_is_gone(), where=progress.where())
        failure = Failure.of(verdict)
        return dataclasses.replace(failure, message=f"{failure.message}; {_host_is_gone()}")

    def _judge(self, verdict: Verdict) -> None:
        """Publishes a verdict of the signs of life, so that all ranks end with it.

        It uses a separate connection, because other threads may be waiting in both existing ones. If the
        store does not answer, because it lived in the rank that is dead or stopped, this rank ends without
        the others.
        """
        published = threading.Event()

        def publish() -> None:
            with contextlib.suppress(Exception):
                self.publish(default_store().clone(), Failure.of(verdict))
                published.set()

        threading.Thread(target=publish, name="verdict", daemon=True).start()
        if published.wait(_STORE_S) or self.orderly.is_set():
            return  # the thread that waits for failures ends this process
        failure = self._without_store()
        self.known = failure
        if self.leaving.acquire(blocking=False):
            tell_once(failure)
            self.leave(None)

    def meet(self, store: Any, where: str, seconds: float) -> bool:
        """Waits until all ranks have called this method with the same ``where``.

        Returns whether they did so in time. It does not wait for dead or stopped ranks, and it returns False
        if the store has ended.
        """
        key = f"{self.key}/{where}"
        everyone = f"{key}/all"
        silent = self.known.silent if self.known else ()
        try:
            if store.add(key, 1) == self.world - len(silent):
                store.set(everyone, "1")
            store.wait([everyone], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def leave(self, store: Any) -> None:
        """Ends the process without running destructors of communicators, whose peers may be gone.

        Args:
            store: the store; None if it is gone. Then this rank does not wait for others.
        """
        deadline = time.monotonic() + _WRITERS_S
        all_seen = store is not None and self.meet(store, "seen", _SEEN_S)
        known = self.known
        if known is not None and known.silent:
            self._kill(known.processes)

        for thread in threading.enumerate():
            if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
                _join(thread, deadline)
        if all_seen:
            self.meet(store, "done", max(_SEEN_S, deadline - time.monotonic()))

        if known is not None and not all_seen:
            self._kill(known.processes)  # a process that hangs may not be able to end itself
        sys.stdout.flush()
        sys.stderr.flush()
        kill_children()  # loaders and exports; a stopped child would otherwise remain
        os._exit(1)

    def _kill(self, processes: tuple[Process, ...]) -> None:
        for process in processes:
            if process != self.life.process:
                process.kill()


def _join(thread: threading.Thread, deadline: float) -> None:
    """Waits for the end of a thread that another one may just be starting, which ``join`` alone refuses."""
    while time.monotonic() < deadline:
        try:
            thread.join(max(0.0, deadline - time.monotonic()))
            return
        except RuntimeError:  # enumerate() has it already, and it does not run yet
            time.sleep(0.001)


def _host_is_gone() -> str:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the process that keeps the store of all ranks ({address}: rank 0, or the launcher) is gone. It was"
        " killed, or its node is lost; start again to continue from the latest checkpoint"
    )


def _read(value: bytes) -> Failure:
    fields = json.loads(value)
    fields["silent"] = tuple(fields["silent"])
    fields["processes"] = tuple(Process(**process) for process in fields["processes"])
    return Failure(**fields)


_watch: _Watch | None = None
_alone: SignsOfLife | None = None
"""The watch of a run of one rank, which has no other ranks to notify."""
_started = 0


def watch(timeout_s: float = 0.0) -> None:
    """From now on, the failure of any rank ends this one. Call it on all ranks, after the group was made.

    Args:
        timeout_s: seconds in which some rank must make progress (``failures.timeout_s``); 0: no limit. The
            death of a rank is detected in any case.
    """
    global _watch, _alone, _started
    import torch.distributed as dist

    if dist.get_world_size() == 1 and timeout_s:
        _alone = SignsOfLife("", timeout_s, _end_alone)
    if dist.get_world_size() > 1 and _watch is None:
        _started += 1
        _watch = _Watch(_started, timeout_s)


def _end_alone(verdict: Verdict) -> None:
    failure = Failure.of(verdict)
    _print_stack()
    tell_once(failure)
    kill_children()
    os._exit(1)


def stop_alone() -> None:
    """Ends the watch of a run of one rank, whether or not the run failed."""
    global _alone
    if _alone is not None:
        _alone.stop()
    _alone = None


def stop() -> None:
    """Ends the threads of all ranks in an orderly way. Call it on all ranks after a barrier."""
    global _watch
    if _watch is None:
        return

    _watch.orderly.set()
    try:
        _watch.publish(default_store(), Failure(_watch.rank, ""))
    except RuntimeError:
        pass  # the rank that hosts the store has ended before this one
    else:
        # The end of the rank that hosts the store would look like its death to the others.
        _watch.meet(default_store(), "stopped", _SEEN_S)
    _watch.life.stop()
    _watch.thread.join(_SEEN_S)
    _watch = None


def report(error: Exception) -> Failure:
    """Publishes this rank's error. Returns the failure to print: the first one of any rank.

    The caller prints it and then calls :func:`leave`. A second call returns the result of the first one. If
    the error usually follows from the end of another rank, this function waits for that rank's failure.
    """
    rank = int(os.environ.get("RANK", "0"))
    own = Failure(rank, describe(error), traceback_helps(error), where=progress.where())
    if _watch is None:
        return own
    if _watch.reported is not None:
        return _watch.reported

    if follows(error) and cause(_CAUSE_S) is None:
        _watch.life.wait_for_verdict(_CAUSE_S)  # the store may have ended with the rank that kept it
    _watch.leaving.acquire()  # does not return if the thread is already ending the process
    try:
        first = _watch.publish(default_store(), own)
    except RuntimeError:
        first = own if _watch.life.verdict is None else _watch._without_store()
        _watch.known = first
    # The first message is empty if other ranks have reached the orderly end.
    _watch.reported = first if first.message else own
    return _watch.reported


def lost() -> tuple[int, ...]:
    """The ranks that are known to be dead or stopped."""
    return _watch.known.silent if _watch is not None and _watch.known is not None else ()


def cause(seconds: float = _SEEN_S) -> str | None:
    """Why the first rank that failed did so; None if that does not become known within ``seconds``."""
    if _watch is None:
        return None
    try:
        failure = _watch.wait(default_store(), seconds)
    except RuntimeError:
        return None
    return failure.message if failure else None


def leave() -> None:
    """Ends this process with exit code 1 once the other ranks know why. Returns only if there are none."""
    if _watch is not None:
        _watch.leave(default_store())


def tell_once(failure: Failure) -> None:
    """Prints why the training ends. Of the ranks of a node, only the first one with this message prints it.

    The rank that hangs also prints the stack of its main thread.
    """
    if failure.hangs and _watch is not None and failure.rank == _watch.rank:
        _print_stack()
    message = failure.message.partition("\n")[0]
    if failure.died or failure.silent:
        message = f"ranks {failure.silent}"  # without the store, the messages of ranks differ in numbers

    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # torchrun makes a folder for this start, which contains one folder for each rank.
        mark = Path(error_file).parent.parent / f"told_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
        try:
            mark.open("x").close()
        except FileExistsError:
            return
        except OSError:
            pass  # it is better to print the message twice than not at all

    where = f" ({failure.where})" if failure.where else ""
    here = any(process.is_here() for process in failure.processes)
    memory = f". {host_memory.about_kill(here)}" if failure.died else ""
    hint = f"\n({TRACEBACK}=1 shows where)" if failure.hint and not os.environ.get(TRACEBACK) else ""
    print(
        f"megatron_vl.train: rank {failure.rank}{where}: {failure.message}{memory}{hint}",
        file=sys.stderr,
        flush=True,
    )


def _print_stack() -> None:
    """Prints the stack of this rank's main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is not None:
        stack = traceback.extract_stack(frame)
        last = len(stack) - 2
        shown = [one for i, one in enumerate(stack) if i >= last or "megatron_vl" in one.filename]
        lines = "".join(traceback.format_list(shown))
        print(f"the stack of the main thread of the rank that hangs:\n{lines}", file=sys.stderr, flush=True)
