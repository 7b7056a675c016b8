"""Ids of any number of records need bounded memory and give the answers of a table that holds all of them."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from data_tools import identities
from data_tools.convert import ConversionOptions, convert
from data_tools.identities import Identities


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes even a small table use its file."""
    monkeypatch.setattr(identities, "CACHE_KB", 256)


def test_the_first_of_equal_ids_is_found_among_many(tmp_path: Path, small_memory: None) -> None:
    """Compared with a dictionary of all ids; every fifth id occurred before, in the same file or another."""
    choose = random.Random(5)
    first = {}
    table = Identities(tmp_path / "ids.sqlite")
    repeated = 0

    for record in range(60_000):
        file = f"{record // 20_000}.jsonl"
        identity = f"str: {choose.randrange(120_000)}"
        expected = first.setdefault(identity, (file, record))
        repeated += expected != (file, record)
        assert table.first(identity, file, record) == expected

    table.close()
    assert 10_000 < repeated < 20_000
    assert (tmp_path / "ids.sqlite").stat().st_size > 1 << 20


def growth(fill: Callable[[int], None], connection: Connection) -> None:
    """Sends the number of MiB by which a process grows while it takes 300,000 ids."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    fill(1)
    before = resident()
    fill(300_000)
    connection.send(resident() - before)


def test_memory_does_not_grow_with_the_ids(tmp_path: Path, small_memory: None) -> None:
    kept: dict[bytes, tuple[str, int]] = {}

    def table(count: int) -> None:
        ids = Identities(tmp_path / "ids.sqlite")
        for i in range(count):
            ids.first(f"str: {i}", "a.jsonl", i)

    def dictionary(count: int) -> None:
        for i in range(count):
            kept[hashlib.blake2b(b"%d" % i, digest_size=16).digest()] = ("a.jsonl", i)

    grown = []
    for fill in (table, dictionary):
        receive, send = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=growth, args=(fill, send))
        process.start()
        assert receive.poll(120)
        grown.append(receive.recv())
        process.join(10)
    assert grown[0] < 4 and grown[1] > 20


def test_ids_that_are_no_valid_unicode(tmp_path: Path) -> None:
    """JSON can spell single surrogates. Ids that differ only there are different, and a refusal
    can show one."""
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    ids = ["x\ud800", "x\ud801", "x?", "x\ud800", 5, "5", True]
    (tmp_path / "in.json").write_text(json.dumps([{"id": value, "conversations": turns} for value in ids]))

    report = convert([tmp_path / "in.json"], ConversionOptions(tmp_path, tmp_path / "out"))
    (line,) = map(json.loads, (tmp_path / "out/quarantine.jsonl").read_text().splitlines())
    assert report.samples == 6
    assert (line["record"], line["reason"]) == (4, "duplicate id")
    assert line["detail"].startswith("str: x\\ud800 is also the id of record 1 of in.json")
