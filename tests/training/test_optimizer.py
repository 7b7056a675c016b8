"""Schedules, and what happens at a step that must be skipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

from megatron_vl.config import OptimizerConfig, TrainConfig
from megatron_vl.training.optimizer import scheduled_rate
from tests.support.ranks import call
from tests.training.offload_programs import gradients_after_a_step
from tests.training.programs import (
    parts_that_move,
    rates_and_decays,
    steps_with_one_not_finite,
    steps_with_one_skipped,
    weights_copied_together,
)


def test_cosine_reaches_peak_and_final() -> None:
    config = TrainConfig(steps=100, optimizer=OptimizerConfig(warmup_steps=10))
    rates = [scheduled_rate(config, step, 1.0) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)  # a tenth of the peak: never zero, or the first step would be lost
    assert max(rates) == rates[9] == rates[10] == pytest.approx(1.0)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert rates[100] == pytest.approx(0.1)
    assert rates[55] == pytest.approx((1.0 + 0.1) / 2)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_shape_equals_transformers_after_warm_up(schedule: str) -> None:
    """transformers decays to zero and starts its warm-up at zero; apart from that the curves are equal."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if schedule == "cosine":
        reference = get_cosine_schedule_with_warmup(optimizer, 10, 100)
    else:
        reference = get_constant_schedule_with_warmup(optimizer, 10)
    fields: dict[str, Any] = {"warmup_steps": 10, "min_lr_ratio": 0.0, "schedule": schedule}
    config = TrainConfig(steps=100, optimizer=OptimizerConfig(**fields))
    for step in range(100):
        if step >= 10:
            ours = scheduled_rate(config, step, 1.0)
            assert ours == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        reference.step()


@pytest.mark.ranks
def test_non_finite_step_is_skipped_and_the_next_one_taken(tiny_checkpoint) -> None:
    out = call(steps_with_one_not_finite, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert [r["updated"] for r in out] == [True, False, True]
    assert [r["changed"] for r in out] == [True, False, True]
    assert [r["finite"] for r in out] == [True, False, True]
    assert [r["skipped"] for r in out] == ["", "not_finite", ""]


@pytest.mark.ranks
@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_without_loss_tokens_leaves_weights_moments_and_count(tiny_checkpoint, pp: int) -> None:
    """Weight decay and decaying moments would move them; rows without loss beside others are trained on.

    With two stages, the first has no loss and must learn of it; updates overlapping the forward pass
    wait for none.
    """
    by_rank = call(
        steps_with_one_skipped, pp, hf=str(tiny_checkpoint("qwen2_5_vl")), second="without_loss", pp=pp
    )
    assert len(by_rank) == pp
    everything = ["exp_avg", "exp_avg_sq", "main", "step"]
    for rank, (first, without, mixed) in enumerate(by_rank):
        assert first[0] == ""
        assert first[1] or rank < pp - 1
        assert without == ["no_loss_tokens", False, everything, []]
        assert mixed == ["", True, [], everything]


@pytest.mark.ranks
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("moments_dtype", ["float32", "bfloat16"])
def test_a_step_without_gradients_leaves_weights_moments_and_count(
    tiny_checkpoint, pp: int, moments_dtype: str
) -> None:
    """Of text alone, where only the vision tower is trained. With two stages, the last has no optimizer."""
    hf = str(tiny_checkpoint("qwen2_5_vl"))
    frozen = {"freeze_language": True, "moments_dtype": moments_dtype}
    by_rank = call(steps_with_one_skipped, pp, hf=hf, second="text", pp=pp, **frozen)
    everything = ["exp_avg", "exp_avg_sq", "main", "step"]
    for rank, (first, without, mixed) in enumerate(by_rank):
        here = everything if rank == 0 else []
        assert first[0] == ""
        assert without == ["no_gradient", True, here, []]
        assert mixed == ["", True, [], here]


@pytest.mark.ranks
@pytest.mark.parametrize("moments_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("clip_grad", [0.0, 1e-3, 1e6])
def test_gradients_are_divided_and_clipped_in_one_multiplication(
    tiny_checkpoint, clip_grad: float, moments_dtype: str
) -> None:
    """Each is rounded once, whether it is clipped or not, and the norm is that before clipping. Our kernel
    multiplies gradients as it reads them, so that the sums stay in the buffers."""
    hf = str(tiny_checkpoint("qwen2_5_vl"))
    out = call(gradients_after_a_step, hf=hf, clip_grad=clip_grad, moments_dtype=moments_dtype)
    ours, expected = out["norms"]
    assert ours == pytest.approx(expected, rel=1e-6) and 1e-3 < ours < 1e6 and out["tokens"] > 1
    assert out["wrong gradients"] == 0 and out["wrong state"] == [] and out["tensors"] > 200


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "tensors"), [("qwen2_5_vl", 77), ("qwen3_vl", 110)])
def test_learning_rates_and_weight_decay_by_part(tiny_checkpoint, family: str, tensors: int) -> None:
    out = call(rates_and_decays, hf=str(tiny_checkpoint(family)))
    assert len(out) == tensors
    for name, (rate, decay, dimensions) in out.items():
        want = (
            2e-4
            if ".merger." in name or ".deepstack_mergers." in name
            else 5e-4
            if name.startswith("vision_model.")
            else 1e-3
        )
        assert math.isclose(rate, want), name
        assert decay == (0.1 if dimensions > 1 else 0.0), name


@pytest.mark.ranks
@pytest.mark.parametrize("still", ["vision", "merger", "language"])
def test_a_part_with_a_rate_of_zero_stays_and_the_others_move(tiny_checkpoint, still: str) -> None:
    """With weight decay, it stays bit for bit. Each part's own rate is logged, and none for frozen parts."""
    rates, moved, frozen = call(parts_that_move, hf=str(tiny_checkpoint("qwen2_5_vl")), still=still)
    want = {"language": 1e-3, "vision": 5e-4, "merger": 2e-4} | {still: 0.0}
    assert rates == [want, want] and frozen == want | {"merger": None}
    assert moved == {part: [False, False] if part == still else [True, True] for part in want}


@pytest.mark.ranks
def test_weights_copied_together_are_those_that_core_copies_one_by_one(tiny_checkpoint) -> None:
    out = call(weights_copied_together, hf=str(tiny_checkpoint("qwen3_vl")))
    assert out == [True, 1, True]
