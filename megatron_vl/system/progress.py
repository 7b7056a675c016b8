"""Records what this rank is doing, for the message of a run that hangs or fails.

Recording costs one assignment. A thread regularly sends the record to rank 0 (see
:mod:`megatron_vl.parallel.heartbeat`), and a rank that fails has it in its message.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PHASES = (
    "setting up",
    "loading rows",
    "sharing rows",
    "forward and backward",
    "updating weights",
    "saving a checkpoint",
    "evaluating",
    "ending",
)
"""The phases in the order of a step. If ranks wait for each other, they wait for the rank whose phase is the
first in this order."""
SETTING_UP, LOADING_ROWS, SHARING_ROWS, FORWARD_BACKWARD, *_LATER_PHASES = PHASES
UPDATING_WEIGHTS, SAVING_CHECKPOINT, RUNNING_EVALUATION, ENDING_RUN = _LATER_PHASES

WRITING_CHECKPOINT = "writing its part of a checkpoint"
"""A background task of a rank for which others may wait."""


@dataclass
class RankProgress:
    """What one rank is doing."""

    grid_position: str = ""
    """The rank's coordinates in the layout, as in ``tp 1, pp 0, dp 1``; empty until they are known."""
    step: int = 0
    """The current step, counted from 1; 0 before the first."""
    phase: str = SETTING_UP
    background_task: str = ""
    syncing_file: str = ""
    """The file whose content the disk has not confirmed yet; empty if there is none."""
    steps_done: int = 0
    progress_count: int = 0
    """Grows with each unit of work: a row, a micro-batch, a part of a file."""


current_progress = RankProgress()
_syncing_files: list[str] = []


def enter_phase(phase: str, step: int | None = None) -> None:
    current_progress.phase = phase
    if step is not None:
        current_progress.step = step
    current_progress.progress_count += 1


def note_progress() -> None:
    """Records progress. Call it regularly in phases that may take long."""
    current_progress.progress_count += 1


def note_rows_read() -> None:
    """This rank has read its rows, and now waits for the other ranks. An evaluation keeps its own phase."""
    if current_progress.phase == LOADING_ROWS:
        enter_phase(SHARING_ROWS)


def set_background_task(task_name: str) -> None:
    """Sets the task of a background thread; an empty name means that it has ended."""
    current_progress.background_task = task_name
    current_progress.progress_count += 1


@contextlib.contextmanager
def waiting_for_disk(file_path: Path) -> Iterator[None]:
    """A context in which this rank waits until the disk has confirmed a file's content."""
    _syncing_files.append(current_file := str(file_path))
    current_progress.syncing_file = current_file
    try:
        yield
    finally:
        _syncing_files.remove(current_file)
        current_progress.syncing_file = _syncing_files[-1] if _syncing_files else ""
        current_progress.progress_count += 1


def describe_progress(reported_progress: RankProgress | None = None) -> str:
    """A text such as ``tp 1, pp 0, dp 1; step 17, loading rows``; empty before the layout is known."""
    shown_progress = reported_progress or current_progress
    if not shown_progress.grid_position:
        return ""
    step = f"step {shown_progress.step}, " if shown_progress.step else ""
    background_text = (
        f" (in the background: {shown_progress.background_task})" if shown_progress.background_task else ""
    )
    return f"{shown_progress.grid_position}; {step}{shown_progress.phase}{background_text}"
