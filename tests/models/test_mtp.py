"""Multi-token prediction computes and trains what the serving engines draft with, in every layout."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from megatron_vl.models.batch import WholeRow
from megatron_vl.training.step import run_schedule
from tests.models.mtp_reference import Reference, write_reference
from tests.support.ranks import call, in_ranks
from tests.support.tiny_trainer import differences, run_passes, trainer_of
from tests.tiny import tiny_checkpoint
from toolkit.parity.case import draw_samples, pack_step
from toolkit.parity.worker import gradient_errors

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


def check_layout(hf: str, reference: str, numbers: list[float], fields: dict[str, Any]) -> None:
    """Compares the step of a layout with the reference. A body of ranks."""
    trainer = trainer_of(hf, SEQ_LEN, optimizer=False, **fields)
    found = run_passes(trainer, KINDS)
    assert found[:2] == pytest.approx(numbers[:2], rel=1e-5)
    assert found[2:] == numbers[2:]
    errors = gradient_errors(trainer, Path(reference))
    wrong = {name: error for name, error in errors.items() if error > 1e-4}
    assert not wrong, wrong
    assert any(name.startswith("mtp.") for name in errors)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "ranks", "fields", "trains"),
    [
        pytest.param(DENSE, 1, {}, "all", marks=pytest.mark.full),
        pytest.param(EXPERTS, 1, {}, "all", marks=pytest.mark.full),
        (DENSE, 2, {"tp": 2}, "all"),
        (EXPERTS, 2, SP | {"ep": 2}, "all"),
        (EXPERTS, 2, SP | {"etp": 2}, "head"),
        (DENSE, 2, {"pp": 2}, "head"),
        (DENSE + " tied", 2, {"pp": 2} | FULL, "all"),
        (EXPERTS, 2, {"pp": 2, "vpp": 2}, "all"),
        (DENSE, 2, {"cp": 2}, "all"),
        (DENSE, 2, {"decoupled": True, "overlap": True}, "all"),
        (DENSE, 4, SP | {"cp": 2} | FULL, "all"),
        pytest.param(EXPERTS, 4, {"cp": 2, "pp": 2, "ep": 2}, "all", marks=pytest.mark.full),
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


@pytest.mark.parametrize(("family", "layout"), [(DENSE + " tied", SP), (EXPERTS, {"ep": 2})])
@in_ranks(2)
def test_head_gives_the_model_no_gradient(family: str, layout: dict[str, Any]) -> None:
    """Those of trunk, embedding and output layer are the same to the bit with and without the layer."""
    gradients = []
    for loss in (0.0, FACTOR):
        trainer = trainer_of(folder_of(family), SEQ_LEN, optimizer=False, mtp={"loss": loss}, **layout)
        run_passes(trainer, KINDS)
        gradients.append({live.tensor_name: live.parameter.main_grad for live in trainer.live_tensors})
    plain, beside = gradients
    assert len(plain) > 10 and any(gradient.any() for gradient in plain.values())
    assert all(gradient.any() for name, gradient in beside.items() if name.startswith("mtp.fc"))
    assert not differences(plain, {name: each for name, each in beside.items() if name[:4] != "mtp."})


def ahead(lengths: list[int], mask: list[float], part: slice) -> tuple[list[int], list[float]]:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    labels = torch.arange(1, sum(lengths) + 1).int() * 10
    return tuple(each.tolist() for each in WholeRow(labels, torch.tensor(mask), bounds, part).two_ahead)


def test_targets_stay_within_their_sequence() -> None:
    """Ten times the number of a token is its label. The mask is that of the label."""
    labels, mask = ahead([3, 1, 4], [1, 0.5, 0, 0, 1, 0, 2, 0], slice(None))
    # The first sequence ends at token 2, the second at 3: their last two tokens have no token two ahead.
    assert labels == [20, 30, 40, 50, 60, 70, 80, 10]
    assert mask == [0.5, 0, 0, 0, 0, 2, 0, 0]


def test_targets_cross_the_edges_of_parts_and_not_those_of_sequences() -> None:
    lengths, mask = [3, 5], [1.0, 1, 0, 1, 1, 1, 1, 0]
    parts = [ahead(lengths, mask, slice(start, start + 2)) for start in range(0, 8, 2)]
    whole = ahead(lengths, mask, slice(None))
    assert tuple(sum((part[i] for part in parts), []) for i in range(2)) == whole
    assert parts[1][1] == [0, 1]  # token 2 ends a sequence, token 3 begins one
    assert parts[2][1] == [1, 1]  # the target of token 5 is in the next part


def outputs_of_samples(hf: str, family: str) -> list[float]:
    """Largest relative errors of the layer's hidden states and of the losses of single tokens."""
    trainer = trainer_of(hf, SEQ_LEN, optimizer=False, mtp={"loss": FACTOR})
    chunk, reference, states = trainer.model_chunks[0].module, Reference(hf), []
    chunk.mtp.register_forward_hook(lambda module, args, output: states.append(output.detach()[:, 0]))
    rows = draw_samples(KINDS, trainer.spec, 0)
    largest = [0.0, 0.0, 0.0]
    for row, samples in zip(pack_step(trainer, rows).rows, rows, strict=True):
        found = chunk(row).detach()
        # Only tokens whose loss counts have one.
        found[1] *= row.whole_row.two_ahead[1]
        start = 0
        for sample in samples:
            expected, length = reference.outputs(sample, "head"), len(sample.token_ids)
            masked = (
                expected["losses"] * sample.loss_mask[1:],
                expected["mtp_losses"] * sample.loss_mask[2:],
            )
            own = (found[0] * row.loss_mask)[start:][: length - 1], found[1][start:][: max(length - 2, 0)]
            pairs = [*zip(own, masked, strict=True), (states[-1][start:][: length - 1], expected["states"])]
            for i, (ours, theirs) in enumerate(pairs):
                scale = float(theirs.detach().abs().max()) if theirs.numel() else 0.0
                if scale:
                    largest[i] = max(largest[i], float((ours - theirs).detach().abs().max()) / scale)
            start += length
    return largest


