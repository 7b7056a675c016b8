"""Files, folders, tests and definitions that README and docs name are where they say."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = [page for page in PAGES if page.parent.name != "log" or page.stem == "index"]
"""Without the pages of the log, whose entries speak of the tree of their day."""
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

TOP = "megatron_vl|converters|data_tools|toolkit|examples|tests|docs|benchmarks"
WRITTEN = re.compile(rf"`((?:{TOP})/[\w./*-]*)(?:::(\w+))?`")
"""A path from the root, perhaps with a test of the file."""
DEFINED = re.compile(rf"`(?!transformers)(\w+)` (?:in|\() ?`((?:{TOP})/[\w./-]+\.py)`")
"""A definition and its file: "`NAME` in `PATH`" or "`NAME` (`PATH`)"."""
ELSEWHERE = re.compile(r"NAME|_SIZE|^megatron_vl/_tools/")
"""A name that the reader chooses, and a folder of the built wheel."""


@cache
def definitions(path: Path) -> set[str]:
    """Functions, classes and constants of a module, and the methods and fields of its classes."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def missing(text: str) -> list[str]:
    """What a page names and the tree does not have."""
    wrong = []
    for path, test in WRITTEN.findall(text):
        if ELSEWHERE.search(path):
            continue
        there = list(ROOT.glob(path)) if "*" in path else [ROOT / path]
        if not there or not there[0].exists():
            wrong.append(path)
        elif test and test not in definitions(there[0]):
            wrong.append(f"{path}::{test}")

    for name, path in DEFINED.findall(text):
        if (ROOT / path).is_file() and name not in definitions(ROOT / path):
            wrong.append(f"{name} in {path}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_what_a_page_names_exists(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_what_does_not_exist_is_noticed() -> None:
    text = (
        "`tests/nowhere.py`, `tests/test_config.py::test_nothing`, `Gone` in `megatron_vl/config/fields.py`"
    )
    assert missing(text) == [
        "tests/nowhere.py",
        "tests/test_config.py::test_nothing",
        "Gone in megatron_vl/config/fields.py",
    ]
    assert (
        missing("`tests/test_config.py`, `DataConfig` (`megatron_vl/config/fields.py`), `megatron_vl/spec/`")
        == []
    )


# --- From the README to code and proof ----------------------------------------------------------------------


def questions() -> dict[str, tuple[str, str]]:
    """The table of docs/architecture.md: question -> (code, test)."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## Where is it?\n")[2].partition("\n## ")[0]
    table = section.strip().partition("\n\n")[0]  # further tables follow
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("| ")]
    return {question.strip(): (code, test) for question, code, test in rows[1:]}


def test_the_readme_leads_to_code_and_test_in_two_steps() -> None:
    """README -> the table -> the file."""
    assert "](docs/architecture.md#where-is-it)" in (ROOT / "README.md").read_text()
    found = questions()
    assert {"Where is window attention computed?", "Where is a conversion rule?"} <= found.keys()
    for question, (code, test) in found.items():
        if "support-matrix.md" in test:
            continue
        files = [path for path, _ in WRITTEN.findall(code)]
        proofs = [path for path, _ in WRITTEN.findall(test)]
        assert files and all(path.endswith(".py") for path in files), question
        assert proofs and all(path.startswith("tests/") for path in proofs), question
