"""A killed conversion continues where it was, gives the same bytes, and never counts as finished
before its end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from converters.convert import convert_weights, export_weights, reshard_weights
from converters.hf_checkpoint import HfCheckpoint, TensorFolder
from megatron_vl.journal import JsonLinesJournal
from megatron_vl.weights.manifest import JOURNAL_FILE, MANIFEST_FILE
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.cli import main

from .helpers import assert_same_folder, released_folder

SIZE = "Qwen2.5-VL-3B-Instruct"
LAYOUT = {"tp": 2, "pp": 2}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_folder(tmp_path_factory.mktemp("restart") / "hf", SIZE)


def interrupted(monkeypatch: pytest.MonkeyPatch, work, after: int = 40) -> None:
    """Runs ``work`` until the disk fails at the n-th region that is read, which leaves what a kill leaves."""
    calls = [0]
    with monkeypatch.context() as patch:
        for source in (HfCheckpoint, WeightReader):

            def failing(self, name, region, read=source.read_region):
                calls[0] += 1
                if calls[0] > after:
                    raise OSError("input/output error")
                return read(self, name, region)

            patch.setattr(source, "read_region", failing)
        with pytest.raises(OSError, match="input/output error"):
            work()


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path, origin: Path, repository: Path) -> None:
    """Real processes get SIGKILL before chosen writing operations and at random times; kills.py
    compares every byte."""
    command = [sys.executable, "-m", "tests.converters.kills", str(origin), str(tmp_path), "2", "1"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=repository, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["command"] for line in lines} == {"convert", "split", "merge", "export"}
    assert all(line["killed"] >= 1 for line in lines if "kill_before" in line)
    # At the middle some tensors are there, after the last rename all are.
    for line in lines:
        if line.get("kill_before") == line["of"]:
            assert line["kept_files"] == line["files"], line
            assert f"continuing: {line['files']} of {line['files']} files kept" in line["told"]
        if line.get("kill_before") == line["of"] // 2 and line["killed"] == 1:
            assert line["kept_tensors"] > 5 and line["kept_files"] < line["files"], line


def test_other_arguments_are_refused(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    interrupted(monkeypatch, lambda: convert_weights(origin, out, LAYOUT))
    for other, message in (
        ({"tp": 4}, "layout tp was 2, but is now 4"),
        (None, "layout was {.*}, but is now absent"),
    ):
        with pytest.raises(FileExistsError, match=f"unfinished conversion, and {message}.*--force"):
            convert_weights(origin, out, other)

    with pytest.raises(
        FileExistsError, match="unfinished conversion to Megatron weights; give another --out"
    ):
        convert_weights(origin, tmp_path / "full")
        export_weights(tmp_path / "full", origin, out, force=True)

    report = convert_weights(origin, out, {"tp": 4}, force=True)
    assert report.kept_tensors == 0
    convert_weights(origin, tmp_path / "whole", {"tp": 4})
    assert_same_folder(tmp_path / "whole", out)


def test_a_changed_source_is_refused(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is noticed by modification time in a HF folder, and by content in Megatron weights."""
    hf, out = tmp_path / "hf", tmp_path / "out"
    shutil.copytree(origin, hf)
    interrupted(monkeypatch, lambda: convert_weights(hf, out))
    os.utime(hf / "model-00002-of-00002.safetensors", ns=(1, 1))
    with pytest.raises(FileExistsError, match="source model-00002-of-00002.safetensors was .*--force"):
        convert_weights(hf, out)
    convert_weights(hf, out, force=True)
    convert_weights(origin, tmp_path / "shards", LAYOUT)
    interrupted(monkeypatch, lambda: reshard_weights(tmp_path / "shards", tmp_path / "merged"))
    shutil.rmtree(tmp_path / "shards")
    convert_weights(origin, tmp_path / "shards", {"tp": 4})
    with pytest.raises(FileExistsError, match="source manifest.json was "):
        reshard_weights(tmp_path / "shards", tmp_path / "merged")


