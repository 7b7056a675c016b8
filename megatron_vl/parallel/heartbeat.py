"""Detects ranks that are dead or hang: every rank regularly reports its progress to rank 0.

A rank that is killed cannot write a message. Neither does a rank that is stopped, or whose file system hangs.
So a thread of each rank holds a connection to rank 0. When the connection ends, rank 0 knows at once that
the process has ended, on any node and however it was started. Over the connection, the rank sends lines with
its progress (see :mod:`megatron_vl.system.progress`): one per second in small jobs, and fewer in large jobs,
so that rank 0 reads at most :data:`MAX_LINES_PER_S` lines per second. Neither the store nor collectives are
involved.

A run hangs if no rank makes progress for ``timeout_s``: no row, no micro-batch, no part of a file. A rank
that waits for another one is not at fault. The diagnosis names the ranks that sent no lines, because they are
stopped or their node is lost. If there are none, it names the ranks with the least progress, because the
others wait for them. Until the first step is done, the limit is :data:`SLOW_START_FACTOR` times as long, and
at least :data:`MIN_SLOW_START_S`, because kernels are compiled and tuned. The same limit holds while training
waits for a disk to confirm a file of a checkpoint, which shows no progress before it is done. The clock does
not run while the main thread of a rank is in a Python debugger.

The other ranks watch rank 0 in the same way: it sends its own lines to all of them.
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
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.system import progress
from megatron_vl.system.progress import RankProgress

MAX_LINES_PER_S = 128
"""Largest number of lines per second that rank 0 reads: 4,096 ranks send one line every 32 seconds."""
SLOW_START_FACTOR, MIN_SLOW_START_S = 3, 300.0
"""Until the first step is done, and while a disk confirms a file, the limit is this many times as long, and
at least this many seconds."""
CONNECT_TIMEOUT_S = 60.0
"""Seconds for which a rank tries to reach rank 0."""
_GATHER_LOST_S = 0.3
"""Seconds to wait for more ranks to be lost, because the ranks of a node are lost together."""
_MAX_LINE_BYTES = 1 << 14
"""Largest number of bytes in a line."""
_MAX_NAMED_RANKS = 8
"""Largest number of ranks that a message names one by one."""


@dataclass(frozen=True)
class RankProcess:
    """A process, identified so that it cannot be confused with a later one of the same id."""

    host_name: str
    pid: int
    machine_id: str
    """The boot of the machine and the namespace of process ids. Where it is equal, ``pid`` means the same."""
    start_time: float
    """When the process started, in seconds since the epoch."""

    def is_local(self) -> bool:
        """Whether the process runs on the machine of the current process."""
        return self.machine_id == _machine_id()

    def is_running(self) -> bool:
        """Whether the process is known to run, which only the machine of the current process can tell."""
        if self.is_local():
            with contextlib.suppress(psutil.Error):
                system_process = psutil.Process(self.pid)
                is_same = abs(system_process.create_time() - self.start_time) <= 1
                return is_same and system_process.status() != psutil.STATUS_ZOMBIE
        return False

    def kill_tree(self) -> None:
        """Kills the process and its children, if it runs on this machine.

        It sends SIGKILL, because a stopped process does not react to SIGTERM.
        """
        if not self.is_running():
            return
        with contextlib.suppress(psutil.Error):
            system_process = psutil.Process(self.pid)
            for killed_process in [*system_process.children(recursive=True), system_process]:
                with contextlib.suppress(psutil.Error):
                    killed_process.kill()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host_name}"

    def system_state(self) -> str:
        """The system's name of the process's state, if it runs on this machine; otherwise empty."""
        if not self.is_local():
            return ""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status()
        return "gone"


def own_process() -> RankProcess:
    try:
        system_process = psutil.Process()
    except psutil.Error:  # there is no /proc, so that no process can find this one
        return RankProcess(socket.gethostname(), os.getpid(), "", 0.0)
    return RankProcess(socket.gethostname(), system_process.pid, _machine_id(), system_process.create_time())


def _machine_id() -> str:
    id_parts = []
    with contextlib.suppress(OSError):
        id_parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join([*id_parts, socket.gethostname()])


@dataclass
class Heartbeat:
    """The latest line of a rank, and when it arrived."""

    rank: int
    rank_process: RankProcess
    rank_progress: RankProgress
    is_debugged: bool = False
    """Whether the main thread is in a debugger."""
    received_at: float = field(default_factory=time.monotonic)
    """When the line arrived, by this process's monotonic clock in seconds."""

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @staticmethod
    def from_line(heartbeat_line: bytes) -> Heartbeat:
        """The inverse of :meth:`to_line`, for a line that has just arrived.

        Raises ValueError, KeyError or TypeError for any other line.
        """
        fields = json.loads(heartbeat_line)
        return Heartbeat(
            int(fields["rank"]),
            RankProcess(**fields["rank_process"]),
            RankProgress(**fields["rank_progress"]),
            bool(fields["is_debugged"]),
        )


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
    """Whether the rank ended without a message."""
    is_hanging: bool = False
    """Whether the rank is alive but makes no progress."""
    has_traceback_hint: bool = False
    """Whether to say how the traceback is shown."""


