"""What the tests of this folder run in processes of their own (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_vl.config import RecomputeConfig
from megatron_vl.data.assemble import pack_row
from megatron_vl.models.names import LiveTensor
from megatron_vl.models.tensors import part_of
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.optimizer_state import optimizer_slices, snapshot
from megatron_vl.training.step import run_schedule, train_step
from tests.support.tiny_trainer import SEQ_LEN, TinyTrainer, tiny_trainer
from toolkit.parity.batches import make_sample


def steps_with_one_not_finite(hf: str) -> list[dict[str, Any]]:
    """Three steps, the second with NaN in its activations: updated, weights changed, loss finite, why it was skipped."""
    trainer = tiny_trainer(hf)
    chunk = trainer.chunks[0]

    def weights() -> dict[str, torch.Tensor]:
        return {name: parameter.detach().clone() for name, parameter in chunk.named_parameters()}

    results = []
    for number in range(3):
        hooks = []
        if number == 1:
            hooks.append(chunk.language_model.register_forward_hook(lambda module, args, out: out * math.nan))
        before = weights()
        result = trainer.step(number)
        for hook in hooks:
            hook.remove()

        changed = any(not torch.equal(before[name], now) for name, now in weights().items())
        outcome = {"updated": result.updated, "changed": changed, "finite": math.isfinite(result.loss)}
        results.append(outcome | {"skipped": result.skipped})
    return results


def steps_with_one_without_loss(hf: str, pp: int = 1) -> list[list[list[Any]]]:
    """By rank, for three steps of which the second has no loss token: [why skipped, loss tokens, what stayed, what moved].

    What stays or moves are the kinds of optimizer state.
    """
    trainer = tiny_trainer(hf, pp=pp)
    steps = [("image", "text"), ("without_loss", "without_loss"), ("image", "without_loss")]
    results = []
    for number, kinds in enumerate(steps):
        rows = [pack_row([make_sample(kind, trainer.spec, 0)], trainer.spec, SEQ_LEN) for kind in kinds]
        data = trainer.feed_of(rows, len(rows)).next_step()
        set_learning_rates(trainer.optimizer, trainer.config, number)
        before = _optimizer_state(trainer) if number else {}
        result = train_step(trainer.wrapped, trainer.optimizer, data.rows, trainer.grid, SEQ_LEN)
        after = _optimizer_state(trainer)

        stayed = {name.rpartition("/")[2] for name in before if torch.equal(before[name], after[name])}
        moved = {name.rpartition("/")[2] for name in before if not torch.equal(before[name], after[name])}
        results.append([result.skipped, result.loss_tokens > 0, sorted(stayed), sorted(moved)])

    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, results)
    return by_rank


def _optimizer_state(trainer: TinyTrainer) -> dict[str, torch.Tensor]:
    named = [LiveTensor(name, p) for chunk in trainer.chunks for name, p in chunk.named_parameters()]
    return {name: t for name, t in snapshot(trainer.optimizer, named).items() if not name.startswith("rng/")}


def parts_that_move(hf: str, still: str) -> list[Any]:
    """[rates of two steps, part -> [any tensor moved, all moved], rates with the merger frozen]; part ``still`` has rate 0."""
    trainer = tiny_trainer(hf, **{"lr" if still == "language" else f"{still}_lr": 0.0})
    parameters = dict(trainer.chunks[0].named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    rates = []
    for number in range(2):
        rates.append(set_learning_rates(trainer.optimizer, trainer.config, number))
        assert trainer.step(number).updated

    moved: dict[str, list[bool]] = {}
    for name, parameter in parameters.items():
        moved.setdefault(part_of(name), []).append(not torch.equal(before[name], parameter))
    trainer.config.model.freeze_merger = True
    frozen = set_learning_rates(trainer.optimizer, trainer.config, 2)
    return [rates, {part: [any(each), all(each)] for part, each in moved.items()}, frozen]


def rates_and_decays(hf: str) -> dict[str, list[float]]:
    """[learning rate, weight decay, dimensions] of each tensor's group."""
    trainer = tiny_trainer(hf)
    set_learning_rates(trainer.optimizer, trainer.config, 0)
    live = [LiveTensor(name, parameter) for name, parameter in trainer.chunks[0].named_parameters()]
    return {
        piece.name: [piece.group["lr"], piece.group["weight_decay"], piece.tensor.parameter.dim()]
        for piece in optimizer_slices(trainer.optimizer, live)
    }


def weights_copied_together(hf: str) -> list[Any]:
    """[updated, optimizers, whether our copy of the main weights equals core's] after a step in bf16."""
    trainer = tiny_trainer(hf, dtype="bfloat16")
    updated = trainer.step().updated
    parts = trainer.optimizer.chained_optimizers
    together = [parameter.detach().clone() for parameter in trainer.chunks[0].parameters()]
    for part in parts:
        copied = part._copy_main_params_to_model_params
        assert len(copied.pairs[0]) == sum(len(group) for group in part.shard_fp32_from_float16_groups), (
            "not all shards"
        )

    for parameter in trainer.chunks[0].parameters():
        parameter.data.fill_(float("nan"))
    for part in parts:
        type(part)._copy_main_params_to_model_params(part)
    one_by_one = list(trainer.chunks[0].parameters())
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(together, one_by_one, strict=True))
    return [updated, len(parts), same]


def counted_flops(hf: str, kinds: list[dict[str, Any]]) -> list[int]:
    """What torch counts in a forward and backward pass of our modules under each kind of recompute."""
    trainer = tiny_trainer(hf)
    samples = [make_sample("mixed", trainer.spec, seed) for seed in (0, 1)]
    length = sum(map(len, samples))

    counts = []
    for kind in kinds:
        config = dataclasses.replace(trainer.config, recompute=RecomputeConfig(**kind))
        chunks = trainer.new_chunks(config)
        chunks[0].config.finalize_model_grads_func = None
        rows = trainer.feed_of([pack_row(samples, trainer.spec, length)], 1).next_step().rows
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run_schedule(chunks, rows, seq_len=length)
        counts.append(counter.get_total_flops())
    return counts
