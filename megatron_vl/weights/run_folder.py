"""A run's folder: the checkpoints in it, what each was trained from, and which one is the latest.

    DIR/latest.json                       {"step": 120, "serial": 7, "branch": "1f3a9c02"}
    DIR/step_00000120/lineage.json        what this checkpoint was trained from; run.json holds a copy
    DIR/step_00000120.branch_9b01c2d4.5/  step 120 of an abandoned branch, set aside when it was saved again
    DIR/hf/step_00000120/                 step 120 as a Hugging Face folder (``checkpoint.export_hf``)

The saves of a folder are numbered (``serial``). **The latest checkpoint is the one saved last**, not the one
with the largest step: after a roll-back to step 2, step 3 is newer than the abandoned step 6. The whole
project uses :func:`find_latest_checkpoint`. The order does not depend on ``latest.json``, so a run that is
killed before that file is written loses nothing.

A roll-back (``checkpoint.step``) begins a branch with the first checkpoint that is saved after it. Until
then, it has no effect. The checkpoints that the new branch was not trained from stay on disk and are used
only if a user asks for their step. Users delete them by hand.

Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.errors import UserError
from megatron_vl.json_files import manifest_digest, write_json

LATEST_FILE = "latest.json"
LINEAGE_FILE = "lineage.json"
EXPORTS_DIR = "hf"
"""Subfolder of a run in which ``checkpoint.export_hf`` writes Hugging Face folders."""
EXPORT_FACTS_FILE = "megatron_vl.json"
"""A file next to exported weights. It holds the limits of pixels and frames that they were trained with and,
in a folder of :data:`EXPORTS_DIR`, the saved step that they come from."""
UNKNOWN_BRANCH = "unknown"
"""The branch of a step folder that holds only weights, or whose lineage is damaged."""

_STEP_DIR_PATTERN = re.compile(r"step_(\d+)(\.branch_\w+\.\d+(\.\d+)?)?")
_BRANCH_PATTERN = re.compile(r"\w{1,32}")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or read. The message says why, and what the user can do."""


class StepMissingError(CheckpointError):
    """The requested step, or the step that ``latest.json`` names, is not in the folder."""


@dataclass(frozen=True)
class CheckpointPoint:
    """A checkpoint, identified by branch and step instead of a path."""

    branch: str
    step: int


@dataclass(frozen=True)
class RollBack:
    """The request that began a branch. A start with the same request continues the branch."""

    step: int
    branch: str
    """The branch of the checkpoint that the run was rolled back to."""
    attempt: int

    def fulfils(self, step: int, branch: str, attempt: int) -> bool:
        """Whether this roll-back has carried out a request (see :func:`choose_start_point`)."""
        return self.step == step and branch in ("", self.branch) and attempt <= self.attempt


@dataclass(frozen=True)
class DataRestart:
    """The record that the data set was read from its start at ``step``.

    All later checkpoints of the branch keep it.
    """

    step: int
    attempt: int


@dataclass(frozen=True)
class Lineage:
    """What a checkpoint was trained from.

    Attributes:
        serial: number of the save in its folder, from 1; 0: not saved yet, or not known.
        branch: name of its branch. Each roll-back, and each start without a checkpoint, makes a new random
            name.
        parent: the checkpoint that training resumed from or saved before this one; None: the run began here.
        forks: the points at which earlier branches were left for this one, oldest first.
    """

    serial: int = 0
    branch: str = UNKNOWN_BRANCH
    parent: CheckpointPoint | None = None
    forks: tuple[CheckpointPoint, ...] = ()
    rollback: RollBack | None = None
    data_restart: DataRestart | None = None

    def contains_checkpoint(self, tip_step: int, other_point: CheckpointPoint) -> bool:
        """Whether ``tip_step`` of this branch is ``other_point`` or was trained from it."""
        if other_point.branch == self.branch:
            return other_point.step <= tip_step
        return any(fork.branch == other_point.branch and other_point.step <= fork.step for fork in self.forks)

    def as_json(self) -> dict[str, Any]:
        """The lineage in plain JSON types. :func:`lineage_from_json` reads it back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint of a run."""

    path: Path
    step: int
    lineage: Lineage

    @property
    def checkpoint_point(self) -> CheckpointPoint:
        return CheckpointPoint(self.lineage.branch, self.step)

    def was_trained_from(self, other: SavedCheckpoint) -> bool:
        """Whether ``other`` is this checkpoint or one that led to it."""
        return self.lineage.contains_checkpoint(self.step, other.checkpoint_point)


# --- Folders and files --------------------------------------------------------------------------------------


def step_dir_path(checkpoint_dir: Path, step: int) -> Path:
    return checkpoint_dir / f"step_{step:08d}"


