"""A run with optimizer state in host memory is that without, bit for bit, and the state moves."""

import dataclasses
import hashlib
import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_vl.platform import get_platform
from megatron_vl.training.offload import build
from megatron_vl.training.offload.build import choose_offloaded, chunked_state
from megatron_vl.training.offload.chunked_step import ChunkedStep, ChunkStreamer, DeviceSlot, SlotPhase
from megatron_vl.training.offload.state_chunks import (
    ChunkedParameter,
    StateChunk,
    allocate_device_chunks,
    allocate_host_chunks,
    lay_out_chunks,
)
from megatron_vl.training.optimizer import build_optimizer, set_learning_rates
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.state.optimizer_state import STATE_KINDS
from tests.support.ranks import in_ranks
from tests.support.tiny_run import metrics, prepare, trained
from tests.support.tiny_trainer import TinyTrainer, load, save, state_of, tiny_trainer
from toolkit.checkpoint.rollback import restart_data

SHARES = (0.0, 0.4, 1.0)


def test_share_is_met_by_whole_parameters() -> None:
    for share, expected in ((0.0, set()), (0.4, {1}), (0.7, {0, 2}), (1.0, {0, 1, 2})):
        assert choose_offloaded([5, 3, 2], share) == expected
    assert choose_offloaded([1] * 1000, 0.333) == set(range(333))
    assert choose_offloaded([], 1.0) == choose_offloaded([0], 1.0) == set()


def test_slice_of_the_state_of_a_weight_in_fp32_is_that_of_the_whole() -> None:
    """The weight is its own master weight; the moments lie in several chunks."""
    parameter = ChunkedParameter(torch.zeros(300), None, {})
    allocate_device_chunks(lay_out_chunks([parameter], 1024, torch.float32), torch.device("cpu"))
    assert len(parameter.chunk_slices) == 3
    for number, kind in enumerate(STATE_KINDS):
        whole = torch.arange(300.0) + 1000 * number
        parameter.write_state(kind, whole)
        for start, end in ((0, 300), (100, 290)):
            assert torch.equal(parameter.read_state(kind, torch.clone, start, end), whole[start:end]), kind


def digest(trainer: TinyTrainer) -> str:
    total, tensors = hashlib.sha256(), state_of(trainer)
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def again(trainer: TinyTrainer, **changes: Any) -> TinyTrainer:
    """A trainer of the same model; ``changes`` of the optimizer."""
    return trainer.again(optimizer=dataclasses.replace(trainer.config.optimizer, **changes))


def some_rows(trainer: TinyTrainer) -> list[Any]:
    """A row of images and one of text; in bfloat16, which takes seconds on CPU, a short one."""
    if trainer.config.dtype == "float32":
        return trainer.batches.next_batch().rows
    return trainer.feed_of([trainer.row_of("image")], 1).next_batch().rows


def steps_of(trainer: TinyTrainer, rows: list[Any], steps: range, bad: int | None = None) -> list[list[str]]:
    """[loss, norm, why skipped, digest of the state] of steps on the same rows; ``bad`` has no loss."""
    outcomes = []
    for number in steps:
        set_learning_rates(trainer.optimizer, trainer.config, number)
        silent = number == bad
        step_rows = trainer.feed_of([trainer.row_of("without_loss")], 1).next_batch().rows if silent else rows
        result = trainer.train_step(StepBatch(step_rows))
        outcomes.append([repr(result.loss), repr(result.grad_norm), result.skip_reason, digest(trainer)])
    return outcomes


def check_shares(hf: Path, dtype: str, bad: int | None = None, **optimizer: Any) -> None:
    """All shares give the same losses, norms and states, in their place; small chunks cut parameters."""
    build.move_state_to_chunks.__defaults__ = (10 * 64 * 500,)
    first = tiny_trainer(hf, dtype=dtype, **optimizer)
    rows, plain = some_rows(first), None
    for share in SHARES:
        trainer = again(first, offload_fraction=share)
        fetched = chunks_after_passes(trainer) if share else []
        steps = steps_of(trainer, rows, range(2), bad)
        plain = plain or steps
        assert steps == plain, share
        if share:
            check_place_of_state(trainer, share)
            num_chunks = len(chunked_state(trainer.optimizer).chunk_streamer.state_chunks)
            assert fetched == [num_chunks] * 2, "all are fetched during the backward pass"
    assert (plain[0][3] == plain[1][3]) == (bad == 1), "only a skipped step leaves the state"
    assert [bool(step[2]) for step in plain] == [number == bad for number in range(2)]


