"""The progress meter of all commands: what is done, the rate and the time left, on standard error."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, TextColumn


@contextlib.contextmanager
def progress(
    total: int, unit: str, description: str, *, done: int = 0, line_interval_s: float = 10.0
) -> Iterator[Callable[..., None]]:
    """A context with a function ``advance(amount, note="")``, which threads may call at the same time.

    A terminal has one line, which is removed at the end. Elsewhere, a line is printed now and then.

    Args:
        total: the whole work; 0: not known.
        unit: "bytes", or what is counted.
        done: how much of it an earlier start has done.
        line_interval_s: least time between two lines where there is no terminal.
    """
    is_terminal = sys.stderr.isatty()
    # Without its own thread: callers fork worker processes.
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        auto_refresh=False,
        # A step may take minutes, and a validation or a save between two of them counts too.
        speed_estimate_period=3600,
        console=Console(stderr=True),
        transient=True,
        disable=not is_terminal,
    )
    bar.add_task(description, total=total or None, completed=done)
    task = bar.tasks[0]
    lock, last_shown = threading.Lock(), time.monotonic()

    def amount_text(amount: float) -> str:
        return decimal(int(amount)) if unit == "bytes" else f"{amount:,.0f} {unit}"

    def rate_text(rate: float) -> str:
        if unit == "bytes" or rate >= 10:
            return f"{amount_text(rate)}/s"
        return f"{1 / rate:.1f} s each" if 0 < rate < 1 else f"{rate:.1f} {unit}/s"

    def advance(amount: int, note: str = "") -> None:
        nonlocal last_shown
        with lock:
            bar.advance(task.id, amount)
            if time.monotonic() - last_shown < (0.2 if is_terminal else line_interval_s):
                return
            last_shown = time.monotonic()
            total_text = f" of {amount_text(total)} ({task.percentage:.0f} %)" if total else ""
            left_text = f", {timedelta(seconds=task.time_remaining)} left" if task.time_remaining else ""
            done_text = amount_text(task.completed)
            if total and unit != "bytes":
                done_text = done_text.removesuffix(f" {unit}")
            line = f"{description}: {done_text}{total_text}, "
            line += f"{rate_text(task.speed or 0)}{left_text}{note and '; ' + note}"
            bar.update(task.id, description=line, refresh=is_terminal)
            if not is_terminal:
                print(line, file=sys.stderr, flush=True)

    with bar:
        bar.console.show_cursor(True)  # a killed process would leave a terminal without one
        yield advance
