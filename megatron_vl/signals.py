"""The signals that ask a run to save its state and end. A cluster sends them before it takes the nodes back.

SIGTERM and SIGUSR1 set a flag. The loop reduces it over all ranks with the loss of the step, so that they
save and end together, whichever of them were signalled. A second SIGTERM ends the process at once.

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
from types import FrameType

from megatron_vl.processes import children

_MESSAGE_S = 10.0
"""Seconds that a rank whose peer is gone has to say why."""

_asked: str = ""


def take_stop_signals() -> None:
    """Handles both signals from now on. Call it in the main thread of a rank."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _ask)


def asked_to_stop() -> str:
    """The name of the signal that asked this process to stop; empty if none has."""
    return _asked


def _ask(number: int, frame: FrameType | None) -> None:
    global _asked
    if number == signal.SIGTERM and _asked == "SIGTERM":
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    if number == signal.SIGTERM and _peer_is_gone():
        end = threading.Timer(_MESSAGE_S, os._exit, (128 + number,))
        end.daemon = True
        end.start()
    _asked = signal.Signals(number).name


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
    """Delays the end of a loader's worker process after SIGTERM, which torchrun sends to the workers too.

    The rank needs its workers until it has saved the loader's state. When the rank has died, they end with
    it; a stopped one would stay otherwise.
    """
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(seconds) and None)
