import shutil
from pathlib import Path

import pytest

from tests.tiny import tiny_checkpoint

from .payload import Mark


@pytest.fixture
def mark(tmp_path):
    """The mark of a hostile item; the test fails if it exists at the end."""
    mark = Mark(tmp_path / "executed")
    yield mark
    mark.check()


@pytest.fixture
def hf(tmp_path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen2_5_vl"), tmp_path / "hf")
