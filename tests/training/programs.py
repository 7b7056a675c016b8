"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_vl.config import (
    CheckpointConfig,
    DataConfig,
    LogConfig,
    ModelConfig,
    RecomputeConfig,
    TrainConfig,
    parse_config,
)
from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.models.parameter_names import LiveTensor
from megatron_vl.parallel.process_grid import init_distributed, make_grid
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import UNSHARDED, model_part
from megatron_vl.train import train
from megatron_vl.training.optimizer import set_learning_rates
from megatron_vl.training.report import metrics
from megatron_vl.training.report.step_metrics import StepMetrics
from megatron_vl.training.rows import batch_broadcast
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.state.optimizer_state import optimizer_slices, snapshot_optimizer
from megatron_vl.training.step import StepResult, run_schedule
from megatron_vl.weights import run_folder
from tests.support.tiny_trainer import SEQ_LEN, TinyTrainer, tiny_trainer
from toolkit.parity.random_samples import make_sample


def steps_with_one_not_finite(hf: str) -> list[dict[str, Any]]:
    """Three steps, the second with NaN activations: updated, weights changed, loss finite,
    reason for skipping."""
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
        result = trainer.run_step(number)
        for hook in hooks:
            hook.remove()

        changed = any(not torch.equal(before[name], now) for name, now in weights().items())
        outcome = {"updated": result.is_updated, "changed": changed, "finite": math.isfinite(result.loss)}
        results.append(outcome | {"skipped": result.skip_reason})
    return results


def steps_with_one_skipped(hf: str, second: str, pp: int = 1, **settings: Any) -> list[list[list[Any]]]:
    """For each rank and three steps, the second of rows of one kind: [why skipped, loss tokens, what
    stayed, what moved].

    The kinds of optimizer state are what stays or moves.
    """
    trainer = tiny_trainer(hf, pp=pp, **settings)
    steps = [("image", "text"), (second, second), ("image", second)]
    results = []
    for number, kinds in enumerate(steps):
        rows = [pack_row([make_sample(kind, trainer.spec, 0)], trainer.spec, SEQ_LEN) for kind in kinds]
        data = trainer.feed_of(rows, len(rows)).next_batch()
        set_learning_rates(trainer.optimizer, trainer.config, number)
        before = _optimizer_state(trainer) if number else {}
        result = trainer.train_step(data)
        after = _optimizer_state(trainer)

        stayed = {name.rpartition("/")[2] for name in before if torch.equal(before[name], after[name])}
        moved = {name.rpartition("/")[2] for name in before if not torch.equal(before[name], after[name])}
        results.append([result.skip_reason, result.loss_tokens > 0, sorted(stayed), sorted(moved)])

    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, results)
    return by_rank


def _optimizer_state(trainer: TinyTrainer) -> dict[str, torch.Tensor]:
    named = [LiveTensor(name, p) for chunk in trainer.chunks for name, p in chunk.named_parameters()]
    return snapshot_optimizer(trainer.optimizer, named)


def parts_that_move(hf: str, still: str) -> list[Any]:
    """[rates of two steps, part -> [any tensor moved, all moved], rates with the merger frozen]; ``still``
    has rate 0."""
    trainer = tiny_trainer(hf, **{"lr" if still == "language" else f"{still}_lr": 0.0})
    parameters = dict(trainer.chunks[0].named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    rates = []
    for number in range(2):
        rates.append(set_learning_rates(trainer.optimizer, trainer.config, number))
        assert trainer.run_step(number).is_updated

    moved: dict[str, list[bool]] = {}
    for name, parameter in parameters.items():
        moved.setdefault(model_part(name), []).append(not torch.equal(before[name], parameter))
    without_merger = dataclasses.replace(trainer.config, model=ModelConfig(freeze_merger=True))
    frozen = set_learning_rates(trainer.optimizer, without_merger, 2)
    return [rates, {part: [any(each), all(each)] for part, each in moved.items()}, frozen]


def rates_and_decays(hf: str) -> dict[str, list[float]]:
    """[learning rate, weight decay, dimensions] of each tensor's group."""
    trainer = tiny_trainer(hf)
    set_learning_rates(trainer.optimizer, trainer.config, 0)
    live = [LiveTensor(name, parameter) for name, parameter in trainer.chunks[0].named_parameters()]
    return {
        piece.state_name: [
            piece.param_group["lr"],
            piece.param_group["weight_decay"],
            piece.live_tensor.parameter.dim(),
        ]
        for piece in optimizer_slices(trainer.optimizer, live)
    }


def state_of_mixed_types(hf: str) -> list[list[Any]]:
    """For each slice of each rank's state after a step in bf16: [name, type of the parameter, whether it is
    the parameter's own: shape of the moments, and main weights that round to the parameter]."""
    trainer = tiny_trainer(hf, dtype="bfloat16")
    assert trainer.run_step().is_updated
    live = [LiveTensor(name, p) for chunk in trainer.chunks for name, p in chunk.named_parameters()]
    found = []
    for piece in optimizer_slices(trainer.optimizer, live):
        parameter = piece.live_tensor.parameter
        part = parameter.detach().view(-1)[piece.start : piece.end]
        own = piece.main_param.numel() == part.numel() == piece.adam_state["exp_avg"].numel()
        own = own and torch.equal(piece.main_param.view(-1).to(part.dtype), part)
        found.append([piece.state_name, str(parameter.dtype), own])
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, found)
    return [line for lines in by_rank for line in lines]


