"""Settings that every test needs before torch is imported, and fixtures that all of them may use."""

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


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Callable[..., Path]:
    """``tiny_checkpoint(family, **options)``: the folder of a small checkpoint, written once a session."""
    from tests.tiny import tiny_checkpoint as cached

    return cached


@pytest.fixture
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY
