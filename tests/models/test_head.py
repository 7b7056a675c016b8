"""Losses of chosen tokens are those of a pass with all logits, and a row without loss still has its gradients."""

from __future__ import annotations

import pytest
import torch

from tests.training.process import run_single
from tests.training.test_optimizer import STEP

PARTS = """
import dataclasses
from megatron_vl.training.step import run_schedule, token_loss
samples = {name: make_sample(name, spec, 0) for name in ("image", "text", "without_loss")}

def row(*names):
    packed = pack_row([samples[name] for name in names], spec, 256)
    return Feed(grid, platform, iter([packed]), 1, balanced=False).next_step().rows[0]
"""


@pytest.mark.parametrize("tied", [False, True])
def test_losses_and_gradients_equal_those_with_all_logits(tiny_checkpoint, tied: bool) -> None:
    result = run_single(
        STEP
        + PARTS
        + """
seen = []
chunks[0].language_model.output_layer.register_forward_hook(lambda module, args, out: seen.append(len(out[0])))
given, found = row("image", "text"), []
for index in (given.loss_index, None):
    chunks[0].zero_grad(set_to_none=True)
    for parameter in chunks[0].parameters():
        parameter.main_grad.zero_()
    losses = chunks[0](dataclasses.replace(given, loss_index=index))
    token_loss(given, losses)[0].backward()
    found.append((losses.detach(), {n: p.main_grad.clone() for n, p in chunks[0].named_parameters()}))
(some, ours), (all_losses, whole) = found
inside = torch.zeros_like(some).index_fill(1, given.loss_index, 1.0)
logits = chunks[0](given, labels=False)
RESULT = {
    "rows of logits": seen,
    "outside": (some * (1 - inside)).abs().max().item(),
    "loss": ((some - all_losses) * inside).abs().max().item(),
    "learnt": (given.loss_mask[given.loss_index].sum() - given.loss_mask.sum()).item(),
    "without gradient": [n for n, g in whole.items() if not g.any()],
    "gradients": {n: ((g - whole[n]).norm() / whole[n].norm().clamp(min=1e-30)).item() for n, g in ours.items()},
}
""",
        HF=str(tiny_checkpoint("qwen2_5_vl", tied=tied, dtype=torch.float32)),
    )
    assert result["rows of logits"] == [128, 256, 256]
    assert result["outside"] == 0.0 and result["learnt"] == 0.0
    assert result["loss"] < 1e-5 and result["without gradient"] == []
    assert max(result["gradients"].values()) < 1e-5


def test_a_row_without_loss_has_zero_gradients_for_every_parameter(tiny_checkpoint) -> None:
    """None is missing: the overlapped reduction of gradients waits for each of them."""
    missing, largest, loss, tokens = run_single(
        STEP
        + PARTS
        + """
came = set()
for name, parameter in chunks[0].named_parameters():
    parameter.register_hook(lambda grad, name=name: came.add(name))
reports = run_schedule(wrapped, [row("without_loss")], seq_len=256)
names = {name for name, _ in chunks[0].named_parameters()}
RESULT = [sorted(names - came), max(p.main_grad.abs().max().item() for p in chunks[0].parameters()), *reports[0]["loss"].tolist()]
""",
        HF=str(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32)),
    )
    assert missing == [] and (largest, loss, tokens) == (0.0, 0.0, 0.0)