@pytest.mark.ranks
@pytest.mark.parametrize("family", [DENSE, EXPERTS])
def test_outputs_equal_the_reference_token_by_token(family: str) -> None:
    errors = call(outputs_of_samples, hf=str(folder_of(family)), family=family)
    assert 0 < min(errors) and max(errors) < 1e-5, errors


@in_ranks()
def test_experts_of_the_layer_have_the_balancing_loss_of_transformers() -> None:
    """With the coefficient of the model's layers; 0 leaves its gradient out."""
    hf, seen, gradients = tiny_checkpoint(EXPERTS, dtype=torch.float32), [], []
    for coefficient in (0.0, 0.5):
        trainer = trainer_of(hf, SEQ_LEN, optimizer=False, aux_loss=coefficient, mtp={"loss": FACTOR})
        router = trainer.model_chunks[0].module.mtp.decoder.layers[0].mlp.router
        hook = router.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
        batch = pack_step(trainer, draw_samples([["text", "image"]], trainer.spec, 0))
        run_schedule(trainer.model_chunks, batch.rows, seq_len=SEQ_LEN)
        gradients.append(router.weight.main_grad.clone())
        hook.remove()
    [row], moe = batch.rows, trainer.spec.language.moe
    weight = router.weight.detach().clone().requires_grad_()
    logits = seen[-1].view(SEQ_LEN, -1)[: row.num_real_tokens] @ weight.T
    balance = load_balancing_loss_func((logits,), moe.num_experts, moe.top_k)
    loss_tokens = int((row.loss_mask != 0).sum())
    (0.5 * balance / trainer.spec.language.num_layers * loss_tokens).backward()
    assert (gradients[1] - gradients[0] - weight.grad).norm() < 1e-4 * weight.grad.norm()
