"""Functions that ranks run for test_offload.py."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.platform import get_platform
from megatron_vl.spec.tensors import tensor_table
from megatron_vl.training import optimizer as optimizer_module
from megatron_vl.training.offload import build
from megatron_vl.training.offload.build import ChunkedOptimizerState, chunked_state
from megatron_vl.training.offload.chunk_streamer import ChunkStreamer, DeviceSlot, SlotPhase
from megatron_vl.training.offload.chunked_step import ChunkedStep
from megatron_vl.training.offload.pinned_memory import allocate_device_chunks, allocate_host_chunks
from megatron_vl.training.offload.state_chunks import ChunkedParameter, StateChunk, lay_out_chunks
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.state.optimizer_state import (
    INDEX_FILE,
    STATE_KINDS,
    OptimizerStateReader,
    list_index_entries,
    restore_optimizer,
    snapshot_optimizer,
    write_hashed_safetensors,
    write_slice_index,
)
from tests.support.tiny_trainer import SEQ_LEN, TinyTrainer, tiny_trainer
from toolkit.parity.random_samples import make_sample

Steps = list[dict[str, Any]]


def again(trainer: TinyTrainer, **changes: Any) -> TinyTrainer:
    """A trainer of the same model with the same random weights and rows; ``changes`` of the optimizer."""
    optimizer = dataclasses.replace(trainer.config.optimizer, **changes)
    torch.manual_seed(0)
    return trainer.again(optimizer=optimizer)


def state(trainer: TinyTrainer) -> dict[str, Tensor]:
    """Weights and optimizer state of this rank."""
    live = live_tensors(trainer)
    held = {f"weight/{one.tensor_name}": one.parameter.detach().clone() for one in live}
    held |= snapshot_optimizer(trainer.optimizer, live)
    return held


def live_tensors(trainer: TinyTrainer) -> list[LiveTensor]:
    return [LiveTensor(name, p) for chunk in trainer.chunks for name, p in chunk.named_parameters()]


def digest(tensors: dict[str, Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def steps_of(
    trainer: TinyTrainer, rows: list[Any], steps: int = 3, bad: int | None = None, first: int = 0
) -> Steps:
    """Steps from ``first`` on, all of the same rows; the step ``bad`` has a row in which no token bears
    loss, and is skipped."""
    silent = pack_row([make_sample("without_loss", trainer.spec, 0)], trainer.spec, SEQ_LEN)
    outcomes = []
    for number in range(first, first + steps):
        set_learning_rates(trainer.optimizer, trainer.config, number)
        now = trainer.feed_of([silent], 1).next_batch().rows if number == bad else rows
        result = trainer.train_step(StepBatch(now))
        facts = {"loss": repr(result.loss), "norm": repr(result.grad_norm), "skipped": result.skip_reason}
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
    build.move_state_to_chunks.__defaults__ = (10 * 64 * 500,)
    first = tiny_trainer(hf, dtype=dtype, **optimizer)
    if not spread:
        changed = dataclasses.replace(first.config.parallel, distributed_optimizer=False)
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


def gradients_after_a_step(hf: str, **optimizer: Any) -> dict[str, Any]:
    """Norms of a step, and how many gradients in the buffers and tensors of the state are not those of one
    multiplication of the sums over tokens.

    With moments in bfloat16, the sums must stay in the buffers.
    """
    trainer = tiny_trainer(hf, **optimizer)
    rows, twin = some_rows(trainer, "float32"), again(trainer)
    trainer = again(trainer)
    sums: list[Tensor] = []
    _after_prepare_grads(trainer, lambda gradients: sums.extend(g.clone() for g in gradients))
    result = trainer.train_step(StepBatch(rows))

    clip_grad = trainer.config.optimizer.clip_grad
    norm = math.sqrt(sum(g.double().square().sum().item() for g in sums)) / result.loss_tokens
    clip_factor = min(1.0, clip_grad / (result.grad_norm + 1e-6)) if clip_grad else 1.0
    scaled = [gradient * (1 / result.loss_tokens * clip_factor) for gradient in sums]
    left = sums if trainer.config.optimizer.moments_dtype == "bfloat16" else scaled
    found = [parameter.grad for parameter in trainer.optimizer.get_parameters()]
    wrong_gradients = sum(not torch.equal(a, b) for a, b in zip(left, found, strict=True))

    # A twin gets the scaled gradients, and its own scaling is left out.
    _after_prepare_grads(twin, lambda gradients: torch._foreach_copy_(gradients, scaled))
    optimizer_module._scale_gradients = lambda *_: None
    assert twin.train_step(StepBatch(rows)).is_updated
    ours, theirs = state(trainer), state(twin)
    wrong_state = [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)]
    return {
        "norms": [result.grad_norm, norm],
        "tokens": result.loss_tokens,
        "wrong gradients": wrong_gradients,
        "wrong state": wrong_state,
        "tensors": len(theirs),
    }


def _after_prepare_grads(trainer: TinyTrainer, call: Callable[[list[Any]], Any]) -> None:
    """Gives ``call`` the gradients of each step before they are scaled."""
    prepare_grads = trainer.optimizer.prepare_grads

    def prepare_and_call() -> Any:
        has_overflow = prepare_grads()
        call([parameter.grad for parameter in trainer.optimizer.get_parameters()])
        return has_overflow

    trainer.optimizer.prepare_grads = prepare_and_call


def some_rows(trainer: TinyTrainer, dtype: str) -> list[Any]:
    """A row of pictures and one of text; in bfloat16, which takes seconds on CPU, a short one."""
    if dtype == "float32":
        return trainer.batches.next_batch().rows
    row = pack_row([make_sample("image", trainer.spec, 0)], trainer.spec, SEQ_LEN)
    return trainer.feed_of([row], 1).next_batch().rows


def held_on_device(trainer: TinyTrainer) -> dict[str, float]:
    """Shares of the elements whose state is in the optimizer, in chunks on the device, and in chunks in host
    memory."""
    moved = chunked_state(trainer.optimizer)
    parameters = list(moved.parameters_by_id.values()) if moved else []
    streamed = {id(chunk) for chunk in moved.chunk_streamer.state_chunks} if moved else set()
    host = sum(p.main_param.numel() for p in parameters if id(p.chunk_slices[0].state_chunk) in streamed)
    device = total = 0
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for main in group["params"]:
                total += main.numel()
                moments = part.optimizer.state.get(main, {}).get("exp_avg")
                device += main.numel() if moments is not None and main.untyped_storage().nbytes() else 0
    return {
        "device": device / total,
        "chunks on device": (sum(p.main_param.numel() for p in parameters) - host) / total,
        "host": host / total,
        "chunks": len(streamed),
        "cut": max((len(p.chunk_slices) for p in parameters), default=0),
    }


def two_steps_by_hand() -> list[dict[str, list[float]]]:
    """What is kept of two weights after each of two steps with the same gradient, with moments in bf16."""
    platform = get_platform("cpu")
    weight, main = torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([1.0, -2.0])
    adam = torch.optim.AdamW([main], lr=0.1, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0)
    parameter = ChunkedParameter(main, weight, adam.param_groups[0])
    chunks = lay_out_chunks([parameter], 4096, torch.bfloat16)
    allocate_device_chunks(chunks, platform.device)
    main.untyped_storage().resize_(0)
    traffic = ChunkStreamer([], platform.device, platform.memory_usage)
    step = ChunkedStep(adam, [parameter], chunks, traffic, range(0))

    kept = []
    for _ in range(2):
        main.grad = torch.tensor([0.5, -0.25])
        step()
        held = {kind: parameter.read_state(kind) for kind in STATE_KINDS}
        kept.append({kind: value.tolist() for kind, value in held.items() if value is not None})
        kept[-1]["weight"] = weight.tolist()
    assert held["exp_avg"].dtype == held["exp_avg_sq"].dtype == torch.bfloat16  # type: ignore[union-attr]
    return kept


def saved_and_restored(hf: str, folder: str) -> dict[str, Any]:
    """Digests of the state after two steps: undisturbed, and saved after one and restored by trainers that
    keep moments in another place, also after they were fp32 for no step; and how fp32 moments become bf16."""
    build.move_state_to_chunks.__defaults__ = (6 * 64 * 500,)
    first = tiny_trainer(hf, dtype="bfloat16", moments_dtype="bfloat16")
    rows = some_rows(first, "bfloat16")
    found: dict[str, Any] = {"undisturbed": steps_of(again(first), rows, 2)[-1]["state"]}

    before = again(first, offload_fraction=0.4)
    steps_of(before, rows, 1)
    files = save(before, Path(folder) / "bf16")
    for share in (0.0, 1.0):
        after = again(first, offload_fraction=share)
        load(after, Path(folder) / "bf16", files)
        assert digest(state(after)) == digest(state(before))
        found[f"share {share}"] = steps_of(after, rows, 1, first=1)[-1]["state"]

    wide = again(first, moments_dtype="float32")
    load(wide, Path(folder) / "bf16", files)
    found["wide"] = sorted({str(tensor.dtype) for key, tensor in state(wide).items() if "exp_avg" in key})
    files = save(wide, Path(folder) / "fp32")
    narrow = again(first, offload_fraction=1.0)
    load(narrow, Path(folder) / "fp32", files)
    found["bf16, fp32, bf16"] = steps_of(narrow, rows, 1, first=1)[-1]["state"]

    steps_of(wide, rows, 1, first=1)
    files = save(wide, Path(folder) / "wide")
    load(narrow, Path(folder) / "wide", files)
    theirs, ours = state(wide), state(narrow)
    found["to the nearest"] = all(
        torch.equal(ours[key], tensor.bfloat16() if "exp_avg" in key else tensor)
        for key, tensor in theirs.items()
    )
    found["rounded"] = any(
        not torch.equal(ours[key].float(), tensor) for key, tensor in theirs.items() if "exp_avg" in key
    )
    return found


def save(trainer: TinyTrainer, folder: Path) -> dict[str, Any]:
    """Writes optimizer state as a checkpoint does. Returns what ``run.json`` says of the files."""
    folder.mkdir()
    held = snapshot_optimizer(trainer.optimizer, trainer.live_tensors)
    files = {"rank.safetensors": write_hashed_safetensors(folder / "rank.safetensors", held, {"tp": "0"})}
    return files | {
        INDEX_FILE: write_slice_index(folder, {"rank.safetensors": list_index_entries(held, 0, 0)})
    }


def load(trainer: TinyTrainer, folder: Path, files: dict[str, Any]) -> None:
    """Restores the optimizer, and the model's weights from its master weights."""
    table = tensor_table(trainer.spec)
    reader = OptimizerStateReader(folder, files, trainer.layout.sharding)
    restore_optimizer(reader, trainer.optimizer, trainer.live_tensors, table, trainer.grid)
    for part in trainer.optimizer.chained_optimizers:
        part._copy_main_params_to_model_params()


