"""Functions that ranks run for test_offload.py."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.assemble import pack_row
from megatron_vl.models.names import LiveTensor
from megatron_vl.training.offload import build
from megatron_vl.training.offload.build import Offload, offload_of
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.optimizer_state import snapshot
from megatron_vl.training.step import train_step, wrap
from tests.support.tiny_trainer import SEQ_LEN, TinyTrainer, tiny_trainer
from toolkit.parity.batches import make_sample

Steps = list[dict[str, Any]]


def again(trainer: TinyTrainer, **changes: Any) -> TinyTrainer:
    """A trainer of the same model with the same random weights and rows; ``changes`` of the optimizer."""
    optimizer = dataclasses.replace(trainer.config.optimizer, **changes)
    config = dataclasses.replace(trainer.config, optimizer=optimizer)
    torch.manual_seed(0)
    other = dataclasses.replace(trainer, config=config, chunks=trainer.new_chunks(config))
    other.wrapped = wrap(config, other.chunks)
    other.optimizer = build_optimizer(config, trainer.platform, other.wrapped)
    return other


def state(trainer: TinyTrainer) -> dict[str, Tensor]:
    """Weights and optimizer state of this rank."""
    live = [LiveTensor(name, p) for chunk in trainer.chunks for name, p in chunk.named_parameters()]
    held = {f"weight/{name}": p.detach().clone() for name, p, _ in live}
    held |= snapshot(trainer.optimizer, live)
    return {name: tensor for name, tensor in held.items() if not name.startswith("rng/")}


def digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def steps_of(trainer: TinyTrainer, rows: list[Any], steps: int = 3, bad: int | None = None) -> Steps:
    """Steps on the same rows; the step ``bad`` has a row in which no token bears loss, and is skipped."""
    silent = pack_row([make_sample("without_loss", trainer.spec, 0)], trainer.spec, SEQ_LEN)
    outcomes = []
    for number in range(steps):
        set_learning_rates(trainer.optimizer, trainer.config, number)
        now = trainer.feed_of([silent], 1).next_step().rows if number == bad else rows
        result = train_step(trainer.wrapped, trainer.optimizer, now, trainer.grid, SEQ_LEN)
        facts = {"loss": repr(result.loss), "norm": repr(result.grad_norm), "skipped": result.skipped}
        outcomes.append(facts | {"state": digest(state(trainer))})
    return outcomes


def steps_by_share(
    hf: str,
    dtype: str,
    shares: list[float],
    steps: int = 3,
    bad: int | None = None,
    spread: bool = True,
    **optimizer: Any,
) -> dict[str, Any]:
    """share -> what the steps gave, on one rank or several data-parallel ones, with chunks so small that
    parameters are cut, and what is on the device between two steps.

    Args:
        bad: the step in which no token bears loss.
        spread: whether the state is spread over data-parallel ranks.
    """
    build.offload.__defaults__ = (10 * 64 * 500,)
    first = tiny_trainer(hf, dtype=dtype, **optimizer)
    if not spread:
        parallel = {"distributed_optimizer": False, "overlap_param_gather": False}
        changed = dataclasses.replace(first.config.parallel, **parallel)
        first.config = dataclasses.replace(first.config, parallel=changed)
    rows = some_rows(first, dtype)
    found: dict[str, Any] = {}
    for share in shares:
        trainer = again(first, offload_fraction=share)
        outcomes: Any = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, steps_of(trainer, rows, steps, bad))
        found[str(share)] = outcomes
        found[f"{share} held"] = held_on_device(trainer)
    return found


def some_rows(trainer: TinyTrainer, dtype: str) -> list[Any]:
    """A row of pictures and one of text; in bfloat16, which takes seconds on CPU, a short one."""
    if dtype == "float32":
        return trainer.feed.next_step().rows
    row = pack_row([make_sample("image", trainer.spec, 0)], trainer.spec, SEQ_LEN)
    return trainer.feed_of([row], 1).next_step().rows


def held_on_device(trainer: TinyTrainer) -> dict[str, float]:
    """Shares of the state: bytes of master weights and moments on the device, and in host memory."""
    moved = offload_of(trainer.optimizer)
    device = total = 0
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                total += main.numel()
                moments = part.optimizer.state.get(main, {}).get("exp_avg")
                device += main.numel() if moments is not None and main.untyped_storage().nbytes() else 0
    return {
        "device": device / total,
        "host": sum(p.main.numel() for p in moved.parameters.values()) / total if moved else 0.0,
        "chunks": len(moved.traffic.chunks) if moved else 0,
        "cut": max(len(p.pieces) for p in moved.parameters.values()) if moved else 0,
    }


def poisoned(hf: str) -> dict[str, Any]:
    """The state after steps when everything on the device that is not to be used is NaN, with room for copies
    beside the passes of the model and without, and when a number in host memory has changed."""
    first = tiny_trainer(hf)
    build.offload.__defaults__ = (10 * 64 * 200,)
    rows = some_rows(first, "float32")
    results: dict[str, Any] = {"plain": steps_of(again(first), rows, bad=1)[-1]["state"]}
    for what in ("room", "no room", "host"):
        trainer = again(first, offload_fraction=1.0)
        moved = offload_of(trainer.optimizer)
        assert moved is not None
        traffic = moved.traffic
        if what == "no room":
            traffic.memory = lambda: (1, 1)
        if what == "host":
            chunk = traffic.chunks[0]
            chunk.state(chunk.host).exp_avg[0] += 1e-3
        ahead = watch(moved)
        results[what] = steps_of(trainer, rows, bad=1)[-1]["state"]
        train_step(trainer.wrapped, trainer.optimizer, rows, trainer.grid, SEQ_LEN)
        results[f"{what}, on the device"] = [max(ahead), traffic.on_the_way]
        moved.settle()
        assert not traffic.on_the_way
    return results


def watch(moved: Offload) -> list[int]:
    """Fills new slots with NaN, so that what is not fetched is seen. Returns a list to which the number of
    chunks on the device is added after each bucket of the last backward pass."""
    make, fetch, ahead = moved.traffic._new_slot, moved.traffic.fetch, [0]

    def filled() -> Any:
        slot = make()
        slot.buffer.fill_(255)
        return slot

    def watched(least: int = 0) -> None:
        fetch(least)
        if not least:
            ahead.append(moved.traffic.on_the_way)

    moved.traffic._new_slot = filled  # type: ignore[method-assign]
    moved.traffic.fetch = watched  # type: ignore[method-assign]
    for chunk in moved.followed:
        chunk.when_bucket_is_ready = watched
    return ahead
