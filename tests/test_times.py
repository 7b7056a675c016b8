"""The longest test files start first, by a table of measured seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import times


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "times.json"
    path.write_text(json.dumps({"training/test_run.py": 200, "test_docs.py": 100, "test_gone.py": 300}))
    monkeypatch.setattr(times, "TABLE", path)
    return path


def test_table_names_files_that_exist() -> None:
    assert [name for name in json.loads(times.TABLE.read_text()) if not (times.TESTS / name).is_file()] == []


def test_long_files_come_first_and_the_rest_stays(table: Path) -> None:
    names = ("test_errors.py", "test_docs.py", "test_config.py", "training/test_run.py", "test_docs.py")
    items = [SimpleNamespace(path=times.TESTS / name, number=i) for i, name in enumerate(names)]
    times.longest_first(items)  # type: ignore[arg-type]
    assert [item.number for item in items] == [3, 1, 4, 0, 2]


def test_what_ran_is_written_and_what_did_not_run_stays(table: Path) -> None:
    measured = times.Times(times.TESTS.parent)
    for name, seconds in (
        ("test_docs", 40.4),
        ("test_docs", 0.2),
        ("test_errors", 3.0),
        ("test_start", 12.0),
    ):
        report = SimpleNamespace(nodeid=f"tests/{name}.py::test_something[a::b]", duration=seconds)
        measured.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    measured.pytest_sessionfinish()
    written = json.loads(table.read_text())
    assert written == {"training/test_run.py": 200, "test_docs.py": 41, "test_start.py": 12}
    assert list(written) == ["training/test_run.py", "test_docs.py", "test_start.py"]
