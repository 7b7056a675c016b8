"""A run's validations as ``eval.jsonl`` records them, and which of its checkpoints did best."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

EVALUATIONS_FILE = "eval.jsonl"


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
    finite = [(each.loss, each.step, each) for each in validations if each.loss is not None]
    return min(finite, key=lambda entry: entry[:2])[-1] if finite else None


def best_steps(run_dir: Path, saved_steps: Collection[int]) -> set[int]:
    """The saved steps with the least validation loss, one for each set of rows that was validated on."""
    saved = [each for each in read_validations(run_dir) if each.step in saved_steps]
    groups = [[each for each in saved if each.rows == rows] for rows in {each.rows for each in saved}]
    return {best.step for best in map(best_validation, groups) if best is not None}