def export_dir_path(checkpoint_dir: Path, step: int) -> Path:
    """The path of a step's Hugging Face folder."""
    return checkpoint_dir / EXPORTS_DIR / step_dir_path(checkpoint_dir, step).name


def step_of_dir(dir_path: Path) -> int | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    name_match = _STEP_DIR_PATTERN.fullmatch(dir_path.name)
    return int(name_match[1]) if name_match else None


def aside_path(checkpoint: SavedCheckpoint) -> Path:
    """An unused path for a checkpoint whose step is saved again on another branch."""
    step_dir = step_dir_path(checkpoint.path.parent, checkpoint.step)
    base_name = f"{step_dir.name}.branch_{checkpoint.lineage.branch}.{checkpoint.lineage.serial}"
    return unused_path(checkpoint.path.with_name(base_name))


def unused_path(wanted_path: Path) -> Path:
    """This path, or the first of ``PATH.2``, ``PATH.3``, ... that does not exist."""
    free_path = wanted_path
    copy_number = 1
    while free_path.exists():
        copy_number += 1
        free_path = wanted_path.with_name(f"{wanted_path.name}.{copy_number}")
    return free_path


def make_branch_name() -> str:
    return secrets.token_hex(4)


def write_lineage(step_dir: Path, step: int, lineage: Lineage) -> None:
    json_fields = {"step": step, **lineage.as_json()}
    write_json(step_dir / LINEAGE_FILE, json_fields | {"digest": manifest_digest(json_fields)})


def lineage_from_json(json_fields: Any) -> Lineage:
    """The inverse of :meth:`Lineage.as_json`. Raises ValueError, KeyError or TypeError for anything else."""
    parent, rollback, data_restart = (json_fields[name] for name in ("parent", "rollback", "data_restart"))
    return Lineage(
        _checked_count(json_fields["serial"]),
        _checked_branch(json_fields["branch"]),
        None if parent is None else _read_record(CheckpointPoint, parent),
        tuple(_read_record(CheckpointPoint, fork) for fork in json_fields["forks"]),
        None if rollback is None else _read_record(RollBack, rollback),
        None if data_restart is None else _read_record(DataRestart, data_restart),
    )


def _read_record[T](record_type: type[T], stored_fields: Any) -> T:
    """One of the records of a lineage. All its fields are counts, except ``branch``."""
    field_values = {}
    for record_field in dataclasses.fields(record_type):  # type: ignore[arg-type]
        check_value = _checked_branch if record_field.name == "branch" else _checked_count
        field_values[record_field.name] = check_value(stored_fields[record_field.name])
    return record_type(**field_values)


def _checked_count(stored_count: Any) -> int:
    if type(stored_count) is not int or stored_count < 0:
        raise ValueError(f"{stored_count!r} is not a count")
    return stored_count


def _checked_branch(stored_name: Any) -> str:
    # The name becomes part of a folder's name.
    if not isinstance(stored_name, str) or not _BRANCH_PATTERN.fullmatch(stored_name):
        raise ValueError(f"{stored_name!r} is not the name of a branch")
    return stored_name


