"""Data sets that several files of this folder mix."""

import shutil
from pathlib import Path

import pytest

from megatron_vl.data import planned_rows

from .datasets import converted
from .mixtures import talk, write


@pytest.fixture(autouse=True)
def small_packing_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_rows, "PACKING_BUFFER", 4)


@pytest.fixture(scope="session")
def parts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    for name, count in (("birds", 24), ("ships", 20), ("other", 24)):
        made = converted(folder / f"in_{name}", talk(name, count), val_fraction=0.2, samples_per_shard=6)[0]
        shutil.move(made, folder / name)
    return folder


@pytest.fixture
def folder(parts, tmp_path) -> Path:
    shutil.copytree(parts, tmp_path / "mix")
    write(tmp_path / "mix")
    return tmp_path / "mix"