def heartbeat_interval_s(world_size: int, timeout_s: float) -> float:
    """Seconds between two lines of a rank, in a run of ``world_size`` ranks."""
    full_interval_s = max(1.0, world_size / MAX_LINES_PER_S)
    return min(full_interval_s, max(0.2, timeout_s / 4)) if timeout_s else full_interval_s


def slow_start_timeout_s(timeout_s: float) -> float:
    """Seconds without progress that are allowed before the first step is done, and while a disk confirms a
    file."""
    return max(SLOW_START_FACTOR * timeout_s, MIN_SLOW_START_S)


class HeartbeatMonitor:
    """The thread of this rank that sends and receives lines. The constructor starts it.

    The constructor is collective, because the other ranks need rank 0's address.

    Args:
        store_key: prefix of the keys in the store under which rank 0 publishes its address.
        timeout_s: seconds without progress after which the run hangs; 0: never.
        on_diagnosis: called once, in the thread, with the diagnosis.
    """

    def __init__(self, store_key: str, timeout_s: float, on_diagnosis: Callable[[RunFailure], None]) -> None:
        import torch.distributed as dist

        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self.on_diagnosis = timeout_s, on_diagnosis
        self.interval_s = heartbeat_interval_s(self.world_size, timeout_s)
        self.silence_limit_s = min(3 * self.interval_s + 5, self.interval_s + timeout_s / 2)
        """Seconds without a line after which a rank is considered stopped."""
        self.rank_process = own_process()
        self.end_event = threading.Event()
        self.diagnosis: RunFailure | None = None
        self.diagnosis_ready = threading.Event()
        """Set when there is a diagnosis."""
        self.progress_clock = _ProgressClock(timeout_s)

        thread_target: Callable[[], None]
        if self.world_size == 1:
            thread_target = self._watch_own_progress
        elif self.rank == 0:
            server_socket, auth_token = _open_server(self.world_size), secrets.token_hex(16)
            default_store().set(
                f"{store_key}/address", json.dumps([server_socket.getsockname()[1], auth_token])
            )
            thread_target = _Rank0Listener(self, server_socket, auth_token).listen_to_ranks
        else:
            server_port, auth_token = json.loads(default_store().get(f"{store_key}/address"))
            thread_target = _RankReporter(self, server_port, auth_token).report_to_rank_0
        self.heartbeat_thread = threading.Thread(target=thread_target, name="signs-of-life", daemon=True)
        self.heartbeat_thread.start()

    def own_heartbeat(self) -> Heartbeat:
        """The current heartbeat of this rank."""
        return Heartbeat(
            self.rank, self.rank_process, dataclasses.replace(progress.current_progress), is_in_debugger()
        )

    def report_diagnosis(self, diagnosis: RunFailure) -> None:
        """Reports a diagnosis, unless this rank has ended."""
        if not self.end_event.is_set():
            self.diagnosis = diagnosis
            self.diagnosis_ready.set()
            self.on_diagnosis(diagnosis)

    def seconds_idle(self, heartbeats: Iterable[Heartbeat]) -> float:
        """Seconds since one of these ranks last made progress. Call it once per interval."""
        return self.progress_clock.seconds_idle(heartbeats, self.interval_s + 1)

    def report_hang(self, heartbeats: dict[int, Heartbeat], idle_s: float) -> bool:
        """Reports a hang if ``idle_s`` seconds without progress are too many. Returns whether it did so."""
        if not self.progress_clock.has_timed_out(idle_s, heartbeats.values()):
            return False
        self.report_diagnosis(diagnose_hang(heartbeats, idle_s, self.silence_limit_s, self.timeout_s))
        return True

    def _watch_own_progress(self) -> None:
        """The thread of a run of one rank, which watches only its own progress."""
        while not self.end_event.wait(self.interval_s):
            own_heartbeat = self.own_heartbeat()
            if self.report_hang({0: own_heartbeat}, self.seconds_idle([own_heartbeat])):
                return

    def stop_monitor(self) -> None:
        """Ends the thread. From now on, the connections of this rank may end."""
        self.end_event.set()


