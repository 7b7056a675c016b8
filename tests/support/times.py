"""How long each test file takes, so that the longest ones start first.

A file runs in one process. If a long one came last, the other core would be idle at the end. ``times.json``
holds the seconds of the longest files as they were measured. To measure them again:

    make test ARGS=--write-times
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLE = TESTS / "times.json"
SHORT_S = 10.0
"""Files that take less are not in the table. They run after the others."""


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts by the files' seconds. The order within a file stays, and that of files which the table lacks."""
    seconds = json.loads(TABLE.read_text())
    items.sort(key=lambda item: -seconds.get(_name(item.path), 0))


class Times:
    """A plugin that adds up the seconds of each file and writes the table.

    Files that did not run keep what the table had, unless they are gone.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = self.root / report.nodeid.partition("::")[0]
        self.seconds[_name(path)] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = {name: s for name, s in json.loads(TABLE.read_text()).items() if (TESTS / name).is_file()}
        table = before | {name: round(s) for name, s in self.seconds.items()}
        longest = sorted(table.items(), key=lambda one: (-one[1], one[0]))
        TABLE.write_text(json.dumps({name: s for name, s in longest if s >= SHORT_S}, indent=1) + "\n")


def _name(path: Path) -> str:
    return path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else str(path)
