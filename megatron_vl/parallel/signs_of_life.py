"""Who is dead, and who hangs: every rank tells rank 0 now and then what it is doing.

A rank that is killed cannot leave a message, and one that is stopped, or whose file system hangs, leaves none
either. So a thread of each rank holds a connection to rank 0. Its end says at once that a process has ended,
wherever that was, however it was started. Over it goes a line that says how far the rank is (see
:mod:`megatron_vl.progress`), every second in small jobs. In large ones the lines come less often, so that
rank 0 reads at most :data:`LINES_A_S` of them a second. Nothing of it touches the store or a collective.

A run hangs if nothing goes on anywhere for ``timeout_s``: no row, no micro-batch, no part of a file, on any
rank. A rank that waits for another is not at fault. The verdict names the ranks that were not heard of,
because they are stopped or their node is lost. If there are none, it names those that came least far, because
the others wait for them. Before the first step is done the limit is :data:`SLOW_START` times as long (and at
least :data:`SLOW_START_S`), because kernels are compiled and tuned then. A rank whose main thread is in a
Python debugger stops the clock.

The ranks watch rank 0 in the same way, which sends its own lines to all of them.
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
"""Lines that rank 0 reads in a second, at most: 4,096 ranks send one every 32 seconds."""
SLOW_START, SLOW_START_S = 3, 300.0
"""How much longer than usual nothing may go on before the first step is done, and how long at least."""
CONNECT_S = 60.0
"""Seconds that a rank tries to reach rank 0."""
_TOGETHER_S = 0.3
"""Seconds that are waited for further ranks to be lost, because those of a node are lost together."""
_LINE = 1 << 14
"""Bytes of the longest line that is read."""
_NAMED = 8
"""Number of ranks that a message names one by one."""


@dataclass(frozen=True)
class Process:
    """A process, so that nobody mistakes another one for it."""

    host: str
    pid: int
    machine: str
    """The start of the machine and the namespace of process ids: equal where ``pid`` means the same."""
    started: float

    def is_here(self) -> bool:
        return self.machine == _machine()

    def kill(self) -> None:
        """SIGKILL to it and its children, if it runs where this process does. SIGTERM does not reach a
        stopped one."""
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
        """Its state, as the system names it, if it runs where this process does; else empty."""
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
    """What a rank last said, and when."""

    rank: int
    process: Process
    progress: Progress
    debugged: bool = False
    heard_at: float = field(default_factory=time.monotonic)

    def line(self) -> bytes:
        told = {"rank": self.rank, "process": asdict(self.process), "progress": asdict(self.progress)}
        return json.dumps(told | {"debugged": self.debugged}).encode() + b"\n"

    @staticmethod
    def of(line: bytes) -> Sign:
        """Raises ValueError, KeyError, TypeError: this is no such line."""
        told = json.loads(line)
        process, done = Process(**told["process"]), Progress(**told["progress"])
        return Sign(int(told["rank"]), process, done, bool(told["debugged"]))


@dataclass(frozen=True)
class Verdict:
    """Why the run ends."""

    rank: int
    """The first of the ranks at fault."""
    where: str
    message: str
    silent: tuple[int, ...] = ()
    """Ranks that are dead or stopped, for which nobody needs to wait."""
    processes: tuple[Process, ...] = ()
    """Their processes, as far as they are known."""
    died: bool = False
    """Whether the rank has ended without a message."""
    hangs: bool = False
    """Whether the rank is alive, but does not go on."""


def interval(world: int, timeout_s: float) -> float:
    """Seconds between two lines of a rank."""
    wanted = max(1.0, world / LINES_A_S)
    return min(wanted, max(0.2, timeout_s / 4)) if timeout_s else wanted


def longest_s(timeout_s: float) -> float:
    """Seconds without progress that are allowed before the first step is done."""
    return max(SLOW_START * timeout_s, SLOW_START_S)


class SignsOfLife:
    """The thread of this rank. Begins at once; collective, because the others need rank 0's address.

    Args:
        key: prefix of the keys in the store under which rank 0 tells its address.
        timeout_s: seconds without progress after which the run is said to hang; 0: never.
        tell: called once, in the thread, with what was found.
    """

    def __init__(self, key: str, timeout_s: float, tell: Callable[[Verdict], None]) -> None:
        import torch.distributed as dist

        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.timeout_s, self.tell = timeout_s, tell
        self.interval = interval(self.world, timeout_s)
        self.silent_s = min(3 * self.interval + 5, self.interval + timeout_s / 2)
        """Seconds after which a rank that was not heard of does not run."""
        self.process = own_process()
        self.ended = threading.Event()
        self.verdict: Verdict | None = None
        self.found = threading.Event()
        """Set with the verdict."""

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
        return Sign(self.rank, self.process, dataclasses.replace(progress.now), in_debugger())

    def find(self, verdict: Verdict | None) -> bool:
        """Tells a verdict, unless this rank has come to its end. Returns whether there was one."""
        if verdict is None or self.ended.is_set():
            return False
        self.verdict = verdict
        self.found.set()
        self.tell(verdict)
        return True

    def wait_for_verdict(self, seconds: float) -> None:
        """Until there is a verdict, or for so many seconds."""
        self.found.wait(seconds)

    def _alone(self) -> None:
        """A single rank looks at its own clock only."""
        clock = _Clock(self.timeout_s)
        while not self.ended.wait(self.interval):
            own = self.own()
            seconds = clock.look([own], self.interval + 1)
            if clock.is_over(seconds, [own]):
                self.find(hanging({0: own}, seconds, self.silent_s, self.timeout_s))
                return

    def stop(self) -> None:
        """The connections of this rank may end from now on."""
        self.ended.set()


def _listen(world: int) -> socket.socket:
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        return socket.create_server(("", 0), family=family, backlog=world, dualstack_ipv6=both)
    except OSError:
        return socket.create_server(("", 0), backlog=world)


class _Clock:
    """How long nothing has gone on, on some ranks."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.counts: dict[int, int] = {}
        self.last = self.looked = time.monotonic()

    def look(self, signs: Iterable[Sign], pause: float) -> float:
        """Seconds since anything went on. Call it at least every ``pause`` seconds.

        A clock that was not looked at for longer was stopped with the whole job, and begins anew.
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
        warm = all(sign.progress.steps_done > 0 for sign in signs)
        return seconds > (self.timeout_s if warm else longest_s(self.timeout_s))


class _FirstRank:
    """Rank 0: listens to all others."""

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
            self.buffers[found] = b""  # no rank sends such a line

    def _hear(self, connection: socket.socket, line: bytes) -> None:
        token, _, told = line.partition(b" ")
        if token != self.token.encode():
            return
        with contextlib.suppress(ValueError, KeyError, TypeError):
            sign = Sign.of(told)
            self.ranks[connection] = sign.rank
            self.signs[sign.rank] = sign

    def _gather_lost(self, selector: selectors.BaseSelector) -> None:
        """Ranks of one node are lost together, and so are ranks that a launcher ends."""
        until = time.monotonic() + _TOGETHER_S
        while (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                self._serve(selector, key.fileobj)

    def _send_to_all(self, line: bytes) -> None:
        for connection in self.ranks:
            # Of a rank that does not read, the buffer fills; the line is then left out.
            with contextlib.suppress(OSError):
                connection.send(line)


class _OtherRank:
    """Any other rank: tells rank 0 what it does, and listens to it."""

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
                    # The last line tells where rank 0 was.
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
                f"NOTE: rank {self.life.rank} does not reach rank 0 at {host}:{self.port} ({error}): if it"
                " dies or hangs, only the timeout of the collectives says so. Open the ports between nodes",
                file=sys.stderr,
                flush=True,
            )
        return None

    def _send(self, connection: socket.socket, sign: Sign) -> None:
        """Sends a line, or the rest of one that did not fit."""
        line = self.unsent or self.token.encode() + b" " + sign.line()
        try:
            self.unsent = line[connection.send(line) :]
        except OSError:
            self.unsent = line


def _received(connection: socket.socket) -> bytes | None:
    """What has arrived; None: the connection has ended."""
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
    """The verdict on a run in which nothing has gone on for ``seconds``.

    Args:
        signs: the last one of each rank that is known.
        silent_s: ranks that were not heard of for longer do not run.
    """
    now = time.monotonic()
    silent = sorted(rank for rank, sign in signs.items() if now - sign.heard_at > silent_s)
    limit = f"If this was no hang, raise failures.timeout_s ({timeout_s:g}; 0: no limit)"
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

    def far(rank: int) -> tuple[int, int, bool]:
        p = signs[rank].progress
        order = progress.PHASES.index(p.phase) if p.phase in progress.PHASES else 0
        return p.step, order, p.background != progress.WRITING

    least = min(map(far, signs))
    slowest = sorted(rank for rank in signs if far(rank) == least)
    first = signs[slowest[0]]
    p = first.progress
    if len(slowest) == len(signs):
        same = ", and all are at the same place" if len(signs) > 1 else ""
        waits = f"nothing has gone on for {seconds:.0f} s on any rank{same}"
    else:
        waits = f"it has been there for {seconds:.0f} s, and the others wait for it{_others(slowest)}"
    process = f"process {first.process.pid} on {first.process.host}"
    message = f"{waits} ({process}). {_ADVICE.get(p.phase, '')}{limit}"
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
    progress.EVALUATING: "Look at the GPUs and the network; eval.interval 0 leaves evaluations out. ",
}


def _others(ranks: list[int]) -> str:
    """``; the same holds for rank 4, 5 and 6 more``, without the first; empty if it is alone."""
    rest = ranks[1:]
    if not rest:
        return ""
    more = f" and {len(rest) - _NAMED} more" if len(rest) > _NAMED else ""
    return f"; the same holds for rank {', '.join(map(str, rest[:_NAMED]))}{more}"


def in_debugger() -> bool:
    """Whether the main thread stands in a debugger of Python."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.endswith(("/bdb.py", "/pdb.py")) or "pydevd" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False
