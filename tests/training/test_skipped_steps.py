"""What a run says and keeps of the steps that moved no weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_vl.training.run_messages import skipped_steps_message
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE
from tests.support.tiny_run import metrics, prepare, train


def test_run_that_stops_says_why_its_steps_were_skipped() -> None:
    told = [
        skipped_steps_message(reasons, 40)
        for reasons in (
            [NOT_FINITE] * 2,
            [NO_LOSS_TOKENS] * 3,
            [NO_LOSS_TOKENS, NOT_FINITE],
        )
    ]
    assert told == [
        "2 consecutive steps (last: 40) had a loss or gradient that was not finite",
        "3 consecutive steps (last: 40) had no loss tokens. Only assistant turns are trained on: check that"
        " the data set has any",
        "2 consecutive steps (last: 40) had a loss or gradient that was not finite or no loss tokens",
    ]


@pytest.mark.ranks
def test_run_whose_last_steps_were_all_skipped_fails(tmp_path: Path, tiny_checkpoint) -> None:
    prepared = prepare(tmp_path / "prepared", tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32))
    run = tmp_path / "run"
    done = train(prepared, run, "--optimizer.lr", "1e30", ranks=1, steps=4)
    assert done.returncode == 1
    assert "3 consecutive steps (last: 4) had a loss or gradient that was not finite" in done.stderr
    assert [line["loss"] is None for line in metrics(run)] == [False, True, True, True]
    assert not list(run.glob("step_*")), "the weights are of no use"
