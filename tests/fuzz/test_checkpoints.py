"""Damaged checkpoints through merge, export and resume."""

import pytest

from tests.fuzz.checkpoints import count_outcomes
from tests.support.ranks import call


@pytest.mark.full
@pytest.mark.ranks
def test_damaged_checkpoint_is_refused_by_name_or_unharmed(tmp_path) -> None:
    """In a process of its own: the trainer's CPU platform changes torch for the rest of it."""
    counts = call(count_outcomes, folder=str(tmp_path), count=500, timeout_s=3000)
    # Both must occur: damage that nothing sees would mean that nothing looks.
    for action in ("merge", "export", "load", "resume"):
        assert counts[f"{action} refused"] > 40 and counts[f"{action} same"] > 40
