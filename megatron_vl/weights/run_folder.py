"""A run's folder: the checkpoints in it, what each was trained from, and which one is the latest.

    DIR/latest.json                       {"step": 120, "serial": 7, "branch": "1f3a9c02"}
    DIR/step_00000120/lineage.json        what this checkpoint was trained from; run.json holds a copy
    DIR/step_00000120.branch_9b01c2d4.5/  step 120 of an abandoned branch, set aside when it was saved again
    DIR/hf/step_00000120/                 step 120 as a Hugging Face folder (``checkpoint.export_hf``)

The saves of a folder are numbered (``serial``). **The latest checkpoint is the one saved last**, not the one
with the largest step: after a roll-back to step 2, step 3 is newer than the abandoned step 6. The whole
project uses :func:`latest`. The order does not depend on ``latest.json``, so a run that is killed before that
file is written loses nothing.

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

LATEST = "latest.json"
LINEAGE = "lineage.json"
EXPORTS = "hf"
"""Subfolder of a run in which ``checkpoint.export_hf`` writes Hugging Face folders."""
EXPORTED = "megatron_vl.json"
"""A file next to exported weights. It holds their rule for videos and, in a folder of :data:`EXPORTS`, the
saved step that they come from."""
UNKNOWN_BRANCH = "unknown"
"""The branch of a step folder that holds only weights, or whose lineage is damaged."""

_FOLDER = re.compile(r"step_(\d+)(\.branch_\w+\.\d+(\.\d+)?)?")
_BRANCH = re.compile(r"\w{1,32}")


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or resumed from. The message says what is wrong and what to do."""


class StepMissingError(CheckpointError):
    """The requested step, or the step that ``latest.json`` names, is not in the folder."""


@dataclass(frozen=True)
class Point:
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
    parent: Point | None = None
    forks: tuple[Point, ...] = ()
    rollback: RollBack | None = None
    data_restart: DataRestart | None = None

    def holds(self, step: int, other: Point) -> bool:
        """Whether ``step`` of this branch is ``other`` or was trained from it."""
        if other.branch == self.branch:
            return other.step <= step
        return any(fork.branch == other.branch and other.step <= fork.step for fork in self.forks)

    def as_json(self) -> dict[str, Any]:
        """The lineage in plain JSON types. :func:`parse_lineage` reads it back."""
        return json.loads(json.dumps(dataclasses.asdict(self)))


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint of a run."""

    path: Path
    step: int
    lineage: Lineage

    @property
    def point(self) -> Point:
        return Point(self.lineage.branch, self.step)


# --- Folders and files --------------------------------------------------------------------------------------


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step_{step:08d}"


def export_folder(folder: Path, step: int) -> Path:
    """The path of a step's Hugging Face folder."""
    return folder / EXPORTS / step_folder(folder, step).name


def folder_step(path: Path) -> int | None:
    """The step in a folder's name; None if it is not the name of a checkpoint."""
    match = _FOLDER.fullmatch(path.name)
    return int(match[1]) if match else None


def aside(saved: Saved) -> Path:
    """An unused path for a checkpoint whose step is saved again on another branch."""
    step = step_folder(saved.path.parent, saved.step)
    lineage = saved.lineage
    base = f"{step.name}.branch_{lineage.branch}.{lineage.serial}"
    path = saved.path.with_name(base)
    copies = 1
    while path.exists():
        copies += 1
        path = saved.path.with_name(f"{base}.{copies}")
    return path


def new_branch() -> str:
    return secrets.token_hex(4)


def write_lineage(folder: Path, step: int, lineage: Lineage) -> None:
    content = {"step": step, **lineage.as_json()}
    write_json(folder / LINEAGE, content | {"digest": manifest_digest(content)})


def parse_lineage(content: Any) -> Lineage:
    """The inverse of :meth:`Lineage.as_json`.

    Raises:
        ValueError, KeyError, TypeError: ``content`` is not a lineage.
    """

    def point(value: Any) -> Point:
        return Point(_branch(value["branch"]), _whole(value["step"]))

    def rollback(value: Any) -> RollBack:
        return RollBack(_whole(value["step"]), _branch(value["branch"]), _whole(value["attempt"]))

    back, restart, parent = content["rollback"], content["data_restart"], content["parent"]
    return Lineage(
        _whole(content["serial"]),
        _branch(content["branch"]),
        None if parent is None else point(parent),
        tuple(point(fork) for fork in content["forks"]),
        None if back is None else rollback(back),
        None if restart is None else DataRestart(_whole(restart["step"]), _whole(restart["attempt"])),
    )


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _branch(value: Any) -> str:
    if not isinstance(value, str) or not _BRANCH.fullmatch(value):  # it becomes part of a folder's name
        raise ValueError(f"{value!r} is not the name of a branch")
    return value


