"""Commands, runs, links, paths and quotations in the documents are valid.

Blocks after the comment ``<!-- The tests run this block. -->`` are run, in order, in one folder that holds
what the document asks the reader to have: examples, checkpoints, conversations with their media. The commands
of all others must be valid.
"""

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import textwrap
from functools import cache
from pathlib import Path

import pytest

from megatron_vl.config import field_types, parse_config, validate_config
from tests.commands import logical_lines, megatron_vl_command, trainer_config
from tests.support.ranks import run_module
from toolkit.demo.command import write_demo_checkpoint
from toolkit.demo.demo_data import write_raw_data

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LOG = sorted((ROOT / "benchmarks" / "log").glob("*.md"))
PACKAGES = ("megatron_vl", "converters", "data_tools", "toolkit")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


MARK = "<!-- The tests run this block. -->\n"
BLOCK = re.compile(rf"(^{MARK})?^ *```(bash|python|yaml)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


@cache
def blocks(document: Path) -> list[tuple[str, str, str]]:
    found = BLOCK.findall(document.read_text())
    return [(mark, language, textwrap.dedent(text)) for mark, language, text in found]


CHECKED = [document for document in DOCUMENTS if any(mark for mark, _, _ in blocks(document))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_commands_and_runs_are_valid(document, tmp_path):
    for _, language, text in blocks(document):
        for line in logical_lines(text) if language == "bash" else ():
            check_command(line)
        if language == "yaml" and "__class__" not in text:  # an Energon metadataset
            (tmp_path / "run.yaml").write_text(text)
            config = parse_config(["--config", str(tmp_path / "run.yaml")])
            assert validate_config(config, config.parallel.replica_ranks) == 1, text


def check_command(line: str) -> None:
    """Programs of other projects are only known by name."""
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    program = words[0].removeprefix(".venv/bin/")
    line = line[line.index(program) :]
    if "megatron_vl.train" in words or line.startswith("megatron-vl train"):
        if (training := trainer_config(line)) is not None:
            validate_config(*training)
    elif program == "megatron-vl":
        megatron_vl_command(line)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in words[1:] if "=" not in word} <= set(targets), line
    elif "/slurm.sh" in line:
        assert (ROOT / "examples" / f"{words[-1]}.yaml").is_file() and (ROOT / words[-2]).is_file(), line
    elif program.startswith("examples/"):
        assert os.access(ROOT / program, os.X_OK), line
        run = ROOT / "examples" / f"{words[1]}.yaml"
        assert run.is_file() or words[1] == "RUN.yaml", line
        if program.endswith("pretrain.sh") and run.is_file():
            parse_config(["--config", str(run), *words[2:]])
    elif program == "python" and words[1] == "-m":
        assert importlib.util.find_spec(words[2]), line
        for word in words[3:]:
            assert not word.startswith("tests/") or (ROOT / word).exists(), line
    elif program not in ("hf", "pip", "pre-commit", "source", "python"):
        pytest.fail(f"no check for {line!r}; write {MARK.strip()!r} before its block, or add one here")


@pytest.fixture(scope="module")
def readers_files(tiny_checkpoint, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "Qwen2.5-VL-7B-Instruct").symlink_to(tiny_checkpoint("qwen2_5_vl", layers=28))
    write_demo_checkpoint(folder / "checkpoints" / "tiny")
    write_raw_data(folder / "data")
    return folder


LOSS = re.compile(r"^step +\d+/\d+ \| loss ([\d.]+)", re.MULTILINE)


@pytest.mark.ranks
@pytest.mark.parametrize("document", CHECKED, ids=name_of)
def test_checked_blocks_run(document, readers_files, tmp_path):
    shutil.copytree(readers_files, tmp_path, symlinks=True, dirs_exist_ok=True)
    output = errors = ""
    for number, (language, text) in enumerate(block[1:] for block in blocks(document) if block[0]):
        (tmp_path / f"block_{number}.py").write_text(text)
        lines = logical_lines(text) if language == "bash" else [f"block_{number}"]
        for words in (shlex.split(line) for line in lines):
            module = "toolkit" if words[0] == "megatron-vl" else words[0]
            done = run_module(module, words[1:], cwd=tmp_path, is_group=False)
            output, errors = output + done.stdout, errors + done.stderr
            assert done.returncode == 0, f"{words}\n{done.stderr[-3000:]}{done.stdout[-1000:]}"
    assert "NOTE" not in output + errors
    if document.name == "weights.md":
        assert "identical" in output
    if document == ROOT / "README.md":
        assert "data: 11 of 11 records converted" in errors.splitlines()
        metrics = (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()
        passes = sum(json.loads(line)["samples"] for line in metrics) / 11
        for line in (f"4 steps: about {passes:.1f} passes over the data", "note: exported step 4, the"):
            assert f"\n{line}" in output and f"\n{line}" in document.read_text()
        lora = (ROOT / "docs" / "lora.md").read_text().partition("The losses of its four steps are")[2]
        printed = LOSS.findall(document.read_text()) + re.findall(r"\d\.\d{4}", lora)[:4]
        shown = list(map(float, LOSS.findall(output)))
        assert len(shown) == 8 and list(map(float, printed)) == pytest.approx(shown, rel=0, abs=1e-4)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_fields_of_a_run_exist(document):
    """``section.field`` in backquotes, perhaps with a value."""
    if document.name in ("coming-from.md", "CHANGELOG.md"):
        return  # names fields of other toolkits, and removed ones
    fields = field_types()
    sections = "|".join({name.partition(".")[0] for name in fields if "." in name})
    named = re.findall(rf"`(?:--)?((?:{sections})\.(?!jsonl?|py\b)\w+)(?::? [^`]*)?`", document.read_text())
    assert [name for name in named if name not in fields] == []


LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


@cache
def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to headings; the second of the same text ends with ``-1``."""
    headings = re.findall(r"^#+ (.*)", FENCED.sub("", document.read_text()), re.MULTILINE)
    titles = [re.sub(r"[`*]", "", heading).strip().lower() for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
    return {f"{name}-{names[:i].count(name)}".removesuffix("-0") for i, name in enumerate(names)}


@pytest.mark.parametrize("document", [*DOCUMENTS, *LOG, ROOT / "llms.txt"], ids=name_of)
def test_links_lead_somewhere(document):
    """In a clone, as GitHub shows it; `make docs` checks those of the built site."""
    broken = []
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", document.read_text()))
    for target, anchor in LINK.findall(text):
        path = (document.parent / target).resolve() if target else document
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append((target, anchor))
    assert broken == []


TOP = "megatron_vl|converters|data_tools|toolkit|examples|tests|docs|benchmarks"
PATH = re.compile(r"`((?:[\w.*-]+/)+[\w.*-]*)(?:::(\w+)(?:\[[^`]*\])?)?`")
"""A path, from the root or within a folder of it, perhaps with a test of the file."""
DEFINED = re.compile(rf"`(?!transformers)(\w+)` (?:in|\() ?`((?:{TOP})/[\w./-]+\.py)`")
"""A definition and its file: "`NAME` in `PATH`" or "`NAME` (`PATH`)"."""
ELSEWHERE = re.compile(r"NAME|_SIZE|^megatron_vl/_tools/")
"""A name that the reader chooses, and a folder of the built wheel."""


@cache
def definitions(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@cache
def files_named(path: str) -> list[Path]:
    """The files and folders of that path, from the root or, for a file of ours, within any of its folders."""
    if re.match(rf"(?:{TOP})/", path) or not path.endswith(".py"):
        return list(ROOT.glob(path))
    return [file for package in (*PACKAGES, "tests") for file in (ROOT / package).rglob(path)]


@pytest.mark.parametrize("page", DOCUMENTS, ids=name_of)
def test_paths_and_definitions_exist(page):
    """The register of faults upstream names files of other projects, too."""
    text, within_folders, wrong = page.read_text(), page.name != "upstream.md", []
    for path, test in PATH.findall(text):
        from_root = re.match(rf"(?:{TOP})/", path)
        if ELSEWHERE.search(path) or not (from_root or (within_folders and path.endswith(".py"))):
            continue
        files = files_named(path)
        if not files:
            wrong.append(path)
        elif test and test not in definitions(files[0]):
            wrong.append(f"{path}::{test}")
    for name, path in DEFINED.findall(text):
        if (ROOT / path).is_file() and name not in definitions(ROOT / path):
            wrong.append(f"{name} in {path}")
    assert wrong == []


def test_python_api_functions_exist():
    """Those that the page's own example does not call are only looked up."""
    names = re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "python-api.md").read_text(), re.MULTILINE)
    assert len(names) > 10
    for name in names:
        module, _, function = name.rpartition(".")
        assert getattr(importlib.import_module(module), function).__doc__, name


