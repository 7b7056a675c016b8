"""A few of the random adapters; 200 of them: ``python -m tests.fuzz.adapters --count 200``."""

from __future__ import annotations

import pytest

from .adapters import fuzz_adapters


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.full)])
def test_random_adapters_are_merged_as_peft_does(count: int) -> None:
    outcomes = fuzz_adapters(count)
    assert sum(outcomes.values()) == count and len(outcomes) > 2
