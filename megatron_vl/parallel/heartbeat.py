"""Detects ranks that are dead or hang: every rank regularly reports its progress to rank 0.

A rank that is killed cannot write a message. Neither does a rank that is stopped, or whose file system hangs.
So a thread of each rank holds a connection to rank 0. When the connection ends, rank 0 knows at once that
the process has ended, on any node and however it was started. Over the connection, the rank sends lines with
its progress (see :mod:`megatron_vl.system.progress`): one per second in small jobs, and fewer in large jobs,
so that rank 0 reads at most :data:`MAX_LINES_PER_S` lines per second. Rank 0 sends its own lines to all
others, which watch it in the same way. Neither the store nor collectives are involved.

A run hangs if no rank makes progress for ``timeout_s``: no row, no micro-batch, no part of a file. A rank
that waits for another one is not at fault (see :func:`diagnose_hang`). Until
the first step is done, the limit is :data:`SLOW_START_FACTOR` times as long, and at least
:data:`MIN_SLOW_START_S`, because kernels are compiled and tuned. The same limit holds while training waits
for a disk to confirm a file of a checkpoint, which shows no progress before it is done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.system import progress
from megatron_vl.system.processes import RankProcess, own_process
from megatron_vl.system.progress import RankProgress

MAX_LINES_PER_S = 128
"""Largest number of lines per second that rank 0 reads: 4,096 ranks send one line every 32 seconds."""
SLOW_START_FACTOR, MIN_SLOW_START_S = 3, 300.0
"""Until the first step is done, and while a disk confirms a file, the limit is this many times as long, and
at least this many seconds."""
CONNECT_TIMEOUT_S = 60.0
_GATHER_LOST_S = 0.3
"""Seconds to wait for more ranks to be lost."""
_MAX_LINE_BYTES = 1 << 14
_MAX_NAMED_RANKS = 8


def slow_start_timeout_s(timeout_s: float) -> float:
    """Seconds without progress that are allowed before the first step is done, and while a disk confirms a
    file."""
    return max(SLOW_START_FACTOR * timeout_s, MIN_SLOW_START_S)


@dataclass
class Heartbeat:
    """The latest line of a rank, and when it arrived."""

    rank: int
    rank_process: RankProcess
    rank_progress: RankProgress
    received_at: float = field(default_factory=time.monotonic)
    """When the line arrived, by this process's monotonic clock in seconds."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(line: bytes) -> Heartbeat:
        """The inverse of :meth:`to_line`, for a line that has just arrived.

        Raises ValueError, KeyError or TypeError for any other line.
        """
        fields = json.loads(line)
        parts = RankProcess(**fields["rank_process"]), RankProgress(**fields["rank_progress"])
        return Heartbeat(int(fields["rank"]), *parts)


@dataclass(frozen=True)
class RunFailure:
    """Why a training run ends."""

    rank: int
    """The rank that failed, the first one if there are several. The empty message of an orderly end also has
    a rank."""
    message: str
    position_text: str = ""
    """The rank's coordinates in the layout, its step, and its phase; empty before the layout is known."""
    silent: tuple[int, ...] = ()
    """Ranks that are dead or stopped. No rank needs to wait for them."""
    processes: tuple[RankProcess, ...] = ()
    """Processes of the ranks that are dead, are stopped, or hang, as far as they are known."""
    has_died: bool = False
    is_hanging: bool = False
    """Whether the rank is alive but makes no progress."""
    has_traceback_hint: bool = False

    @staticmethod
    def from_json(text: bytes) -> RunFailure:
        fields = json.loads(text)
        processes = tuple(RankProcess(**process) for process in fields["processes"])
        return RunFailure(**fields | {"silent": tuple(fields["silent"]), "processes": processes})


