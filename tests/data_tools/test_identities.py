"""The first of equal ids is found among any number of them."""

import random

from data_tools import convert
from data_tools.convert import RecordIds


def test_first_of_equal_ids_is_found_among_many(monkeypatch, capsys) -> None:
    """Compared with a dictionary of all ids; every fifth id occurred before, in the same file or another."""
    monkeypatch.setattr(convert, "MAX_LATEST", 1000)
    monkeypatch.setattr(convert, "WARNED_COUNT", 20_000)
    choose = random.Random(5)
    first: dict[str, tuple[str, int]] = {}
    ids = RecordIds()
    repeated = 0
    for record in range(60_000):
        file = f"{record // 20_000}.jsonl"
        identity = f"str: {choose.randrange(120_000)}"
        expected = first.setdefault(identity, (file, record))
        repeated += expected != (file, record)
        assert ids.first_occurrence(identity, file, record) == expected
    assert 10_000 < repeated < 20_000
    said = capsys.readouterr().err
    assert said == (
        "20,000 ids so far take 0.0 GB of memory; --duplicate-ids keep needs none, and --part divides them\n"
    )


def test_hashes_that_end_in_zero_bytes_are_found(monkeypatch) -> None:
    """numpy cuts them off."""
    monkeypatch.setattr(convert, "MAX_LATEST", 500)
    ids = RecordIds()
    for turn in range(2):
        for number in range(2000):  # about eight hashes end in a zero byte
            assert ids.first_occurrence(f"int: {number}", "a", number + turn) == ("a", number)
