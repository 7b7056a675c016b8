"""What this rank is doing, for whoever has to say why a run does not go on.

Noting it costs an assignment. A thread sends it to rank 0 now and then (see
:mod:`megatron_vl.parallel.signs_of_life`), and a rank that fails names it in its message.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SETTING_UP = "setting up"
LOADING = "loading rows"
SHARING = "sharing rows"
COMPUTING = "forward and backward"
UPDATING = "updating weights"
SAVING = "saving a checkpoint"
EVALUATING = "evaluating"
ENDING = "ending"

PHASES = (SETTING_UP, LOADING, SHARING, COMPUTING, UPDATING, SAVING, EVALUATING, ENDING)
"""In the order in which a step passes through them. Of ranks that wait for each other, the one that is first
in this order is the one that the others wait for."""

WRITING = "writing its part of a checkpoint"
"""What a rank does in the background that others may wait for."""


@dataclass
class Progress:
    """What one rank is doing."""

    place: str = ""
    """Its place in the layout, as in ``tp 1, pp 0, dp 1``; empty until it is known."""
    step: int = 0
    """The step under way, counted from 1; 0 before the first."""
    phase: str = SETTING_UP
    background: str = ""
    """What a thread does while training goes on; empty: nothing."""
    syncing: str = ""
    """The file whose content the disk is to confirm; empty: none."""
    steps_done: int = 0
    """Whole steps since this start."""
    count: int = 0
    """Rises with everything that goes on: a row, a micro-batch, a part of a file."""


now = Progress()


def enter(phase: str, step: int | None = None) -> None:
    """The main thread begins something else."""
    now.phase = phase
    if step is not None:
        now.step = step
    now.count += 1


def tick() -> None:
    """Something went on. Call it where a phase may take long."""
    now.count += 1


def rows_are_read() -> None:
    """This rank's rows are there; it now waits for those of others. An evaluation stays one."""
    if now.phase == LOADING:
        enter(SHARING)


def step_is_done() -> None:
    now.steps_done += 1
    now.count += 1


def in_background(what: str) -> None:
    """A thread does something, or (empty) has done it."""
    now.background = what
    now.count += 1


@contextlib.contextmanager
def syncing(path: Path) -> Iterator[None]:
    """A context in which the disk is asked to confirm a file's content, which nothing can hurry."""
    now.syncing = str(path)
    try:
        yield
    finally:
        now.syncing = ""
        now.count += 1


def where(progress: Progress | None = None) -> str:
    """As in ``tp 1, pp 0, dp 1; step 17, loading rows``; empty before the layout is known."""
    p = progress or now
    if not p.place:
        return ""
    step = f"step {p.step}, " if p.step else ""
    also = f" (in the background: {p.background})" if p.background else ""
    return f"{p.place}; {step}{p.phase}{also}"
