"""Towers with our Triton kernels equal towers with torch's SDPA; tests also how a backend is chosen."""

from __future__ import annotations

import pytest
import torch

from megatron_vl.config import RunConfigError
from megatron_vl.kernels.tower_attention import tower_attention
from megatron_vl.models.attention import check_gradients, choose_backend
from tests.models.programs import step_with_and_without_kernels
from tests.support.ranks import call


@pytest.mark.ranks
def test_a_step_with_the_kernels_is_the_step_without(tiny_checkpoint) -> None:
    """Takes one step from the same weights on the same rows, with the kernels (also of
    window layers) interpreted."""
    hf = str(tiny_checkpoint(vision_heads=2))  # of 40
    plain, kernels = call(step_with_and_without_kernels, environment={"TRITON_INTERPRET": "1"}, hf=hf)
    assert plain[2] == 0 and kernels[2] > 0
    assert kernels[:2] == pytest.approx(plain[:2], rel=1e-5)


def test_triton_is_for_towers_in_bfloat16() -> None:
    def chosen(name: str, head_dim: int = 72, causal: bool = False, **more) -> str:
        return choose_backend(name, platform="cuda", head_dim=head_dim, causal=causal, **more)

    assert chosen("triton") == "triton"
    for options in ({"causal": True}, {"head_dim": 76}, {"head_dim": 256}, {"dtype": torch.float32}):
        with pytest.raises(ValueError, match="vision towers in bfloat16"):
            chosen("triton", **options)
    assert [chosen("auto"), chosen("auto", 80), chosen("auto", 64)] == ["triton"] * 3
    assert chosen("auto", 72, dtype=torch.float16) == "torch_varlen"
    assert chosen("auto", 128, causal=True) == "te"


def test_wide_heads_do_not_take_cudnn() -> None:
    """Its gradients of packed rows are wrong for heads of 256, which Qwen3.5 has (tests.gpu.attention)."""
    options = {"platform": "cuda", "head_dim": 256, "causal": True}
    assert choose_backend("auto", **options) == "torch_varlen"
    with pytest.raises(RunConfigError, match="wrong gradients"):
        choose_backend("te", **options)


def test_flash_attention_computes_language_models_where_it_is_installed(monkeypatch) -> None:
    """Its own results are compared on a GPU (tests.gpu.attention)."""

    def chosen(name: str, head_dim: int = 128, causal: bool = True, **more) -> str:
        return choose_backend(name, platform="cuda", head_dim=head_dim, causal=causal, **more)

    with pytest.raises(RunConfigError, match="flash-attn-4"):
        chosen("flash_attn")

    monkeypatch.setattr("megatron_vl.models.attention.has_flash_attention", lambda: True)
    assert [chosen("auto", head_dim) for head_dim in (64, 80, 128, 256)] == [
        "flash_attn",
        "torch_varlen",
        "flash_attn",
        "flash_attn",
    ]
    assert chosen("auto", dtype=torch.float16) == "te"
    assert chosen("auto", 72, causal=False) == "triton"
    assert choose_backend("auto", platform="cpu", head_dim=128, causal=True) == "sdpa"


@pytest.mark.parametrize("error", [1.3, float("nan")])
def test_a_run_with_wrong_gradients_does_not_start(monkeypatch, error: float) -> None:
    monkeypatch.setattr("megatron_vl.models.attention.largest_gradient_error", lambda group, head_dim: error)
    with pytest.raises(RunConfigError, match=r"heads of 256.*use torch_varlen"):
        check_gradients("flash_attn", 4, 256)
    check_gradients("te", 7, 128)
    monkeypatch.setattr("megatron_vl.models.attention.largest_gradient_error", lambda group, head_dim: 0.004)
    check_gradients("flash_attn", 4, 256)


def test_a_size_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        tower_attention(
            torch.zeros(4, 3 * 68), torch.zeros(4, 34), torch.zeros(4, 34), torch.tensor([0, 4]), 68
        )
