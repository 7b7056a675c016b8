"""Multi-token prediction computes and trains what the serving engines draft with, in every layout."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import load_balancing_loss_func

from megatron_vl.models.batch import WholeRow
from megatron_vl.models.mtp import embeddings_of_next
from megatron_vl.training.step import run_schedule
from tests.models.mtp_reference import run_case, write_reference
from tests.support.ranks import call, in_ranks
from tests.support.tiny_trainer import differences, join, run_passes, trainer_of
from tests.tiny import TWO_LAYERS, tiny_checkpoint
from toolkit.parity.case import ParityCase, draw_samples, pack_step

KINDS = [["image", "short_text"], ["mixed", "word"], ["text", "text"], ["without_loss", "video"]]
"""Samples of each row."""
SEQ_LEN = 256
FACTOR = 0.3
DENSE, EXPERTS = "qwen3_5", "qwen3_5_moe"
TIED, DEEP = "tied", "deep"
"""Words after a family: with tied embeddings, with a decoder layer for each of four chunks."""
EXPERTS_DEEP, DENSE_DEEP = f"{EXPERTS} {DEEP}", f"{DENSE} {DEEP}"
SP, VPP = {"tp": 2, "sequence_parallel": True}, {"pp": 2, "vpp": 2}
FULL = {"recompute": {"language": "full", "vision": "full"}}
SELECTIVE = {"recompute": {"language": "selective", "language_modules": ["core_attn", "mlp"]}}


def folder_of(family: str) -> Path:
    family, *words = family.split()
    sizes = TWO_LAYERS | {"layers": 4 if DEEP in words else 2}
    return tiny_checkpoint(family, dtype=torch.float32, tied=TIED in words, **sizes)


@functools.cache
def reference_of(family: str, trains: str) -> str:
    """The folder of a reference, which a process of its own computes."""
    hf, kinds = str(folder_of(family)), json.dumps(KINDS)
    return call(write_reference, hf=hf, kinds_json=kinds, factor=FACTOR, trains=trains)


def check_layout(case: ParityCase) -> None:
    """Compares the step of a layout with the reference. A body of ranks."""
    [found] = run_case(case, join())["steps"]
    assert found["ok"], found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("family", "ranks", "fields", "trains"),
    [
        (DENSE, 2, {"tp": 2}, "all"),
        (EXPERTS, 2, SP | {"ep": 2}, "all"),
        pytest.param(EXPERTS, 2, SP | {"etp": 2}, "head", marks=pytest.mark.full),
        (f"{DENSE} {TIED}", 2, {"pp": 2} | FULL, "all"),
        (EXPERTS_DEEP, 2, VPP, "all"),
        (DENSE, 2, {"decoupled": True, "overlap": True}, "all"),
        (DENSE, 4, SP | {"cp": 2} | FULL, "all"),
        pytest.param(EXPERTS, 4, {"cp": 2, "pp": 2, "ep": 2}, "all", marks=pytest.mark.full),
        (DENSE, 2, SP | {"lora": {"rank": 4}}, "head"),
        pytest.param(DENSE, 2, {"cp": 2, "lora": {"rank": 4}} | FULL, "all", marks=pytest.mark.full),
        pytest.param(DENSE_DEEP, 2, VPP | {"decoupled": True}, "all", marks=pytest.mark.full),
        pytest.param(DENSE, 2, {"cp": 2, "decoupled": True} | SELECTIVE, "all", marks=pytest.mark.full),
        pytest.param(EXPERTS, 2, {"cp": 2, "ep": 2, "overlap": True}, "head", marks=pytest.mark.full),
        pytest.param(EXPERTS_DEEP, 4, SP | VPP | SELECTIVE, "all", marks=pytest.mark.full),
    ],
)
def test_step_equals_the_reference(family: str, ranks: int, fields: dict[str, Any], trains: str) -> None:
    """Both losses (1e-5), targets, top-1 and the gradient of every tensor (1e-4)."""
    hf, reference = str(folder_of(family)), reference_of(family, trains)
    shared = {"seq_len": SEQ_LEN, "optimizer": False, "reference": reference}
    case = ParityCase("", hf, "", [KINDS], mtp={"loss": FACTOR, "trains": trains}, **shared, **fields)
    call(check_layout, ranks, case=case)


@pytest.mark.parametrize(
    ("family", "layout"), [(f"{DENSE} {TIED}", SP), pytest.param(EXPERTS, {"ep": 2}, marks=pytest.mark.full)]
)
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


def test_targets_stay_within_their_sequence() -> None:
    """Ten times the number of a token is its label. The mask is that of the label."""
    bounds, mask = torch.tensor([0, 3, 4, 8]).int(), torch.tensor([1, 0.5, 0, 0, 1, 0, 2, 0])
    labels, weights = WholeRow(torch.arange(1, 9).int() * 10, mask, bounds).two_ahead
    # The first sequence ends at token 2, the second at 3: their last two tokens have no token two ahead.
    assert labels.tolist() == [20, 30, 40, 50, 60, 70, 80, 10]
    assert weights.tolist() == [0.5, 0, 0, 0, 0, 2, 0, 0]


@in_ranks(3)
def test_next_token_of_a_part_is_the_first_one_of_the_next_rank() -> None:
    """With two ranks, that would be the rank before, too."""
    join()
    rank, cp = dist.get_rank(), SimpleNamespace(cp=dist.group.WORLD)
    model: Any = SimpleNamespace(pg_collection=cp, config=SimpleNamespace(sequence_parallel=False))
    part = torch.arange(6.0).view(3, 2, 1, 1)[rank]
    assert embeddings_of_next(part, model).flatten().tolist() == [2 * rank + 1, (2 * rank + 2) % 6]


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
