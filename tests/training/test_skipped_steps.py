"""What a run says and keeps of the steps that moved no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_vl.training.run_messages import skipped_steps_message
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE
from tests.training.small_run import metrics, prepare, train


def test_a_run_that_stops_says_why_its_steps_were_skipped() -> None:
    told = [
        skipped_steps_message(reasons, 40)
        for reasons in (
            [NOT_FINITE] * 2,
            [NO_LOSS_TOKENS] * 3,
            [NO_LOSS_TOKENS, NOT_FINITE],
        )
    ]
    assert told == [
        "loss or gradient was not finite in 2 steps in a row, the last one step 40",
        (
            "no token bore loss in 3 steps in a row, the last one step 40; only answers of the assistant do,"
            " so look for them in the data set"
        ),
        "loss or gradient was not finite or no token bore loss in 2 steps in a row, the last one step 40",
    ]


@pytest.mark.ranks
def test_a_run_whose_last_steps_were_all_skipped_fails(tmp_path: Path, tiny_checkpoint) -> None:
    prepared = prepare(tmp_path / "prepared", tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32))
    run = tmp_path / "run"
    done = train(prepared, run, "--optimizer.lr", "1e30", ranks=1, steps=4)
    assert done.returncode == 1
    assert "loss or gradient was not finite in 3 steps in a row, the last one step 4" in done.stderr
    assert [line["loss"] is None for line in metrics(run)] == [False, True, True, True]
    assert not list(run.glob("step_*")), "the weights are of no use"
