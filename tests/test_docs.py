"""Checks commands and links in the documents.

Blocks after the comment ``<!-- The tests run this block. -->``, which no reader of the page sees, are run;
the commands of all others must be valid. A block of Python is a program of its own. The blocks of a document
run in order in one folder that holds what its text asks the reader to have: the examples, a checkpoint (a
small one with as many layers as the example's layout needs) and conversations with their media.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.config import parse_config, validate_config
from tests.commands import logical_lines, megatron_vl_command, trainer_config
from toolkit.demo.demo_data import write_raw_data

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(document.relative_to(ROOT)) for document in DOCUMENTS]
MARK = "<!-- The tests run this block. -->\n"
BLOCK = re.compile(rf"(^{MARK})?^ *```(bash|python)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def blocks(document: Path) -> list[tuple[str, str, str]]:
    """Mark, language and text of each block; text within lists loses its indentation."""
    found = BLOCK.findall(document.read_text())
    return [(mark, language, textwrap.dedent(text)) for mark, language, text in found]


COMMANDS = [
    (name, line)
    for name, document in zip(NAMES, DOCUMENTS, strict=True)
    for _, language, block in blocks(document)
    if language == "bash"
    for line in logical_lines(block)
]
STARTS_RANKS = re.compile(r"^megatron-vl train (?!.*--help)", re.MULTILINE)


def checked_script(document: Path) -> str:
    """The checked blocks of a document, one after the other; empty where it has none."""
    parts = []
    for mark, language, block in blocks(document):
        if mark:
            parts.append(block if language == "bash" else f"python - <<'END OF BLOCK'\n{block}END OF BLOCK\n")
    return "\n".join(parts)


def checked_documents() -> list[Any]:
    """Documents with checked blocks; those whose blocks train carry the mark of tests that start ranks, the
    others that of slow tests: each command is a process of its own."""
    found = []
    for name, document in zip(NAMES, DOCUMENTS, strict=True):
        script = checked_script(document)
        marks = [pytest.mark.ranks if STARTS_RANKS.search(script) else pytest.mark.slow]
        if script:
            found.append(pytest.param(document, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("document", "line"), COMMANDS, ids=[line[:70] for _, line in COMMANDS])
def test_commands_are_valid(document, line):
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    program = words[0].removeprefix(".venv/bin/")
    line = line[line.index(program) :]
    if "megatron_vl.train" in words or line.startswith("megatron-vl train"):
        training = trainer_config(line)
        if training is not None:
            validate_config(*training)
    elif program == "megatron-vl":
        megatron_vl_command(line)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets)
    elif "/slurm.sh" in line:
        assert (ROOT / "examples" / f"{words[-1]}.yaml").is_file() and (ROOT / words[-2]).is_file()
    elif program.startswith("examples/"):
        assert os.access(ROOT / program, os.X_OK)
        name = words[1]
        path = str(ROOT / "examples" / f"{name}.yaml")
        assert Path(path).is_file() or name == "RUN.yaml"
        if program.endswith("pretrain.sh") and name != "RUN.yaml":
            parse_config(["--config", path, *words[2:]])
    elif program in ("pip", "pre-commit", "source", "python") or words[1:3] == ["-m", "pytest"]:
        for word in words[1:]:
            assert not word.startswith(("tests/", "constraints")) or (ROOT / word).exists()
        if program == "python" and "-m" in words:
            module = words[words.index("-m") + 1]
            assert importlib.util.find_spec(module), f"{document}: there is no module {module}"
    else:
        pytest.fail(
            f"{document}: nobody checks {line!r}; write {MARK.strip()!r} before its block, or teach "
            "this test to validate it"
        )


@pytest.mark.parametrize("document", checked_documents())
def test_checked_blocks_run(document, tiny_checkpoint, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "Qwen2.5-VL-7B-Instruct").symlink_to(tiny_checkpoint("qwen2_5_vl", layers=28))
    write_raw_data(tmp_path / "data")
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    script = checked_script(document)
    done = subprocess.run(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    if "megatron-vl verify" in script:
        assert "identical" in done.stdout


def test_documents_have_blocks_that_are_run():
    """A mark that is written differently would run nothing."""
    assert {param.id for param in checked_documents()} >= {
        "README.md",
        "docs/data.md",
        "docs/python-api.md",
        "docs/weights.md",
    }


def named_functions(page: str) -> list[str]:
    """The dotted names in the first column of the tables of a page."""
    return re.findall(r"^\| `([\w.]+)` \|", page, re.MULTILINE)


def test_the_functions_of_the_python_api_exist():
    """Those that the page's own example does not call are only looked up."""
    names = named_functions((ROOT / "docs" / "python-api.md").read_text())
    assert len(names) > 10
    for name in names:
        module, _, function = name.rpartition(".")
        assert getattr(importlib.import_module(module), function).__doc__, name


LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


@cache
def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a document.

    Words in small letters are joined with hyphens, without other signs; the second heading of the same text
    ends with ``-1``. mkdocs checks the links of the built site, which joins words in its own way.
    """
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", document.read_text()), re.MULTILINE)
    titles = [re.sub(r"[`*]", "", heading).strip().lower() for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
    return {f"{name}-{names[:i].count(name)}".removesuffix("-0") for i, name in enumerate(names)}


def broken_links(document: Path) -> list[str]:
    """The relative links of a document that lead nowhere in a clone, as GitHub shows it."""
    broken = []
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", document.read_text()))
    for target, anchor in LINK.findall(text):
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{target}#{anchor}" if anchor else target)
    return broken


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document):
    assert broken_links(document) == []


def test_broken_links_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Where is `it`?\n\n# Twice\n\n# Twice\n\n```bash\n# no heading\n```\n\n"
        "[a](#where-is-it) [b](page.md#twice-1) [c](https://x.y/z) `[d](code.md)`\n\n"
        "[e](gone.md) [f](#gone) [g](page.md#no-heading) [h\ni](gone.md#it)\n"
    )
    assert broken_links(page) == ["gone.md", "#gone", "page.md#no-heading", "gone.md#it"]


LOG = [page for page in sorted((ROOT / "docs" / "log").glob("*.md")) if page.stem != "index"]


@pytest.mark.parametrize("page", LOG, ids=lambda path: path.name)
def test_a_page_of_the_log_has_its_newest_entry_first_and_lines_that_fit(page):
    """Rows of tables cannot be broken; all other lines have less than 120 characters."""
    lines = page.read_text().splitlines()
    dates = [line[3:13] for line in lines if line.startswith("## ")]
    assert dates == sorted(dates, reverse=True)
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", date) for date in dates)
    assert [line for line in lines if len(line) >= 120 and not line.lstrip().startswith("|")] == []
    assert f"]({page.name})" in (page.parent / "index.md").read_text()


def test_every_entry_of_the_glossary_says_what_else_it_is_called():
    """The site's search finds a page by words that stand in it."""
    entries = re.split(r"^- \*\*", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) > 30
    assert [entry.partition("**")[0] for entry in entries if "*Also called:*" not in entry] == []


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text()
    named = {ROOT / "docs" / page for page in re.findall(r": ([\w./-]+\.md)$", text, re.MULTILINE)}
    assert named == set((ROOT / "docs").rglob("*.md"))


BUILDS = [
    pytest.param("#a-page", True, marks=pytest.mark.slow),
    ("nowhere.md", False),
    pytest.param("#nowhere", False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("link", "built"), BUILDS)
def test_the_site_is_not_built_with_a_broken_link(tmp_path, link, built):
    """With the options of `make docs`: mkdocs forgets --strict where --quiet is given too."""
    recipe = re.search(r"\$\(BIN\)/mkdocs (build.*)", (ROOT / "Makefile").read_text())
    assert recipe is not None
    options = recipe[1].split()
    options[options.index("--site-dir") + 1] = str(tmp_path / "site")

    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "index.md").write_text(f"# A page\n\n[A link]({link})\n")
    config = f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: pages\nhooks: []\nplugins: []\nnav: [index.md]\n"
    (tmp_path / "mkdocs.yml").write_text(config)
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", *options, "--config-file", tmp_path / "mkdocs.yml"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == built, done.stderr[-2000:]