def _open_server(world_size: int) -> socket.socket:
    is_dual_stack = socket.has_dualstack_ipv6()
    address_family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
    try:
        return socket.create_server(
            ("", 0), family=address_family, backlog=world_size, dualstack_ipv6=is_dual_stack
        )
    except OSError:
        return socket.create_server(("", 0), backlog=world_size)


class _ProgressClock:
    """Measures for how long no rank of a set has made progress."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.progress_counts: dict[int, int] = {}
        self.last_progress = self.last_look = time.monotonic()

    def seconds_idle(self, heartbeats: Iterable[Heartbeat], max_pause_s: float) -> float:
        """Seconds since a rank last made progress. Call it at least every ``max_pause_s`` seconds.

        If it was not called for longer, the whole job was stopped, and the clock starts again from 0.
        """
        current_time = time.monotonic()
        was_paused = current_time - self.last_look > max_pause_s + max(5.0, self.timeout_s / 4)
        self.last_look = current_time
        for rank_heartbeat in heartbeats:
            progress_count = rank_heartbeat.rank_progress.progress_count
            if self.progress_counts.get(rank_heartbeat.rank) != progress_count or rank_heartbeat.is_debugged:
                self.progress_counts[rank_heartbeat.rank] = progress_count
                self.last_progress = current_time
        if was_paused:
            self.last_progress = current_time
        return current_time - self.last_progress

    def has_timed_out(self, idle_s: float, heartbeats: Iterable[Heartbeat]) -> bool:
        """Whether ``idle_s`` seconds without progress are too many for what the ranks are doing."""
        if not self.timeout_s:
            return False

        # All ranks take part in a step, so one report is enough. A rank that was stopped in its first step
        # has not reported that step yet.
        first_step_done = is_syncing = is_saving = False
        for heartbeat in heartbeats:
            rank_progress = heartbeat.rank_progress
            first_step_done |= rank_progress.steps_done > 0
            is_syncing |= bool(rank_progress.syncing_file)
            is_saving |= rank_progress.phase == progress.SAVING_CHECKPOINT
        is_slow_phase = not first_step_done or is_syncing and is_saving
        return idle_s > (slow_start_timeout_s(self.timeout_s) if is_slow_phase else self.timeout_s)


class _Rank0Listener:
    """The thread of rank 0: listens to all other ranks."""

    def __init__(
        self, heartbeat_monitor: HeartbeatMonitor, server_socket: socket.socket, auth_token: str
    ) -> None:
        self.heartbeat_monitor = heartbeat_monitor
        self.server_socket = server_socket
        self.auth_token = auth_token
        self.heartbeats: dict[int, Heartbeat] = {}
        self.receive_buffers: dict[socket.socket, bytes] = {}
        self.rank_by_connection: dict[socket.socket, int] = {}
        self.lost_ranks: list[int] = []

    def listen_to_ranks(self) -> None:
        """Receives lines and sends this rank's own, until there is a diagnosis or the monitor ends."""
        heartbeat_monitor = self.heartbeat_monitor
        selector = selectors.DefaultSelector()
        selector.register(self.server_socket, selectors.EVENT_READ)
        next_send = time.monotonic()

        while not heartbeat_monitor.end_event.is_set():
            # A second at most, so that the thread sees the end of the run soon.
            for selector_key, _ in selector.select(min(heartbeat_monitor.interval_s, 1.0)):
                self._serve_socket(selector, selector_key.fileobj)

            # A connection that ended is certain, so it needs no timeout.
            if self.lost_ranks:
                self._gather_lost_ranks(selector)
                heartbeat_monitor.report_diagnosis(diagnose_dead_ranks(self.lost_ranks, self.heartbeats))
                return
            if time.monotonic() < next_send:
                continue

            # The other ranks watch rank 0 by these lines.
            next_send = time.monotonic() + heartbeat_monitor.interval_s
            self.heartbeats[0] = heartbeat_monitor.own_heartbeat()
            self._send_to_all(self.heartbeats[0].to_line())

            # One rank that makes progress is enough: the others may wait for it for a good reason.
            idle_s = heartbeat_monitor.seconds_idle(self.heartbeats.values())
            if heartbeat_monitor.report_hang(self.heartbeats, idle_s):
                return

    def _serve_socket(self, selector: selectors.BaseSelector, ready_socket: Any) -> None:
        """Accepts a new connection, or reads what has arrived on an existing one."""
        if ready_socket is self.server_socket:
            with contextlib.suppress(OSError):
                new_connection, _ = self.server_socket.accept()
                new_connection.setblocking(False)
                self.receive_buffers[new_connection] = b""
                selector.register(new_connection, selectors.EVENT_READ)
            return

        received_bytes = _receive_bytes(ready_socket)
        if received_bytes is None:
            selector.unregister(ready_socket)
            ready_socket.close()
            del self.receive_buffers[ready_socket]
            if ready_socket in self.rank_by_connection:
                self.lost_ranks.append(self.rank_by_connection.pop(ready_socket))
            return

        # The last piece is a line that has not arrived as a whole yet.
        *rank_lines, self.receive_buffers[ready_socket] = (
            self.receive_buffers[ready_socket] + received_bytes
        ).split(b"\n")
        for rank_line in rank_lines:
            self._accept_line(ready_socket, rank_line)
        if len(self.receive_buffers[ready_socket]) > _MAX_LINE_BYTES:
            self.receive_buffers[ready_socket] = b""  # no rank sends such a long line

    def _accept_line(self, rank_connection: socket.socket, rank_line: bytes) -> None:
        """Stores the heartbeat of a line. A line without the token, or of another format, is ignored."""
        token, _, fields = rank_line.partition(b" ")
        if token != self.auth_token.encode():
            return

        with contextlib.suppress(ValueError, KeyError, TypeError):
            rank_heartbeat = Heartbeat.from_line(fields)
            self.rank_by_connection[rank_connection] = rank_heartbeat.rank
            self.heartbeats[rank_heartbeat.rank] = rank_heartbeat

    def _gather_lost_ranks(self, selector: selectors.BaseSelector) -> None:
        """Waits for more lost ranks: those of a node, or those that a launcher ends, are lost together."""
        end_time = time.monotonic() + _GATHER_LOST_S
        while (remaining_s := end_time - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                self._serve_socket(selector, key.fileobj)

    def _send_to_all(self, heartbeat_line: bytes) -> None:
        for rank_connection in self.rank_by_connection:
            # If a rank does not read, its buffer fills, and the line is dropped.
            with contextlib.suppress(OSError):
                rank_connection.send(heartbeat_line)


class _RankReporter:
    """The thread of any other rank: reports its progress to rank 0, and listens to it."""

    def __init__(self, heartbeat_monitor: HeartbeatMonitor, server_port: int, auth_token: str) -> None:
        self.heartbeat_monitor, self.server_port, self.auth_token = heartbeat_monitor, server_port, auth_token
        self.rank_0_heartbeat: Heartbeat | None = None
        self.last_received = 0.0
        """When anything last arrived from rank 0, by this process's monotonic clock in seconds."""
        self.unsent_bytes = self.unread_bytes = b""

    def report_to_rank_0(self) -> None:
        """Sends lines and receives those of rank 0, until there is a diagnosis or the monitor ends."""
        heartbeat_monitor = self.heartbeat_monitor
        rank_0_connection = self._connect_to_rank_0()
        if rank_0_connection is None:
            return

        rank_0_connection.setblocking(False)
        next_send = self.last_received = time.monotonic()
        selector = selectors.DefaultSelector()
        selector.register(rank_0_connection, selectors.EVENT_READ)

        while not heartbeat_monitor.end_event.is_set():
            if selector.select(min(heartbeat_monitor.interval_s, 1.0)) and not self._receive_lines(
                rank_0_connection
            ):
                # The last line says where rank 0 was.
                known_heartbeats = {0: self.rank_0_heartbeat} if self.rank_0_heartbeat else {}
                heartbeat_monitor.report_diagnosis(diagnose_dead_ranks([0], known_heartbeats))
                return
            if time.monotonic() < next_send:
                continue

            next_send = time.monotonic() + heartbeat_monitor.interval_s
            own_heartbeat = heartbeat_monitor.own_heartbeat()
            self._send_heartbeat(rank_0_connection, own_heartbeat)

            # As long as rank 0 sends lines, it decides: it knows the progress of all ranks.
            idle_s = min(
                heartbeat_monitor.seconds_idle([own_heartbeat]), time.monotonic() - self.last_received
            )
            if self.rank_0_heartbeat is not None and heartbeat_monitor.report_hang(
                {0: self.rank_0_heartbeat, heartbeat_monitor.rank: own_heartbeat}, idle_s
            ):
                return

    def _receive_lines(self, rank_0_connection: socket.socket) -> bool:
        """Keeps the latest heartbeat that has arrived. Returns False if the connection has ended."""
        received_bytes = _receive_bytes(rank_0_connection)
        if received_bytes is None:
            return False

        self.last_received = time.monotonic()
        *rank_0_lines, self.unread_bytes = (self.unread_bytes + received_bytes).split(b"\n")
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            self.rank_0_heartbeat = Heartbeat.from_line(rank_0_lines[-1])
        return True

    def _connect_to_rank_0(self) -> socket.socket | None:
        """The connection to rank 0; None, with a note, if rank 0 cannot be reached."""
        rank_0_host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        end_time = time.monotonic() + CONNECT_TIMEOUT_S
        connect_error = ""
        while time.monotonic() < end_time and not self.heartbeat_monitor.end_event.is_set():
            try:
                return socket.create_connection((rank_0_host, self.server_port), timeout=10)
            except OSError as refused_error:
                connect_error = str(refused_error)
                time.sleep(1)

        if not self.heartbeat_monitor.end_event.is_set():
            print(
                f"NOTE: rank {self.heartbeat_monitor.rank} does not reach rank 0 at"
                f" {rank_0_host}:{self.server_port} ({connect_error}). If this rank dies or hangs, only the"
                " timeout of the collectives will show it. Open the ports between nodes",
                file=sys.stderr,
                flush=True,
            )
        return None

    def _send_heartbeat(self, rank_0_connection: socket.socket, own_heartbeat: Heartbeat) -> None:
        """Sends a line, or the rest of an earlier line that did not fit the buffer."""
        line = self.unsent_bytes or self.auth_token.encode() + b" " + own_heartbeat.to_line()
        try:
            self.unsent_bytes = line[rank_0_connection.send(line) :]
        except OSError:
            self.unsent_bytes = line


def _receive_bytes(rank_connection: socket.socket) -> bytes | None:
    """The bytes that have arrived; None if the connection has ended."""
    try:
        return rank_connection.recv(1 << 16) or None
    except (BlockingIOError, InterruptedError):
        return b""
    except OSError:
        return None


def diagnose_dead_ranks(dead_ranks: list[int], heartbeats: dict[int, Heartbeat]) -> RunFailure:
    """The diagnosis of ranks whose connections have ended."""
    dead_ranks = sorted(dead_ranks)
    first_heartbeat = heartbeats.get(dead_ranks[0])
    return RunFailure(
        dead_ranks[0],
        f"{first_heartbeat.rank_process if first_heartbeat else 'the process'} ended without a message: it"
        f" was killed from outside (SIGKILL), or crashed in native code{_other_ranks_text(dead_ranks)}",
        progress.describe_progress(first_heartbeat.rank_progress) if first_heartbeat else "",
        tuple(dead_ranks),
        tuple(heartbeats[rank].rank_process for rank in dead_ranks if rank in heartbeats),
        has_died=True,
    )


def diagnose_hang(
    heartbeats: dict[int, Heartbeat], idle_s: float, silence_limit_s: float, timeout_s: float
) -> RunFailure:
    """The diagnosis of a run in which no rank has made progress for ``idle_s``.

    Args:
        heartbeats: the latest heartbeat of each known rank.
        silence_limit_s: a rank whose latest heartbeat is older, in seconds, is considered stopped.
        timeout_s: ``failures.timeout_s``, for the message.
    """
    limit_hint = f"If the run did not hang, raise failures.timeout_s ({timeout_s:g}; 0: no limit)"
    heard_since = time.monotonic() - silence_limit_s
    silent_ranks = sorted(
        rank for rank, heartbeat in heartbeats.items() if heartbeat.received_at < heard_since
    )
    if silent_ranks:
        return _diagnose_silent_ranks(silent_ranks, heartbeats, limit_hint)

    # Ranks with the least progress are those that the others wait for.
    least_progress = min(map(_progress_order, heartbeats.values()))
    slowest_ranks = sorted(
        rank for rank, heartbeat in heartbeats.items() if _progress_order(heartbeat) == least_progress
    )
    blamed_ranks = slowest_ranks if len(slowest_ranks) < len(heartbeats) else []
    first_heartbeat = heartbeats[slowest_ranks[0]]
    return RunFailure(
        slowest_ranks[0],
        f"{_waiting_text(blamed_ranks, len(heartbeats), idle_s)} ({first_heartbeat.rank_process})."
        f" {_phase_advice(first_heartbeat.rank_progress)}{limit_hint}",
        progress.describe_progress(first_heartbeat.rank_progress),
        processes=tuple(heartbeats[rank].rank_process for rank in blamed_ranks),
        is_hanging=True,
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


def _waiting_text(blamed_ranks: list[int], num_ranks: int, idle_s: float) -> str:
    """Who has made no progress for ``idle_s`` seconds: the blamed ranks, or all if none is blamed."""
    if blamed_ranks:
        return (
            f"it has made no progress for {idle_s:.0f} s, and the others wait for"
            f" it{_other_ranks_text(blamed_ranks)}"
        )
    same_phase_text = ", and all ranks are in the same phase" if num_ranks > 1 else ""
    return f"no rank has made progress for {idle_s:.0f} s{same_phase_text}"


def _phase_advice(rank_progress: RankProgress) -> str:
    """What to look at if a rank hangs in this phase: sentences with a space after them, or nothing."""
    phase_advice = _ADVICE_BY_PHASE.get(rank_progress.phase, "")
    if rank_progress.syncing_file:
        return f"The disk has not confirmed {rank_progress.syncing_file} (fsync). {phase_advice}"
    return phase_advice


def _diagnose_silent_ranks(
    silent_ranks: list[int], heartbeats: dict[int, Heartbeat], limit_hint: str
) -> RunFailure:
    """The diagnosis of ranks that send no lines. Its message ends with ``limit_hint``."""
    first_heartbeat = heartbeats[silent_ranks[0]]
    process_state = first_heartbeat.rank_process.system_state()
    state_text = f"its state is {process_state!r}" if process_state else "it is stopped, or its node is lost"
    return RunFailure(
        silent_ranks[0],
        f"no sign of life for {time.monotonic() - first_heartbeat.received_at:.0f} s: {state_text}"
        f" ({first_heartbeat.rank_process}){_other_ranks_text(silent_ranks)}. {limit_hint}",
        progress.describe_progress(first_heartbeat.rank_progress),
        tuple(silent_ranks),
        tuple(heartbeats[rank].rank_process for rank in silent_ranks),
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


def is_in_debugger() -> bool:
    """Whether the main thread is in a Python debugger."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(("/bdb.py", "/pdb.py")) or "pydevd" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
