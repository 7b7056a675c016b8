"""A checkpoint holds the same, wherever the vision tower was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from converters.convert import convert_weights
from megatron_vl.training.step import NOT_FINITE
from tests.support.ranks import call
from tests.tiny import tiny_checkpoint
from tests.training.decoupled_programs import moved, not_finite_in_one_share


@pytest.mark.ranks
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"tp": 2, "sequence_parallel": True}, id="TP2"),
        pytest.param({"pp": 2, "distributed_optimizer": False}, id="PP2", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_moves_between_placements_bit_for_bit(tmp_path: Path, layout: dict) -> None:
    hf = tiny_checkpoint("qwen3_vl", dtype=torch.float32)
    convert_weights(hf, tmp_path / "weights")
    there_and_back = call(
        moved, 2, hf=str(hf), weights=str(tmp_path / "weights"), folder=str(tmp_path), layout=layout
    )
    for line in there_and_back:
        assert line["different"] == [] and line["compared"] > 100, line
        assert line["loss"] == pytest.approx(line["loss_of_another_step"], rel=1e-6)
        assert line["norm"] == pytest.approx(line["norm_of_another_step"], rel=1e-5)


@pytest.mark.ranks
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    """The loss is finite, and so is the language model's gradient; the tower's, summed over all ranks, is
    not. Nobody's weights move, and the next step is as usual."""
    hf = tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)
    convert_weights(hf, tmp_path / "weights")
    given = {"hf": str(hf), "weights": str(tmp_path / "weights"), "layout": {"pp": 2}}
    by_rank = call(not_finite_in_one_share, 2, **given)
    assert len(by_rank) == 2
    for steps in by_rank:
        assert steps == [["", True, True], [NOT_FINITE, False, True], ["", True, True]]
