"""The signals that ask a run to save its state and end.

A cluster sends SIGTERM or SIGUSR1 before it takes the nodes back, Ctrl-C sends SIGINT, and a terminal that is
closed sends SIGHUP. Each sets a flag. The loop reduces it over all ranks with the loss of the step, so that
all ranks save and end together, whichever of them were signalled. Before the first step they agree on it too,
and end without saving. A second SIGTERM or SIGINT ends the process at once.

torchrun forwards SIGTERM and kills the remaining ranks after 30 seconds. It also sends SIGTERM to the
remaining ranks when one has died; they end with the message of the dead rank (see
:mod:`megatron_vl.parallel.failures`). ``python -m megatron_vl.launch`` forwards SIGUSR1 instead, and waits.
"""

import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from megatron_vl.system.processes import end_with_parent

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

_CTRL_C_HINT = (
    b"megatron_vl.train: SIGINT: the run saves and ends; Ctrl-C again ends it at once, without saving\n"
)
_received_stop_signals: list[str] = []


def handle_stop_signals() -> None:
    """Handles the signals from now on. Call it in the main thread of a rank."""
    set_signal_handler(STOP_SIGNALS, note_stop_request)


def set_signal_handler(
    signal_numbers: Iterable[signal.Signals],
    signal_handler: Callable[[int, FrameType | None], object] | signal.Handlers,
) -> None:
    """Sets a handler for signals. SIGINT and SIGHUP stay ignored if they are.

    SIGINT is ignored in the background of a script, and SIGHUP under nohup.
    """
    for number in signal_numbers:
        if number not in (signal.SIGINT, signal.SIGHUP) or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal_handler)


def exit_on_signals() -> None:
    """Lets SIGTERM and SIGHUP end this process as Ctrl-C does: what it has opened is closed, and temporary
    folders are removed. Its forks end at once."""
    own_pid = os.getpid()

    def end(signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() == own_pid:
            sys.exit(128 + signal_number)
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)

    set_signal_handler((signal.SIGTERM, signal.SIGHUP), end)


def requested_stop_signal() -> str:
    """The name of the signal that asked this process to stop; empty if none has."""
    return _received_stop_signals[-1] if _received_stop_signals else ""


def note_stop_request(signal_number: int, frame: FrameType | None = None) -> None:
    """Handles a signal that asks this process to stop. A second SIGTERM or SIGINT ends it."""
    signal_name = signal.Signals(signal_number).name
    if signal_number in (signal.SIGTERM, signal.SIGINT) and signal_name in _received_stop_signals:
        signal.signal(signal_number, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
    # The only rank of its node, unless a launcher started it that prints a message.
    is_alone = os.environ.get("LOCAL_WORLD_SIZE") == "1" and "TORCHELASTIC_RUN_ID" not in os.environ
    if signal_number == signal.SIGINT and is_alone:
        with contextlib.suppress(OSError):  # nobody reads it
            os.write(2, _CTRL_C_HINT)  # print() may be what the signal has interrupted
    _received_stop_signals.append(signal_name)


def shield_loader_worker() -> None:
    """Keeps a loader's worker alive for 30 seconds after a signal that asks its rank to stop.

    torchrun sends SIGTERM to the workers too, and a terminal sends SIGINT and SIGHUP. The rank needs its
    workers until it has saved the loader's state. When the rank has died, they end with it; otherwise a
    stopped one would stay. Call it in a fork, which has the handlers of its rank.
    """
    end_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(30) and None)
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) not in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(number, signal.SIG_IGN)


class _PipeSafeOutput(io.FileIO):
    """A standard stream that becomes /dev/null when nobody can read it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):  # EIO: the terminal was closed
                raise

        null_descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_descriptor, self.fileno())
        os.close(null_descriptor)
        return memoryview(data).nbytes


def open_missing_streams() -> None:
    """Opens /dev/null for each standard stream that was closed before the start, as by ``2>&-``.

    Python has None for such a stream. The next file that was opened would get its number, and the messages.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def hide_native_warnings() -> None:
    """Hides warnings of torch's C++ unless the user has set their level. Call it before torch is imported.

    If the launcher is killed, each of its connections would print 15 frames before the message of the run.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def survive_closed_outputs() -> None:
    """Lets this process and its forks continue if nobody can read their output any more.

    That is so after a terminal is closed, or when the reader of a pipe ends, as in ``train ... | head``.
    """
    open_missing_streams()
    for name, number in (("stdout", 1), ("stderr", 2)):
        old_stream = getattr(sys, name)
        if not isinstance(old_stream, io.TextIOWrapper) or old_stream.fileno() != number:
            continue  # a test has replaced the stream
        old_stream.flush()
        lasting_stream = io.TextIOWrapper(
            io.BufferedWriter(_PipeSafeOutput(number, "wb", closefd=False)),
            old_stream.encoding,
            old_stream.errors,
            # Without a buffer (`python -u`), a stream is not line-buffered but written through.
            line_buffering=old_stream.line_buffering or old_stream.write_through or name == "stderr",
        )
        setattr(sys, name, lasting_stream)