def chunks_after_passes(trainer: TinyTrainer) -> list[int]:
    """Gets the number of chunks on the device after the passes of each step."""
    numbers, prepare_grads = [], trainer.optimizer.prepare_grads
    streamer = chunked_state(trainer.optimizer).chunk_streamer
    trainer.optimizer.prepare_grads = lambda: numbers.append(streamer.num_chunks_on_device) or prepare_grads()
    return numbers


def check_place_of_state(trainer: TinyTrainer, share: float) -> None:
    """The share is in host memory; the rest is in the optimizer, or, in bf16, in chunks on the device."""
    moved = chunked_state(trainer.optimizer)
    assert moved is not None
    streamed = {id(chunk) for chunk in moved.chunk_streamer.state_chunks}
    parameters = list(moved.parameters_by_id.values())
    sizes = {id(p): p.main_param.numel() for p in parameters}
    host = sum(sizes[id(p)] for p in parameters if id(p.chunk_slices[0].state_chunk) in streamed)
    optimizer = total = 0
    for part in trainer.optimizer.chained_optimizers:
        for main in part.get_parameters():
            total += main.numel()
            moments = part.optimizer.state.get(main, {}).get("exp_avg")
            optimizer += main.numel() if moments is not None and main.untyped_storage().nbytes() else 0

    assert share - 0.02 <= host / total <= share
    in_chunks = trainer.config.optimizer.moments_dtype == "bfloat16"
    assert optimizer == (0 if in_chunks else total - host)
    assert sum(sizes.values()) - host == (total - host if in_chunks else 0)
    assert len(streamed) > 2 and max(len(p.chunk_slices) for p in parameters) > 1


@in_ranks()
def test_offloaded_shares_give_the_same_bits(hf) -> None:
    """Master weights move in bf16 (with a rate of zero), and are the weights in fp32 (with a skipped step);
    moments in bf16 are all in chunks (with a skipped first step)."""
    check_shares(hf, "bfloat16", vision_lr=0.0)
    check_shares(hf, "float32", bad=1)
    check_shares(hf, "bfloat16", bad=0, moments_dtype="bfloat16")


@in_ranks()
def test_moments_in_bf16_of_two_steps_worked_by_hand() -> None:
    """Gradients of 0.5 and -0.25, learning rate 0.1, betas 0.9 and 0.95, no epsilon.

    After the first step, the moments are a tenth of the gradient and a twentieth of its square: 0.05 and
    -0.025, 0.0125 and 0.003125. All are 1.6 times a power of two, between 204 and 205 of 128 parts of it, of
    which they take one. Corrected for their start, they give a step of 0.1.
    """
    platform = get_platform("cpu")
    weight, main = torch.tensor([1.0, -2.0], dtype=torch.bfloat16), torch.tensor([1.0, -2.0])
    adam = torch.optim.AdamW([main], lr=0.1, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0)
    parameter = ChunkedParameter(main, weight, adam.param_groups[0])
    chunks = lay_out_chunks([parameter], 4096, torch.bfloat16)
    allocate_device_chunks(chunks, platform.device)
    main.untyped_storage().resize_(0)
    streamer = ChunkStreamer([], platform.device, platform.memory_usage)
    step = ChunkedStep(adam, [parameter], chunks, streamer, range(0))

    kept = []
    for _ in range(2):
        main.grad = torch.tensor([0.5, -0.25])
        step()
        state = {
            kind: parameter.read_state(kind, lambda t: t.detach().view(-1), 0, 2) for kind in STATE_KINDS
        }
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16  # type: ignore[union-attr]
        kept.append({kind: value.tolist() for kind, value in state.items()} | {"weight": weight.tolist()})
    first, second = kept
    assert first["main"] == pytest.approx([0.9, -1.9], rel=1e-6)
    assert first["weight"] == [0.8984375, -1.8984375]
    assert first["exp_avg"] == [204 / 128 / 2**5, -204 / 128 / 2**6]  # to the nearest, 204.8 would be 205
    assert first["exp_avg_sq"] == [205 / 128 / 2**7, 205 / 128 / 2**9]

    # The second step begins with what was kept, and Adam computes it in fp32.
    for i, gradient in enumerate((0.5, -0.25)):
        avg = 0.9 * first["exp_avg"][i] + 0.1 * gradient
        square = 0.95 * first["exp_avg_sq"][i] + 0.05 * gradient**2
        change = 0.1 * (avg / (1 - 0.9**2)) / (square / (1 - 0.95**2)) ** 0.5
        assert second["main"][i] == pytest.approx(first["main"][i] - change, rel=3e-7)
        assert second["exp_avg"][i] == pytest.approx(avg, rel=1 / 128)
        assert second["exp_avg_sq"][i] == pytest.approx(square, rel=1 / 128)
        assert abs(abs(change) - 0.1) > 1e-6  # what moments in fp32 would give


