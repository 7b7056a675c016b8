"""What is wrong with a machine, a data set, a checkpoint or a run, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "note", "broken"]
    """``note``: works, but look at it; ``broken``: something that was asked for will not work."""
    found: str
    advice: str = ""
    """What to do; empty when there is nothing to do."""


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def note(name: str, found: str, advice: str) -> Finding:
    return Finding(name, "note", found, advice)


def broken(name: str, found: str, advice: str) -> Finding:
    return Finding(name, "broken", found, advice)