def read_lineage(step_dir: Path, step: int) -> Lineage:
    """Reads the lineage of the checkpoint in ``step_dir``; that of a folder with only weights is not known.

    ``lineage.json`` is small, because every rank reads that of every checkpoint. If it is damaged, the copy
    in ``run.json`` is used.

    Raises:
        CheckpointError: both files are damaged.
    """
    try:
        return lineage_from_json(read_signed_json(step_dir / LINEAGE_FILE, step))
    except FileNotFoundError:
        lineage_problem = ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        lineage_problem = f"{step_dir / LINEAGE_FILE} is damaged ({type(error).__name__}: {error})"

    try:
        return lineage_from_json(read_signed_json(step_dir / "run.json", step)["lineage"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not lineage_problem:
            return Lineage()  # only weights, or damage that is reported when this checkpoint is used
        raise CheckpointError(
            f"{lineage_problem}, and run.json cannot be read either, so the latest checkpoint is not known; "
            f"move {step_dir} away, or fetch it again"
        ) from error


def read_signed_json(file_path: Path, step: int) -> dict[str, Any]:
    """Reads a file of a checkpoint that contains its own digest.

    Raises OSError, ValueError, KeyError or TypeError if it is missing, damaged or of another step.
    """
    json_fields = json.loads(file_path.read_text())
    if not isinstance(json_fields, dict) or json_fields["digest"] != manifest_digest(json_fields):
        raise ValueError("its digest differs")
    if json_fields["step"] != step:
        raise ValueError(f"it belongs to step {json_fields['step']}")
    return json_fields


# --- Checkpoints in a folder --------------------------------------------------------------------------------


def saved_checkpoints(checkpoint_dir: Path) -> list[SavedCheckpoint]:
    """The complete checkpoints of a run, in the order in which they were saved.

    Raises CheckpointError if the files that record the order are damaged.
    """
    checkpoints = []
    for path in sorted(checkpoint_dir.glob("step_*")):
        step = step_of_dir(path)
        if step is not None and path.is_dir():
            checkpoints.append(SavedCheckpoint(path, step, read_lineage(path, step)))
    return sorted(checkpoints, key=lambda saved: (saved.lineage.serial, saved.step))


def find_latest_checkpoint(checkpoint_dir: Path) -> SavedCheckpoint | None:
    """The checkpoint saved last; None if there is none.

    A run resumes from it, and other commands use it if they are given the run's folder.

    Raises:
        StepMissingError: ``latest.json`` names a checkpoint that is missing, so the folder is incomplete.
        CheckpointError: ``latest.json`` or a lineage is damaged.
    """
    latest_fields = _read_latest_file(checkpoint_dir / LATEST_FILE)
    checkpoints = saved_checkpoints(checkpoint_dir) if checkpoint_dir.is_dir() else []
    if latest_fields is not None and not any(
        _is_named_checkpoint(saved, latest_fields) for saved in checkpoints
    ):
        problem_text = "there is no such step_ folder"
        if any(saved.step == latest_fields["step"] for saved in checkpoints):
            problem_text = f"its folder holds an earlier save than number {latest_fields['serial']}"
        raise StepMissingError(
            f"{checkpoint_dir / LATEST_FILE} names step {latest_fields['step']}, but {problem_text}; fetch "
            f"it, set checkpoint.step, or remove {LATEST_FILE} to use the newest checkpoint that exists"
        )

    return checkpoints[-1] if checkpoints else None


def split_by_branch(checkpoint_dir: Path) -> tuple[list[SavedCheckpoint], list[SavedCheckpoint]]:
    """The checkpoints that led to the latest one, sorted by step, and those that roll-backs abandoned."""
    newest_checkpoint = find_latest_checkpoint(checkpoint_dir)
    if newest_checkpoint is None:
        return [], []

    branch_checkpoints: list[SavedCheckpoint] = []
    abandoned_checkpoints: list[SavedCheckpoint] = []
    for checkpoint in saved_checkpoints(checkpoint_dir):
        is_ancestor = newest_checkpoint.was_trained_from(checkpoint)
        (branch_checkpoints if is_ancestor else abandoned_checkpoints).append(checkpoint)
    return sorted(branch_checkpoints, key=lambda saved: saved.step), abandoned_checkpoints


def _read_latest_file(file_path: Path) -> dict[str, Any] | None:
    try:
        json_fields = json.loads(file_path.read_text())
        return {"step": json_fields["step"], "serial": json_fields["serial"]}
    except (FileNotFoundError, NotADirectoryError):
        return None  # it was removed, or the run was killed before it was first written
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file_path} is damaged ({error}); remove it to use the newest step_ folder"
        ) from error


def _is_named_checkpoint(checkpoint: SavedCheckpoint, latest_fields: dict[str, Any]) -> bool:
    """Whether a checkpoint is the one that ``latest.json`` names, or a later save of its step."""
    return (
        type(latest_fields["step"]) is int
        and type(latest_fields["serial"]) is int
        and checkpoint.step == latest_fields["step"]
        and checkpoint.lineage.serial >= latest_fields["serial"]
    )


# --- Where a run begins -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StartPoint:
    """Where a run begins."""

    source_checkpoint: SavedCheckpoint | None
    """The checkpoint that it resumes from; None: it starts from ``model.checkpoint`` or random weights."""
    lineage: Lineage
    """The lineage of the checkpoints that it will save."""
    user_messages: tuple[str, ...] = ()
    """Lines to print for the user."""
    restarts_data: bool = False
    """Whether the data set is read from its start, although the run resumes from a checkpoint."""


def choose_start_point(
    checkpoint_dir: Path | None, step: int | None = None, branch: str = "", attempt: int = 1
) -> StartPoint:
    """Decides where a run begins.

    Args:
        checkpoint_dir: the run's folder; None: start from step 0.
        step: the step to roll back to. If the same request began the current branch, the run continues this
            branch, so that a job that is queued again keeps its progress.
        branch: the branch of that step, if several branches saved it. Empty: the current branch if it saved
            the step, else the one that saved it last.
        attempt: number of the request, among requests for the same step. A request that was already carried
            out is not repeated.

    Raises:
        StepMissingError: there is no such checkpoint. The message lists the existing ones.
        CheckpointError: the latest checkpoint is not known (:func:`find_latest_checkpoint`).
    """
    if checkpoint_dir is not None and step is not None:
        return _roll_back(checkpoint_dir, step, branch, attempt)
    newest_checkpoint = find_latest_checkpoint(checkpoint_dir) if checkpoint_dir is not None else None
    if newest_checkpoint is None:
        return StartPoint(None, Lineage(branch=make_branch_name()))
    return StartPoint(newest_checkpoint, _continued_lineage(newest_checkpoint))


