"""Takes a run back to one of its steps, or its data to their start.

Both happen at once and are not remembered: what a run does next depends only on what is in its folder.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_vl.system import durable_files
from megatron_vl.training.report.sinks import STEP_LOG_FILES
from megatron_vl.training.state.keep import lock_run_dir, unlock_run_dir
from megatron_vl.training.state.load import drop_loader_state, has_all_files
from megatron_vl.weights.run_folder import (
    ABANDONED_DIR,
    EXPORTS_DIR,
    UNFINISHED_SUFFIX,
    CheckpointError,
    find_latest_checkpoint,
    saved_checkpoints,
    step_dir_path,
    unfinished_rollback,
    unused_path,
)


@contextmanager
def _hold_run(run_dir: Path) -> Iterator[None]:
    """A context in which no run writes to ``run_dir``.

    Raises CheckpointError if one does, or if this is no run's folder.
    """
    if not saved_checkpoints(run_dir):
        raise CheckpointError(f"{run_dir} holds no checkpoint of a run: looked for step_ folders")
    lock_file = lock_run_dir(run_dir)
    try:
        yield
    finally:
        unlock_run_dir(lock_file)


def restart_data(run_dir: Path) -> Path:
    """Makes the next start of a run read its data set from the start. Returns the latest step's folder."""
    with _hold_run(run_dir):
        latest_checkpoint = find_latest_checkpoint(run_dir)
        assert latest_checkpoint is not None
        drop_loader_state(latest_checkpoint.path)
        return latest_checkpoint.path


def roll_back(run_dir: Path, step: int) -> Path | None:
    """Moves the checkpoints, exports and lines of logs after ``step`` into a folder of their own.

    After a kill, the same call continues; until then, the run does not start.

    Returns:
        That folder; None if nothing came after the step.

    Raises:
        CheckpointError: a run holds the folder; the step is missing or incomplete; or a roll-back to another
            step was interrupted.
    """
    with _hold_run(run_dir):
        _check_step(run_dir, step)
        final_dir = run_dir / ABANDONED_DIR / f"after_{step_dir_path(run_dir, step).name}"
        partial_dir = final_dir.with_name(final_dir.name + UNFINISHED_SUFFIX)
        durable_files.make_dirs(partial_dir)
        for checkpoint in saved_checkpoints(run_dir):
            if checkpoint.step > step:
                durable_files.rename_path(checkpoint.path, partial_dir / checkpoint.path.name)
        for export_dir in (run_dir / EXPORTS_DIR).glob("step_*"):
            name_match = re.match(r"step_(\d+)", export_dir.name)  # also step_00000120_merged
            if name_match and int(name_match[1]) > step:
                durable_files.make_dirs(partial_dir / EXPORTS_DIR)
                durable_files.rename_path(export_dir, partial_dir / EXPORTS_DIR / export_dir.name)
        for file_name in STEP_LOG_FILES:
            _move_lines(run_dir / file_name, partial_dir / file_name, step)

        if not any(partial_dir.iterdir()):
            os.removedirs(partial_dir)
            return None
        durable_files.fsync_path(run_dir)
        final_dir = unused_path(final_dir)
        durable_files.rename_path(partial_dir, final_dir)
        return final_dir


def _check_step(run_dir: Path, step: int) -> None:
    if unfinished_rollback(run_dir) not in (None, step):
        find_latest_checkpoint(run_dir)  # it says how to finish that one
    steps = [saved.step for saved in saved_checkpoints(run_dir)]
    if step not in steps:
        raise CheckpointError(
            f"{run_dir} has no checkpoint of step {step}; existing steps: {', '.join(map(str, steps))}. To"
            " begin anew, give another checkpoint.dir"
        )
    if not has_all_files(step_dir_path(run_dir, step)):
        raise CheckpointError(
            f"{step_dir_path(run_dir, step)} is incomplete or damaged; `megatron-vl checkpoint verify` names"
            " the files"
        )


def _move_lines(log_path: Path, abandoned_path: Path, step: int) -> None:
    def is_later(line: bytes) -> bool:
        step_match = re.match(rb'\{"step": (\d+)', line)
        return step_match is not None and int(step_match[1]) > step

    durable_files.drop_incomplete_line(log_path)
    if not log_path.exists():
        return
    with log_path.open("rb") as lines:
        if not any(map(is_later, lines)):  # also if a killed call has moved them
            return
        lines.seek(0)
        # The file of moved lines gets its name first, so that a kill loses none.
        with (
            durable_files.open_new_file(log_path) as kept_lines,
            durable_files.open_new_file(abandoned_path) as moved_lines,
        ):
            for line in lines:
                (moved_lines if is_later(line) else kept_lines).write(line)
