"""The progress meter of all commands: what is done, the rate and the time left, on standard error."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn


@contextlib.contextmanager
def progress(total: int, unit: str, description: str) -> Iterator[Callable[..., None]]:
    """A context with a function ``advance(amount, note="")``, which threads may call at the same time.

    A terminal has one line, which is removed at the end. Elsewhere, a line is printed every 10 seconds.

    Args:
        total: the whole work; 0: not known.
        unit: "bytes", or what is counted.
    """
    is_terminal = sys.stderr.isatty()
    # Without its own thread: callers fork worker processes.
    columns = (TextColumn("{task.description}", markup=False), BarColumn())
    console = Console(stderr=True)
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=not is_terminal)
    bar.add_task(description, total=total or None)
    task = bar.tasks[0]
    lock, last_shown = threading.Lock(), time.monotonic()

    def amount_text(amount: float) -> str:
        return decimal(int(amount)) if unit == "bytes" else f"{amount:,.0f} {unit}"

    def advance(amount: int, note: str = "") -> None:
        nonlocal last_shown
        with lock:
            bar.advance(task.id, amount)
            if time.monotonic() - last_shown < (0.2 if is_terminal else 10.0):
                return
            last_shown = time.monotonic()
            total_text = f" of {amount_text(total)} ({task.percentage:.0f} %)" if total else ""
            left_text = f", {task.time_remaining:,.0f} s left" if task.time_remaining else ""
            line = f"{description}: {amount_text(task.completed)}{total_text}, "
            line += f"{amount_text(task.speed or 0)}/s{left_text}{note and '; ' + note}"
            bar.update(task.id, description=line, refresh=is_terminal)
            if not is_terminal:
                print(line, file=sys.stderr, flush=True)

    with bar:
        yield advance
