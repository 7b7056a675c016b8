"""The signals that ask a run to save its state and end.

A cluster sends SIGTERM or SIGUSR1 before it takes the nodes back, Ctrl-C sends SIGINT, and a terminal that is
closed sends SIGHUP. Each sets a flag.
The loop reduces it over all ranks with the loss of the step, so that they save and end together, whichever of
them were signalled. Before the first step they agree on it too, and end without saving. A second SIGTERM or
SIGINT ends the process at once.

torchrun forwards SIGTERM and kills the remaining ranks after 30 seconds. It also sends SIGTERM to the
remaining ranks when one has died. These would wait for the dead rank without end, which :func:`_peer_is_gone`
prevents: they end with its message (see :mod:`megatron_vl.parallel.failures`), or without one after
``_MESSAGE_S``. ``python -m megatron_vl.launch`` has neither problem, because it forwards SIGUSR1 instead.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from megatron_vl.processes import children, end_with_parent

_MESSAGE_S = 10.0
"""Seconds that a rank whose peer is gone has to say why."""

Handler = Callable[[int, FrameType | None], object] | signal.Handlers

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

_asked: list[str] = []
"""Names of the signals that have come, the latest last."""


def take_stop_signals() -> None:
    """Handles the signals from now on. Call it in the main thread of a rank."""
    handle(STOP_SIGNALS, note_request)


def handle(numbers: Iterable[signal.Signals], handler: Handler) -> None:
    """Sets a handler for signals, except for an ignored SIGINT, as in the background of a script, and an
    ignored SIGHUP, as under nohup."""
    for number in numbers:
        may_be_ignored = number in (signal.SIGINT, signal.SIGHUP)
        if not may_be_ignored or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def asked_to_stop() -> str:
    """The name of the signal that asked this process to stop; empty if none has."""
    return _asked[-1] if _asked else ""


def note_request(number: int, frame: FrameType | None = None) -> None:
    """Handles a signal that asks this process to stop. A second SIGTERM or SIGINT ends it."""
    name = signal.Signals(number).name
    if number in (signal.SIGTERM, signal.SIGINT) and name in _asked:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if number == signal.SIGTERM and _peer_is_gone():
        end = threading.Timer(_MESSAGE_S, os._exit, (128 + number,))
        end.daemon = True
        end.start()
    if number == signal.SIGINT and _is_alone():
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, _HINT)  # print() may be what the signal has interrupted
    _asked.append(name)


_HINT = b"megatron_vl.train: SIGINT: the run saves and ends; Ctrl-C again ends it at once, without saving\n"


def _is_alone() -> bool:
    """Whether this process is the only rank of its node and no launcher started it, which would say more."""
    return os.environ.get("LOCAL_WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ


def _peer_is_gone() -> bool:
    """Whether fewer ranks of this node are alive than torchrun started.

    Ranks are the children of torchrun's process that have our command line.
    """
    siblings = children(os.getppid())
    own = siblings.get(os.getpid())
    return list(siblings.values()).count(own) < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if own else False


def shield_loader_worker(seconds: int = 30) -> None:
    """Delays the end of a loader's worker process after SIGTERM, which torchrun sends to the workers too, and
    after the SIGINT or SIGHUP of a terminal if the rank takes it as a request to stop.

    The rank needs its workers until it has saved the loader's state. When the rank has died, they end with
    it; a stopped one would stay otherwise. Call it in a fork, which has the handlers of its rank.
    """
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(seconds) and None)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, signal.SIG_IGN)


class _Output(io.FileIO):
    """A standard stream that becomes /dev/null when nobody can read it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal was closed
                raise

        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return memoryview(data).nbytes


def outlive_readers() -> None:
    """From now on this process and its forks go on if a terminal is closed, or if a program that reads their
    output through a pipe ends, as in ``train ... | head``."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
            continue  # a test's
        stream.flush()
        file = io.BufferedWriter(_Output(number, "wb", closefd=False))
        # Without a buffer (`python -u`), a stream is not line-buffered but written through.
        by_line = stream.line_buffering or stream.write_through or name == "stderr"
        lasting = io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=by_line)
        setattr(sys, name, lasting)
