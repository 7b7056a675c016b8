"""What pages of the site have from the code: nothing is missing, and every test that they name exists."""

from __future__ import annotations

import argparse
import ast
import json
import re
import tomllib
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from mkdocs.config import load_config
from mkdocs.structure.files import File
from mkdocs.structure.pages import Page

import megatron_vl
from megatron_vl import config
from megatron_vl.core_fixes.core_version import TESTED_CORE_VERSIONS
from megatron_vl.estimate.gpus import known_gpus
from megatron_vl.spec.families import FAMILIES
from tests.docs_site import docs_hooks
from tests.parity import matrix
from tests.parity.cases import CASES
from toolkit.cli import main as toolkit_main
from toolkit.commands import COMMANDS
from toolkit.common.options import build_parser

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", docs_hooks().PAGES)
def test_the_site_adds_to_the_page_what_is_made_of_the_code(name: str) -> None:
    introduction = (ROOT / "docs" / name).read_text()
    file = File(name, "docs", "site", use_directory_urls=False)
    page = Page(None, file, load_config(str(ROOT / "mkdocs.yml")))
    shown = docs_hooks().on_page_markdown(introduction, page=page)
    assert shown.startswith(docs_hooks().lists_indented(introduction)) and shown.count("\n## ") >= 5


# --- The support matrix -------------------------------------------------------------------------------------


@cache
def functions_of(file: str) -> set[str]:
    """The functions of a file that pytest collects."""
    path = ROOT / file
    if not path.is_file():
        return set()
    tree = ast.parse(path.read_text())
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def exists(test: str) -> bool:
    """Whether there is such a test; ``file::test``, perhaps with its parameter."""
    file, _, function = test.partition("[")[0].partition("::")
    return function in functions_of(file)


def test_a_test_that_is_not_there_is_noticed() -> None:
    assert exists("tests/test_config.py::test_impossible_values_are_refused_by_name[0]")
    assert not exists("tests/test_config.py::test_of_nothing")
    assert not exists("tests/test_nowhere.py::test_impossible")


def test_every_test_that_the_matrix_names_exists() -> None:
    page = matrix.markdown()
    named = set(re.findall(r"tests/[\w/]+\.py::\w+", page))
    assert matrix.PARITY in named and len(named) > 15
    assert [test for test in named if not exists(test)] == []


def test_every_case_that_the_matrix_names_is_in_the_parity_table() -> None:
    table = {f"{ranks}-{case['name']}": case for ranks, cases in CASES.items() for case in cases}
    page = matrix.markdown()
    for family, title in matrix.FAMILIES.items():
        section = page.partition(f"### {title}\n")[2].partition("\n### ")[0]
        named = re.findall(r"\| `([124]-[^`]+)` \|", section)
        assert named and {table[name]["family"] for name in named} == {family}


def test_the_matrix_has_every_family() -> None:
    assert set(matrix.FAMILIES) == set(FAMILIES)
    assert {
        family for proof in matrix.PROOFS for families in proof.tests.values() for family in families
    } == set(FAMILIES)


@pytest.mark.parametrize(
    ("feature", "in_name"),
    [
        ("Tensor parallel (TP)", r"\bTP\d"),
        ("Sequence parallel", r"\+ SP"),
        ("Interleaved pipeline (VPP)", r"\bVPP\d"),
        ("Expert parallel (EP)", r"\bEP\d"),
        ("Expert tensor parallel (ETP)", r"\bETP\d"),
        ("TP, PP, VPP and sequence parallel together", r"TP2 x PP2 x VPP2"),
        ("Tied embeddings", r"\btied\b"),
        ("Whole trainings: losses, weights and moments", r"^training"),
        ("Full recompute", r"full recompute"),
        ("The merger trained alone", r"merger alone"),
        (
            "Data parallel, optimizer not distributed",
            r"without distributed|no distributed|text-only step between",
        ),
    ],
)
def test_cases_are_counted_for_what_their_names_say(feature: str, in_name: str) -> None:
    features = {name: holds for part in matrix.SECTIONS.values() for name, holds in part.items()}
    counted = {
        entry.case["name"]
        for family in matrix.FAMILIES
        for entry in matrix.proving(features[feature], family)
    }
    names = [case["name"] for cases in CASES.values() for case in cases]
    said = {name for name in names if re.search(in_name, name)}
    silent = {"training, PP2, qwen3_vl", "training, TP2 x PP2 x VPP2 + SP, qwen3_vl"}
    silent |= {"TP2 x PP2 x VPP2 + SP, qwen3_vl, uneven"}
    assert counted - said <= (silent if feature == "Tied embeddings" else set())
    assert said <= counted


def test_cells_that_nothing_proves_say_so() -> None:
    lines = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in matrix.markdown().partition("## The cases")[0].splitlines()
        if "|" in line
    }
    assert [cell.strip() for cell in lines["Expert parallel (EP)"]][:3] == ["", "", ""]
    assert lines["Samples without a token that bears loss"][0].strip() == "–"


