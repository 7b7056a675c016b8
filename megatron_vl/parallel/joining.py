"""The wait until all ranks of a run have found each other: in slices, so that a signal ends it, and with a
line that says who is missing. torch would wait in native code, silent and deaf to signals."""

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from megatron_vl.parallel.heartbeat import list_ranks, slow_start_timeout_s
from megatron_vl.system.errors import UserError
from megatron_vl.system.signals import requested_stop_signal

NOTE_AFTER_S = 30.0
"""Seconds after which a line says who is missing. Further lines follow, each after twice the time."""
MAX_OPEN_FILES = 65_536
"""Enough for a process of the largest runs: one or two connections to each of some ten thousand ranks."""
_LEFT = 1 << 24
"""A signal that ends the wait makes the count ``joined - _LEFT * signal number``, which is below 0."""


class JoinError(UserError, RuntimeError):
    """The ranks have not found each other in time. The message says which are missing, and where."""


def raise_open_file_limit() -> None:
    """Raises this process's limit on open files to :data:`MAX_OPEN_FILES`, or as far as the system permits.

    The usual limit is 1,024. The server of a store needs more, because it holds two connections to each rank.
    So does a gloo group, which has a connection to each member.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    target_limit = MAX_OPEN_FILES if hard_limit == resource.RLIM_INFINITY else min(hard_limit, MAX_OPEN_FILES)
    if soft_limit != resource.RLIM_INFINITY and soft_limit < target_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target_limit, hard_limit))


def join_limit_s(timeout_s: float) -> float:
    """Seconds that ranks wait for each other at the start, under ``failures.timeout_s``."""
    return slow_start_timeout_s(timeout_s) if timeout_s else 1800.0


class JoinWait:
    """One process's wait for others, of at most ``limit_s`` seconds."""

    def __init__(self, limit_s: float) -> None:
        self.start_time, self.limit_s = time.monotonic(), limit_s
        self.next_note_s, self.pause_s = NOTE_AFTER_S, 0.01

    def pause(self, describe_missing: Callable[[], str], is_reporter: bool = True) -> None:
        """Sleeps for up to a second.

        Raises:
            JoinError: the time is over.
        """
        if (waited_s := time.monotonic() - self.start_time) > self.limit_s:
            raise JoinError(
                f"{describe_missing()}. To wait longer than {self.limit_s:.0f} s, raise failures.timeout_s"
            )
        if waited_s > self.next_note_s:
            self.next_note_s *= 2
            if is_reporter:
                print(f"NOTE: {describe_missing()}", file=sys.stderr, flush=True)
        time.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, 1.0)

    def reach_address(self, host: str, port: int, is_server: bool) -> None:
        """Waits until somebody listens at an address or, for the process that will, until it exists."""
        reason = ""

        def describe_missing() -> str:
            return (
                f"{socket.gethostname()} does not reach {host}:{port}, where the ranks meet ({reason}); check"
                " that the name is right, and that rank 0 runs there"
            )

        while True:
            try:
                if is_server:
                    socket.getaddrinfo(host, port)
                else:
                    socket.create_connection((host, port), timeout=5).close()
                return
            except OSError as error:
                reason = error.strerror or str(error)
            if signal_name := requested_stop_signal():
                stop_early(signal.Signals[signal_name])
            self.pause(describe_missing, is_reporter=os.environ.get("LOCAL_RANK", "0") == "0")


def stop_early(signal_number: int) -> None:
    """Ends this process, which was asked to stop before its first step. Rank 0 says so."""
    if os.environ.get("RANK", "0") == "0":
        print("a signal stopped the run before its first step; nothing was saved", flush=True)
    raise SystemExit(128 + signal_number)


def join_store(rank: int, world_size: int, limit_s: float) -> Any:
    """Opens the store at MASTER_ADDR:MASTER_PORT, which rank 0 or torchrun serves, and waits for all ranks.

    A signal to one of them ends the wait of all, with its number, until the last one has come.

    Raises JoinError or SystemExit.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # torchrun's store outlives a restart of the ranks.
    key = f"megatron_vl/joined/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return join(host, port, is_server, key, "rank", rank, world_size, limit_s)


def join(
    host: str, port: int, is_server: bool, key: str, kind: str, index: int, count: int, limit_s: float
) -> Any:
    """Opens a store, which one of ``count`` processes serves while it keeps the result, and waits for all.

    Args:
        key: begins the names of what the processes write to the store.
        kind: what they are, ``rank`` or ``node``.

    Raises JoinError, as :meth:`JoinWait.pause` does, or SystemExit.
    """
    import torch.distributed as dist

    join_wait = JoinWait(limit_s)
    join_wait.reach_address(host, port, is_server)
    store: Any = dist.TCPStore(
        host, port, None, is_server, timedelta(seconds=20), wait_for_workers=False, multi_tenant=True
    )

    store.append(f"{key}/{kind}s", f"{index} ")
    is_first = store.add(f"{key}/count", 1) == 1

    def describe_missing() -> str:
        missing = sorted(set(range(count)) - set(map(int, store.get(f"{key}/{kind}s").split())))
        return (
            f"{count - len(missing)} of {count} {kind}s have come to {host}:{port}; missing:"
            f" {list_ranks(missing, kind)}. Start them, or look at their nodes"
        )

    while (num_joined := store.add(f"{key}/count", 0)) < count:
        if num_joined < 0:
            if is_server and num_joined % _LEFT > 1:
                time.sleep(2.0)  # the others ask once a second, and the store ends with this process
            stop_early(-(num_joined // _LEFT))
        if signal_name := requested_stop_signal():
            # Not if one more has come meanwhile. If it was the last one, all go on, and stop together later:
            # a rank that left alone would let others wait for it until the launcher kills them.
            store.compare_set(
                f"{key}/count", str(num_joined), str(num_joined - _LEFT * signal.Signals[signal_name])
            )
            continue
        join_wait.pause(describe_missing, is_first)
    return store
