"""The first of equal ids is found among any number of them."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

from data_tools.record_ids import RecordIds


def test_first_of_equal_ids_is_found_among_many(tmp_path: Path) -> None:
    """Compared with a dictionary of all ids; every fifth id occurred before, in the same file or another."""
    choose = random.Random(5)
    first: dict[str, tuple[str, int]] = {}
    repeated = 0
    with closing(RecordIds(tmp_path / "ids.sqlite")) as ids:
        for record in range(60_000):
            file = f"{record // 20_000}.jsonl"
            identity = f"str: {choose.randrange(120_000)}"
            expected = first.setdefault(identity, (file, record))
            repeated += expected != (file, record)
            assert ids.first_occurrence(identity, file, record) == expected
    assert 10_000 < repeated < 20_000