class HeartbeatMonitor:
    """The thread of this rank that sends and receives lines. The constructor starts it.

    The constructor is collective, because the other ranks need rank 0's address.

    Args:
        timeout_s: seconds without progress after which the run hangs; 0: never.
        on_diagnosis: called once, in the thread, with the diagnosis.
    """

    def __init__(self, store_key: str, timeout_s: float, on_diagnosis: Callable[[RunFailure], None]) -> None:
        import torch.distributed as dist

        self.rank, world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self.on_diagnosis = timeout_s, on_diagnosis
        self.interval_s = max(1.0, world_size / MAX_LINES_PER_S)
        """Seconds between two lines of a rank."""
        if timeout_s:
            self.interval_s = min(self.interval_s, max(0.2, timeout_s / 4))
        self.silence_limit_s = min(3 * self.interval_s + 5, self.interval_s + timeout_s / 2)
        """Seconds without a line after which a rank is considered stopped."""
        self.rank_process = own_process()
        self.end_event = threading.Event()
        """Set when this monitor ends. From then on, the connections of this rank may end."""
        self.diagnosis: RunFailure | None = None
        self.diagnosis_ready = threading.Event()

        self.heartbeats: dict[int, Heartbeat] = {}
        """The latest heartbeat of this rank and of each rank that it hears: all on rank 0, else rank 0."""
        self.links = _Links(self._accept_line)
        self.token = secrets.token_hex(16)
        """What each line begins with, so that a stranger at the port is not heard."""
        rank_0_port = 0
        if world_size > 1:
            if self.rank == 0:
                rank_0_port = self.links.listen(world_size)
                default_store().set(f"{store_key}/address", json.dumps([rank_0_port, self.token]))
            else:
                rank_0_port, self.token = json.loads(default_store().get(f"{store_key}/address"))
        threading.Thread(target=self._watch, args=(rank_0_port,), name="heartbeat", daemon=True).start()

    def _watch(self, rank_0_port: int) -> None:
        """Sends and receives lines until there is a diagnosis or the monitor ends."""
        if self.rank != 0 and not self._connect_to_rank_0(rank_0_port):
            return
        clock = ProgressClock(self.timeout_s)
        next_send = time.monotonic()
        while not self.end_event.is_set():
            # A second at most, so that the thread sees the end of the run soon.
            self.links.receive(min(self.interval_s, 1.0))
            # A connection that ended is certain, so it needs no timeout.
            if self.links.lost_ranks:
                # Ranks of a node, or those that a launcher ends, are lost together.
                end_time = time.monotonic() + _GATHER_LOST_S
                while (remaining_s := end_time - time.monotonic()) > 0:
                    self.links.receive(remaining_s)
                self._report(diagnose_dead_ranks(self.links.lost_ranks, self.heartbeats))
                return
            if time.monotonic() < next_send:
                continue

            next_send = time.monotonic() + self.interval_s
            self.heartbeats[self.rank] = Heartbeat(
                self.rank, self.rank_process, dataclasses.replace(progress.current_progress)
            )
            self.links.send_to_all(self.token.encode() + b" " + self.heartbeats[self.rank].to_line())

            # One rank that makes progress is enough: the others may wait for it for a good reason.
            idle_s = clock.seconds_idle(self.heartbeats.values(), self.interval_s + 1)
            if self.rank != 0:
                # As long as rank 0 sends lines, it decides: it knows the progress of all ranks.
                heard = self.heartbeats.get(0)
                idle_s = min(idle_s, time.monotonic() - heard.received_at) if heard else 0.0
            if clock.has_timed_out(idle_s, self.heartbeats.values()):
                self._report(diagnose_hang(self.heartbeats, idle_s, self.silence_limit_s, self.timeout_s))
                return

    def _accept_line(self, line: bytes) -> int | None:
        """Stores the heartbeat of a line and returns its rank.

        None: the line, which is ignored, is without the token or of another format.
        """
        token, _, fields = line.partition(b" ")
        if token != self.token.encode():
            return None
        try:
            heartbeat = Heartbeat.from_line(fields)
        except (ValueError, KeyError, TypeError):
            return None
        self.heartbeats[heartbeat.rank] = heartbeat
        return heartbeat.rank

    def _report(self, diagnosis: RunFailure) -> None:
        if not self.end_event.is_set():
            self.diagnosis = diagnosis
            self.diagnosis_ready.set()
            self.on_diagnosis(diagnosis)

    def _connect_to_rank_0(self, port: int) -> bool:
        """Connects to rank 0. Returns False, with a note, if it cannot be reached."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        end_time, reason = time.monotonic() + CONNECT_TIMEOUT_S, ""
        while time.monotonic() < end_time and not self.end_event.is_set():
            try:
                self.links.add(socket.create_connection((host, port), timeout=10), rank=0)
                return True
            except OSError as error:
                reason = str(error)
                time.sleep(1)
        if not self.end_event.is_set():
            print(
                f"NOTE: rank {self.rank} does not reach rank 0 at {host}:{port} ({reason}). If this rank dies"
                " or hangs, only the timeout of the collectives will show it. Open the ports between nodes",
                file=sys.stderr,
                flush=True,
            )
        return False


class _Links:
    """The connections of a rank to the ranks that it hears."""

    def __init__(self, accept_line: Callable[[bytes], int | None]) -> None:
        self.accept_line = accept_line
        self.selector = selectors.DefaultSelector()
        self.server: socket.socket | None = None
        self.unread: dict[socket.socket, bytes] = {}
        """The beginning of a line, by the connection on which it arrived."""
        self.ranks: dict[socket.socket, int] = {}
        self.lost_ranks: list[int] = []

    def listen(self, world_size: int) -> int:
        """Accepts connections from now on. Returns the port."""
        dual_stack = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual_stack else socket.AF_INET
        try:
            self.server = socket.create_server(
                ("", 0), family=family, backlog=world_size, dualstack_ipv6=dual_stack
            )
        except OSError:
            self.server = socket.create_server(("", 0), backlog=world_size)
        self.selector.register(self.server, selectors.EVENT_READ)
        return self.server.getsockname()[1]

    def add(self, connection: socket.socket, rank: int | None = None) -> None:
        connection.setblocking(False)
        self.unread[connection] = b""
        if rank is not None:
            self.ranks[connection] = rank
        self.selector.register(connection, selectors.EVENT_READ)

    def receive(self, wait_s: float) -> None:
        """Accepts connections and reads lines, after waiting for the first for up to ``wait_s`` seconds."""
        for key, _ in self.selector.select(wait_s):
            ready: Any = key.fileobj
            if key.fileobj is self.server:
                with contextlib.suppress(OSError):
                    self.add(ready.accept()[0])
            else:
                self._read(ready)

    def _read(self, connection: socket.socket) -> None:
        try:
            received = connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if not received:
            self.selector.unregister(connection)
            connection.close()
            del self.unread[connection]
            if connection in self.ranks:
                self.lost_ranks.append(self.ranks.pop(connection))
            return

        # The last piece is a line that has not arrived as a whole yet.
        *lines, rest = (self.unread[connection] + received).split(b"\n")
        self.unread[connection] = rest if len(rest) <= _MAX_LINE_BYTES else b""  # no rank sends as much
        for line in lines:
            if (rank := self.accept_line(line)) is not None:
                self.ranks[connection] = rank

    def send_to_all(self, line: bytes) -> None:
        for connection in self.ranks:
            # If a rank does not read, its buffer fills, and the line is dropped.
            with contextlib.suppress(OSError):
                connection.send(line)


class ProgressClock:
    """Measures for how long no rank of a set has made progress."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.progress_counts: dict[int, int] = {}
        self.last_progress = self.last_look = time.monotonic()

    def seconds_idle(self, heartbeats: Iterable[Heartbeat], max_pause_s: float) -> float:
        """Seconds since a rank last made progress. Call it at least every ``max_pause_s`` seconds.

        If it was not called for longer, the whole job was stopped, and the clock starts again from 0.
        """
        now = time.monotonic()
        if now - self.last_look > max_pause_s + max(5.0, self.timeout_s / 4):
            self.last_progress = now
        self.last_look = now
        for heartbeat in heartbeats:
            count = heartbeat.rank_progress.progress_count
            if self.progress_counts.get(heartbeat.rank) != count:
                self.progress_counts[heartbeat.rank] = count
                self.last_progress = now
        return now - self.last_progress

    def has_timed_out(self, idle_s: float, heartbeats: Iterable[Heartbeat]) -> bool:
        """Whether ``idle_s`` seconds without progress are too many for what the ranks are doing."""
        if not self.timeout_s or idle_s <= self.timeout_s:
            return False
        # All ranks take part in a step, so one report is enough. A rank that was stopped in its first step
        # has not reported that step yet.
        seen = [heartbeat.rank_progress for heartbeat in heartbeats]
        is_saving = any(each.phase == progress.SAVING_CHECKPOINT for each in seen)
        waits_for_disk = is_saving and any(each.syncing_file for each in seen)
        is_slow_phase = waits_for_disk or not any(each.steps_done for each in seen)
        return not is_slow_phase or idle_s > slow_start_timeout_s(self.timeout_s)


