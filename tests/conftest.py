"""Settings that must be made before torch is imported, and fixtures for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

# Groups of processes share the machine's cores: one thread each, or they fight.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is downloaded in a test.
os.environ["HF_HUB_OFFLINE"] = "1"

REPOSITORY = Path(__file__).resolve().parent.parent
if str(REPOSITORY) not in sys.path:
    sys.path.insert(0, str(REPOSITORY))

import pytest  # noqa: E402

from tests.support import ranks  # noqa: E402

LONGEST_FIRST = (
    "toolkit/test_demo.py",
    "fuzz/test_kills.py",
    "distributed/test_parity.py",
    "training/test_run.py",
    "toolkit/test_evaluate_sets.py",
    "training/test_run_experts.py",
    "models/moe/test_experts.py",
    "training/test_signals.py",
    "toolkit/test_plan.py",
    "test_examples.py",
)
"""Files that take minutes start first; otherwise one of the two cores would be idle at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; the order within a file and among the others stays."""
    place = {str(REPOSITORY / "tests" / name): number for number, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """``make quick`` leaves out the tests marked ``ranks``; a test that starts ranks without
    the mark fails."""
    ranks.allowed = item.get_closest_marker("ranks") is not None


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[..., Path]:
    """``tiny_checkpoint(family, **options)``: the folder of a small checkpoint, written once per session."""
    from tests.tiny import tiny_checkpoint as cached

    return cached


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY
