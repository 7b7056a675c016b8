"""Signals that ask a run to save its state and end: what a cluster sends before it takes the nodes back.

SIGTERM and SIGUSR1 set a flag; the loop tells all ranks with the loss of the step, so that they save and end
together, whichever of them were signalled. A second SIGTERM ends the process at once.

torchrun forwards SIGTERM and kills what is left after 30 seconds, and it also sends SIGTERM to the ranks that
are left when one has died: those would wait for the dead one for ever, hence :func:`_peer_is_gone`.
``python -m megatron_vl.launch`` has neither problem, because it forwards SIGUSR1 instead.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from megatron_vl.processes import children

_asked: str = ""


def take_stop_signals() -> None:
    """Takes both signals from now on; for the main thread of a rank."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, _ask)


def asked_to_stop() -> str:
    """The name of the signal that asked this process to stop; empty when none has."""
    return _asked


def _ask(number: int, frame: FrameType | None) -> None:
    global _asked
    if number == signal.SIGTERM and (_asked == "SIGTERM" or _peer_is_gone()):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    _asked = signal.Signals(number).name


def _peer_is_gone() -> bool:
    """Whether fewer ranks of this node are alive than torchrun started: children of its process with our
    command line."""
    siblings = children(os.getppid())
    own = siblings.get(os.getpid())
    return list(siblings.values()).count(own) < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if own else False


def shield_loader_worker(seconds: int = 30) -> None:
    """In a loader's worker process: SIGTERM, which torchrun sends to them too, ends it only after a while.

    The rank needs its workers until it has saved the loader's state.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(seconds) and None)
