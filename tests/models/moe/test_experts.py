"""Tests grouped experts and their weights in DDP (expert_checks.py), and their tokens on
the way (dispatch_checks.py).

They check values, gradients, one reduction of each weight's gradient, and that no more rows are exchanged
than there are tokens for each rank.
"""

import json

import pytest
import torch

from tests.support.ranks import run_module

pytestmark = pytest.mark.ranks

ON_CPU = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}


def errors_of(checks: str, *arguments: str, ranks: int, **variables: str) -> dict[str, float]:
    done = run_module(f"tests.models.moe.{checks}", arguments, ranks, environment=variables)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_grouped_experts_equal_one_expert_after_another() -> None:
    errors = errors_of("expert_checks", ranks=2, **ON_CPU)
    assert len(errors) == 6
    for name, error in errors.items():
        assert error < 5e-6, (name, error)


def test_dispatched_tokens_come_back_as_if_they_had_stayed() -> None:
    """Covers 1 and 4 ranks, uneven ones and one without tokens; each token goes to a rank and back once.

    Padding is not sent, not by core's dispatcher either.
    """
    errors = errors_of("dispatch_checks", ranks=4, **ON_CPU)
    assert len(errors) == 2 * 2 * (2 * 6 + 1) + 6
    for name, error in errors.items():
        assert error < 1e-6, (name, error)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_dispatched_tokens_on_gpus() -> None:
    """Runs in bf16 on 1, 2, 4 or 8 GPUs, as many as there are."""
    ranks = max(n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count())
    errors = errors_of("dispatch_checks", "--gpu", ranks=ranks)
    assert len(errors) == ranks.bit_length() * (2 * 6 + 1 + 6)
    for name, error in errors.items():
        assert error < 2e-2, (name, error)
