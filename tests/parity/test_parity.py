"""Loss and gradients of every layout equal those of transformers, in real groups of processes.

One group for each number of ranks runs all of that number's chosen cases; each test reads its case's result.
"""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert_weights
from tests.support.ranks import run_module
from tests.tiny import tiny_checkpoint, with_yarn
from toolkit.parity.case import ParityCase, write_cases
from toolkit.parity.tolerances import GRADIENT_TOLERANCE, LOSS_TOLERANCE

from .cases import CASES, PLAIN_CASES, QUICK, SEEDS
from .matrix import settings
from .training import TableCase

NAMES = [(ranks, entry["name"]) for ranks, entries in CASES.items() for entry in entries]
TABLE = [
    pytest.param(ranks, name, marks=[pytest.mark.full] * (name not in QUICK), id=f"{ranks}-{name}")
    for ranks, name in NAMES
]


@pytest.fixture(scope="session")
def run_group(request, tmp_path_factory) -> Callable[[int], dict[str, Any]]:
    """Returns a function from a number of ranks to the results of its cases that this session tests."""
    folder = tmp_path_factory.mktemp("parity")
    wanted = {item.callspec.params["name"] for item in request.session.items if _is_case(item)}

    @cache
    def weights(hf: Path) -> Path:
        full = folder / f"{hf.name}_full"
        convert_weights(hf, full)
        return full

    @cache
    def run(ranks: int) -> dict[str, Any]:
        cases = []
        for entry in CASES[ranks]:
            if entry["name"] in wanted:
                fields = dict(entry)
                family = fields.pop("family")
                hf = tiny_checkpoint(
                    family,
                    tied=fields.pop("tied"),
                    dtype=torch.float32,
                    seed=SEEDS.get(family, 0),
                    **fields.pop("sizes", {}),
                )
                if yarn := fields.pop("yarn", None):
                    hf = with_yarn(hf, folder / f"{hf.name}_yarn", yarn)
                cases.append(TableCase(hf=str(hf), weights=str(weights(hf)), **fields))
        return run_cases(cases, ranks, folder / str(ranks))

    return run


def _is_case(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == test_parity.__name__


def run_cases(cases: Sequence[ParityCase], ranks: int, folder: Path) -> dict[str, Any]:
    """Results of one group by name. Cases that it did not reach are missing; ``log`` is its output."""
    folder.mkdir()
    write_cases(cases, given := folder / "cases.json")
    words = [given, out := folder / "results.json", folder.parent / "references"]
    done = run_module("tests.parity.collective_orders", words, ranks, timeout_s=1800)
    results = json.loads(out.read_text()) if out.exists() else {}
    return results | {"log": done.stdout[-4000:] + done.stderr[-20000:]}


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "name"), TABLE)
def test_parity(run_group: Callable[[int], dict[str, Any]], ranks: int, name: str) -> None:
    results = run_group(ranks)
    assert name in results, f"the group of {ranks} ranks ended before this case:\n{results['log']}"
    result = results[name]
    assert "error" not in result, result["error"]
    assert not result["order"], f"ranks enter collectives in different orders: {result['order']}"
    assert ranks == 1 or result["collectives"] > 10
    for number, step in enumerate(result["steps"]):
        if "norm_error" in step:  # a training: every step moves the weights
            assert step["ok"], f"step {number}: {step}"
            continue
        assert not step["unexpected"], f"step {number}: gradients missing or not wanted: {step['unexpected']}"
        assert step["loss_error"] <= LOSS_TOLERANCE, (
            f"step {number}: loss {step['loss']} against {step['reference']}"
        )
        assert step["gradient_error"] <= GRADIENT_TOLERANCE, f"step {number}: {step['worst']}"
        assert step["compared"] > 0
    assert result["ok"], result.get("state")


def test_names_of_cases_are_unique_and_quick_ones_have_every_setting() -> None:
    assert len({name for _, name in NAMES}) == len(NAMES)
    cases = [entry for entries in CASES.values() for entry in entries]
    plain = [entry for entries in PLAIN_CASES.values() for entry in entries]
    held = set().union(*(settings(entry) for entry in cases if entry["name"] in QUICK))
    assert set().union(*map(settings, plain)) <= held
