"""A run's folder: the checkpoints in it, and which one is the latest.

    DIR/step_00000120/                     a checkpoint; it has this name once all of it is on the disk
    DIR/hf/step_00000120/                  step 120 as a Hugging Face folder (``checkpoint.export_hf``)
    DIR/abandoned/after_step_00000100/     what ``megatron-vl checkpoint rollback DIR 100`` moved away

The latest checkpoint is the one with the largest step. A roll-back moves the steps after it away at once, so
that nothing has to be remembered.

Nothing here imports torch.
"""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_vl.system.errors import UserError

EXPORTS_DIR = "hf"
"""Subfolder of a run in which ``checkpoint.export_hf`` writes Hugging Face folders."""
EXPORT_FACTS_FILE = "megatron_vl.json"
"""A file next to exported weights. It holds the limits of pixels and frames that they were trained with and,
in a folder of :data:`EXPORTS_DIR`, the saved step that they come from."""
ABANDONED_DIR = "abandoned"
"""Subfolder of a run with a folder for each roll-back."""
UNFINISHED_SUFFIX = ".partial"
"""The end of the name of a roll-back's folder until all is moved into it."""

_STEP_DIR_PATTERN = re.compile(r"step_(\d+)")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or read. The message says why, and what the user can do."""


@dataclass(frozen=True)
class SavedCheckpoint:
    path: Path
    step: int


# --- Folders and files --------------------------------------------------------------------------------------


def step_dir_path(checkpoint_dir: Path, step: int) -> Path:
    return checkpoint_dir / f"step_{step:08d}"


def export_dir_path(checkpoint_dir: Path, step: int) -> Path:
    return checkpoint_dir / EXPORTS_DIR / step_dir_path(checkpoint_dir, step).name


def step_of_dir(dir_path: Path) -> int | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    name_match = _STEP_DIR_PATTERN.fullmatch(dir_path.name)
    return int(name_match[1]) if name_match else None


def unused_path(wanted_path: Path) -> Path:
    """This path, or the first of ``PATH.2``, ``PATH.3``, ... that does not exist."""
    candidates = (wanted_path.with_name(f"{wanted_path.name}.{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([wanted_path], candidates) if not path.exists())


# --- Checkpoints in a folder --------------------------------------------------------------------------------


def saved_checkpoints(checkpoint_dir: Path) -> list[SavedCheckpoint]:
    steps = {path: step_of_dir(path) for path in checkpoint_dir.glob("step_*") if path.is_dir()}
    checkpoints = [SavedCheckpoint(path, step) for path, step in steps.items() if step is not None]
    return sorted(checkpoints, key=lambda saved: saved.step)


def find_latest_checkpoint(checkpoint_dir: Path) -> SavedCheckpoint | None:
    """The checkpoint with the largest step; None if there is none.

    A run resumes from it, and other commands use it if they are given the run's folder.

    Raises:
        CheckpointError: a roll-back was interrupted, so that later steps may still be there.
    """
    if (step := unfinished_rollback(checkpoint_dir)) is not None:
        raise CheckpointError(
            f"a roll-back of {checkpoint_dir} to step {step} was interrupted; finish it with `megatron-vl"
            f" checkpoint rollback {checkpoint_dir} {step}`"
        )
    checkpoints = saved_checkpoints(checkpoint_dir)
    return checkpoints[-1] if checkpoints else None


def unfinished_rollback(checkpoint_dir: Path) -> int | None:
    """The step of a roll-back that was interrupted; None if there is none."""
    for path in (checkpoint_dir / ABANDONED_DIR).glob(f"after_step_*{UNFINISHED_SUFFIX}"):
        return step_of_dir(Path(path.stem.removeprefix("after_")))
    return None
