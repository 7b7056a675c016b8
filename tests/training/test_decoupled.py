"""A checkpoint holds the same, wherever the vision tower was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.training.step import NOT_FINITE, replicated_modules
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import differences, load, save, train, trainer_of

ROWS = [["mixed", "text"], ["image"]]


@pytest.mark.parametrize("family", ["qwen3_vl"])
@in_ranks(2)
def test_checkpoint_moves_between_placements_bit_for_bit(hf, family, tmp_path: Path) -> None:
    """The next step has the same loss and norm, too."""
    layout: dict[str, Any] = {"tp": 2, "sequence_parallel": True}
    for was_decoupled in (False, True):
        first = trainer_of(hf, 512, decoupled=was_decoupled, **layout)
        train(first, ROWS, range(2))
        second = trainer_of(hf, 512, decoupled=not was_decoupled, **layout)
        saved = save(first, tmp_path / f"{was_decoupled}0")
        load(second, tmp_path / f"{was_decoupled}0")
        moved = save(second, tmp_path / f"{was_decoupled}1")
        assert differences(saved, moved) == [] and (len(saved) > 100 or dist.get_rank())

        [here], [there] = train(first, ROWS, [2]), train(second, ROWS, [2])
        assert there.loss == pytest.approx(here.loss, rel=1e-6)
        assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-5)


@in_ranks(2)
def test_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(hf) -> None:
    """The images of the last rank alone have a gradient with one NaN in step 2.

    The loss is finite, and so is the language model's gradient; the tower's, summed over all ranks, is not.
    No rank's weights move, and the next step is as usual.
    """
    trainer = trainer_of(hf, 512, decoupled=True, pp=2)
    tower: Any = trainer.model_chunks[0].module.decoupled
    is_last, backward, calls = dist.get_rank() == 1, tower.backward_call, []

    def backward_with_nan(features: list[Tensor], patches: slice, gradient: Tensor) -> None:
        calls.append(patches)
        gradient = gradient.clone()
        gradient[patches.start // tower.vision.merge_unit, 0, 0] = float("nan")
        backward(features, patches, gradient)

    parameters = [p for part in replicated_modules(trainer.model_chunks) for p in part.parameters()]
    for step, reason in enumerate(("", NOT_FINITE, "")):
        before = [parameter.detach().clone() for parameter in parameters]
        tower.backward_call = backward_with_nan if is_last and step == 1 else backward
        [result] = train(trainer, ROWS, [step])
        changed = any(not torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
        assert result.skip_reason == reason and changed == (not reason)
        assert all(bool(parameter.isfinite().all()) for parameter in parameters)
    assert bool(calls) == is_last  # that rank has images of its own
