"""Detects ranks that are dead or hang: every rank regularly reports its progress to rank 0.

A rank that is killed cannot write a message. Neither does a rank that is stopped, or whose file system hangs.
So a thread of each rank holds a connection to rank 0. When the connection ends, rank 0 knows at once that
the process has ended, on any node and however it was started. Over the connection, the rank sends lines with
its progress (see :mod:`megatron_vl.progress`): one per second in small jobs, and fewer in large jobs, so that
rank 0 reads at most :data:`LINES_A_S` lines per second. Neither the store nor collectives are involved.

A run hangs if no rank makes progress for ``timeout_s``: no row, no micro-batch, no part of a file. A rank
that waits for another one is not at fault. The verdict names the ranks that sent no lines, because they are
stopped or their node is lost. If there are none, it names the ranks with the least progress, because the
others wait for them. Until the first step is done, the limit is :data:`SLOW_START` times as long, and at
least :data:`SLOW_START_S`, because kernels are compiled and tuned. The same limit holds while training waits
for a disk to confirm a file of a checkpoint, which shows no progress before it is done. The clock does not
run while the main thread of a rank is in a Python debugger.

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

from megatron_vl import progress
from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.progress import Progress

LINES_A_S = 128
"""Largest number of lines per second that rank 0 reads: 4,096 ranks send one line every 32 seconds."""
SLOW_START, SLOW_START_S = 3, 300.0
"""The factor by which the limit is longer until the first step is done or while a disk confirms a file, and
its least value in seconds."""
CONNECT_S = 60.0
"""Seconds for which a rank tries to reach rank 0."""
_TOGETHER_S = 0.3
"""Seconds to wait for more ranks to be lost, because the ranks of a node are lost together."""
_LINE = 1 << 14
"""Largest number of bytes in a line."""
_NAMED = 8
"""Largest number of ranks that a message names one by one."""


@dataclass(frozen=True)
class Process:
    """A process, identified so that it cannot be confused with a later one of the same id."""

    host: str
    pid: int
    machine: str
    """The boot of the machine and the namespace of process ids. Where it is equal, ``pid`` means the same."""
    started: float
    """When the process started, in seconds since the epoch."""

    def is_here(self) -> bool:
        """Whether the process runs on the machine of the current process."""
        return self.machine == _machine()

    def kill(self) -> None:
        """Kills the process and its children, if it runs on this machine.

        It sends SIGKILL, because a stopped process does not react to SIGTERM.
        """
        if not self.is_here():
            return
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > 1:
                return
            for one in [*process.children(recursive=True), process]:
                with contextlib.suppress(psutil.Error):
                    one.kill()

    def state(self) -> str:
        """The system's name of the process's state, if it runs on this machine; otherwise empty."""
        if not self.is_here():
            return ""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status()
        return "gone"


def own_process() -> Process:
    process = psutil.Process()
    return Process(socket.gethostname(), process.pid, _machine(), process.create_time())


def _machine() -> str:
    parts = []
    with contextlib.suppress(OSError):
        parts = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join([*parts, socket.gethostname()])


@dataclass
class Sign:
    """The latest line of a rank, and when it arrived."""

    rank: int
    process: Process
    progress: Progress
    debugged: bool = False
    """Whether the main thread is in a debugger."""
    heard_at: float = field(default_factory=time.monotonic)
    """When the line arrived, by this process's monotonic clock in seconds."""

    def line(self) -> bytes:
        fields = {"rank": self.rank, "process": asdict(self.process), "progress": asdict(self.progress)}
        return json.dumps(fields | {"debugged": self.debugged}).encode() + b"\n"

    @staticmethod
    def of(line: bytes) -> Sign:
        """The inverse of :meth:`line`.

        Raises:
            ValueError, KeyError, TypeError: ``line`` is not such a line.
        """
        fields = json.loads(line)
        process, done = Process(**fields["process"]), Progress(**fields["progress"])
        return Sign(int(fields["rank"]), process, done, bool(fields["debugged"]))


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    rank: int
    """The first of the ranks at fault."""
    where: str
    """The rank's coordinates in the layout, its step, and its phase."""
    message: str
    silent: tuple[int, ...] = ()
    """Ranks that are dead or stopped. No rank needs to wait for them."""
    processes: tuple[Process, ...] = ()
    """The processes of the ranks at fault, as far as they are known."""
    died: bool = False
    """Whether the rank ended without a message."""
    hangs: bool = False
    """Whether the rank is alive but makes no progress."""


