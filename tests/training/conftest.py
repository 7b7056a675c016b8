"""Small models and data sets that the tests of the trainer share."""

from pathlib import Path

import pytest
import torch

from tests.support.tiny_run import prepare
from tests.tiny import SHORT_TOWER


@pytest.fixture(scope="session")
def shared_files(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint) -> dict[str, Path]:
    """A tied model, its weights in a layout that no run has, and a small data set of images and text."""
    folder = tmp_path_factory.mktemp("shared") / "files"
    hf = tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32, **SHORT_TOWER)
    return prepare(folder, hf, val_fraction=0.25)


@pytest.fixture(scope="module")
def prepared(shared_files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The shared files, and a folder for the runs of a test file."""
    return shared_files | {"folder": tmp_path_factory.mktemp("runs")}
