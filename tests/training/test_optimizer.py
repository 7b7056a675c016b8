"""Schedules, and what happens at a step that must not be taken."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from megatron_vl.training.optimizer import learning_rate
from tests.support.ranks import call
from tests.training.programs import rates_and_decays, steps_with_one_not_finite, weights_copied_together

SHAPE = {"peak": 3e-4, "final": 3e-5, "steps": 100, "warmup": 10}


def test_cosine_reaches_peak_and_final() -> None:
    rates = [learning_rate(step, schedule="cosine", **SHAPE) for step in range(101)]
    assert rates[0] == pytest.approx(3e-5)  # a tenth of the peak: never zero, or the first step would be lost
    assert max(rates) == rates[9] == rates[10] == pytest.approx(3e-4)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(3e-5)
    assert rates[55] == pytest.approx((3e-4 + 3e-5) / 2)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_shape_equals_transformers_after_warm_up(schedule: str) -> None:
    """transformers decays to zero and starts its warm-up at zero; apart from that the curves are one."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if schedule == "cosine":
        reference = get_cosine_schedule_with_warmup(optimizer, 10, 100)
    else:
        reference = get_constant_schedule_with_warmup(optimizer, 10)
    for step in range(100):
        if step >= 10:
            ours = learning_rate(step, peak=1.0, final=0.0, steps=100, warmup=10, schedule=schedule)
            assert ours == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()



@pytest.mark.ranks
def test_non_finite_step_is_skipped_and_the_next_one_taken(tiny_checkpoint) -> None:
    out = call(steps_with_one_not_finite, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert [r["updated"] for r in out] == [True, False, True]
    assert [r["changed"] for r in out] == [True, False, True]
    assert [r["finite"] for r in out] == [True, False, True]


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "tensors"), [("qwen2_5_vl", 77), ("qwen3_vl", 110)])
def test_learning_rates_and_weight_decay_by_part(tiny_checkpoint, family: str, tensors: int) -> None:
    out = call(rates_and_decays, hf=str(tiny_checkpoint(family)))
    assert len(out) == tensors
    for name, (rate, decay, dimensions) in out.items():
        want = 2e-4 if ".merger." in name or ".deepstack_mergers." in name else 5e-4 if name.startswith("vision_model.") else 1e-3
        assert math.isclose(rate, want), name
        assert decay == (0.1 if dimensions > 1 else 0.0), name


@pytest.mark.ranks
def test_weights_copied_together_are_those_that_core_copies_one_by_one(tiny_checkpoint) -> None:
    out = call(weights_copied_together, hf=str(tiny_checkpoint("qwen3_vl")))
    assert out == [True, 1, True]
