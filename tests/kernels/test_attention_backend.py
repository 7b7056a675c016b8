"""How a backend of attention is chosen, and what a GPU is too old for is replaced or refused by name."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from megatron_vl import platform
from megatron_vl.config import Fp8Config, RunConfigError, TrainConfig
from megatron_vl.kernels.attention import flash_attention
from megatron_vl.models.attention import choose_backend, flash_attention_is_right, make_backend
from megatron_vl.models.batch import KeySegments, Segments
from megatron_vl.models.transformer_configs import _fp8_settings, _recompute_settings
from megatron_vl.platform import Platform, PlatformError

CHOICES: list[tuple[str, dict]] = [
    # The tower takes our kernels for heads of at most 128 that 8 divides, in bfloat16.
    ("triton", {"head_dim": 80, "has_flash": True}),
    ("sdpa", {"head_dim": 76}),
    ("torch_varlen", {"head_dim": 256}),
    ("torch_varlen", {"dtype": torch.float32}),
    # The language model takes FlashAttention-4 where it is installed and right, and cuDNN never for heads of
    # 256 or gathered keys: its gradients of packed rows are wrong for them (tests.gpu.attention).
    ("te", {"head_dim": 128, "causal": True}),
    ("torch_varlen", {"head_dim": 256, "causal": True}),
    ("torch_varlen", {"head_dim": 128, "causal": True, "gathers_keys": True}),
    ("flash_attn", {"head_dim": 256, "causal": True, "has_flash": True}),
    ("torch_varlen", {"head_dim": 80, "causal": True, "has_flash": True}),
    ("te", {"head_dim": 128, "causal": True, "has_flash": True, "dtype": torch.float16}),
    ("te", {"head_dim": 128, "causal": True, "has_flash": True, "tries_flash_attention": False}),
    ("sdpa", {"attention": "reference", "head_dim": 128, "causal": True, "has_flash": True}),
    ("sdpa", {"platform": "cpu", "head_dim": 128, "causal": True, "has_flash": True}),
]


@pytest.mark.parametrize(("backend", "fields"), CHOICES, ids=range(len(CHOICES)))
def test_backend_follows_heads_types_and_what_is_installed(monkeypatch, backend: str, fields: dict) -> None:
    fields = {"attention": "auto", "platform": "cuda", "head_dim": 72, "causal": False} | fields
    has_flash = fields.pop("has_flash", False)
    monkeypatch.setattr("megatron_vl.models.attention.has_flash_attention", lambda: has_flash)
    assert choose_backend(fields.pop("attention"), **fields) == backend


def platform_of(monkeypatch: pytest.MonkeyPatch, capability: int) -> Platform:
    """The platform of a machine with a GPU, Transformer Engine and FlashAttention-4."""
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["transformer_engine"], "pytorch", ModuleType("pytorch"), raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: divmod(capability, 10))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.0")
    # What it has found before, or will have found here, is not that of another machine.
    search = flash_attention.has_flash_attention.__wrapped__
    monkeypatch.setattr("megatron_vl.models.attention.has_flash_attention", search)
    return platform._make_platform("cuda")


@pytest.mark.parametrize(
    ("capability", "backend"), [(80, "te"), (89, "te"), (90, "flash_attn"), (100, "flash_attn")]
)
def test_kernels_and_fp8_follow_the_generation(monkeypatch, capability: int, backend: str) -> None:
    """Hopper and Blackwell have everything; before them there are other kernels, and no FP8."""
    found = platform_of(monkeypatch, capability)
    assert choose_backend("auto", platform=found.name, head_dim=128, causal=True) == backend
    with_fp8 = TrainConfig(fp8=Fp8Config(recipe="delayed"), dtype="bfloat16")
    assert _fp8_settings(found, TrainConfig()) == {}
    if capability >= 90:
        assert _fp8_settings(found, with_fp8) == {"fp8": "hybrid", "fp8_recipe": "delayed"}
        assert _recompute_settings(found, "selective", ["activation"], has_experts=True) == {}  # no moe_act
        return
    stated = f"fp8.recipe delayed needs Hopper .*, and this GPU has 8.{capability % 10}; set fp8.recipe"
    with pytest.raises(RunConfigError, match=stated):
        _fp8_settings(found, with_fp8)


def test_gpu_without_bfloat16_is_refused(monkeypatch) -> None:
    stated = "Some card has compute capability 7.5; .* need 8.0 .Ampere. or later"
    with pytest.raises(PlatformError, match=stated):
        platform_of(monkeypatch, 75)


@pytest.mark.parametrize("error", [1.3, float("nan")])
def test_wrong_gradients_of_flash_attention_are_noticed(monkeypatch, error: float) -> None:
    errors = {(4, 256, True): error, (4, 256, False): 0.004}
    monkeypatch.setattr("megatron_vl.models.attention.largest_gradient_error", lambda *case: errors[case])
    assert [flash_attention_is_right(4, 256, gathers_keys) for gathers_keys in (True, False)] == [False, True]


def test_reference_of_gathered_keys_attends_as_the_cpu_backend() -> None:
    query_lengths, key_lengths = torch.tensor([3, 1, 0, 4]), torch.tensor([5, 1, 2, 4])
    query, key, value = (torch.randn(tokens, 2, 8) for tokens in (8, 12, 12))
    bounds = [F.pad(each.cumsum(0), (1, 0)).int() for each in (query_lengths, key_lengths)]
    segments = Segments(bounds[0], 4, KeySegments(bounds[1], 5, slice(0, 12)))
    out = make_backend("sdpa")(query, key, value, segments, True)
    mask = flash_attention.packed_causal_mask(query_lengths, key_lengths)
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*heads_first, mask).transpose(0, 1))