def read_lineage(path: Path, step: int) -> Lineage:
    """Reads the lineage of the checkpoint in ``path``; that of a folder with only weights is not known.

    ``lineage.json`` is small, because every rank reads that of every checkpoint. If it is damaged, the copy
    in ``run.json`` is used.

    Raises:
        CheckpointError: both files are damaged.
    """
    try:
        return parse_lineage(read_signed(path / LINEAGE, step))
    except FileNotFoundError:
        problem = ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{path / LINEAGE} is damaged ({type(error).__name__}: {error})"

    try:
        return parse_lineage(read_signed(path / "run.json", step)["lineage"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not problem:
            return Lineage()  # only weights, or damage that is reported when this checkpoint is used
        raise CheckpointError(
            f"{problem}, and run.json cannot be read either, so the latest checkpoint is not known; "
            f"move {path} away, or fetch it again"
        ) from error


def read_signed(path: Path, step: int) -> dict[str, Any]:
    """Reads a file of a checkpoint that contains its own digest.

    Raises:
        OSError, ValueError, KeyError, TypeError: the file is missing, damaged or of another step.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content["digest"] != manifest_digest(content):
        raise ValueError("its digest differs")
    if content["step"] != step:
        raise ValueError(f"it belongs to step {content['step']}")
    return content


# --- Checkpoints in a folder --------------------------------------------------------------------------------


def saved_checkpoints(folder: Path) -> list[Saved]:
    """The complete checkpoints of a run, in the order in which they were saved.

    Raises:
        CheckpointError: the order is not known, because the files that record it are damaged.
    """
    found = []
    for path in sorted(folder.glob("step_*")):
        step = folder_step(path)
        if step is not None and path.is_dir():
            found.append(Saved(path, step, read_lineage(path, step)))
    return sorted(found, key=lambda saved: (saved.lineage.serial, saved.step))


def latest(folder: Path) -> Saved | None:
    """The checkpoint saved last; None if there is none.

    A run resumes from it, and other commands use it if they are given the run's folder.

    Raises:
        StepMissingError: ``latest.json`` names a checkpoint that is missing, so the folder is incomplete.
        CheckpointError: ``latest.json`` or a lineage is damaged.
    """
    named = _read_latest(folder / LATEST)
    checkpoints = saved_checkpoints(folder) if folder.is_dir() else []
    if not checkpoints and named is None:
        return None

    if named is not None and not any(_is_named(saved, named) for saved in checkpoints):
        held = any(saved.step == named["step"] for saved in checkpoints)
        what = "there is no such step_ folder"
        if held:
            what = f"its folder holds an earlier save than number {named['serial']}"
        raise StepMissingError(
            f"{folder / LATEST} names step {named['step']}, but {what}; fetch it, set checkpoint.step, or "
            f"remove {LATEST} to use the newest checkpoint that exists"
        )

    return checkpoints[-1]


def by_branch(folder: Path) -> tuple[list[Saved], list[Saved]]:
    """The checkpoints that led to the latest one, sorted by step, and those that roll-backs abandoned."""
    tip = latest(folder)
    checkpoints = saved_checkpoints(folder)
    if tip is None:
        return [], []
    present = [saved for saved in checkpoints if tip.lineage.holds(tip.step, saved.point)]
    left = [saved for saved in checkpoints if saved not in present]
    return sorted(present, key=lambda saved: saved.step), left


def _read_latest(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
        return {"step": content["step"], "serial": content["serial"]}
    except FileNotFoundError:
        return None  # it was removed, or the run was killed before it was first written
    except NotADirectoryError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}); remove it to use the newest step_ folder"
        ) from error


def _is_named(saved: Saved, named: dict[str, Any]) -> bool:
    """Whether a checkpoint is the one that ``latest.json`` names, or a later save of its step."""
    numbers = type(named["step"]) is int and type(named["serial"]) is int
    return numbers and saved.step == named["step"] and saved.lineage.serial >= named["serial"]


# --- Where a run begins -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """Where a run begins."""

    source: Saved | None
    """The checkpoint that it resumes from; None: it starts from step 0."""
    lineage: Lineage
    """The lineage of the checkpoints that it will save."""
    said: tuple[str, ...] = ()
    """Lines to print for the user."""


def choose(folder: Path | None, step: int | None = None, branch: str = "", attempt: int = 1) -> Choice:
    """Decides where a run begins.

    Args:
        folder: the run's folder; None: start from step 0.
        step: the step to roll back to. If the same request began the current branch, the run continues this
            branch, so that a job that is queued again keeps its progress.
        branch: the branch of that step, if several branches saved it. Empty: the current branch if it saved
            the step, else the one that saved it last.
        attempt: number of the request, among requests for the same step. A request that was already carried
            out is not repeated.

    Raises:
        StepMissingError: there is no such checkpoint. The message lists the existing ones.
        CheckpointError: the latest checkpoint is not known (:func:`latest`).
    """
    tip = latest(folder) if folder is not None and step is None else None
    if folder is None or (step is None and tip is None):
        return Choice(None, Lineage(branch=new_branch()))

    if step is None:
        assert folder is not None and tip is not None
        return Choice(tip, dataclasses.replace(tip.lineage, parent=tip.point))

    checkpoints = saved_checkpoints(folder)
    tip = _tip_for_roll_back(folder, checkpoints)
    if tip is not None and tip.lineage.rollback and _done(tip.lineage.rollback, step, branch, attempt):
        line = _done_line(tip, tip.lineage.rollback, checkpoints)
        return Choice(tip, dataclasses.replace(tip.lineage, parent=tip.point), (line,))

    source = _find(folder, checkpoints, tip, step, branch)
    forks = (*source.lineage.forks, source.point)
    rollback = RollBack(step, source.lineage.branch, attempt)
    lineage = Lineage(0, new_branch(), source.point, forks, rollback, source.lineage.data_restart)
    return Choice(source, lineage, (_roll_back_line(source, tip),))


def _tip_for_roll_back(folder: Path, checkpoints: list[Saved]) -> Saved | None:
    """The latest checkpoint, as far as it is known.

    A folder that has lost it can still be rolled back, which repairs the folder.
    """
    try:
        return latest(folder)
    except CheckpointError:
        return checkpoints[-1] if checkpoints else None


def _done(done: RollBack, step: int, branch: str, attempt: int) -> bool:
    return done.step == step and branch in ("", done.branch) and attempt <= done.attempt


def _done_line(tip: Saved, done: RollBack, checkpoints: list[Saved]) -> str:
    line = (
        f"checkpoint.step {done.step}: this roll-back was done before, and its branch {tip.lineage.branch} "
        f"is saved up to step {tip.step}; the run continues from there"
    )
    if Point(done.branch, done.step) not in [saved.point for saved in checkpoints]:
        return f"{line}. Step {done.step} itself no longer exists (checkpoint.keep)"
    return f"{line}. To go back to step {done.step} once more, give --checkpoint.attempt {done.attempt + 1}"


def _find(folder: Path, checkpoints: list[Saved], tip: Saved | None, step: int, branch: str) -> Saved:
    found = [saved for saved in checkpoints if saved.step == step and branch in ("", saved.lineage.branch)]
    if not found:
        wanted = f"checkpoint.step {step}" + (f" of checkpoint.branch {branch}" if branch else "")
        steps = ", ".join(map(str, sorted({saved.step for saved in checkpoints}))) or "none"
        raise StepMissingError(f"{wanted} is not in {folder}; existing steps: {steps}")
    on_line = [saved for saved in found if tip is not None and tip.lineage.holds(tip.step, saved.point)]
    return (on_line or found)[-1]


def _roll_back_line(source: Saved, tip: Saved | None) -> str:
    line = f"rolled back to step {source.step} of branch {source.lineage.branch} ({source.path.name})"
    if tip is None or tip.point == source.point:
        return line
    return (
        f"{line}. Once this run saves, its checkpoints are the latest. The later checkpoints of branch "
        f"{tip.lineage.branch} stay on disk and are not used. Until then, a start without checkpoint.step "
        f"resumes from step {tip.step}"
    )