def weights_copied_together(hf: str) -> list[Any]:
    """[updated, optimizers, whether our copy of the main weights equals core's] after a step in bf16."""
    trainer = tiny_trainer(hf, dtype="bfloat16")
    updated = trainer.run_step().is_updated
    parts = trainer.optimizer.chained_optimizers
    together = [parameter.detach().clone() for parameter in trainer.chunks[0].parameters()]
    for part in parts:
        copied = part._copy_main_params_to_model_params
        assert len(copied.slices_and_shards[0]) == sum(
            len(group) for group in part.shard_fp32_from_float16_groups
        ), "not all shards"

    for parameter in trainer.chunks[0].parameters():
        parameter.data.fill_(float("nan"))
    for part in parts:
        type(part)._copy_main_params_to_model_params(part)
    one_by_one = list(trainer.chunks[0].parameters())
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(together, one_by_one, strict=True))
    return [updated, len(parts), same]


def counted_flops(hf: str, kinds: list[dict[str, Any]]) -> list[int]:
    """Torch's count for a forward and backward pass of our modules under each kind of recomputation."""
    trainer = tiny_trainer(hf)
    samples = [make_sample("mixed", trainer.spec, seed) for seed in (0, 1)]
    length = sum(map(len, samples))

    counts = []
    for kind in kinds:
        chunks = trainer.again(recompute=RecomputeConfig(**kind)).model_chunks
        rows = trainer.feed_of([pack_row(samples, trainer.spec, length)], 1).next_batch().rows
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            run_schedule(chunks, rows, seq_len=length)
        counts.append(counter.get_total_flops())
    return counts


def rows_over_the_wire(hf: str) -> list[list[Any]]:
    """[fields that do not arrive as they left, whether the room made is right] of a row with pictures
    and one without."""
    get_platform("cpu")
    spec = read_spec(hf)
    results = []
    for names in (["image", "text", "video"], ["text"]):
        row = pack_row([make_sample(name, spec, 0) for name in names], spec, 512)
        row.loss_mask *= 0.3  # weights travel with every bit
        packed = batch_broadcast._serialize_row(row)
        fields = batch_broadcast._unpack_tensors(packed.row_header, packed.flat_buffers)
        found = batch_broadcast._device_row(packed.row_header, fields)
        vision, feature_index = batch_broadcast._vision_input(packed.row_header, fields)

        equal = {}
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            ours, theirs = getattr(found, name), getattr(row, name)
            equal[name] = torch.equal(ours, theirs) and ours.dtype == theirs.dtype
        for name in ("planes", "plane_index", "position_hw", "frame_hw"):
            equal[name] = torch.equal(getattr(vision, name), getattr(row.vision, name))
        equal["feature_index"] = torch.equal(feature_index, row.vision.feature_index.long())
        equal["cu_seqlens"] = torch.equal(found.segments.cu_seqlens, row.cu_seqlens)
        equal["full"] = torch.equal(vision.full_segments.cu_seqlens, row.vision.cu_seqlens)
        equal["window"] = torch.equal(vision.window_segments.cu_seqlens, row.vision.cu_window_seqlens)
        equal["loss_index"] = torch.equal(found.loss_index, batch_broadcast.loss_index(row.loss_mask))
        equal["max_seqlen"] = vision.full_segments.max_seqlen == row.vision.max_seqlen
        equal["max_window_seqlen"] = vision.window_segments.max_seqlen == row.vision.max_window_seqlen

        sizes = [
            buffer.numel() == batch_broadcast._buffer_numel(packed.row_header, name)
            for name, buffer in packed.flat_buffers.items()
        ]
        results.append([[name for name, same in equal.items() if not same], all(sizes)])
    return results


def failures_of_loaders() -> list[str]:
    """The messages about a loader that ends, and about one that fails."""
    platform = get_platform("cpu")

    def broken() -> Iterator[Any]:
        raise OSError("train-000007.tar: Input/output error")
        yield

    grid: Any = SimpleNamespace(owns_loader=True, dp=1, dp_rank=3, replica_ranks=1, cp=1, sharding=UNSHARDED)
    grid.from_loader_owner = lambda value: value
    messages = []
    for loader in (iter(()), broken()):
        try:
            batch_broadcast.BatchBroadcast(grid, platform, loader, 2).next_batch()
        except RuntimeError as error:
            messages.append(str(error))
    return messages


