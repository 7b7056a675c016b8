"""The failure of one rank ends all ranks, within seconds and with one message.

If one rank fails (because of its replica's data or its part of a checkpoint, say), the others wait for it in
collectives. Over NCCL they wait until the watchdog's timeout after half an hour; over gloo they report that a
connection was closed. So a rank that fails leaves its message in the key-value store of the process group
before it ends. On every other rank a thread waits for that key, prints the message and ends the process,
wherever the main thread is. The first message counts, because later failures usually follow from it.

Steps do not become slower: the threads wait inside the store's server without polling. Each rank holds one
more connection to that server (2 instead of 1, for any number of ranks). The time from the failure to the end
of the last rank is the store's round trip, plus at most ``_SEEN_S`` for ranks that no longer answer and at
most ``_WRITERS_S`` while a checkpoint is being written. No rank ends before all have written, because
launchers end the remaining ranks as soon as one is gone.

The store lives in rank 0, or in the launcher's process. If that is killed, nobody can leave a message: the
threads see the connection close and end their processes with a message of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.errors import TRACEBACK

_SEEN_S = 5.0
"""Seconds that an ending rank waits for all others to read the message, because the store may end with it."""
_WRITERS_S = 60.0
"""Seconds that an ending rank waits for threads that write a checkpoint, on all ranks."""
_HOST_S = 5.0
"""Seconds that the orderly end may be under way on a rank that has lost the store."""


@dataclass(frozen=True)
class Failure:
    """Why a training run ends."""

    rank: int
    """The rank that failed. The empty message of an orderly end also has a rank."""
    message: str
    fixable: bool = True
    """Whether a user can fix it; a traceback would then not help."""


class _Watch:
    """A thread of this rank that waits for the failure of another rank."""

    def __init__(self, number: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.key = f"megatron_vl/failure/{number}"
        # The thread needs a separate connection, because the main thread may be waiting in its own for a lost
        # rank. Both are opened at the start: connecting to a server that has ended blocks until a timeout.
        self.store = default_store().clone()
        self.leaving = threading.RLock()
        self.orderly = threading.Event()
        """Set when this rank has come to the orderly end."""
        self.thread = threading.Thread(target=self._run, name="failures", daemon=True)
        self.thread.start()

    def publish(self, store: Any, message: str, fixable: bool = True) -> Failure:
        """Publishes ``message`` unless another was published earlier. Returns the first one."""
        mine = json.dumps(asdict(Failure(self.rank, message, fixable)))
        return _read(store.compare_set(self.key, "", mine))

    def wait(self, store: Any, seconds: float) -> Failure | None:
        """The first failure, or None after ``seconds``. Raises RuntimeError if the store has ended."""
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
                return  # the host of the store has ended before this rank, and well
            failure = Failure(self.rank, _host_is_gone(), fixable=False)
        if not failure.message or not self.leaving.acquire(blocking=False):
            return  # an orderly end, or the main thread is already ending the process
        tell_once(failure)
        self.leave(self.store)

    def meet(self, store: Any, where: str, seconds: float) -> bool:
        """Waits until all ranks are here. Returns whether they came: one that does not has ended, or the
        store has."""
        place = f"{self.key}/{where}"
        everyone = f"{place}/all"
        try:
            if store.add(place, 1) == self.world:
                store.set(everyone, "1")
            store.wait([everyone], timedelta(seconds=seconds))
        except RuntimeError:
            return False
        return True

    def leave(self, store: Any) -> None:
        """Ends the process without running destructors of communicators, whose peers may be gone."""
        deadline = time.monotonic() + _WRITERS_S
        all_seen = self.meet(store, "seen", _SEEN_S)

        for thread in threading.enumerate():
            if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
                thread.join(max(0.0, deadline - time.monotonic()))
        if all_seen:
            self.meet(store, "done", max(_SEEN_S, deadline - time.monotonic()))

        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _host_is_gone() -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the process that keeps the store of all ranks ({place}: rank 0, or the launcher) is gone. It was"
        " killed, or its node is lost; start again to continue from the latest checkpoint"
    )


def _read(value: bytes) -> Failure:
    return Failure(**json.loads(value))


_watch: _Watch | None = None
_started = 0


def watch() -> None:
    """From now on, the failure of any rank ends this one. Call it on all ranks, with a process group."""
    global _watch, _started
    import torch.distributed as dist

    if dist.get_world_size() > 1 and _watch is None:
        _started += 1
        _watch = _Watch(_started)


def stop() -> None:
    """Ends the threads of all ranks in an orderly way. Call it on all ranks after a barrier."""
    global _watch
    if _watch is None:
        return

    _watch.orderly.set()
    try:
        _watch.publish(default_store(), "")
    except RuntimeError:
        pass  # the rank that hosts the store has ended before this one
    else:
        _watch.meet(default_store(), "stopped", _SEEN_S)  # the host's end would look like its death elsewhere
    _watch.thread.join(_SEEN_S)
    _watch = None


def report(message: str, fixable: bool = True) -> Failure:
    """Publishes this rank's failure. Returns the failure to print: the first of any rank.

    The caller prints it and then calls :func:`leave`.
    """
    own = Failure(int(os.environ.get("RANK", "0")), message, fixable)
    if _watch is None:
        return own
    _watch.leaving.acquire()  # does not return if the thread is already ending the process
    try:
        first = _watch.publish(default_store(), message, fixable)
    except RuntimeError:
        return own  # the store's server has ended
    return first if first.message else own  # others may have come to the orderly end


def cause(seconds: float = _SEEN_S) -> str | None:
    """Why another rank that is known to have failed did so; None if that does not become known in time."""
    if _watch is None:
        return None
    try:
        failure = _watch.wait(default_store(), seconds)
    except RuntimeError:
        return None
    return failure.message if failure else None


def leave() -> None:
    """Ends this process with exit code 1 once the others know why. Returns only if there are no others."""
    if _watch is not None:
        _watch.leave(default_store())


def tell_once(failure: Failure) -> None:
    """Prints why the training ends. Of this node's ranks, only the first with this message prints it."""
    message = failure.message.partition("\n")[0]
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # torchrun makes one folder for this start, and in it one for each rank.
        mark = Path(error_file).parent.parent / f"told_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
        try:
            mark.open("x").close()
        except FileExistsError:
            return
        except OSError:
            pass  # better printed twice than never

    hint = f"\n({TRACEBACK}=1 shows where)" if failure.fixable and not os.environ.get(TRACEBACK) else ""
    print(f"megatron_vl.train: rank {failure.rank}: {failure.message}{hint}", file=sys.stderr, flush=True)
