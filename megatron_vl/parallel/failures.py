"""The failure of one rank ends all ranks, within seconds and with one message.

Ranks meet in collectives. When one fails alone (its replica's data, its part of a checkpoint), the others
wait there: over NCCL until the watchdog's timeout, half an hour later; over gloo they say that a connection
was closed. Therefore a rank that fails leaves its message in the key-value store of the process group before
it ends. On every other rank a thread waits for that key, prints the message and ends the process, wherever
the main thread is. The first message counts: what fails after it mostly fails because of it.

A step costs nothing: the threads wait inside the store's server, without polling. Each rank holds one more
connection to that server (2 instead of 1, for any number of ranks). From the failure to the last rank's end
it takes the store's round trip, at most ``_SEEN_S`` for ranks that no longer answer, and at most
``_WRITERS_S`` while a checkpoint is still being written. No rank ends before all have written: launchers end
the ranks that are left as soon as one is gone.

The store lives in rank 0, or in the launcher's process. When that is killed, nobody can leave a message: the
threads see the connection close, and end their processes with a message of their own.
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

from megatron_vl.errors import TRACEBACK

_SEEN_S = 5.0
"""How long a rank that ends waits until all others have read the message: the store may end with it."""
_WRITERS_S = 60.0
"""How long a rank that ends waits for threads that write a checkpoint, on all ranks."""
_HOST_S = 5.0
"""How long the orderly end may be under way on a rank that has lost the store."""


@dataclass(frozen=True)
class Failure:
    """Why a training ends."""

    rank: int
    """The rank that failed; the empty message of an orderly end has one too."""
    message: str
    fixable: bool = True
    """Whether it is something that a user can fix, of which a traceback says nothing."""


class _Watch:
    """This rank's thread that waits for a failure of another rank."""

    def __init__(self, number: int) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.key = f"megatron_vl/failure/{number}"
        # A connection of its own: the main thread may wait in its own one for a rank that is gone. Both are
        # there from the start, as connecting to a server that has ended takes until the store's timeout.
        self.store = _store().clone()
        self.leaving = threading.RLock()
        self.orderly = threading.Event()
        """Set when this rank has come to the orderly end."""
        self.thread = threading.Thread(target=self._run, name="failures", daemon=True)
        self.thread.start()

    def publish(self, store: Any, message: str, fixable: bool = True) -> Failure:
        """Makes ``message`` known unless another was earlier. Returns the first one."""
        mine = json.dumps(asdict(Failure(self.rank, message, fixable)))
        return _read(store.compare_set(self.key, "", mine))

    def wait(self, store: Any, seconds: float) -> Failure | None:
        """The first failure, or None after that time. Raises RuntimeError when the store has ended."""
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
            return  # an orderly end, or the main thread is on its way out by itself
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
        """Ends the process, without the destructors of communicators whose other ends are gone."""
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


def _store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _host_is_gone() -> str:
    place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the process that keeps the store of all ranks ({place}: rank 0, or the launcher) is gone. It was"
        " killed, or its node is lost; start again to go on from the latest checkpoint"
    )


def _read(value: bytes) -> Failure:
    return Failure(**json.loads(value))


_watch: _Watch | None = None
_started = 0


def watch() -> None:
    """From now on the failure of any rank ends this one. Once the process group is there, on all ranks."""
    global _watch, _started
    import torch.distributed as dist

    if dist.get_world_size() > 1 and _watch is None:
        _started += 1
        _watch = _Watch(_started)


def stop() -> None:
    """The orderly end: the threads end on all ranks. After a barrier, on all ranks."""
    global _watch
    if _watch is None:
        return

    _watch.orderly.set()
    try:
        _watch.publish(_store(), "")
    except RuntimeError:
        pass  # the rank that hosts the store has ended before this one
    else:
        _watch.meet(_store(), "stopped", _SEEN_S)  # the host's end would look like its death elsewhere
    _watch.thread.join(_SEEN_S)
    _watch = None


def report(message: str, fixable: bool = True) -> Failure:
    """Makes this rank's failure known to the others. Returns the one to speak of: the first of any rank.

    The caller tells it and then calls :func:`leave`.
    """
    own = Failure(int(os.environ.get("RANK", "0")), message, fixable)
    if _watch is None:
        return own
    _watch.leaving.acquire()  # does not return when the thread is already ending the process
    try:
        first = _watch.publish(_store(), message, fixable)
    except RuntimeError:
        return own  # the store's server has ended
    return first if first.message else own  # others may have come to the orderly end


def cause(seconds: float = _SEEN_S) -> str | None:
    """Why another rank, which is known to have failed, did so; None when that is not known in time."""
    if _watch is None:
        return None
    try:
        failure = _watch.wait(_store(), seconds)
    except RuntimeError:
        return None
    return failure.message if failure else None


def leave() -> None:
    """Ends this process with exit code 1 once the others know why. Returns only where there are no others."""
    if _watch is not None:
        _watch.leave(_store())


def tell_once(failure: Failure) -> None:
    """Prints why the training ends; of this node's ranks, only the first with this message does."""
    message = failure.message.partition("\n")[0]
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        # torchrun gives each rank a folder of its own within one of this start's.
        mark = Path(error_file).parent.parent / f"told_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
        try:
            mark.open("x").close()
        except FileExistsError:
            return
        except OSError:
            pass  # better twice than never

    hint = f"\n({TRACEBACK}=1 shows where)" if failure.fixable and not os.environ.get(TRACEBACK) else ""
    print(f"megatron_vl.train: rank {failure.rank}: {failure.message}{hint}", file=sys.stderr, flush=True)
