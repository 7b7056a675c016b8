"""The progress meter on a terminal and elsewhere."""

import io
import itertools
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vl.system import progress_bar
from megatron_vl.training.hooks import ShowProgress


def replace_stderr(monkeypatch: Any, is_terminal: bool, clock: Callable[[], float]) -> io.StringIO:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_bar.time, "monotonic", clock)
    monkeypatch.setattr("rich.console.monotonic", clock)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return stream


@pytest.mark.parametrize("is_terminal", [True, False])
def test_share_rate_and_time_left_are_shown(monkeypatch, is_terminal):
    stream = replace_stderr(monkeypatch, is_terminal, itertools.count(0.0, 3.0).__next__)
    with progress_bar.progress(4_000_000, "bytes", "converting") as advance:
        for number in range(4):
            advance(1_000_000, f"{number} records")
    said = stream.getvalue()
    if not is_terminal:
        line, *_ = said.splitlines()
        assert line.startswith("converting: ") and " of 4.0 MB (" in line and "\x1b" not in said
        assert "/s" in line and "records" in line
    else:
        assert "converting: 4.0 MB of 4.0 MB (100 %)" in said and "\n\n" not in said


def test_bar_of_a_run_shows_slow_steps_and_the_time_left(monkeypatch):
    """A step takes three minutes, and the run has done 90 of 100 before this start."""
    stream = replace_stderr(monkeypatch, True, itertools.count(0.0, 90.0).__next__)
    with progress_bar.progress(100, "steps", "training", done=90) as advance:
        for _ in range(4):
            advance(1)
        print("step 94/100 | loss 1.0", file=sys.stderr)
    said = stream.getvalue()
    last = said[said.rindex("training: 94 of 100 steps (94 %), ") :]
    assert re.match(r".*, \d+\.0 s each, \d:\d\d:\d\d left ", last), last
    assert "\r\x1b[2Kstep 94/100 | loss 1.0\n" in said, "the bar makes room for a line"
    assert said.rindex("\x1b[?25h") > said.index("\x1b[?25l"), "the cursor is not left hidden"
    assert said.index("\x1b[?25h") < said.index("training: 91"), "not even by a kill"


def test_a_log_of_a_run_has_the_time_left_once_a_minute(monkeypatch):
    """Steps of 25 s: the first line follows the third step, and each of the next two the third after it."""
    seconds = [0.0]
    stream = replace_stderr(monkeypatch, False, lambda: seconds[0])
    hook = ShowProgress()
    hook.begin(SimpleNamespace(step=0, last_step=10))
    for _ in range(9):
        seconds[0] += 25.0
        hook.after_step(None, None, None)
    hook.end(None, has_failed=False)
    assert stream.getvalue().splitlines() == [
        "training: 3 of 10 steps (30 %), 25.0 s each, 0:02:55 left",
        "training: 6 of 10 steps (60 %), 25.0 s each, 0:01:40 left",
        "training: 9 of 10 steps (90 %), 25.0 s each, 0:00:25 left",
    ]
