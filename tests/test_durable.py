"""Durably written files have their bytes and names on the disk when the call returns."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_vl.system import durable_files
from megatron_vl.training.state.optimizer_state import SavedTensor, write_hashed_safetensors
from megatron_vl.weights.tensor_files import TensorWriter, make_safetensors_header
from tests.disk import Disk


def bytes_of_a_file(path: Path) -> None:
    durable_files.write_file(path, b"new")


def tensors_one_by_one(path: Path) -> None:
    writer = TensorWriter(path, make_safetensors_header({"a": (torch.float32, (4,))}))
    writer.write_tensor("a", [torch.arange(4.0)])
    writer.commit()


def optimizer_state(path: Path) -> None:
    write_hashed_safetensors(path, {"a": SavedTensor(torch.float32, 4, torch.arange(4.0).clone)}, {"dp": "0"})


@pytest.mark.parametrize("write", [bytes_of_a_file, tensors_one_by_one, optimizer_state])
@pytest.mark.parametrize("there_before", [False, True])
def test_written_files(tmp_path, monkeypatch, write: Callable[[Path], None], there_before: bool) -> None:
    path = tmp_path / "file"
    if there_before:
        path.write_bytes(b"old")
    before = path.stat().st_ino if there_before else None

    def before_rename(old: Path, new: Path) -> None:
        assert "the content of file.partial" not in disk.lost(tmp_path)
        assert not there_before or new.read_bytes() == b"old"

    disk = Disk(monkeypatch, before_rename)
    write(path)
    assert disk.lost(tmp_path) == []
    assert path.stat().st_ino != before


def test_new_folders_and_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    durable_files.make_dirs(tmp_path / "a" / "b")
    durable_files.make_dirs(tmp_path / "a" / "c")
    assert disk.lost(tmp_path) == []

    (tmp_path / "a/b/file").write_text("x")
    assert disk.lost(tmp_path / "a") == ["b: the name file", "b: the content of file"]
    durable_files.fsync_tree(tmp_path / "a")
    assert disk.lost(tmp_path / "a") == []
