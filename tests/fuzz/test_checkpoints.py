"""Damaged checkpoints through merge, export and resume; the long run is
``python -m tests.fuzz.checkpoints --count 500``."""

from __future__ import annotations

import json

import pytest

from tests.support.ranks import run_module

pytestmark = [pytest.mark.ranks, pytest.mark.full]


def test_damage_is_refused_by_name_or_does_not_matter() -> None:
    """In a process of its own: the trainer's CPU platform changes torch for the rest of it."""
    done = run_module("tests.fuzz.checkpoints", ["--count", "60", "--seed", "5", "--json"])
    assert done.returncode == 0, "\n".join(
        line for line in done.stderr.splitlines() if line.startswith(("FAULT", "  "))
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["damaged"] == 60 and result["faults"] == []
    for action in ("merge", "export", "load", "resume"):
        # Both must occur: damage that nothing sees would mean that nothing looks.
        assert result["outcomes"][action]["refused"] > 5 and result["outcomes"][action]["same"] > 5, action