def test_a_source_that_changes_meanwhile(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf = tmp_path / "hf"
    region = HfCheckpoint.read_region
    shutil.copytree(origin, hf)

    def touching(self, name, w):
        os.utime(hf / "model-00001-of-00002.safetensors")
        return region(self, name, w)

    monkeypatch.setattr(HfCheckpoint, "read_region", touching)
    with pytest.raises(WeightsError, match="model-00001-of-00002.safetensors changed while it was read"):
        convert_weights(hf, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_damage_to_what_was_written_is_written_again(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a flipped bit, a truncated file, a missing file or half a line in the journal, only intact
    tensors are kept."""
    out = tmp_path / "out"
    convert_weights(origin, tmp_path / "whole", LAYOUT)
    interrupted(monkeypatch, lambda: convert_weights(origin, out, LAYOUT), after=100)
    lines = (out / JOURNAL_FILE).read_text().splitlines()
    files = sorted(out.glob("*.partial"))

    assert len(files) == 4
    data = bytearray(files[0].read_bytes())
    data[100_000] ^= 1
    files[0].write_bytes(data)
    files[1].write_bytes(files[1].read_bytes()[:5000])
    files[2].unlink()

    with (out / JOURNAL_FILE).open("a") as file:
        file.write('["tp00_pp00.safetens')
    report = convert_weights(origin, out, LAYOUT)
    assert 0 < report.kept_tensors < len(lines) - 1

    assert_same_folder(tmp_path / "whole", out)


def test_force_killed_after_its_first_step(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the journal's first line on, a replaced checkpoint does not come back half replaced."""
    out = tmp_path / "out"
    convert_weights(origin, out, {"tp": 4})
    removed = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        if len(removed) == 3:
            raise KeyboardInterrupt
        os.unlink(path)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", unlink)
        convert_weights(origin, out, LAYOUT, force=True)
    assert removed[0] == MANIFEST_FILE and (out / JOURNAL_FILE).is_file()
    with pytest.raises(FileNotFoundError, match="a conversion that is not finished"):
        WeightReader(out)
    convert_weights(origin, out, LAYOUT)
    convert_weights(origin, tmp_path / "whole", LAYOUT)
    assert_same_folder(tmp_path / "whole", out)


def test_an_unfinished_folder_is_not_a_checkpoint(
    tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    convert_weights(origin, tmp_path / "full")
    interrupted(monkeypatch, lambda: export_weights(tmp_path / "full", origin, tmp_path / "back"))
    interrupted(monkeypatch, lambda: convert_weights(origin, tmp_path / "shards", LAYOUT))
    with pytest.raises(WeightsError, match="an unfinished export; run the same export again"):
        TensorFolder(tmp_path / "back")
    with pytest.raises(FileNotFoundError, match="a conversion that is not finished; run it again"):
        WeightReader(tmp_path / "shards")

    words = ["export", "--checkpoint", tmp_path / "full", "--hf", origin, "--out", tmp_path / "back"]
    assert main([str(word) for word in words]) == 0
    told = capsys.readouterr()
    assert "of 2 files kept" in told.err and "continued: " in told.out
    assert_same_folder(origin, tmp_path / "back")


def test_two_processes_do_not_write_to_one_folder(tmp_path: Path, origin: Path) -> None:
    (tmp_path / "out").mkdir()
    journal = JsonLinesJournal(tmp_path / "out" / JOURNAL_FILE, dict, is_exclusive=True)
    with pytest.raises(FileExistsError, match="another process is writing"):
        convert_weights(origin, tmp_path / "out")
    journal.close(remove_file=True)
    convert_weights(origin, tmp_path / "out")
    assert not (tmp_path / "out" / JOURNAL_FILE).exists()


def test_full_disk_keeps_what_is_there(tmp_path: Path, origin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the remaining files need room, and nothing is lost if there is too little."""
    out = tmp_path / "out"
    usage = shutil.disk_usage(tmp_path)
    interrupted(monkeypatch, lambda: convert_weights(origin, out, LAYOUT))
    with monkeypatch.context() as patch, pytest.raises(WeightsError, match="the disk has 0.0 GB free"):
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        convert_weights(origin, out, LAYOUT)
    assert convert_weights(origin, out, LAYOUT).kept_tensors > 0


def test_an_exported_folder_is_on_the_disk_when_export_returns(
    tiny_checkpoint, tmp_path: Path, monkeypatch
) -> None:
    """Each file's bytes are synced, under its final or former name, and so is the folder that
    holds the names."""
    hf = tiny_checkpoint("qwen2_5_vl")
    synced = set()
    fsync = os.fsync

    def recorded(handle: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{handle}").removesuffix(".partial"))
        fsync(handle)

    convert_weights(hf, tmp_path / "full")
    monkeypatch.setattr(os, "fsync", recorded)
    export_weights(tmp_path / "full", hf, tmp_path / "out")
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(files) > 4
    assert {str(path) for path in (tmp_path / "out", *files)} <= synced
