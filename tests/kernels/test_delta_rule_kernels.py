"""The Triton kernels of linear attention compute what torch computes in float64, gradients included."""

import json

import pytest
import torch

from tests.support.ranks import run_module

pytestmark = pytest.mark.ranks
INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def check(which: str, bound: float, variables: dict[str, str], timeout_s: int = 600) -> None:
    done = run_module("tests.kernels.delta_rule_checks", (which,), environment=variables, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr
    cases = json.loads(done.stdout)
    assert len(cases) >= 5
    for case, errors in cases.items():
        for name, error in errors.items():
            # Differences of running decays are rounded where decays are fast.
            assert error < (10 * bound if name == "dg" else bound), (case, name, error)


def test_kernels_equal_torch() -> None:
    check("quick", 3e-6, INTERPRETED)


@pytest.mark.full
def test_kernels_equal_torch_for_all_decays_and_heads() -> None:
    check("full", 3e-6, INTERPRETED, timeout_s=1200)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    check("gpu", 1e-2, {})
