"""Keeps a run's folder: one run writes to it, checkpoints that are not needed any more are deleted, and those
with the best validation loss stay."""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.estimate.parameters import checkpoint_bytes
from megatron_vl.spec.families import ModelSpec
from megatron_vl.system.processes import RankProcess, own_process
from megatron_vl.weights.run_folder import CheckpointError, saved_checkpoints

OWNER_FILE = ".owner.json"
EVALUATIONS_FILE = "eval.jsonl"


def lock_run_dir(run_dir: Path) -> Any:
    """Keeps other runs from writing to ``run_dir`` until :func:`unlock_run_dir`, or until the process ends.

    Some file systems have no locks, or only those of one node. So this process also enters itself as the
    owner of the folder. Whoever was the owner before stops at its next save.

    Returns the open lock file. Raises CheckpointError if another run holds the lock, or is known to go on.
    """
    lock_file = (run_dir / ".lock").open("w")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # of any other number: the file system has no locks
        owner = read_owner(run_dir)
        is_owned = owner is not None and owner.pid != os.getpid() and owner.is_running()
        if is_owned or error.errno in (errno.EAGAIN, errno.EACCES):
            lock_file.close()
            raise CheckpointError(
                f"another run ({owner or 'of an unknown process'}) is writing to {run_dir}; end it, or give"
                " another checkpoint.dir"
            ) from error
    # In place: other nodes see the new content of a known file sooner than another file of the same name.
    (run_dir / OWNER_FILE).write_text(json.dumps(dataclasses.asdict(own_process())))
    return lock_file


def unlock_run_dir(lock_file: Any) -> None:
    """Undoes :func:`lock_run_dir`. Closing alone would not: forked processes hold the file too."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(lock_file, fcntl.LOCK_UN)
    lock_file.close()


def read_owner(run_dir: Path) -> RankProcess | None:
    """The process that last began to write to a run's folder; None if that is not known."""
    try:
        return RankProcess(**json.loads((run_dir / OWNER_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def last_good_text(run_dir: Path) -> str:
    """Names the checkpoint from which a run continues whose last save has failed."""
    checkpoints = saved_checkpoints(run_dir)
    return (
        f"the last good checkpoint is step {checkpoints[-1].step}"
        if checkpoints
        else "there is no earlier checkpoint"
    )


def check_free_space(config: TrainConfig, spec: ModelSpec) -> None:
    """Raises RunConfigError if ``checkpoint.dir`` has no room for a checkpoint."""
    if not config.checkpoint.dir:
        return
    run_dir, size = Path(config.checkpoint.dir), checkpoint_bytes(config, spec)
    existing_dir = next(part for part in (run_dir, *run_dir.absolute().parents) if part.exists())
    free_bytes = shutil.disk_usage(existing_dir).free
    # This start deletes what a kill or a stop has left, before its first save.
    num_kept = config.checkpoint.keep
    old_dirs = [saved.path for saved in saved_checkpoints(run_dir)[:-num_kept]] if num_kept else []
    leftovers = (
        path for folder in (*run_dir.glob("step_*.partial"), *old_dirs) for path in folder.rglob("*")
    )
    free_bytes += sum(path.stat().st_size for path in leftovers if path.is_file())
    if free_bytes < size:
        raise RunConfigError(
            f"checkpoint.dir {run_dir}: a checkpoint takes {size / 1e9:.2f} GB, and the disk has"
            f" {free_bytes / 1e9:.2f} GB free; make room, or give a checkpoint.dir on another disk"
        )


def delete_checkpoint(path: Path) -> None:
    """Deletes a checkpoint. A failure is only printed, because the new checkpoint is good all the same."""
    trash = path.with_name(f"{path.name}.old.partial")
    try:
        remove_dir(trash)  # an earlier start could not delete it
        os.replace(path, trash)  # a checkpoint that is only partly deleted must not look complete
        remove_dir(trash)
    except OSError as error:
        print(f"NOTE: {path} is not needed any more and could not be deleted ({error})", flush=True)


def remove_dir(path: Path) -> None:
    """Deletes a folder if it exists. Of a link, only the link goes: what it leads to belongs to the user."""
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


# --- Validations, as ``eval.jsonl`` records them ------------------------------------------------------------


@dataclass(frozen=True)
class Validation:
    """A line of the file."""

    step: int
    loss: float | None
    """None if it was not finite."""
    rows: str
    """Digest of the rows. Losses on other rows are not compared."""


def read_validations(run_dir: Path) -> list[Validation]:
    """The validations of the steps that the run has, in their order.

    A run that went back to an older step has left the later ones, so their lines do not count any more.
    """
    path = run_dir / EVALUATIONS_FILE
    validations: dict[tuple[int, str], Validation] = {}
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            new = Validation(record["step"], record["loss"], record.get("rows", ""))
        except (ValueError, KeyError, TypeError):  # a line that a kill has torn
            continue
        while validations and next(reversed(validations))[0] > new.step:
            validations.popitem()
        validations.pop((new.step, new.rows), None)  # the new one comes last
        validations[new.step, new.rows] = new
    return list(validations.values())


def best_validation(validations: Collection[Validation]) -> Validation | None:
    """The one with the least loss, of several the earliest."""
    finite = [each for each in validations if each.loss is not None]
    return min(finite, key=lambda each: (each.loss, each.step), default=None)


def best_steps(run_dir: Path, saved_steps: Collection[int]) -> set[int]:
    """The saved steps with the least validation loss, one for each set of rows that was validated on."""
    saved = [each for each in read_validations(run_dir) if each.step in saved_steps]
    groups = ([each for each in saved if each.rows == rows] for rows in {each.rows for each in saved})
    return {best.step for best in map(best_validation, groups) if best is not None}