VARYING = ("step_s", "tokens_per_s_per_rank", "tflops_per_rank", "mfu")
"""Numbers of a line that depend on the clock."""


def printed_lines(hf: str, folder: str, limit: int) -> dict[str, Any]:
    """Four lines of a log under TP2 x DP2, with ``limit`` bytes for lists per line; samples are dropped
    in step 2."""
    platform = get_platform("cpu")
    init_distributed(platform)
    spec = read_spec(hf)
    grid = make_grid(make_layout(spec, 2, 1, 1, None))
    config = TrainConfig(
        checkpoint=CheckpointConfig(dir=folder),
        log=LogConfig(samples=True),
        data=DataConfig(max_bad_share=0.0),
    )
    metrics.MAX_LIST_BYTES = limit
    log = metrics.MetricsLog(config, spec, grid, platform)

    result = StepResult(loss=1.5, loss_tokens=20, grad_norm=0.5, skip_reason="")
    rates: Any = {"language": 0.1, "vision": 0.1, "merger": 0.1}
    lines = []
    for steps in ((1,), (2,), (3, 4), (5,)):
        for number in steps:
            log.add_step(_counted_step(number, grid.dp_rank))
        lines.append(log.log_step(steps[-1], result, rates, {}))
    log.close()

    everyone: list[Any] = [None] * 4
    fixed = [{k: v for k, v in line.items() if k not in VARYING} for line in lines]
    dist.all_gather_object(everyone, [*fixed, log.bad_sample_meter.stop_reason()])
    store = dist.distributed_c10d._get_default_store()
    left = [store.check([f"megatron_vl/mailbox/{number}/slots"]) for number in range(1, 5)]
    alike = all(other == everyone[0] for other in everyone)
    return {
        "lines": lines,
        "alike": alike,
        "left": left,
        "bad": log.bad_sample_meter.bad_count,
        "problem": everyone[0][-1],
    }


def _counted_step(number: int, dp_rank: int) -> StepBatch:
    """What the rows of a replica count in a step."""

    def sample(key: str, reason: str, data_set: str = "", size: int = 0) -> dict[str, Any]:
        where = {"key": key, "shard": "train-000000.tar", "source": "", "data_set": data_set}
        return where | {"reason": reason, "detail": "why", "size": size}

    first = dp_rank == 0
    counts = (
        {"samples": 3, "images": 2, "patches": 64} if first else {"samples": 5, "images": 0, "patches": 0}
    )
    dropped = []
    if number == 2 and not first:
        counts |= {"dropped/no tokens": 3, "dropped/medium missing": 1, "dropped/longer than seq_len": 1}
        dropped = [sample("a", "no tokens"), sample("b", "no tokens"), sample("c", "medium missing")]
        dropped += [sample("a", "no tokens"), sample("a", "longer than seq_len", "charts", 90)]
    if number == 2 and first:
        counts |= {"dropped/medium missing": 4}
        dropped = [sample("d", "medium missing")]  # the row lists one of its four

    lengths = [[10, 20], [7]] if first else [[100], [1, 2, 3]]
    keys = [[f"{dp_rank}.{number}.0"], [f"{dp_rank}.{number}.1"]]
    wait = 0.25 if first else 0.75
    return StepBatch([], counts, lengths, [([], []), ([], [])], [5, 5], keys, dropped, wait)


def tally_of_one_rank() -> list[Any]:
    """A tally that was reduced over one rank, and the types of its fields."""
    platform = get_platform("cpu")
    init_distributed(platform)
    total = StepMetrics(num_real_tokens=2**53 - 1, language_flops=0.1, data_wait_s=0.3).reduce_over_ranks(
        platform.device
    )
    types = [type(value).__name__ for value in vars(total).values()]
    return [total.num_real_tokens, total.language_flops, total.data_wait_s, types]


def a_run_whose_second_rank_sees_an_older_folder(words: list[str], seen: int) -> str:
    """What a training prints while rank 1 sees steps up to ``seen`` alone, as shared storage may have it."""
    if int(os.environ["RANK"]) == 1:
        everything = run_folder.saved_checkpoints
        run_folder.saved_checkpoints = lambda folder: [one for one in everything(folder) if one.step <= seen]

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(parse_config(words))
    return out.getvalue()


def what_trainings_say(starts: list[list[str]]) -> list[str]:
    """The output of each start of the trainer, all in one process, and the message that it ended with."""
    gc.disable()  # nothing may rest on when it runs, such as the lock of a run's folder
    said = []
    for words in starts:
        out = io.StringIO()
        problem = ""
        with contextlib.redirect_stdout(out):
            try:
                train(parse_config(words))
            except (ValueError, OSError, RuntimeError) as error:
                problem = f"{type(error).__name__}: {error}"
        said.append(out.getvalue() + problem)
    return said