def bytes_at_start(hf: str, share: float, moments: str) -> dict[str, int]:
    """Most bytes of new fp32 tensors while the optimizer is built, and those that are left; and the bytes of
    the largest master weight, and of all of them."""
    first = tiny_trainer(hf, dtype="bfloat16")
    mains = [main for part in first.optimizer.chained_optimizers for main in part.get_parameters()]
    sizes = [4 * main.numel() for main in mains]
    optimizer = dataclasses.replace(first.config.optimizer, offload_fraction=share, moments_dtype=moments)
    other = TinyTrainer(dataclasses.replace(first.config, optimizer=optimizer), with_optimizer=False)
    with Allocations() as allocations:
        built = build_optimizer(other.config, other.platform, other.model_chunks)
    assert built.param_groups
    return {"most": allocations.most, "left": allocations.now(), "largest": max(sizes), "all": sum(sizes)}


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages of fp32 tensors that are made within it and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def now(self) -> int:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in self._alive()}
        return sum(storage.nbytes() for storage in storages.values())

    def _alive(self) -> list[Tensor]:
        return [tensor for tensor in (ref() for ref in self.made) if tensor is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        ours = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        new = isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in ours
        if new and out.dtype == torch.float32:
            self.made.append(weakref.ref(out))
        self.most = max(self.most, self.now())
        return out


def poisoned(hf: str) -> dict[str, Any]:
    """The state after steps when everything on the device that is not to be used is NaN, with room for copies
    beside the passes of the model and without, and when a number in host memory has changed."""
    first = tiny_trainer(hf)
    build.move_state_to_chunks.__defaults__ = (10 * 64 * 200,)
    rows = some_rows(first, "float32")
    results: dict[str, Any] = {"plain": steps_of(again(first), rows, bad=1)[-1]["state"]}
    for what in ("room", "no room", "host"):
        trainer = again(first, offload_fraction=1.0)
        moved = chunked_state(trainer.optimizer)
        assert moved is not None
        traffic = moved.chunk_streamer
        if what == "no room":
            traffic.memory_usage = lambda: (1, 1)
        if what == "host":
            chunk = traffic.state_chunks[0]
            chunk.state_views(chunk.home_buffer).exp_avg[0] += 1e-3
        ahead = watch(moved)
        results[what] = steps_of(trainer, rows, bad=1)[-1]["state"]
        trainer.train_step(StepBatch(rows))
        results[f"{what}, on the device"] = [max(ahead), traffic.num_chunks_on_device]
        moved.chunk_streamer.wait_for_host_state()
        assert not traffic.num_chunks_on_device
    return results


def phases_of_slots() -> dict[str, Any]:
    """The phases of each slot in an update of four chunks, a dropped fetch and an update whose copies go
    on into the next step; and what is asserted if a slot is dropped during its update."""
    platform = get_platform("cpu")
    chunks = [StateChunk(False, torch.float32, 64) for _ in range(4)]
    allocate_host_chunks(chunks, is_pinned=False)
    streamer = ChunkStreamer(chunks, platform.device, lambda: (0, 1))
    streamer.overlaps_passes = True

    slots: list[Any] = []
    phases: list[list[str]] = []
    make, enter = streamer._new_slot, DeviceSlot.enter

    def listed() -> DeviceSlot:
        slots.append(make())
        phases.append([])
        return slots[-1]

    def noted(slot: DeviceSlot, phase: SlotPhase) -> None:
        enter(slot, phase)
        phases[slots.index(slot)].append(phase.value)

    streamer._new_slot, DeviceSlot.enter = listed, noted  # type: ignore[method-assign]
    for dropped in (False, True):
        streamer.fetch_chunks(1)
        if dropped:
            streamer.drop_slots()
        for number in range(len(chunks)):
            with streamer.chunk_on_device(number) as state:
                state.exp_avg.add_(number + 1)
        streamer.release_slots()
    result: dict[str, Any] = {"phases": [list(each) for each in phases]}
    result["sums"] = [float(chunk.state_views(chunk.home_buffer).exp_avg.mean()) for chunk in chunks]

    try:
        with streamer.chunk_on_device(0):
            streamer.wait_for_host_state()
    except AssertionError as error:
        result["error"] = str(error)
    return result


def watch(moved: ChunkedOptimizerState) -> list[int]:
    """Fills new slots with NaN, so that what is not fetched is seen. Returns a list to which the number of
    chunks on the device is added after each bucket of the last backward pass."""
    make, fetch, ahead = moved.chunk_streamer._new_slot, moved.chunk_streamer.fetch_chunks, [0]

    def filled() -> Any:
        slot = make()
        slot.device_buffer.fill_(255)
        return slot

    def watched(least: int = 0) -> None:
        fetch(least)
        if not least:
            ahead.append(moved.chunk_streamer.num_chunks_on_device)

    moved.chunk_streamer._new_slot = filled  # type: ignore[method-assign]
    moved.chunk_streamer.fetch_chunks = watched  # type: ignore[method-assign]
    return ahead
