"""Checkpoints are removed as soon as their test is over: pytest would keep gigabytes of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _remove_checkpoints(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "tmp_path" in request.fixturenames:
        path: Path = request.getfixturevalue("tmp_path")
        shutil.rmtree(path, ignore_errors=True)
