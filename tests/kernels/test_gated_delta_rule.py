"""The packed delta rule equals that of ``transformers``, sequence by sequence."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
)

from megatron_vl.kernels.linear_attention.gated_delta_rule import (
    gated_delta_rule,
    make_segment_ids,
)
from tests.kernels.relative import RATES

LENGTHS = [1, 63, 64, 65, 3, 200, 2, 130]


def inputs(kind: torch.dtype, decays: str, key_heads: int = 2, value_heads: int = 6) -> list[Tensor]:
    """query, key, value, g, beta of a packed row."""
    generator = torch.Generator().manual_seed(0)
    length = sum(LENGTHS)

    def draw(*shape: int) -> Tensor:
        return torch.randn(length, *shape, generator=generator, dtype=kind)

    rates = torch.linspace(*RATES[decays], value_heads, dtype=kind)
    g = -rates * F.softplus(draw(value_heads) + 1)
    given = [draw(key_heads, 16), draw(key_heads, 16), draw(value_heads, 12), g, draw(value_heads).sigmoid()]
    return [t.requires_grad_() for t in given]


def bounds() -> list[tuple[int, int]]:
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return list(zip([0, *ends], ends, strict=False))


def numbers() -> Tensor:
    return make_segment_ids(torch.tensor([0, *(end for _, end in bounds())], dtype=torch.int32), sum(LENGTHS))


def alone(rule, given: list[Tensor]) -> Tensor:
    """The outputs of ``rule`` for each sequence by itself."""
    repeats = given[2].shape[1] // given[0].shape[1]
    q, k = (t.repeat_interleave(repeats, dim=1) for t in given[:2])
    options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
    parts = (tuple(t[None, start:end] for t in (q, k, *given[2:])) for start, end in bounds())
    return torch.cat([rule(*part, **options)[0][0] for part in parts])


@pytest.mark.parametrize("decays", RATES)
def test_values_and_gradients_are_those_of_transformers(decays: str) -> None:
    given = inputs(torch.float32, decays)
    ours = gated_delta_rule(*given, numbers())
    theirs = alone(torch_chunk_gated_delta_rule, given)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((out * weight).sum(), given) for out in (ours, theirs)]
    names = ("o", "q", "k", "v", "g", "beta")
    for name, a, b in zip(names, (ours, *grads[0]), (theirs, *grads[1]), strict=True):
        assert (a - b).norm() <= (3e-5 if name == "g" else 3e-6) * b.norm(), name


def test_sequence_changes_no_bit_of_the_others() -> None:
    start, end = bounds()[4]
    results = []
    for change in (False, True):
        given = [t.detach().clone() for t in inputs(torch.float32, "slow")]
        if change:
            for tensor in given:
                tensor[start:end] *= 0.7
        for tensor in given:
            tensor.requires_grad_()
        out = gated_delta_rule(*given, numbers())
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:start], after[:start]) and torch.equal(before[end:], after[end:])
        assert not torch.equal(before[start:end], after[start:end])