def test_the_arrows_are_those_of_the_contracts() -> None:
    """docs/architecture.md writes the layers of import-linter by hand."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = text.partition("```text\n")[2].partition("```")[0].splitlines()
    tools = drawn[: drawn.index("megatron_vl:")]
    library = drawn[drawn.index("megatron_vl:") + 1 :]

    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [
        [set(layer.split(" | ")) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers" and contract.get("containers", ["megatron_vl"]) == ["megatron_vl"]
    ]
    assert [[*map(names, tools), {"megatron_vl"}], [*map(names, library)]] == layers


def names(line: str) -> set[str]:
    return set(line.replace(",", " ").split())


# --- The supported versions ---------------------------------------------------------------------------------


def test_supported_versions_are_those_that_run_here() -> None:
    tested = docs_hooks().tested_versions()
    assert {name for name in docs_hooks().TESTED_BY if name not in tested} == set()
    assert tested["megatron-core"] in TESTED_CORE_VERSIONS
    for name in ("megatron-core", "megatron-energon", "torch"):
        assert version(name).partition("+")[0] == tested[name], name


def test_every_known_gpu_is_among_the_supported_ones() -> None:
    listed = " ".join(gpu for gpu, _ in docs_hooks().GPUS)
    assert set(known_gpus()) == set(re.findall(r"\b(?:RTX )?[A-Z]?\d{3,4}\b|\bL40S\b", listed))


def test_files_of_a_release_name_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == released[0] == megatron_vl.__version__


def test_the_hosted_checks_are_those_of_ci_run() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"] and (ROOT / ".ci" / "run").stat().st_mode & 0o111


# --- Long rows ----------------------------------------------------------------------------------------------


def test_a_layout_of_long_rows_is_predicted_as_by_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = docs_hooks()
    config = ROOT / "tests" / "hf_configs" / "Qwen3-VL-8B-Instruct.json"
    line = hooks.long_row_line(hooks.read_spec(config), 262_144)
    _, length, tp, cp, recompute, gib, _, mfu, tokens, _ = (cell.strip() for cell in line.split("|"))
    assert (length, tp, cp, recompute) == ("262,144", "1", "2", "full, inputs in host memory")

    words = ["plan", "--hf", str(config), "--gpus", "8", "--json", "--dtype", "bfloat16"]
    words += ["--data.seq_len", "262144", "--global_batch_size", "8", "--parallel.cp", cp]
    words += ["--recompute.language", "full", "--recompute.vision", "full"]
    words += ["--recompute.offload_inputs", "true"]
    assert toolkit_main(words) == 0
    predicted = json.loads(capsys.readouterr().out)["own"]
    assert predicted["fits"] and f"{predicted['peak_gib']:.0f}" == gib
    assert f"{100 * predicted['mfu']:.1f} %" == mfu
    assert f"{predicted['tokens_per_second'] / 8:,.0f}" == tokens


# --- The reference ------------------------------------------------------------------------------------------


def test_every_field_of_a_run_is_explained() -> None:
    page = docs_hooks().run_reference()
    parser = config.build_parser()
    helps = {action.dest: action.help for action in parser._actions}
    for name in config.field_types():
        section = page.partition(f"### `{name}`\n")[2].partition("\n##")[0]
        assert section, f"{name} is missing"
        assert plain(helps[name].partition(" (type:")[0]) in plain(section), name


def plain(text: str) -> str:
    """Letters and digits alone."""
    text = re.sub(r"&#(\d+);", lambda match: chr(int(match[1])), text)
    return re.sub(r"[^a-z0-9]", "", text.lower())


def test_defaults_are_those_of_an_empty_run() -> None:
    page = docs_hooks().run_reference()
    assert "### `data.seq_len`\n\nWhole number, default: `4096`" in page
    assert "### `data.pack`\n\n`true` or `false`, default: `true`" in page
    assert "### `optimizer.vision_lr`\n\nNumber, default: empty" in page
    assert "### `dtype`\n\nOne of `bfloat16`, `float32`, default: `bfloat16`" in page


@cache
def commands_page() -> str:
    return docs_hooks().commands_reference()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_there(name: str) -> None:
    page = commands_page()
    section = page.partition(f"## megatron-vl {name}\n")[2].partition("\n## ")[0]
    parser = build_parser(COMMANDS[name].load_options_class(), f"megatron-vl {name}")
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    words = [word for action in shown for word in action.option_strings]
    options = {word for word in words if word.startswith("--")}
    listed = set(re.findall(r"^`(--[\w-]+)", section, re.MULTILINE))
    assert listed == options - {"--help"}


def test_signs_of_markdown_stay_what_they_are() -> None:
    text = docs_hooks().as_markdown("ends with <|im_end|>, 2 * pp; see `a_b*` and c_d")
    assert text == "ends with &#60;&#124;im&#95;end&#124;&#62;, 2 &#42; pp; see `a_b*` and c&#95;d"


def test_lists_are_indented_as_python_markdown_wants_it() -> None:
    written = """\
- item
  goes on

  | table |

  ```bash
  make
    deeper
  ```

A paragraph:
1. one
   two

   more of one
2. two

    code
"""

    given = docs_hooks().lists_indented(written)
    assert given.splitlines() == [
        "- item",
        "    goes on",
        "",
        "    | table |",
        "",
        "    ```bash",
        "    make",
        "      deeper",
        "    ```",
        "",
        "A paragraph:",
        "",
        "1. one",
        "    two",
        "",
        "    more of one",
        "",
        "2. two",
        "",
        "    code",
    ]