# --- Who is at fault ----------------------------------------------------------------------------------------


def diagnose_dead_ranks(dead_ranks: list[int], heartbeats: dict[int, Heartbeat]) -> RunFailure:
    dead_ranks = sorted(dead_ranks)
    first = heartbeats.get(dead_ranks[0])
    return RunFailure(
        dead_ranks[0],
        f"{first.rank_process if first else 'the process'} ended without a message: it was killed from"
        f" outside (SIGKILL), or crashed in native code{_other_ranks_text(dead_ranks)}",
        progress.describe_progress(first.rank_progress) if first else "",
        tuple(dead_ranks),
        tuple(heartbeats[rank].rank_process for rank in dead_ranks if rank in heartbeats),
        has_died=True,
    )


def diagnose_hang(
    heartbeats: dict[int, Heartbeat], idle_s: float, silence_limit_s: float, timeout_s: float
) -> RunFailure:
    """The diagnosis of a run in which no rank has made progress for ``idle_s``.

    It names the ranks that sent no lines, because they are stopped or their node is lost. If there are none,
    it names the ranks with the least progress, because the others wait for them.

    Args:
        silence_limit_s: a rank whose latest heartbeat is older, in seconds, is considered stopped.
    """
    limit_hint = f"If the run did not hang, raise failures.timeout_s ({timeout_s:g}; 0: no limit)"
    heard_since = time.monotonic() - silence_limit_s
    silent_ranks = sorted(rank for rank, each in heartbeats.items() if each.received_at < heard_since)
    least_progress = min(map(_progress_order, heartbeats.values()))
    slowest_ranks = sorted(
        rank for rank, each in heartbeats.items() if _progress_order(each) == least_progress
    )
    blamed_ranks = silent_ranks or (slowest_ranks if len(slowest_ranks) < len(heartbeats) else [])
    first = heartbeats[(blamed_ranks or slowest_ranks)[0]]
    process, others = first.rank_process, _other_ranks_text(blamed_ranks)

    if silent_ranks:
        state = process.system_state()
        state_text = f"its state is {state!r}" if state else "it is stopped, or its node is lost"
        silent_s = time.monotonic() - first.received_at
        message = f"no sign of life for {silent_s:.0f} s: {state_text} ({process}){others}. {limit_hint}"
    else:
        same_phase = ", and all ranks are in the same phase" if len(heartbeats) > 1 else ""
        waiting_text = f"no rank has made progress for {idle_s:.0f} s{same_phase}"
        if blamed_ranks:
            waiting_text = f"it has made no progress for {idle_s:.0f} s, and the others wait for it{others}"
        advice = _ADVICE_BY_PHASE.get(first.rank_progress.phase, "")
        if syncing := first.rank_progress.syncing_file:
            advice = f"The disk has not confirmed {syncing} (fsync). {advice}"
        message = f"{waiting_text} ({process}). {advice}{limit_hint}"

    return RunFailure(
        first.rank,
        message,
        progress.describe_progress(first.rank_progress),
        silent=tuple(silent_ranks),
        processes=tuple(heartbeats[rank].rank_process for rank in blamed_ranks),
        is_hanging=not silent_ranks,
    )