@in_ranks()
def test_moments_in_bf16_are_saved_and_resumed_with_any_share(hf, tmp_path: Path) -> None:
    """Also after having been fp32 for no step; fp32 moments are rounded to the nearest."""
    build.move_state_to_chunks.__defaults__ = (6 * 64 * 500,)
    first = tiny_trainer(hf, dtype="bfloat16", moments_dtype="bfloat16")
    rows = some_rows(first)
    undisturbed = steps_of(again(first), rows, range(2))[-1]

    before = again(first, offload_fraction=0.4)
    steps_of(before, rows, range(1))
    save(before, tmp_path, 1)
    for share in (0.0, 1.0):
        after = again(first, offload_fraction=share)
        load(after, tmp_path, 1)
        assert digest(after) == digest(before)
        assert steps_of(after, rows, range(1, 2)) == [undisturbed]

    wide, narrow = again(first, moments_dtype="float32"), again(first, offload_fraction=1.0)
    load(wide, tmp_path, 1)
    assert {tensor.dtype for key, tensor in state_of(wide).items() if "exp_avg" in key} == {torch.float32}
    save(wide, tmp_path, 2)
    load(narrow, tmp_path, 2)
    assert steps_of(narrow, rows, range(1, 2)) == [undisturbed]

    steps_of(wide, rows, range(1, 2))
    save(wide, tmp_path, 3)
    load(narrow, tmp_path, 3)
    wide_state, narrow_state, is_rounded = state_of(wide), state_of(narrow), False
    for key, tensor in wide_state.items():
        expected = tensor.bfloat16() if "exp_avg" in key else tensor
        assert torch.equal(narrow_state[key], expected), key
        is_rounded |= not torch.equal(expected.float(), tensor.float())
    assert is_rounded


