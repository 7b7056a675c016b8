"""How a backend of attention is chosen."""

import pytest
import torch

from megatron_vl.kernels.attention.flash_attention import packed_causal_mask
from megatron_vl.models.attention import choose_backend, flash_attention_is_right, make_backend
from megatron_vl.models.batch import KeySegments, Segments

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


@pytest.mark.parametrize("error", [1.3, float("nan")])
def test_wrong_gradients_of_flash_attention_are_noticed(monkeypatch, error: float) -> None:
    errors = {(4, 256, True): error, (4, 256, False): 0.004}
    monkeypatch.setattr("megatron_vl.models.attention.largest_gradient_error", lambda *case: errors[case])
    assert [flash_attention_is_right(4, 256, gathers_keys) for gathers_keys in (True, False)] == [False, True]


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
