"""Multi-token prediction computes and trains what the serving engines draft with, in every layout."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_vl.models.batch import WholeRow
from megatron_vl.training.step import reduce_losses, run_schedule
from megatron_vl.training.trainer import Trainer
from tests.models.mtp_reference import Reference, write_reference
from tests.support.ranks import call, in_ranks
from tests.support.tiny_trainer import gather, trainer_of
from tests.tiny import tiny_checkpoint
from toolkit.parity.case import draw_samples, pack_step
from toolkit.parity.worker import complete_gradients, gradient_errors

KINDS = [["image", "short_text"], ["mixed", "word"], ["text", "text"], ["without_loss", "video"]]
"""Samples of each row."""
SEQ_LEN = 256
FACTOR = 0.3
DENSE, EXPERTS = "qwen3_5", "qwen3_5_moe"
SP = {"tp": 2, "sequence_parallel": True}
FULL = {"recompute": {"language": "full", "vision": "full"}}


def folder_of(family: str) -> Path:
    family, _, tied = family.partition(" ")
    return tiny_checkpoint(family, dtype=torch.float32, tied=bool(tied))


@functools.cache
def reference_of(family: str, trains: str) -> tuple[str, list[float]]:
    """(folder with the gradients, numbers of the step) of a reference that other processes compute."""
    out = tempfile.mkdtemp(prefix="mtp_")
    hf = str(folder_of(family))
    numbers = call(write_reference, hf=hf, kinds=KINDS, factor=FACTOR, trains=trains, out=out)
    return out, numbers


def run_passes(trainer: Trainer) -> list[float]:
    """Runs forward and backward passes; the numbers of :func:`write_reference`. Collective."""
    batch = pack_step(trainer, draw_samples(KINDS, trainer.spec, 0))
    for chunk in trainer.model_chunks:
        chunk.zero_grad_buffer()
    reports = run_schedule(trainer.model_chunks, batch.rows, seq_len=SEQ_LEN)
    device, has_mtp = trainer.platform.device, bool(trainer.config.mtp.loss)
    loss, tokens, _, _, mtp = reduce_losses(reports, trainer.grid, device, has_mtp=has_mtp)
    complete_gradients(trainer, tokens)
    return [loss / tokens, *([mtp.loss_sum / mtp.tokens, mtp.tokens, mtp.first] if mtp else [])]


def check_layout(hf: str, reference: str, numbers: list[float], fields: dict[str, Any]) -> None:
    """Compares the step of a layout with the reference. A body of ranks."""
    trainer = trainer_of(hf, SEQ_LEN, optimizer=False, **fields)
    found = run_passes(trainer)
    assert found[:2] == pytest.approx(numbers[:2], rel=1e-5)
    assert found[2:] == numbers[2:]
    errors = gradient_errors(trainer, Path(reference))
    wrong = {name: error for name, error in errors.items() if error > 1e-4}
    assert not wrong, wrong
    assert any(name.startswith("mtp.") for name in errors)


@pytest.mark.ranks
@pytest.mark.parametrize("trains", ["head", "all"])
@pytest.mark.parametrize(
    ("family", "ranks", "fields"),
    [
        (DENSE, 1, {}),
        (EXPERTS, 1, {}),
        (DENSE + " tied", 1, {}),
        (DENSE, 2, SP),
        (DENSE, 2, {"tp": 2}),
        (EXPERTS, 2, SP | {"ep": 2}),
        (EXPERTS, 2, {"ep": 2}),
        (DENSE, 2, {"pp": 2}),
        (DENSE + " tied", 2, {"pp": 2} | FULL),
        (EXPERTS, 2, {"pp": 2, "vpp": 2}),
        (DENSE, 2, {"cp": 2}),
        (DENSE, 2, {"overlap": True}),
        (DENSE, 2, {"decoupled": True}),
    ],
)
def test_step_equals_the_reference(family: str, ranks: int, fields: dict[str, Any], trains: str) -> None:
    """Losses (1e-5), targets, top-1 and the gradient of every tensor (1e-4)."""
    reference, numbers = reference_of(family, trains)
    mtp = {"mtp": {"loss": FACTOR, "trains": trains}}
    call(
        check_layout,
        ranks,
        hf=str(folder_of(family)),
        reference=reference,
        numbers=numbers,
        fields=fields | mtp,
    )
