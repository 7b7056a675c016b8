from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

from .payload import Mark


@pytest.fixture
def mark(tmp_path):
    """The mark of a hostile thing; the test fails when it is there in the end."""
    mark = Mark(tmp_path / "executed")
    yield mark
    mark.check()


@pytest.fixture
def hf(tmp_path) -> Path:
    """A checkpoint folder of one's own."""
    return shutil.copytree(tiny_checkpoint("qwen2_5_vl"), tmp_path / "hf")
