"""What a run says and keeps of the steps that moved no weights."""

from __future__ import annotations

from megatron_vl.training.loop import _skipped_before, _too_many_skipped
from megatron_vl.training.step import NO_LOSS_TOKENS, NOT_FINITE


def test_counts_go_on_from_a_checkpoint() -> None:
    saved = {"skipped_steps": {"not_finite": 3, "no_loss_tokens": 2}}
    assert _skipped_before(saved) == {NOT_FINITE: 3, NO_LOSS_TOKENS: 2}
    # A checkpoint may come from anybody.
    for damaged in ({"skipped_steps": [3]}, {"skipped_steps": {"not_finite": "3", "other": 1}}):
        assert _skipped_before(damaged) == {}


def test_a_run_that_stops_says_why_its_steps_were_skipped() -> None:
    told = [
        _too_many_skipped(reasons, 40)
        for reasons in ([NOT_FINITE] * 2, [NO_LOSS_TOKENS] * 3, [NO_LOSS_TOKENS, NOT_FINITE])
    ]
    assert told == [
        "loss or gradient was not finite in 2 steps in a row, the last one step 40",
        (
            "no token bore loss in 3 steps in a row, the last one step 40; only answers of the assistant do,"
            " so look for them in the data set"
        ),
        "loss or gradient was not finite or no token bore loss in 2 steps in a row, the last one step 40",
    ]
