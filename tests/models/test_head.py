"""Losses of chosen tokens equal those with all logits, and a row without loss still has its gradients."""

from __future__ import annotations

import pytest
import torch

from tests.models.programs import gradients_without_loss, losses_of_chosen_tokens
from tests.support.ranks import call

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_equal_those_with_all_logits(tiny_checkpoint, tied: bool) -> None:
    result = call(
        losses_of_chosen_tokens, hf=str(tiny_checkpoint("qwen2_5_vl", tied=tied, dtype=torch.float32))
    )
    chunks = [50, 50, 28]
    # Chunks are computed again in the backward pass.
    assert result["rows of logits"] == [128, *chunks, *chunks, 256, 256]
    assert result["loss in chunks"] < 1e-6
    assert result["outside"] == 0.0 and result["trained"] == 0.0
    assert result["loss"] < 1e-5 and result["without gradient"] == []
    assert max(result["gradients"].values()) < 1e-5


def test_a_row_without_loss_has_zero_gradients_for_every_parameter(tiny_checkpoint) -> None:
    """No gradient is missing, because the overlapped reduction waits for each of them."""
    hf = str(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    missing, largest, loss, tokens = call(gradients_without_loss, hf=hf)
    assert missing == [] and (largest, loss, tokens) == (0.0, 0.0, 0.0)
