"""The signals that ask a run to save its state and end.

A cluster sends SIGTERM or SIGUSR1 before it takes the nodes back, and Ctrl-C sends SIGINT. Each sets a flag.
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
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from megatron_vl.processes import children

_MESSAGE_S = 10.0
"""Seconds that a rank whose peer is gone has to say why."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

_asked: list[str] = []
"""Names of the signals that have come, the latest last."""


def take_stop_signals() -> None:
    """Handles the signals from now on. Call it in the main thread of a rank."""
    handle(STOP_SIGNALS, note_request)


def handle(numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]) -> None:
    """Sets a handler for signals, except for a SIGINT that is ignored, as in the background of a script."""
    for number in numbers:
        if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


def asked_to_stop() -> str:
    """The name of the signal that asked this process to stop; empty if none has."""
    return _asked[-1] if _asked else ""


def note_request(number: int, frame: FrameType | None = None) -> None:
    """Handles a signal that asks this process to stop. A second SIGTERM or SIGINT ends it."""
    name = signal.Signals(number).name
    if number != signal.SIGUSR1 and name in _asked:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if number == signal.SIGTERM and _peer_is_gone():
        end = threading.Timer(_MESSAGE_S, os._exit, (128 + number,))
        end.daemon = True
        end.start()
    if number == signal.SIGINT and _is_alone():
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


_PR_SET_PDEATHSIG = 1
"""Linux's prctl: the signal that a process gets when its parent ends."""


def shield_loader_worker(seconds: int = 30) -> None:
    """Delays the end of a loader's worker process after SIGTERM, which torchrun sends to the workers too, and
    after the SIGINT of a terminal if the rank takes it as a request to stop.

    The rank needs its workers until it has saved the loader's state. When the rank has died, they end with
    it; a stopped one would stay otherwise. Call it in a fork, which has the handlers of its rank.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(seconds) and None)
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
