"""Ids of any number of records need bounded memory and give the answers of a table that holds all of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from data_tools import record_ids
from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.record_ids import RecordIdTable
from tests.support.ranks import REPOSITORY


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes even a small table use its file."""
    monkeypatch.setattr(record_ids, "CACHE_SIZE_KB", 256)


def test_the_first_of_equal_ids_is_found_among_many(tmp_path: Path, small_memory: None) -> None:
    """Compared with a dictionary of all ids; every fifth id occurred before, in the same file or another."""
    choose = random.Random(5)
    first = {}
    table = RecordIdTable(tmp_path / "ids.sqlite")
    repeated = 0

    for record in range(60_000):
        file = f"{record // 20_000}.jsonl"
        identity = f"str: {choose.randrange(120_000)}"
        expected = first.setdefault(identity, (file, record))
        repeated += expected != (file, record)
        assert table.first_occurrence(identity, file, record) == expected

    table.close()
    assert 10_000 < repeated < 20_000
    assert (tmp_path / "ids.sqlite").stat().st_size > 1 << 20


@pytest.mark.slow
def test_memory_does_not_grow_with_the_ids(tmp_path: Path) -> None:
    grown = {}
    for kind in ("table", "dictionary"):
        command = [sys.executable, "-m", "tests.data_tools.programs", kind, str(tmp_path)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
        grown[kind] = float(done.stdout)
    assert grown["table"] < 4 and grown["dictionary"] > 20


def test_ids_that_are_no_valid_unicode(tmp_path: Path) -> None:
    """JSON can spell single surrogates. Ids that differ only there are different, and a refusal
    can show one."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    ids = ["x\ud800", "x\ud801", "x?", "x\ud800", 5, "5", True]
    (tmp_path / "in.json").write_text(json.dumps([{"id": value, "conversations": turns} for value in ids]))

    report = convert_dataset([tmp_path / "in.json"], ConversionOptions(tmp_path, tmp_path / "out"))
    (line,) = map(json.loads, (tmp_path / "out/quarantine.jsonl").read_text().splitlines())
    assert report.samples == 6
    assert (line["record"], line["id"], line["reason"]) == (4, "x\\ud800", "duplicate id")
    assert line["detail"].startswith("str: x\\ud800 is also the id of record 1 of in.json")


def test_the_quarantine_shows_text_and_whole_numbers_as_ids(tmp_path: Path) -> None:
    ids = ["x" * 100, "x" * 101, 7, True, ["a"]]
    (tmp_path / "in.json").write_text(json.dumps([{"id": value} for value in ids]))
    convert_dataset([tmp_path / "in.json"], ConversionOptions(tmp_path, tmp_path / "out"))
    lines = map(json.loads, (tmp_path / "out/quarantine.jsonl").read_text().splitlines())
    assert [line["id"] for line in lines] == ["x" * 100, f"{'x' * 97}...", "7", "", ""]
