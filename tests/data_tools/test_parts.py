"""A part of the records becomes a data set of its own; all parts together hold what one conversion holds."""

import json
import os
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools import convert as tool
from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.records import ConvertError
from tests.data.media import encoded, write
from tests.data_tools.test_convert import shards
from toolkit.cli import main

COUNT = 150


@pytest.fixture
def inputs(tmp_path, monkeypatch) -> list[Path]:
    """A file of each kind, with broken records and images in the records."""
    monkeypatch.setattr(tool, "RECORDS_PER_BLOCK", 16)
    write(tmp_path / "media/a.png", encoded(40, 60))

    def record(i: int) -> dict:
        if i % 29 == 5:
            return {"id": i}
        turns = [{"from": "human", "value": "<image>" if i % 3 else "Hi"}, {"from": "gpt", "value": f"{i}"}]
        return {"id": i, "conversations": turns, "image": "a.png" if i % 3 else None}

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


@pytest.mark.parametrize("count", [2, 9])
def test_parts_hold_the_samples_of_one_conversion(tmp_path, inputs, count):
    whole = convert_dataset(inputs, options(tmp_path, "whole"))
    samples: dict[str, bytes] = {}
    records = 0
    for i in reversed(range(count)):
        part_options = options(tmp_path, "parts", part=(i, count))
        records += convert_dataset(inputs, part_options).records
        found = shards(part_options.dataset_dir)
        assert not samples.keys() & found.keys()
        samples |= found
    assert records == whole.records == COUNT + 1
    assert samples == shards(tmp_path / "whole")
    names = [f"part-{i:05d}-of-{count:05d}" for i in range(count)]
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == names


def test_parts_of_another_conversion_are_refused(tmp_path, inputs):
    convert_dataset(inputs, options(tmp_path, "out", part=(0, 2)))
    with pytest.raises(ConvertError, match="converted from other input or with other arguments"):
        convert_dataset(inputs[:2], options(tmp_path, "out", part=(1, 2)))
    with pytest.raises(ConvertError, match="holds part-00000-of-00002, which is none of 3 parts"):
        convert_dataset(inputs, options(tmp_path, "out", part=(1, 3)))
    with pytest.raises(ConvertError, match="out exists; remove it"):
        convert_dataset(inputs, options(tmp_path, "out"))
    with pytest.raises(ConvertError, match="hold no record in part 10/20"):
        convert_dataset(inputs, options(tmp_path, "other", part=(10, 20)))
    assert list((tmp_path / "other").iterdir()) == []


def test_parts_are_converted_by_commands(tmp_path, inputs, capsys):
    out = tmp_path / "out"
    command = ["data", "convert", "--input", *map(str, inputs), "--media-root", str(tmp_path / "media")]
    command += ["--out", str(out), "--workers", "2", "--max-quarantined", "1"]
    for part in ("0/2", "1/2"):
        assert main([*command, "--part", part]) == 0
    capsys.readouterr()
    assert all((out / f"part-0000{part}-of-00002/train-000000.tar").exists() for part in (0, 1))
    for wrong in ("2/2", "1", "a/b", "1/x"):
        assert main([*command, "--part", wrong]) == 2
        assert "must be I/N" in capsys.readouterr().err


def test_records_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    turns = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    for number, text in enumerate((json.dumps([{"conversations": turns}] * 3), json.dumps({"messages": 1}))):
        writer = threading.Thread(target=pipe.write_text, args=(text + "\n",))
        writer.start()
        report = convert_dataset([pipe], ConversionOptions(None, tmp_path / str(number)))
        writer.join()
        assert report.records == (3, 1)[number]
