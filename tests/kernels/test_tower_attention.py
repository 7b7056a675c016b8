"""Towers with our Triton kernels equal towers with torch's SDPA; tests also how a backend is chosen."""

from __future__ import annotations

import pytest
import torch

from megatron_vl.kernels.attention.flash_attention import packed_causal_mask
from megatron_vl.models.attention import choose_backend, flash_attention_is_right, make_backend
from megatron_vl.models.batch import KeySegments, Segments
from tests.models.programs import step_with_and_without_kernels
from tests.support.ranks import call


@pytest.mark.ranks
def test_step_with_the_kernels_is_the_step_without(tiny_checkpoint) -> None:
    """Takes one step from the same weights on the same rows, with the kernels (also of
    window layers) interpreted."""
    # Heads of 40; interpreted layers take most of the time, one with windows and one without.
    hf = str(tiny_checkpoint(vision_heads=2, vision_layers=2, full_attention_layers=(1,), layers=2))
    plain, kernels = call(step_with_and_without_kernels, environment={"TRITON_INTERPRET": "1"}, hf=hf)
    assert plain[2] == 0 and kernels[2] > 0
    assert kernels[:2] == pytest.approx(plain[:2], rel=1e-5)


CHOICES: list[tuple[str, dict]] = [
    # The tower takes our kernels for heads of at most 128 that 8 divides, in bfloat16.
    *(("triton", {"head_dim": head_dim}) for head_dim in (64, 72, 80)),
    ("sdpa", {"head_dim": 76}),
    *(
        ("torch_varlen", fields)
        for fields in ({"head_dim": 256}, {"dtype": torch.float16}, {"dtype": torch.float32})
    ),
    ("triton", {"has_flash": True}),
    # The language model takes FlashAttention-4 where it is installed and right, and cuDNN never for heads of
    # 256 or gathered keys: its gradients of packed rows are wrong for them (tests.gpu.attention).
    ("te", {"head_dim": 128, "causal": True}),
    ("torch_varlen", {"head_dim": 256, "causal": True}),
    ("torch_varlen", {"head_dim": 128, "causal": True, "gathers_keys": True}),
    *(("flash_attn", {"head_dim": d, "causal": True, "has_flash": True}) for d in (64, 128, 256)),
    ("torch_varlen", {"head_dim": 80, "causal": True, "has_flash": True}),
    ("te", {"head_dim": 128, "causal": True, "has_flash": True, "dtype": torch.float16}),
    ("te", {"head_dim": 128, "causal": True, "has_flash": True, "tries_flash_attention": False}),
    ("torch_varlen", {"head_dim": 256, "causal": True, "has_flash": True, "tries_flash_attention": False}),
    ("sdpa", {"attention": "reference"}),
    ("sdpa", {"attention": "reference", "head_dim": 128, "causal": True, "has_flash": True}),
    ("sdpa", {"platform": "cpu", "head_dim": 128, "causal": True, "has_flash": True}),
]


@pytest.mark.parametrize(("backend", "fields"), CHOICES, ids=range(len(CHOICES)))
def test_backend_follows_heads_types_and_what_is_installed(monkeypatch, backend: str, fields: dict) -> None:
    fields = {"attention": "auto", "platform": "cuda", "head_dim": 72, "causal": False} | fields
    has_flash = fields.pop("has_flash", False)
    monkeypatch.setattr("megatron_vl.models.attention.has_flash_attention", lambda: has_flash)
    assert choose_backend(fields.pop("attention"), **fields) == backend


@pytest.mark.parametrize("error", [1.3, float("nan")])
@pytest.mark.parametrize("wrong_with_gathered_keys", [False, True])
def test_wrong_gradients_of_flash_attention_are_noticed(monkeypatch, error, wrong_with_gathered_keys) -> None:
    def gradient_error(group: int, head_dim: int, gathers_keys: bool) -> float:
        return error if gathers_keys == wrong_with_gathered_keys else 0.004

    monkeypatch.setattr("megatron_vl.models.attention.largest_gradient_error", gradient_error)
    assert not flash_attention_is_right(4, 256, wrong_with_gathered_keys)
    assert flash_attention_is_right(4, 256, not wrong_with_gathered_keys)


def test_reference_of_gathered_keys_attends_as_the_cpu_backend() -> None:
    query_lengths, key_lengths = torch.tensor([3, 1, 0, 4]), torch.tensor([5, 1, 2, 4])
    query, key, value = (torch.randn(tokens, 2, 8) for tokens in (8, 12, 12))
    bounds = [torch.nn.functional.pad(each.cumsum(0), (1, 0)).int() for each in (query_lengths, key_lengths)]
    segments = Segments(bounds[0], 4, KeySegments(bounds[1], 5, slice(0, 12)))
    out = make_backend("sdpa")(query, key, value, segments, True)
    mask = packed_causal_mask(query_lengths, key_lengths)
    heads_first = [tensor.transpose(0, 1) for tensor in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first, mask)
    torch.testing.assert_close(out, expected.transpose(0, 1))
