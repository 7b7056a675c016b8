"""The Triton kernels compute what torch computes; on CPU they run in Triton's interpreter."""

import ast
import json
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_vl
from megatron_vl.config import DataConfig, RecomputeConfig
from megatron_vl.data.packing import training_row
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.kernels.attention import tower_attention
from megatron_vl.kernels.layers import biased_layers
from megatron_vl.models import build, layer_specs
from megatron_vl.models.fused_layers import PendingSum, ResidualNorm, add_to_residual, postpone_addition
from megatron_vl.training.step import run_schedule
from tests.kernels.compiled_kernels import SHARED_MEMORY
from tests.kernels.triton_checks import fix_interpreter, torch_only
from tests.support.ranks import call, run_module
from tests.support.tiny_trainer import differences, tiny_trainer
from tests.tiny import TWO_LAYERS
from toolkit.parity.random_samples import make_sample

pytestmark = pytest.mark.ranks

INTERPRETED = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def output_of(program: str, *arguments: str, **environment: str) -> str:
    done = run_module(f"tests.kernels.{program}", arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_equal_torch() -> None:
    output_of("triton_checks", **INTERPRETED)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_kernels_on_a_gpu() -> None:
    output_of("triton_checks", "--gpu")


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
    offsets = json.loads(output_of("offset_checks", **INTERPRETED))
    # All products of sizes but those of few tokens pass 32 bits.
    assert offsets.keys() == launched_kernels() - WITHOUT_TOKENS and min(offsets.values()) > 2**31
    assert offsets["swiglu._forward_kernel"] == 2**20 * 2 * 29568 - 1
    assert offsets["delta_rule_forward.scan_kernel"] == 2**20 // 64 * 64 * 128 * 128 - 1


@pytest.mark.full
def test_products_do_not_wait_for_each_other_on_hopper() -> None:
    """ptxas warns (C7515) if it serializes a kernel's products, which makes the kernel 1.2 times as slow."""
    warnings = json.loads(output_of("compiled_kernels"))
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
    shared = json.loads(output_of("compiled_kernels", str(capability)))
    assert len(shared) > 25 and max(shared.values()) > 64 << 10
    assert {name: size for name, size in shared.items() if size > SHARED_MEMORY[capability]} == {}


SIZES = TWO_LAYERS | {"vision_heads": 2}
"""Interpreted kernels take most of the time. Vision heads are 40 wide."""
SMALL_IMAGE = ("without_loss", 48)
"""A sample with an image of 24 patches, and the length of its row."""
FULL = {"language": "full", "vision": "full"}


@pytest.mark.parametrize(
    ("family", "sample", "recompute"),
    [
        pytest.param("qwen2_vl", SMALL_IMAGE, {}, marks=pytest.mark.full),
        ("qwen2_5_vl", ("image", 80), {"vision": "activation"}),
        ("qwen3_vl_moe", SMALL_IMAGE, {}),
        pytest.param("qwen3_vl_moe", SMALL_IMAGE, FULL, marks=pytest.mark.full),
        pytest.param("qwen3_5", SMALL_IMAGE, {"vision": "activation"}, marks=pytest.mark.full),
        ("qwen3_5", SMALL_IMAGE, FULL),
    ],
)
def test_fused_layers_train_as_plain_ones(
    tiny_checkpoint, family: str, sample: tuple[str, int], recompute: dict
) -> None:
    """In fp32: norms of both kinds and zero-centred ones, all activations of towers, attention with and
    without windows, DeepStack, experts, linear attention."""
    hf = str(tiny_checkpoint(family, **SIZES))
    kind, seq_len = sample
    variables = {"hf": hf, "kind": kind, "seq_len": seq_len, "recompute": recompute}
    call(check_fused_layers, environment=INTERPRETED, **variables)


def check_fused_layers(hf: str, kind: str, seq_len: int, recompute: dict[str, str]) -> None:
    """Loss and gradients of torch's layers against those of interpreted norms, sums, activations and tower
    attention; and these with recompute, bit for bit. A body of a rank. The answer to the image is trained
    on, so that the tower has gradients."""
    fix_interpreter()
    training_row.LOSS_INDEX_MULTIPLE = 16  # only chosen tokens have logits, as in longer rows
    trainer = tiny_trainer(hf)
    samples = [make_sample(each, trainer.spec, 0) for each in ("short_text", kind)]
    samples[1].loss_mask[-8:] = True
    [row] = trainer.feed_of([pack_row(samples, trainer.spec, seq_len)], 1).next_batch().rows

    def run(**fields: str) -> dict[str, torch.Tensor]:
        other = trainer.again(recompute=RecomputeConfig(**fields), data=DataConfig(seq_len=seq_len))
        [report] = run_schedule(other.model_chunks, [row], seq_len=seq_len)
        gradients = {f"{live.tensor_name} {live.expert_index}": live.parameter for live in other.live_tensors}
        return {"loss": report["loss"]} | {name: p.main_grad for name, p in gradients.items()}

    calls = Counter[str]()

    class CountedNorm(ResidualNorm):
        def forward(self, x: torch.Tensor | PendingSum) -> Any:
            calls.update(["norm of a sum" if isinstance(x, PendingSum) else "norm"])
            return super().forward(x)

    def counted(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        calls.update([function.__name__])
        return function(*arguments, **options)

    biased_layers.biased_activation = partial(counted, biased_layers.biased_activation)
    tower_attention.attention_forward = partial(counted, tower_attention.attention_forward)
    plain = torch_only(run)()
    assert not calls

    local_modules = layer_specs._layer_modules
    additions = {"add_attention": postpone_addition, "add_mlp": add_to_residual}
    layer_specs._layer_modules = lambda *arguments: local_modules(*arguments)._replace(
        layer_norm=CountedNorm, expert_norm=CountedNorm, **additions
    )
    build.choose_backend = lambda attention, *, causal, **rest: "sdpa" if causal else "triton"
    fused = run()
    assert calls.keys() == {"norm", "norm of a sum", "biased_activation", "attention_forward"}
    assert fused["loss"].tolist() == pytest.approx(plain["loss"].tolist(), rel=1e-6)
    largest = max(gradient.norm() for gradient in plain.values())
    for name, gradient in plain.items():
        assert (fused[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7 * largest, name
    if recompute:
        assert not differences(run(**recompute), fused)