class Allocations(TorchDispatchMode):
    """Counts the bytes of the storages of fp32 tensors that are made within it and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []
        self.most = 0

    def now(self) -> int:
        alive = [tensor for tensor in (ref() for ref in self.made) if tensor is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in alive}
        return sum(storage.nbytes() for storage in storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        is_new = isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given
        if is_new and out.dtype == torch.float32:
            self.made.append(weakref.ref(out))
        self.most = max(self.most, self.now())
        return out


@in_ranks()
def test_master_weights_that_leave_the_device_are_never_all_on_it(hf) -> None:
    """While an optimizer is built, at most one of them and its copy in bf16 has storage."""
    first = tiny_trainer(hf, dtype="bfloat16")
    parts = first.optimizer.chained_optimizers
    sizes = [4 * main.numel() for part in parts for main in part.get_parameters()]
    for share, kept in ((0.0, 1.0), (1.0, 0.0), (0.4, 0.6)):
        optimizer = dataclasses.replace(first.config.optimizer, offload_fraction=share)
        other = TinyTrainer(dataclasses.replace(first.config, optimizer=optimizer), with_optimizer=False)
        with Allocations() as allocations:
            built = build_optimizer(other.config, other.platform, other.model_chunks)
        assert built.param_groups
        assert allocations.now() == pytest.approx(kept * sum(sizes), rel=0.04, abs=4096), share
        assert allocations.most <= allocations.now() + max(sizes) + 4096, share


@in_ranks()
def test_slots_know_what_happens_to_their_chunks() -> None:
    """An update of four chunks, a dropped fetch, and an update whose copies go on into the next step."""
    platform = get_platform("cpu")
    chunks = [StateChunk(False, torch.float32, 64) for _ in range(4)]
    allocate_host_chunks(chunks, is_pinned=False)
    streamer = ChunkStreamer(chunks, platform.device, lambda: (0, 1))
    streamer.overlaps_passes = True

    phases: dict[DeviceSlot, list[str]] = {}
    enter = DeviceSlot.enter

    def noted(slot: DeviceSlot, phase: SlotPhase) -> None:
        enter(slot, phase)
        phases.setdefault(slot, []).append(phase.value)

    DeviceSlot.enter = noted  # type: ignore[method-assign]
    for is_dropped in (False, True):
        streamer.fetch_chunks(1)
        if is_dropped:
            streamer.drop_slots()
        for number in range(len(chunks)):
            with streamer.chunk_on_device(number) as state:
                state.exp_avg.add_(number + 1)
        streamer.release_slots()
    texts = [" ".join(each) for each in phases.values()]
    once = "fetching updating leaving free"
    assert all(re.fullmatch(rf"(({once}|fetching free) ?)+", text) for text in texts), texts
    assert sum(text.count(once) for text in texts) == 8
    sums = [float(chunk.state_views(chunk.home_buffer).exp_avg.mean()) for chunk in chunks]
    assert sums == [2.0, 4.0, 6.0, 8.0]
    with pytest.raises(AssertionError, match="from SlotPhase.UPDATING to SlotPhase.FREE"):
        with streamer.chunk_on_device(0):
            streamer.wait_for_host_state()


def run(prepared: dict[str, Path], folder: Path, share: float, ranks: int, steps: int, *options: str) -> str:
    share_options = ("--optimizer.offload_fraction", str(share))
    printed = trained(prepared, folder, *options, *share_options, ranks=ranks, steps=steps)
    assert ("of optimizer state in host memory" in printed) == (share > 0)
    return printed


def saved(folder: Path, step: int) -> dict[str, str]:
    """Hashes of what a checkpoint holds of weights and optimizer."""
    facts = json.loads((folder / f"step_{step:08d}" / "run.json").read_text())
    state = {name: one["sha256"] for name, one in facts["files"].items() if name.startswith("optimizer/")}
    return state | {"weights": facts["weights"]}


CONSTANT = tuple("--optimizer.schedule constant --optimizer.warmup_steps 0 --data.num_workers 0".split())
TP2 = ("--parallel.tp", "2", "--parallel.sequence_parallel", "true")
BF16 = ("--optimizer.moments_dtype", "bfloat16")


@pytest.mark.ranks
def test_offloaded_share_resumes_any_other_in_any_layout(prepared: dict[str, Path], tmp_path: Path) -> None:
    """Two replicas save with a share of 0.4; TP2 goes on with all of it in host memory, and with none."""
    run(prepared, tmp_path / "some", 0.4, 2, 2, *CONSTANT)
    shutil.copytree(tmp_path / "some", tmp_path / "none")
    for name, share in (("some", 1.0), ("none", 0.0)):
        restart_data(tmp_path / name)
        run(prepared, tmp_path / name, share, 2, 4, *CONSTANT, *TP2)
    assert saved(tmp_path / "some", 4) == saved(tmp_path / "none", 4) != saved(tmp_path / "none", 2)


EXPERTS = ("--parallel.ep", "2")
LAYOUTS = {
    "moments in bf16, VPP": ("--parallel.pp", "2", "--parallel.vpp", "2", *BF16),
    "tower on every rank": ("--parallel.pp", "2", "--vision.placement", "decoupled"),
    "moments in bf16, not spread": (*BF16, "--parallel.distributed_optimizer", "false"),
    "frozen language, TP2": ("--model.freeze_language", "true", *TP2),
    "experts": EXPERTS,
    "experts, not spread": (*EXPERTS, "--parallel.distributed_optimizer", "false"),
}


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_run_in_bf16_saves_the_same(prepared, tiny_checkpoint, tmp_path: Path, layout: str) -> None:
    """From none in host memory to some to all: each step and each checkpoint is that of the run without."""
    if "experts" in layout:  # which have an optimizer of their own
        prepared = prepare(tmp_path / "files", tiny_checkpoint("qwen3_vl_moe", dtype=torch.float32))
    saves = ("--checkpoint.interval", "1", "--checkpoint.keep", "0")
    options = (*LAYOUTS[layout], *CONSTANT, "--dtype", "bfloat16", *saves)
    run(prepared, tmp_path / "plain", 0.0, 2, 3, *options)
    for step, share in enumerate(SHARES, 1):
        run(prepared, tmp_path / "moved", share, 2, step, *options)
    for step in (1, 2, 3):
        assert saved(tmp_path / "plain", step) == saved(tmp_path / "moved", step), step
    lines = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("plain", "moved")]
    assert lines[0] == lines[1] and len(lines[0]) == 3
