"""Tests of a conversion that several nodes share: its data set must not depend on how they did."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools import work_parts
from data_tools.convert import ConversionOptions, ConvertError, convert_dataset, read_part_arguments
from data_tools.work_parts import WorkPart
from megatron_vl import durable_files
from tests.data.media import encoded, write
from toolkit.cli import main

COUNT = 150


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> list[Path]:
    """A file of each kind, with broken records, double ids and pictures in the records."""
    monkeypatch.setattr(work_parts, "BATCHES_PER_BLOCK", 1)  # blocks of 16 records
    write(tmp_path / "media/a.png", encoded(40, 60))

    def record(i: int) -> dict:
        if i % 29 == 5:
            return {"id": i}
        turns = [{"from": "human", "value": "<image>" if i % 3 else "Hi"}, {"from": "gpt", "value": f"{i}"}]
        return {"id": i % 140, "conversations": turns, "image": "a.png" if i % 3 else None}

    records = [record(i) for i in range(COUNT)]
    lines = [json.dumps(r) for r in records[:50]]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:20], "{broken", "", *lines[20:]]))
    (tmp_path / "b.json").write_text(json.dumps(records[50:100]))
    table = [
        {**r, "image": {"bytes": encoded(30, 30), "path": None} if r.get("image") else None}
        for r in records[100:]
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "c.parquet", row_group_size=9)
    return [tmp_path / name for name in ("a.jsonl", "b.json", "c.parquet")]


def options(tmp_path: Path, name: str, **more) -> ConversionOptions:
    return ConversionOptions(
        tmp_path / "media", tmp_path / name, val_fraction=0.1, samples_per_shard=11, **more
    )


def files(out: Path) -> dict[str, str]:
    found = (path for path in out.rglob("*") if path.is_file())
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def test_the_merged_set_is_that_of_one_conversion_whatever_the_parts(tmp_path, inputs, monkeypatch):
    whole = convert_dataset(inputs, options(tmp_path, "whole"))
    wanted = files(tmp_path / "whole")
    assert whole.records == COUNT + 1 and whole.quarantined_records > 10

    for count in (1, 2, 3, 16):
        name = f"of{count}"
        records = 0
        for i in reversed(range(count)):
            records += convert_dataset(inputs, options(tmp_path, name, part=WorkPart(i, count))).records
        assert records == COUNT + 1
        given, stored = read_part_arguments(tmp_path / name, 1)

        monkeypatch.setattr("data_tools.convert.inspect_medium", None)  # media are not decoded a second time
        report = convert_dataset(given, stored)
        monkeypatch.undo()
        monkeypatch.setattr(work_parts, "BATCHES_PER_BLOCK", 1)
        assert files(tmp_path / name) == wanted
        assert report.refused == whole.refused


def test_a_killed_part_goes_on_and_parts_of_several_divisions_add_up(tmp_path, inputs):
    convert_dataset(inputs, options(tmp_path, "whole"))
    out = tmp_path / "out"
    convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(0, 2)))
    journal = out / ".convert/part-0-of-2.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:2]) + lines[2][:10])  # killed while it wrote its third line

    with pytest.raises(ConvertError, match="the parts 0/2, 1/2 are not complete"):
        read_part_arguments(out, 1)
    again = convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(0, 2)))
    assert journal.read_bytes() == b"".join(lines) and again.records == 16 * (len(lines) - 3)
    assert convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(0, 2))).records == 0
    with pytest.raises(ConvertError, match="the parts 1/2 are not complete"):
        read_part_arguments(out, 1)

    convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(2, 3)))
    convert_dataset(inputs, options(tmp_path, "out"))  # does what no part has done
    assert files(out) == files(tmp_path / "whole")


def test_parts_of_other_arguments_and_merges_beside_parts_are_refused(tmp_path, inputs):
    convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(0, 2)))
    with pytest.raises(ConvertError, match="other arguments or input: inputs were"):
        convert_dataset(inputs[:2], options(tmp_path, "out", part=WorkPart(1, 2)))
    with pytest.raises(ConvertError, match="--force would delete"):
        convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(1, 2), force=True))
    with pytest.raises(ConvertError, match="holds no parts"):
        read_part_arguments(tmp_path, 1)


def test_links_to_files_without_a_suffix_are_found_again(tmp_path, inputs, monkeypatch):
    """A hub's cache keeps files under their hash, and links to them."""
    (tmp_path / "snapshot").mkdir()
    inputs[2].rename(tmp_path / "0a1b2c")
    link = tmp_path / "snapshot/c.parquet"
    link.symlink_to("../0a1b2c")
    monkeypatch.chdir(tmp_path)
    convert_dataset([Path("snapshot/c.parquet")], options(tmp_path, "out", part=WorkPart(0, 1)))
    given, stored = read_part_arguments(tmp_path / "out", 1)
    assert given == [link]
    assert convert_dataset(given, stored).records == COUNT - 100


def test_the_commands_of_an_array_of_jobs(tmp_path, inputs, capsys):
    out = tmp_path / "out"
    command = ["data", "convert", "--input", *map(str, inputs), "--media-root", str(tmp_path / "media")]
    command += ["--out", str(out), "--workers", "2"]
    assert main([*command, "--shard", "0/2"]) == 0
    assert "when all parts are done: megatron-vl data merge" in capsys.readouterr().out
    assert main(["data", "merge", str(out)]) == 1
    assert "1/2 are not complete" in capsys.readouterr().err
    assert main([*command, "--shard", "1/2"]) == 0
    assert main(["data", "merge", str(out), "--workers", "2", "--max-quarantined", "1"]) == 0
    assert main(["data", "verify", str(out)]) == 0
    assert main([*command, "--shard", "2/2"]) == 2
    capsys.readouterr()
    assert main(["data", "merge", str(out), "--max-quarantined", "1"]) == 0  # as a job that is queued again
    assert "2 shards" not in (said := capsys.readouterr().out) and f"of {COUNT + 1} records" in said
    alone = tmp_path / "alone"
    shutil.copytree(out, alone)
    (alone / "report.json").unlink()
    assert main(["data", "merge", str(alone)]) == 1


def killed_merge(out: Path, files_put: int) -> bool:
    """Merges in another process, which SIGKILL ends before it puts one more file in place."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    put = durable_files.publish_file
    left = files_put

    def counted(*arguments: Path) -> None:
        nonlocal left
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        put(*arguments)

    durable_files.publish_file = counted
    main(["data", "merge", str(out), "--workers", "1", "--max-quarantined", "1"])
    os._exit(0)


@pytest.mark.parametrize("files_put", [0, 5, 18])
def test_a_killed_merge_goes_on(tmp_path, inputs, files_put):
    """Finished shards stay as they are: each has two files, and one of them is put before the other."""
    convert_dataset(inputs, options(tmp_path, "whole"))
    for i in range(2):
        convert_dataset(inputs, options(tmp_path, "out", part=WorkPart(i, 2)))
    out = tmp_path / "out"
    assert killed_merge(out, files_put)
    kept = {path: path.stat().st_ino for path in out.glob("*.tar")}
    assert len(kept) == files_put // 2 and not (out / ".nv-meta").exists()

    assert main(["data", "merge", str(out), "--workers", "1", "--max-quarantined", "1"]) == 0
    assert files(out) == files(tmp_path / "whole")
    assert {path: path.stat().st_ino for path in kept} == kept