def texts_of_the_code() -> str:
    """All texts in our sources, one a line; what an f-string fills in is left out as ``...``."""
    found = []
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if isinstance(node, ast.JoinedStr | ast.Constant):
                texts = (str(part.value) if isinstance(part, ast.Constant) else "..." for part in parts)
                found.append(" ".join("".join(texts).split()))
    return "\n".join(found)


def test_messages_on_the_errors_page_are_those_of_the_code():
    """What stands between the dots of a message is, in this order, in one text of the code."""
    texts = texts_of_the_code()
    heads = re.findall(r"^- (`.*`):$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE)
    messages = [message for head in heads for message in re.findall(r"`([^`]+)`", head)]
    assert len(messages) > 50
    for message in messages:
        pieces = [piece for piece in message.split("...") if piece.strip()]
        assert re.search(".*?".join(map(re.escape, pieces)), texts), message


@pytest.mark.parametrize("document", sorted((ROOT / "docs").rglob("*.md")), ids=name_of)
def test_lists_are_written_for_python_markdown(document):
    """What belongs to an item is indented by four spaces, and a blank line comes before a list."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\n\n {1,3}\S.*", text) == []
    assert re.findall(r"^ {1,3}(?:[-*] |\d+\. |```|\|).*", text, re.MULTILINE) == []
    assert re.findall(r"\n\n[^\s|#<\d*-].*\n(?:\S.*\n)*?(?:[-*]|\d+\.) .*", text) == []
