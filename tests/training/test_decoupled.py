"""A checkpoint holds the same, wherever the vision tower was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from converters.convert import convert
from tests.support.ranks import call
from tests.tiny import tiny_checkpoint
from tests.training.decoupled_programs import moved


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
    convert(hf, tmp_path / "weights")
    there_and_back = call(
        moved, 2, hf=str(hf), weights=str(tmp_path / "weights"), folder=str(tmp_path), layout=layout
    )
    for line in there_and_back:
        assert line["different"] == [] and line["compared"] > 100, line
        assert line["loss"] == pytest.approx(line["loss_of_another_step"], rel=1e-6)
        assert line["norm"] == pytest.approx(line["norm_of_another_step"], rel=1e-5)