def interval(world: int, timeout_s: float) -> float:
    """Seconds between two lines of a rank, in a run of ``world`` ranks."""
    wanted = max(1.0, world / LINES_A_S)
    return min(wanted, max(0.2, timeout_s / 4)) if timeout_s else wanted


def longest_s(timeout_s: float) -> float:
    """Seconds without progress that are allowed before the first step is done, and while a disk confirms a
    file."""
    return max(SLOW_START * timeout_s, SLOW_START_S)


class SignsOfLife:
    """The thread of this rank that sends and receives lines. The constructor starts it.

    The constructor is collective, because the other ranks need rank 0's address.

    Args:
        key: prefix of the keys in the store under which rank 0 publishes its address.
        timeout_s: seconds without progress after which the run hangs; 0: never.
        tell: called once, in the thread, with the verdict.
    """

    def __init__(self, key: str, timeout_s: float, tell: Callable[[Verdict], None]) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self.tell = timeout_s, tell
        self.interval = interval(self.world, timeout_s)
        self.silent_s = min(3 * self.interval + 5, self.interval + timeout_s / 2)
        """Seconds without a line after which a rank is considered stopped."""
        self.process = own_process()
        self.ended = threading.Event()
        self.verdict: Verdict | None = None
        self.found = threading.Event()
        """Set when there is a verdict."""

        work: Callable[[], None]
        if self.world == 1:
            work = self._alone
        elif self.rank == 0:
            server, token = _listen(self.world), secrets.token_hex(16)
            default_store().set(f"{key}/address", json.dumps([server.getsockname()[1], token]))
            work = _FirstRank(self, server, token).run
        else:
            port, token = json.loads(default_store().get(f"{key}/address"))
            work = _OtherRank(self, port, token).run
        self.thread = threading.Thread(target=work, name="signs-of-life", daemon=True)
        self.thread.start()

    def own(self) -> Sign:
        """The current sign of this rank."""
        return Sign(self.rank, self.process, dataclasses.replace(progress.now), in_debugger())

    def find(self, verdict: Verdict | None) -> bool:
        """Reports a verdict, if there is one and this rank has not ended. Returns whether it did so."""
        if verdict is None or self.ended.is_set():
            return False
        self.verdict = verdict
        self.found.set()
        self.tell(verdict)
        return True

    def wait_for_verdict(self, seconds: float) -> None:
        """Waits until there is a verdict, at most ``seconds``."""
        self.found.wait(seconds)

    def _alone(self) -> None:
        """The thread of a run of one rank, which watches only its own progress."""
        clock = _Clock(self.timeout_s)
        while not self.ended.wait(self.interval):
            own = self.own()
            seconds = clock.look([own], self.interval + 1)
            if clock.is_over(seconds, [own]):
                self.find(hanging({0: own}, seconds, self.silent_s, self.timeout_s))
                return

    def stop(self) -> None:
        """From now on, the connections of this rank may end."""
        self.ended.set()


def _listen(world: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=both)
    except OSError:
        return socket.create_server(("", 0), backlog=world)


