"""In random weights, padding is zero and stays zero, and live modules agree with the tensor table."""

from __future__ import annotations

import pytest

from tests.models.programs import padding_under_training
from tests.support.ranks import call

pytestmark = pytest.mark.ranks


def test_padding_stays_zero_under_training(tiny_checkpoint) -> None:
    """With FFN width 107 in 128, rows and columns beyond 107 are zero before and after steps
    with weight decay."""
    before, after = call(padding_under_training, hf=str(tiny_checkpoint("qwen2_5_vl")))
    assert before[:5] == after[:5] == [0.0] * 5
    assert before[5] > 0 and after[5] != before[5]
