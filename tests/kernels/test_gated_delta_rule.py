"""The packed delta rule equals that of ``transformers``, and its Triton kernels equal torch in float64."""

from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from megatron_vl.kernels.linear_attention.gated_delta_rule import gated_delta_rule
from tests.kernels.delta_rule_checks import NAMES, RATES, errors, relative, rule_inputs, run, segments_of
from tests.support.ranks import call

LENGTHS = [1, 63, 64, 65, 3, 200, 2, 130]
BOUNDS = list(pairwise(accumulate(LENGTHS, initial=0)))


def inputs(rates: str) -> list[Tensor]:
    torch.manual_seed(0)
    return rule_inputs(LENGTHS, (2, 6), (16, 12), rates)


def packed(*given: Tensor) -> Tensor:
    return gated_delta_rule(*given, segments_of(LENGTHS))


def alone(*given: Tensor) -> Tensor:
    """The outputs of transformers' rule for each sequence by itself."""
    q, k = (t.repeat_interleave(3, dim=1) for t in given[:2])
    options = {"initial_state": None, "output_final_state": False, "use_qk_l2norm_in_kernel": True}
    parts = ([t[None, start:end] for t in (q, k, *given[2:])] for start, end in BOUNDS)
    return torch.cat([torch_chunk_gated_delta_rule(*part, **options)[0][0] for part in parts])


@pytest.mark.parametrize("rates", RATES)
def test_values_and_gradients_are_those_of_transformers(rates: str) -> None:
    given = inputs(rates)
    for name, ours, theirs in zip(NAMES, run(packed, given), run(alone, given), strict=True):
        assert relative(ours, theirs) <= (3e-5 if name == "dg" else 3e-6), name


def test_sequence_changes_no_bit_of_the_others() -> None:
    start, end = BOUNDS[4]
    given = [t.detach() for t in inputs("slow")]
    changed = [t.index_fill(0, torch.arange(start, end), 0.7) for t in given]
    results = []
    for tensors in (given, changed):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = packed(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for before, after in zip(*results, strict=True):
        assert torch.equal(before[:start], after[:start]) and torch.equal(before[end:], after[end:])
        assert not torch.equal(before[start:end], after[start:end])


@pytest.mark.parametrize(
    ("which", "bound"),
    [
        pytest.param("quick", 3e-6, marks=pytest.mark.ranks),
        pytest.param("full", 3e-6, marks=[pytest.mark.ranks, pytest.mark.full]),
        pytest.param(
            *("gpu", 1e-2),
            marks=[
                pytest.mark.ranks,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
            ],
        ),
    ],
)
def test_kernels_equal_torch(which: str, bound: float) -> None:
    environment = {} if which == "gpu" else {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    for case, of_case in call(errors, which=which, environment=environment, timeout_s=1200).items():
        for name, error in of_case.items():
            # Differences of running decays are rounded where decays are fast.
            assert error < (10 * bound if name == "dg" else bound), (case, name, error)
