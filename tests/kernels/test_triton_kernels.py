"""The Triton kernels compute what torch computes; on CPU they run in Triton's interpreter.

For timings on a GPU, see benchmarks/tower_attention.py, fused_layers.py and experts.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import megatron_vl
from megatron_vl.kernels.layers.biased_activation import SIGMOID_COEFFICIENTS
from megatron_vl.models.fused_layers import ACTIVATIONS
from tests.models.programs import steps_with_fused_layers
from tests.support.ranks import call, run_module

pytestmark = pytest.mark.ranks


TWO_LAYERS = {
    "layers": 2,
    "vision_layers": 2,
    "full_attention_layers": (1,),
    "deepstack_layers": (0, 1),
    "full_attention_layers_of": 2,
}
"""Interpreted kernels take most of the time; these layers have one of each kind."""


def errors_of(*arguments: str, **variables: str) -> dict[str, float]:
    done = run_module("tests.kernels.triton_checks", arguments, environment=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_equal_torch() -> None:
    errors = errors_of(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert len(errors) == 41
    for name, error in errors.items():
        assert error < 5e-6, (name, error)


def test_products_do_not_wait_for_each_other_on_hopper() -> None:
    """ptxas warns (C7515) if it serializes a kernel's products, which makes the kernel 1.2 times as slow."""
    done = run_module("tests.kernels.compiled_kernels")
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)
    assert len(warnings) == 25
    assert not any(warnings.values()), warnings


def test_the_kernel_has_the_coefficients_of_every_activation() -> None:
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    assert SIGMOID_COEFFICIENTS.keys() == ACTIVATIONS.keys()
    for name, (linear, cubic) in SIGMOID_COEFFICIENTS.items():
        torch.testing.assert_close(
            x * torch.sigmoid(linear * x + cubic * x**3), ACTIVATIONS[name](x), msg=name
        )


def test_one_function_says_where_kernels_run() -> None:
    package = Path(megatron_vl.__file__).parent
    files = [path.name for path in package.rglob("*.py") if "TRITON_INTERPRET" in path.read_text()]
    assert files == ["where_kernels_run.py"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    errors = errors_of("--gpu")
    assert errors.pop("not deterministic") == 0
    assert len(errors) == 32
    for name, error in errors.items():
        assert error < 2e-2, (name, error)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
def test_fused_layers_train_as_plain_ones(tiny_checkpoint, family: str) -> None:
    """Two steps in fp32, one with recompute: norms of both kinds and zero-centred ones, all activations of
    towers, DeepStack, experts, linear attention."""
    hf = str(tiny_checkpoint(family, **TWO_LAYERS))
    results = call(steps_with_fused_layers, environment={"TRITON_INTERPRET": "1"}, hf=hf)
    assert results["fused"] == pytest.approx(results["plain"], rel=1e-5)
    assert results["recomputed"] == results["recomputed activations"] == results["fused"][:2]
    assert set(results["calls of norms"]) == {0, 1} and results["calls of activations"]
