"""Checks a machine, a data set, a checkpoint or a run, and says how to fix what is wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: Literal["ok", "note", "broken"]
    """``note``: it works, but deserves a look; ``broken``: something that was asked for will not work."""
    found: str
    advice: str = ""
    """What to do; empty if nothing needs to be done."""


def ok_finding(check_name: str, finding_text: str) -> Finding:
    return Finding(check_name, "ok", finding_text)


def note_finding(check_name: str, finding_text: str, advice: str) -> Finding:
    return Finding(check_name, "note", finding_text, advice)


def broken_finding(check_name: str, finding_text: str, advice: str) -> Finding:
    return Finding(check_name, "broken", finding_text, advice)
