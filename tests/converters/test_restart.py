"""A killed conversion starts again and gives the same bytes; only complete folders have the name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from converters.convert import convert_weights, export_weights
from megatron_vl.weights.tensor_files import TensorWriter
from tests.disk import Disk

from .helpers import assert_same_folder, released_folder

SIZE = "Qwen2.5-VL-3B-Instruct"
LAYOUT = {"tp": 2, "pp": 2}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_folder(tmp_path_factory.mktemp("restart") / "hf", SIZE)


COMMANDS = ("convert", "split", "merge", "export")


@pytest.mark.slow
@pytest.mark.parametrize("killed", [("convert", "export"), pytest.param(COMMANDS, marks=pytest.mark.full)])
def test_killed_conversion_gives_the_same_bytes(
    tmp_path: Path, origin: Path, repository: Path, killed: tuple[str, ...]
) -> None:
    """Real processes get SIGKILL before chosen writing operations and at random times; kills.py
    compares every byte. Split and merge, which write as convert does, are killed where a merge replaces
    an earlier checkpoint."""
    arguments = [str(origin), str(tmp_path), "2", "1", "0", *killed]
    command = [sys.executable, "-m", "tests.converters.kills", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=repository, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["command"] for line in lines} == {*killed, "merge"}
    assert all(line["killed"] >= 1 for line in lines if "kill_before" in line)
    states = {(line["force"], line["after_kill"]) for line in lines}
    # An earlier checkpoint is replaced by two renames, and missing for the moment between them.
    assert states == {
        (False, "absent"),
        (False, "complete"),
        *((True, s) for s in ("earlier", "absent", "complete")),
    }


@pytest.mark.parametrize("force", [False, True])
def test_full_disk_leaves_what_was_there(tmp_path, origin, monkeypatch, force: bool) -> None:
    if force:
        convert_weights(origin, tmp_path / "out", LAYOUT)
        shutil.copytree(tmp_path / "out", tmp_path / "before")
    before = sorted(tmp_path.rglob("*"))
    calls = [0]

    def failing(self, data, offset, write=TensorWriter._write_at):
        calls[0] += 1
        if calls[0] > 40:
            raise OSError(28, "No space left on device")
        write(self, data, offset)

    monkeypatch.setattr(TensorWriter, "_write_at", failing)
    with pytest.raises(OSError, match="No space left"):
        convert_weights(origin, tmp_path / "out", force=force)
    assert sorted(tmp_path.rglob("*")) == before
    if force:
        assert_same_folder(tmp_path / "before", tmp_path / "out")


def test_folders_of_others_are_not_removed(tmp_path: Path, origin: Path, monkeypatch) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="out.partial is needed .* holds something else; rename it"):
        convert_weights(origin, tmp_path / "out")
    assert (tmp_path / "out.partial" / "notes.txt").read_text() == "mine"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (Path("."), Path("/")):
        with pytest.raises(FileExistsError, match="is the current folder or a mount point"):
            convert_weights(origin, out)


def test_link_to_another_disk_stays_a_link(tmp_path: Path, origin: Path) -> None:
    """``OUT.partial`` is beside the folder that the link leads to, so that it can be renamed."""
    (tmp_path / "disk" / "weights").mkdir(parents=True)
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "weights")
    convert_weights(origin, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["weights"]
    convert_weights(origin, tmp_path / "whole")
    assert_same_folder(tmp_path / "whole", tmp_path / "disk" / "weights")


@pytest.mark.parametrize("fails_at", [1, 2])
def test_failed_rename_gives_the_earlier_folder_back(tmp_path, origin, monkeypatch, fails_at: int) -> None:
    out = tmp_path / "out"
    convert_weights(origin, out, LAYOUT)
    (out / "mine").mkdir()
    shutil.copytree(out, tmp_path / "before")
    calls = [0]

    def failing(old, new, replace=os.replace):
        if ".partial" in f"{old} {new}" and not str(old).endswith(".safetensors.partial"):
            calls[0] += "manifest" not in str(old)
            if calls[0] == fails_at:
                raise OSError(5, "Input/output error")
        replace(old, new)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="Input/output"):
        convert_weights(origin, out, force=True)
    assert_same_folder(tmp_path / "before", out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["before", "out"]


def test_export_is_on_the_disk_when_it_returns(tiny_checkpoint, tmp_path: Path, monkeypatch) -> None:
    hf = tiny_checkpoint("qwen2_5_vl")
    convert_weights(hf, tmp_path / "full")
    disk = Disk(monkeypatch)
    (tmp_path / "there").mkdir()
    export_weights(tmp_path / "full", hf, tmp_path / "there" / "out")
    assert disk.lost(tmp_path / "there") == [] and len(list((tmp_path / "there" / "out").iterdir())) > 4
