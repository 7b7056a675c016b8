"""What pages have from the code is complete and up to date."""

import argparse
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

import megatron_vl
from megatron_vl import config
from megatron_vl.core_fixes.core_version import TESTED_CORE_VERSIONS
from megatron_vl.estimate.gpus import known_gpus
from megatron_vl.spec.families import FAMILIES
from tests.docs_site import docs_hooks, site_page
from tests.parity import matrix
from toolkit.commands import COMMANDS
from toolkit.common.options import build_parser

ROOT = Path(__file__).resolve().parent.parent
HOOKS = docs_hooks()
WHOLE = [name for name in HOOKS.WRITTEN if name != "which-gpu.md"]


@pytest.mark.parametrize("name", [*WHOLE, pytest.param("which-gpu.md", marks=pytest.mark.full)])
def test_written_pages_are_those_of_the_code(name: str) -> None:
    written = (ROOT / "docs" / name).read_text().partition(HOOKS.MARK)[2]
    assert written == f"{HOOKS.WRITTEN[name]().strip()}\n", "run `make pages`"


def test_one_model_of_the_page_of_gpus_is_as_the_code_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HOOKS, "GPU_PAGE_MODELS", ["Qwen2.5-VL-7B-Instruct"])
    assert HOOKS.gpus_for_models() in (ROOT / "docs" / "which-gpu.md").read_text(), "run `make pages`"


def test_matrix_has_every_family() -> None:
    """``test_docs.py`` checks that the tests that it names exist."""
    proven = {each for tests in matrix.PROOFS.values() for families in tests.values() for each in families}
    assert set(matrix.FAMILIES) == set(FAMILIES) == proven


def test_arrows_of_the_architecture_page_are_the_import_contracts() -> None:
    drawn = (ROOT / "docs" / "architecture.md").read_text().partition("```text\n")[2].partition("```")[0]
    layers = [set(line.replace(",", " ").split()) for line in drawn.splitlines()]
    top = layers.index({"megatron_vl:"})
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    declared = [
        [set(layer.split(" | ")) for layer in contract["layers"]]
        for contract in contracts
        if contract["type"] == "layers" and contract.get("containers", ["megatron_vl"]) == ["megatron_vl"]
    ]
    assert [[*layers[:top], {"megatron_vl"}], layers[top + 1 :]] == declared


def test_supported_versions_are_those_that_run_here() -> None:
    tested = HOOKS.tested_versions()
    assert set(HOOKS.TESTED_BY) <= set(tested) and tested["megatron-core"] in TESTED_CORE_VERSIONS
    for name in ("megatron-core", "megatron-energon", "torch"):
        assert version(name).partition("+")[0] == tested[name], name
    assert set(known_gpus()) == set(", ".join(HOOKS.GPUS).split(", ")) - {"none: CPU", "two cores"}


def test_release_files_name_this_version_and_hosted_checks_are_those_of_ci_run() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert citation["version"] == released[0] == megatron_vl.__version__
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands == [".ci/run"] and (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_reference_explains_every_field_of_a_run() -> None:
    page = site_page("reference/run.md")
    helps = {action.dest: action.help for action in config.build_parser()._actions}
    for name in config.field_types():
        section = page.partition(f"### `{name}`\n")[2].partition("\n##")[0]
        assert section, f"{name} is missing"
        assert letters(helps[name].partition(" (type:")[0]) in letters(section), name


def letters(text: str) -> str:
    text = re.sub(r"&#(\d+);", lambda match: chr(int(match[1])), text)
    return re.sub(r"[^a-z0-9]", "", text.lower())


def test_reference_has_every_option_of_every_command() -> None:
    page = site_page("reference/commands.md")
    for name, command in COMMANDS.items():
        section = page.partition(f"## megatron-vl {name}\n")[2].partition("\n## ")[0]
        actions = build_parser(command.load_options_class(), f"megatron-vl {name}")._actions
        shown = [action for action in actions if action.help != argparse.SUPPRESS]
        options = {word for action in shown for word in action.option_strings if word.startswith("--")}
        assert set(re.findall(r"^`(--[\w-]+)", section, re.MULTILINE)) == options - {"--help"}, name