def _progress_order(heartbeat: Heartbeat) -> tuple[int, int, bool, bool]:
    """A value that is the larger, the further a rank is."""
    rank_progress = heartbeat.rank_progress
    return (
        rank_progress.step,
        progress.PHASES.index(rank_progress.phase) if rank_progress.phase in progress.PHASES else 0,
        not rank_progress.syncing_file,
        rank_progress.background_task != progress.WRITING_CHECKPOINT,
    )


_ADVICE_BY_PHASE = {
    progress.SETTING_UP: "Look at the file systems of model.hf, model.checkpoint and checkpoint.dir. ",
    progress.LOADING_ROWS: "Look at the file system of data.path and at the loader's worker processes. ",
    progress.SHARING_ROWS: "Look at the network between the ranks. ",
    progress.FORWARD_BACKWARD: (
        "Look at the GPUs (dmesg shows Xid errors) and the network; NCCL_DEBUG=INFO shows its connections. "
    ),
    progress.UPDATING_WEIGHTS: "Look at the GPUs (dmesg shows Xid errors) and the network. ",
    progress.SAVING_CHECKPOINT: "Look at the file system of checkpoint.dir. ",
    progress.RUNNING_EVALUATION: "Look at the GPUs and the network; eval.interval 0 turns evaluations off. ",
}


def _other_ranks_text(affected_ranks: list[int]) -> str:
    """Text about all ranks but the first, such as ``; the same holds for rank 4, 5 and 6 more``, or empty."""
    return f"; the same holds for {list_ranks(affected_ranks[1:])}" if affected_ranks[1:] else ""


def list_ranks(ranks: list[int], kind: str = "rank") -> str:
    """Names ranks, or nodes, for instance ``rank 4, 5 and 6 more``."""
    more_text = f" and {len(ranks) - _MAX_NAMED_RANKS} more" if len(ranks) > _MAX_NAMED_RANKS else ""
    return f"{kind} {', '.join(map(str, ranks[:_MAX_NAMED_RANKS]))}{more_text}"
