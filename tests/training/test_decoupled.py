"""A checkpoint holds the same, wherever the vision tower was."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.training.step import NOT_FINITE, replicated_modules
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import train, trainer_of

ROWS = [["mixed", "text"], ["image"]]


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
