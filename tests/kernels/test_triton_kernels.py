"""The Triton kernels compute what torch computes; on CPU they run in Triton's interpreter.

For timings on a GPU, see benchmarks/tower_attention.py and experts.py.
"""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_vl
from tests.kernels.compiled_kernels import SHARED_MEMORY
from tests.models.programs import steps_with_fused_layers
from tests.support.ranks import call, run_module

pytestmark = pytest.mark.ranks


TWO_LAYERS = {
    "layers": 2,
    "vision_layers": 2,
    "vision_heads": 2,
    "full_attention_layers": (1,),
    "deepstack_layers": (0, 1),
    "full_attention_layers_of": 2,
}
"""Interpreted kernels take most of the time; these layers have one of each kind. Vision heads are 40 wide."""
SMALL_IMAGE = ("without_loss", 48)
"""A sample with an image of 24 patches, and the length of its row."""


def errors_of(*arguments: str, **variables: str) -> dict[str, float]:
    done = run_module("tests.kernels.triton_checks", arguments, environment=variables)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_equal_torch() -> None:
    errors = errors_of(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert len(errors) == 33
    for name, error in errors.items():
        assert error < 5e-6, (name, error)


WITHOUT_TOKENS = {
    *("adam_triton._adam_step_kernel", "adam_triton._split_kernel"),
    *("adam_triton._join_kernel", "grouped_gemm._plan_tiles_kernel"),
}
"""Kernels over one parameter, of less than 2^31 elements, or over the experts."""


def launched_kernels() -> set[str]:
    """Every kernel in the tree: what Triton compiles and no other such function calls or is given."""
    compiled, called = set(), set()
    for path in (Path(megatron_vl.__file__).parent / "kernels").rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
                compiled.add(f"{path.stem}.{function.name}")
                calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
                called |= {ast.unparse(name) for call in calls for name in (call.func, *call.args)}
    # One that another kernel calls may be launched too.
    return {name for name in compiled if name.endswith("_kernel") or name.split(".")[1] not in called}


def test_offsets_of_rows_of_a_million_tokens() -> None:
    """Of every kernel over rows of 2^20 tokens (PP and TP 1, CP 1), so also of a rank's share of them."""
    done = run_module(
        "tests.kernels.offset_checks", environment={"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["faults"] == []
    assert found["faults of a wrong kernel"]
    # All products of sizes but those of few tokens pass 32 bits.
    offsets = found["offsets"]
    assert offsets.keys() == launched_kernels() - WITHOUT_TOKENS and min(offsets.values()) > 2**31
    assert offsets["swiglu._forward_kernel"] == 2**20 * 2 * 29568 - 1
    assert offsets["delta_rule_forward.scan_kernel"] == 2**20 // 64 * 64 * 128 * 128 - 1


@pytest.mark.full
def test_products_do_not_wait_for_each_other_on_hopper() -> None:
    """ptxas warns (C7515) if it serializes a kernel's products, which makes the kernel 1.2 times as slow."""
    done = run_module("tests.kernels.compiled_kernels")
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)
    assert len(warnings) == 25
    assert not any(warnings.values()), warnings


@pytest.mark.full
@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(
            each,
            marks=pytest.mark.xfail(
                each == 100, reason="Triton 3.6.0 fails on _key_gradients_kernel", strict=True
            ),
        )
        for each in sorted(SHARED_MEMORY)
    ],
)
def test_kernels_have_room_on_every_gpu(capability: int) -> None:
    """A launch that takes more shared memory than a block may have fails, and on no GPU of the CI."""
    done = run_module("tests.kernels.compiled_kernels", [str(capability)])
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert len(shared) > 25 and max(shared.values()) > 64 << 10
    assert {name: size for name, size in shared.items() if size > SHARED_MEMORY[capability]} == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    errors = errors_of("--gpu")
    assert errors.pop("not deterministic") == 0
    assert len(errors) == 32
    for name, error in errors.items():
        assert error < 2e-2, (name, error)


@pytest.mark.parametrize(
    ("family", "sample", "recomputes"),
    [
        pytest.param("qwen2_vl", SMALL_IMAGE, False, marks=pytest.mark.full),
        ("qwen2_5_vl", ("image", 80), False),
        ("qwen3_vl_moe", SMALL_IMAGE, False),
        pytest.param("qwen3_vl_moe", SMALL_IMAGE, True, marks=pytest.mark.full),
        ("qwen3_5", SMALL_IMAGE, True),
    ],
)
def test_fused_layers_train_as_plain_ones(
    tiny_checkpoint, family: str, sample: Any, recomputes: bool
) -> None:
    """Two steps in fp32: norms of both kinds and zero-centred ones, all activations of towers, attention with
    and without windows, DeepStack, experts, linear attention; one step with recompute."""
    hf = str(tiny_checkpoint(family, **TWO_LAYERS))
    kind, seq_len = sample
    variables = {"hf": hf, "sample_kind": kind, "seq_len": seq_len, "recomputes": recomputes}
    results = call(steps_with_fused_layers, environment={"TRITON_INTERPRET": "1"}, **variables)
    assert results["fused"] == pytest.approx(results["plain"], rel=1e-5)
    for name in ["recomputed", "recomputed activations"] * recomputes:
        assert results[name] == results["fused"][:2]
    assert set(results["sums in norms"]) == {False, True}
    assert results["calls"].keys() == {"biased_activation", "attention_forward"}
