"""Loss and gradients of every layout equal those of transformers, in real groups of processes.

One group is started for each number of ranks and runs all of that number's cases; each test reads its case's result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert
from tests.tiny import tiny_checkpoint
from toolkit import launch
from toolkit.parity.run import GRADIENT_TOLERANCE, LOSS_TOLERANCE, Case, write_cases

from .cases import CASES, SEEDS

TABLE = [(ranks, entry["name"]) for ranks, entries in CASES.items() for entry in entries]


@pytest.fixture(scope="session")
def run_group(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Any]]:
    """``run_group(ranks)``: the results of all cases of that number of ranks."""
    folder = tmp_path_factory.mktemp("parity")

    @cache
    def weights(hf: Path) -> Path:
        full = folder / f"{hf.name}_full"
        convert(hf, full)
        return full

    @cache
    def run(ranks: int) -> dict[str, Any]:
        cases: list[Case] = []
        for entry in CASES[ranks]:
            fields = dict(entry)
            family = fields.pop("family")
            hf = tiny_checkpoint(family, tied=fields.pop("tied"), dtype=torch.float32, seed=SEEDS.get(family, 0))
            cases.append(Case(hf=str(hf), weights=str(weights(hf)), **fields))
        results, log = run_cases(cases, ranks, folder / str(ranks))
        return results | {"log": log}

    return run


def run_cases(cases: list[Case], ranks: int, folder: Path) -> tuple[dict[str, Any], str]:
    """Results by name, as far as the group came, and the end of what it said."""
    folder.mkdir()
    given, out = folder / "cases.json", folder / "results.json"
    write_cases(cases, given)
    done = launch.run_group("toolkit.parity.run", [given, out], ranks, timeout=900)
    results = json.loads(out.read_text()) if out.exists() else {}
    return results, done.stdout[-4000:] + done.stderr[-20000:]


@pytest.mark.parametrize(("ranks", "name"), TABLE, ids=[f"{ranks}-{name}" for ranks, name in TABLE])
def test_parity(run_group: Callable[[int], dict[str, Any]], ranks: int, name: str) -> None:
    results = run_group(ranks)
    assert name in results, f"the group of {ranks} ranks ended before this case:\n{results['log']}"
    result = results[name]
    assert "error" not in result, result["error"]
    for number, step in enumerate(result["steps"]):
        if "norm_error" in step:  # a training: every step moves the weights
            assert step["ok"], f"step {number}: {step}"
            continue
        assert not step["unexpected"], f"step {number}: gradients missing or not wanted: {step['unexpected']}"
        assert step["loss_error"] <= LOSS_TOLERANCE, f"step {number}: loss {step['loss']} against {step['reference']}"
        assert step["gradient_error"] <= GRADIENT_TOLERANCE, f"step {number}: {step['worst']}"
        assert step["compared"] > 0
    assert result["ok"], result.get("state")


def test_names_are_unique() -> None:
    assert len({name for _, name in TABLE}) == len(TABLE)