def _roll_back(checkpoint_dir: Path, step: int, branch: str, attempt: int) -> StartPoint:
    """:func:`choose_start_point` for a run that goes back to a step."""
    checkpoints = saved_checkpoints(checkpoint_dir)
    try:
        newest_checkpoint = find_latest_checkpoint(checkpoint_dir)
    except CheckpointError:
        # A folder that has lost its latest checkpoint can still be rolled back, which repairs the folder.
        newest_checkpoint = checkpoints[-1] if checkpoints else None

    # A job that is queued again repeats its command. It must not roll back a second time.
    done_rollback = newest_checkpoint.lineage.rollback if newest_checkpoint is not None else None
    if newest_checkpoint and done_rollback and done_rollback.fulfils(step, branch, attempt):
        user_message = _done_rollback_line(newest_checkpoint, done_rollback, checkpoints)
        return StartPoint(newest_checkpoint, _continued_lineage(newest_checkpoint), (user_message,))

    # A new branch begins. It takes effect with its first save.
    source_checkpoint = _find_checkpoint(checkpoint_dir, checkpoints, newest_checkpoint, step, branch)
    lineage = Lineage(
        0,
        make_branch_name(),
        source_checkpoint.checkpoint_point,
        (*source_checkpoint.lineage.forks, source_checkpoint.checkpoint_point),
        RollBack(step, source_checkpoint.lineage.branch, attempt),
        source_checkpoint.lineage.data_restart,
    )
    return StartPoint(source_checkpoint, lineage, (_rollback_line(source_checkpoint, newest_checkpoint),))


def _continued_lineage(checkpoint: SavedCheckpoint) -> Lineage:
    """The lineage of the checkpoints that follow ``checkpoint`` on its branch."""
    return dataclasses.replace(checkpoint.lineage, parent=checkpoint.checkpoint_point)


def _done_rollback_line(
    newest_checkpoint: SavedCheckpoint, done_rollback: RollBack, checkpoints: list[SavedCheckpoint]
) -> str:
    line = (
        f"checkpoint.step {done_rollback.step}: this roll-back was done "
        f"before, and its branch {newest_checkpoint.lineage.branch} is saved "
        f"up to step {newest_checkpoint.step}; the run continues from there"
    )
    if CheckpointPoint(done_rollback.branch, done_rollback.step) not in [
        saved.checkpoint_point for saved in checkpoints
    ]:
        return f"{line}. Step {done_rollback.step} itself no longer exists (checkpoint.keep)"
    return (
        f"{line}. To go back to step {done_rollback.step} once more, "
        f"give --checkpoint.attempt {done_rollback.attempt + 1}"
    )


def _find_checkpoint(
    checkpoint_dir: Path,
    checkpoints: list[SavedCheckpoint],
    newest_checkpoint: SavedCheckpoint | None,
    step: int,
    branch: str,
) -> SavedCheckpoint:
    matching_checkpoints = [
        saved for saved in checkpoints if saved.step == step and branch in ("", saved.lineage.branch)
    ]
    if not matching_checkpoints:
        requested_text = f"checkpoint.step {step}" + (f" of checkpoint.branch {branch}" if branch else "")
        steps = ", ".join(map(str, sorted({saved.step for saved in checkpoints}))) or "none"
        raise StepMissingError(f"{requested_text} is not in {checkpoint_dir}; existing steps: {steps}")

    for saved in reversed(matching_checkpoints):
        if newest_checkpoint is not None and newest_checkpoint.was_trained_from(saved):
            return saved
    return matching_checkpoints[-1]


def _rollback_line(source_checkpoint: SavedCheckpoint, newest_checkpoint: SavedCheckpoint | None) -> str:
    line = (
        f"rolled back to step {source_checkpoint.step} of branch "
        f"{source_checkpoint.lineage.branch} ({source_checkpoint.path.name})"
    )
    if newest_checkpoint is None or newest_checkpoint.checkpoint_point == source_checkpoint.checkpoint_point:
        return line
    return (
        f"{line}. Once this run saves, its checkpoints are the latest. The later checkpoints "
        f"of branch {newest_checkpoint.lineage.branch} stay on disk and are not used. Until "
        f"then, a start without checkpoint.step resumes from step {newest_checkpoint.step}"
    )
