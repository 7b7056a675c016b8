"""Damaged checkpoints through merge, export and resume; the long run is
``python -m tests.fuzz.checkpoints --count 500``."""

import json

import pytest

from tests.support.ranks import run_module

pytestmark = [pytest.mark.ranks, pytest.mark.full]


def test_damaged_checkpoint_is_refused_by_name_or_unharmed() -> None:
    """In a process of its own: the trainer's CPU platform changes torch for the rest of it."""
    done = run_module("tests.fuzz.checkpoints", ["--count", "60", "--seed", "5"])
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    # Both must occur: damage that nothing sees would mean that nothing looks.
    assert all(counts[f"{action} refused"] > 5 for action in ("merge", "export", "load", "resume"))
    assert all(counts[f"{action} same"] > 5 for action in ("merge", "export", "load", "resume"))
