"""What a GPU is too old for is replaced or refused by name, for each generation; capabilities are faked."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from megatron_vl import platform
from megatron_vl.config import Fp8Config, RunConfigError, TrainConfig
from megatron_vl.kernels.attention import flash_attention
from megatron_vl.models.attention import choose_backend
from megatron_vl.models.transformer_configs import _fp8_settings
from megatron_vl.platform import Platform, PlatformError


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with a GPU, Transformer Engine and FlashAttention-4, as far as they are asked."""
    package = ModuleType("transformer_engine")
    package.pytorch = ModuleType("transformer_engine.pytorch")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package.pytorch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some card")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0")
    flash_attention.has_flash_attention.cache_clear()
    yield monkeypatch
    flash_attention.has_flash_attention.cache_clear()


def platform_of(fake: pytest.MonkeyPatch, capability: int) -> Platform:
    fake.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    return platform._make_platform("cuda")


FP8 = TrainConfig(fp8=Fp8Config(recipe="delayed"), dtype="bfloat16")


def test_gpu_without_bfloat16_is_refused(fake: pytest.MonkeyPatch) -> None:
    stated = "Some card has compute capability 7.5; .* need 8.0 .Ampere. or later"
    with pytest.raises(PlatformError, match=stated):
        platform_of(fake, 75)


@pytest.mark.parametrize("capability", [80, 89])
def test_gpu_before_hopper_takes_other_kernels_and_no_fp8(fake: pytest.MonkeyPatch, capability: int) -> None:
    found = platform_of(fake, capability)
    assert choose_backend("auto", platform=found.name, head_dim=128, causal=True) == "te"
    stated = f"fp8.recipe delayed needs Hopper .*, and this GPU has 8.{capability % 10}; set fp8.recipe"
    with pytest.raises(RunConfigError, match=stated):
        _fp8_settings(found, FP8)
    assert _fp8_settings(found, TrainConfig()) == {}


@pytest.mark.parametrize("capability", [90, 100])
def test_hopper_and_blackwell_have_everything(fake: pytest.MonkeyPatch, capability: int) -> None:
    found = platform_of(fake, capability)
    assert choose_backend("auto", platform=found.name, head_dim=128, causal=True) == "flash_attn"
    assert _fp8_settings(found, FP8) == {"fp8": "hybrid", "fp8_recipe": "delayed"}