class _Clock:
    """Measures how long none of some ranks has made progress."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.counts: dict[int, int] = {}
        self.last = self.looked = time.monotonic()

    def look(self, signs: Iterable[Sign], pause: float) -> float:
        """Seconds since a rank last made progress. Call it at least every ``pause`` seconds.

        If it was not called for longer, the whole job was stopped, and the clock starts again from 0.
        """
        now = time.monotonic()
        paused = now - self.looked > pause + max(5.0, self.timeout_s / 4)
        self.looked = now
        for sign in signs:
            count = sign.progress.count
            if self.counts.get(sign.rank) != count or sign.debugged:
                self.counts[sign.rank] = count
                self.last = now
        if paused:
            self.last = now
        return now - self.last

    def is_over(self, seconds: float, signs: Iterable[Sign]) -> bool:
        if not self.timeout_s:
            return False
        # All ranks take part in a step. One that was stopped at once has not reported its first step yet.
        known = [sign.progress for sign in signs]
        warm = any(p.steps_done > 0 for p in known)
        waits_for_disk = any(p.syncing for p in known) and any(p.phase == progress.SAVING for p in known)
        return seconds > (self.timeout_s if warm and not waits_for_disk else longest_s(self.timeout_s))


class _FirstRank:
    """The thread of rank 0: listens to all other ranks."""

    def __init__(self, life: SignsOfLife, server: socket.socket, token: str) -> None:
        self.life, self.server, self.token = life, server, token
        self.signs: dict[int, Sign] = {}
        self.buffers: dict[socket.socket, bytes] = {}
        self.ranks: dict[socket.socket, int] = {}
        self.lost: list[int] = []

    def run(self) -> None:
        life, clock = self.life, _Clock(self.life.timeout_s)
        selector = selectors.DefaultSelector()
        selector.register(self.server, selectors.EVENT_READ)
        due = time.monotonic()

        while not life.ended.is_set():
            for key, _ in selector.select(0.1 if self.lost else min(life.interval, 1.0)):
                self._serve(selector, key.fileobj)
            if self.lost:
                self._gather_lost(selector)
                life.find(dead(self.lost, self.signs))
                return
            if time.monotonic() < due:
                continue

            due = time.monotonic() + life.interval
            self.signs[0] = life.own()
            self._send_to_all(self.signs[0].line())
            seconds = clock.look(self.signs.values(), life.interval + 1)
            if clock.is_over(seconds, self.signs.values()):
                life.find(hanging(self.signs, seconds, life.silent_s, life.timeout_s))
                return

    def _serve(self, selector: selectors.BaseSelector, found: Any) -> None:
        if found is self.server:
            with contextlib.suppress(OSError):
                connection, _ = self.server.accept()
                connection.setblocking(False)
                self.buffers[connection] = b""
                selector.register(connection, selectors.EVENT_READ)
            return

        data = _received(found)
        if data is None:
            selector.unregister(found)
            found.close()
            del self.buffers[found]
            if found in self.ranks:
                self.lost.append(self.ranks.pop(found))
            return

        *lines, self.buffers[found] = (self.buffers[found] + data).split(b"\n")
        for line in lines:
            self._hear(found, line)
        if len(self.buffers[found]) > _LINE:
            self.buffers[found] = b""  # no rank sends such a long line

    def _hear(self, connection: socket.socket, line: bytes) -> None:
        token, _, fields = line.partition(b" ")
        if token != self.token.encode():
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):
            sign = Sign.of(fields)
            self.ranks[connection] = sign.rank
            self.signs[sign.rank] = sign

    def _gather_lost(self, selector: selectors.BaseSelector) -> None:
        """Waits for more lost ranks: those of a node, or those that a launcher ends, are lost together."""
        until = time.monotonic() + _TOGETHER_S
        while (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                self._serve(selector, key.fileobj)

    def _send_to_all(self, line: bytes) -> None:
        for connection in self.ranks:
            # If a rank does not read, its buffer fills, and the line is dropped.
            with contextlib.suppress(OSError):
                connection.send(line)


class _OtherRank:
    """The thread of any other rank: reports its progress to rank 0, and listens to it."""

    def __init__(self, life: SignsOfLife, port: int, token: str) -> None:
        self.life, self.port, self.token = life, port, token
        self.zero: Sign | None = None
        self.unsent = b""

    def run(self) -> None:
        life, clock = self.life, _Clock(self.life.timeout_s)
        connection = self._connect()
        if connection is None:
            return
        connection.setblocking(False)
        due, heard_at, buffer = time.monotonic(), time.monotonic(), b""
        selector = selectors.DefaultSelector()
        selector.register(connection, selectors.EVENT_READ)

        while not life.ended.is_set():
            ready = selector.select(min(life.interval, 1.0))
            if ready:
                data = _received(connection)
                if data is None:
                    # The last line says where rank 0 was.
                    life.find(dead([0], {0: self.zero} if self.zero else {}))
                    return
                heard_at = time.monotonic()
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines[-1:]:
                    with contextlib.suppress(ValueError, KeyError, TypeError):
                        self.zero = Sign.of(line)
            if time.monotonic() < due:
                continue

            due = time.monotonic() + life.interval
            own = life.own()
            self._send(connection, own)
            still = min(clock.look([own], life.interval + 1), time.monotonic() - heard_at)
            if self.zero is not None and clock.is_over(still, [own, self.zero]):
                signs = {0: self.zero, life.rank: own}
                life.find(hanging(signs, still, life.silent_s, life.timeout_s))
                return

    def _connect(self) -> socket.socket | None:
        host, until, error = os.environ.get("MASTER_ADDR", "127.0.0.1"), time.monotonic() + CONNECT_S, ""
        while time.monotonic() < until and not self.life.ended.is_set():
            try:
                return socket.create_connection((host, self.port), timeout=10)
            except OSError as refused:
                error = str(refused)
                time.sleep(1)

        if not self.life.ended.is_set():
            print(
                f"NOTE: rank {self.life.rank} does not reach rank 0 at {host}:{self.port} ({error}). If this"
                " rank dies or hangs, only the timeout of the collectives will show it. Open the ports"
                " between nodes",
                file=sys.stderr,
                flush=True,
            )
        return None

    def _send(self, connection: socket.socket, sign: Sign) -> None:
        """Sends a line, or the rest of an earlier line that did not fit the buffer."""
        line = self.unsent or self.token.encode() + b" " + sign.line()
        try:
            self.unsent = line[connection.send(line) :]
        except OSError:
            self.unsent = line


def _received(connection: socket.socket) -> bytes | None:
    """The bytes that have arrived; None if the connection has ended."""
    try:
        return connection.recv(1 << 16) or None
    except (BlockingIOError, InterruptedError):
        return b""
    except OSError:
        return None


def dead(ranks: list[int], signs: dict[int, Sign]) -> Verdict:
    """The verdict on ranks whose connections have ended."""
    ranks = sorted(ranks)
    known = [signs[rank] for rank in ranks if rank in signs]
    first = signs.get(ranks[0])
    process = f"process {first.process.pid} on {first.process.host}" if first else "the process"
    message = (
        f"{process} ended without a message: it was killed from outside (SIGKILL), or crashed in native"
        f" code{_others(ranks)}"
    )
    processes = tuple(sign.process for sign in known)
    where = progress.where(first.progress) if first else ""
    return Verdict(ranks[0], where, message, tuple(ranks), processes, died=True)


def hanging(signs: dict[int, Sign], seconds: float, silent_s: float, timeout_s: float) -> Verdict:
    """The verdict on a run in which no rank has made progress for ``seconds``.

    Args:
        signs: the latest sign of each known rank.
        silent_s: a rank whose latest sign is older is considered stopped.
        timeout_s: the limit, for the message.
    """
    now = time.monotonic()
    silent = sorted(rank for rank, sign in signs.items() if now - sign.heard_at > silent_s)
    limit = f"If the run did not hang, raise failures.timeout_s ({timeout_s:g}; 0: no limit)"
    if silent:
        first = signs[silent[0]]
        state = first.process.state()
        seen = f"its state is {state!r}" if state else "it is stopped, or its node is lost"
        message = (
            f"no sign of life for {now - first.heard_at:.0f} s: {seen} (process {first.process.pid} on"
            f" {first.process.host}){_others(silent)}. {limit}"
        )
        processes = tuple(signs[rank].process for rank in silent)
        return Verdict(silent[0], progress.where(first.progress), message, tuple(silent), processes)

    def far(rank: int) -> tuple[int, int, bool, bool]:
        p = signs[rank].progress
        order = progress.PHASES.index(p.phase) if p.phase in progress.PHASES else 0
        return p.step, order, not p.syncing, p.background != progress.WRITING

    least = min(map(far, signs))
    slowest = sorted(rank for rank in signs if far(rank) == least)
    first = signs[slowest[0]]
    p = first.progress
    if len(slowest) == len(signs):
        same = ", and all ranks are in the same phase" if len(signs) > 1 else ""
        waits = f"no rank has made progress for {seconds:.0f} s{same}"
    else:
        waits = f"it has made no progress for {seconds:.0f} s, and the others wait for it{_others(slowest)}"
    process = f"process {first.process.pid} on {first.process.host}"
    disk = f"The disk has not confirmed {p.syncing} (fsync). " if p.syncing else ""
    message = f"{waits} ({process}). {disk}{_ADVICE.get(p.phase, '')}{limit}"
    processes = tuple(signs[rank].process for rank in slowest) if len(slowest) < len(signs) else ()
    return Verdict(slowest[0], progress.where(p), message, processes=processes, hangs=True)


_ADVICE = {
    progress.SETTING_UP: "Look at the file systems of model.hf, model.checkpoint and checkpoint.dir. ",
    progress.LOADING: "Look at the file system of data.path and at the loader's worker processes. ",
    progress.SHARING: "Look at the network between the ranks. ",
    progress.COMPUTING: (
        "Look at the GPUs (dmesg shows Xid errors) and the network; NCCL_DEBUG=INFO shows its connections. "
    ),
    progress.UPDATING: "Look at the GPUs (dmesg shows Xid errors) and the network. ",
    progress.SAVING: "Look at the file system of checkpoint.dir. ",
    progress.EVALUATING: "Look at the GPUs and the network; eval.interval 0 turns evaluations off. ",
}


def _others(ranks: list[int]) -> str:
    """Text about all ranks but the first, such as ``; the same holds for rank 4, 5 and 6 more``, or empty."""
    rest = ranks[1:]
    if not rest:
        return ""
    more = f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
    return f"; the same holds for rank {', '.join(map(str, rest[:_NAMED]))}{more}"


def in_debugger() -> bool:
    """Whether the main thread is in a Python debugger."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(("/bdb.py", "/pdb.py")) or "pydevd" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
