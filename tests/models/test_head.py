"""Losses of chosen tokens equal those with all logits."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_vl.models import head
from megatron_vl.training.step import token_loss
from tests.support.ranks import in_ranks
from tests.support.tiny_trainer import tiny_trainer


@pytest.mark.parametrize("sizes", [{}, {"tied": True}], ids=["untied", "tied"])
@in_ranks()
def test_losses_and_gradients_equal_those_with_all_logits(hf, sizes: dict[str, Any]) -> None:
    """With logits of the loss tokens alone, in one piece and in pieces, which the backward pass repeats."""
    trainer = tiny_trainer(hf)
    chunk = trainer.chunks[0]
    rows_of_logits: list[int] = []
    chunk.language_model.output_layer.register_forward_hook(
        lambda module, args, out: rows_of_logits.append(len(out[0]))
    )
    row = trainer.device_row("image", "text")
    found = []
    for index, head.LOSS_CHUNK_TOKENS in ((None, 8192), (row.loss_index, 8192), (row.loss_index, 50)):
        trainer.model_chunks[0].zero_grad_buffer()
        losses = chunk(dataclasses.replace(row, loss_index=index))
        token_loss(row, losses)[0].backward()
        trainer.model_chunks[0].finish_grad_sync()
        found.append((losses.detach(), {name: p.main_grad.clone() for name, p in chunk.named_parameters()}))

    assert rows_of_logits == [256, 128, *[50, 50, 28] * 2]
    (all_losses, whole), *others = found
    inside = torch.zeros_like(all_losses).index_fill(1, row.loss_index, 1.0)
    for losses, gradients in others:
        assert not (losses * (1 - inside)).any() and ((losses - all_losses) * inside).abs().max() < 1e-5
        for name, gradient in whole.items():
            assert gradient.any() and (gradients[name] - gradient).norm() < 1e-5 * gradient.norm(), name
