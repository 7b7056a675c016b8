"""Runs named cases in a real process group and compares each with the reference.

    torchrun --nproc-per-node 4 -m toolkit.parity.worker CASES.json OUT.json [cpu|cuda]

``CASES.json`` is a list of :class:`Case` fields. Every case runs the trainer's own schedule, DDP and gradient
finalisation; nothing of the model is rebuilt for the comparison. ``megatron-vl parity`` and the tests run it alike; the
reference is computed by rank 0, or (:mod:`toolkit.parity.stored`) was before the group started.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.config import DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, RecomputeConfig, TrainConfig
from megatron_vl.data.assemble import Sample, pack_row
from megatron_vl.data.pixels import read_pixel_norm
from megatron_vl.models.build import build_chunks, check_tensors, chunk_tensors
from megatron_vl.models.names import LiveTensor
from megatron_vl.parallel.grid import Grid, end_distributed, init_distributed, make_grid
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, make_layout
from megatron_vl.spec.tensors import part_of, tensor_table
from megatron_vl.training import checkpoint
from megatron_vl.training.feed import Feed, StepData
from megatron_vl.training.optimizer import build_optimizer
from megatron_vl.training.step import reduce_losses, run_schedule, wrap
from megatron_vl.weights.store import WeightReader, unshard
from toolkit.samples import read_samples

from .activations import Recorder
from .batches import make_sample
from .gather import StoredParts, StoredTensors, gather_on_first
from .places import place_of
from .reference import fingerprint, load_hf, reference, remembered
from .tolerances import BF16_GRADIENT_RATIO, BF16_LOSS_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE

ADAM = OptimizerConfig(lr=1e-3, weight_decay=0.1, clip_grad=1.0, schedule="constant", warmup_steps=2)


@dataclass
class Case:
    """One layout, one model, and for each step the rows of the global batch, each a list of sample kinds."""

    name: str
    hf: str
    """HF folder of the small model."""
    weights: str
    """Its Megatron weights (any layout)."""
    steps: list[list[list[str]]]
    """[step][row][sample kind]; rows go to data-parallel ranks in order, an equal number each."""
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    layers: list[int] | None = None
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    tp_comm_overlap: bool = False
    balanced: bool = False
    """Rows may change data-parallel ranks."""
    distributed_optimizer: bool = True
    overlap: bool = False
    seq_len: int = 256
    bucket_size: int | None = None
    freeze: list[str] = field(default_factory=list)
    """Of vision, merger, language."""
    recompute: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    """float32 or bfloat16."""
    aux_loss: float = 0.0
    """Coefficient of the experts' load-balancing loss, which ``transformers`` leaves out unless asked for it."""
    train: bool = False
    """Take real optimizer steps and compare losses, weights and Adam's moments with a training of ``transformers``."""
    samples: str = ""
    """File of :func:`toolkit.samples.write_samples`; kind ``sample:2`` in ``steps`` is its third sample."""
    reference: str = ""
    """Folder that :mod:`toolkit.parity.stored` wrote; empty: rank 0 computes the reference while the others wait."""
    activations: bool = False
    """Compare what layers give, and logits, too. Needs ``reference``; samples without videos, each step one forward pass."""
    optimizer: bool = True
    """Off: no optimizer state is allocated, and what overlaps with an optimizer step is not tried."""
    attention: str = "auto"
    """Attention backend of tower and language model; the fused ones on GPUs take no float32."""

    @property
    def config(self) -> TrainConfig:
        return TrainConfig(
            optimizer=ADAM,
            dtype=self.dtype,  # type: ignore[arg-type]
            data=DataConfig(seq_len=self.seq_len, balance=self.balanced),
            model=ModelConfig(
                checkpoint=self.weights,
                hf=self.hf,
                freeze_vision="vision" in self.freeze,
                freeze_merger="merger" in self.freeze,
                freeze_language="language" in self.freeze,
                moe_aux_loss=self.aux_loss,
                vision_attention=self.attention,  # type: ignore[arg-type]
                language_attention=self.attention,  # type: ignore[arg-type]
            ),
            recompute=RecomputeConfig(**self.recompute),
            parallel=ParallelConfig(
                tp=self.tp,
                pp=self.pp,
                vpp=self.vpp,
                layers=self.layers,
                ep=self.ep,
                etp=self.etp,
                sequence_parallel=self.sequence_parallel,
                tp_comm_overlap=self.tp_comm_overlap,
                distributed_optimizer=self.distributed_optimizer,
                overlap_grad_reduce=self.overlap,
                overlap_param_gather=self.overlap and self.distributed_optimizer,
                bucket_size=self.bucket_size,
            ),
        )


@dataclass
class Live:
    """A case built in this process group, with the weights loaded."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    grid: Grid
    wrapped: list[Any]
    optimizer: Any
    """None when the case does without."""
    tensors: list[LiveTensor]

    def feed(self, samples: list[list[Sample]], platform: Platform, seq_len: int) -> StepData:
        """This rank's rows of one step."""
        rows = iter(local_rows(samples, self.grid, self.spec, seq_len)) if self.grid.owns_loader else None
        return Feed(self.grid, platform, rows, len(samples) // self.grid.dp, balanced=self.config.data.balance).next_step()


def build(case: Case, platform: Platform) -> Live:
    """Collective."""
    config = case.config
    spec = read_spec(case.hf)
    layout = make_layout(spec, case.tp, case.pp, case.vpp, case.layers, case.ep, case.etp)
    grid = make_grid(layout, owners=config.data.balance)
    norm = read_pixel_norm(case.hf)
    chunks = build_chunks(platform, spec, layout, config, pixel_mean=norm.mean, pixel_std=norm.std)
    tensors = chunk_tensors(chunks, layout, grid.pp_rank, grid.ep_rank)
    check_tensors(spec, layout, tensors)
    checkpoint.load_weights(WeightReader(case.weights), tensors, grid)
    wrapped = wrap(config, chunks)
    optimizer = build_optimizer(config, platform, wrapped) if case.optimizer else None
    return Live(config, spec, layout, grid, wrapped, optimizer, tensors)


def run_case(case: Case, platform: Platform) -> dict[str, Any]:
    """Collective. On rank 0: {"ok", "steps": [{loss, reference, loss_error, gradient_error, worst}]}."""
    if case.train:
        from .training import run_training

        return run_training(case, platform)
    live = build(case, platform)
    spec, grid, wrapped, optimizer = live.spec, live.grid, live.wrapped, live.optimizer
    if optimizer is not None:
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0  # the weights stay, so every step can be compared with the reference
    models = make_reference(case, platform) if grid.rank == 0 else None
    results = []
    for number, rows in enumerate(case.steps):
        samples = draw(rows, spec, number, case.samples)
        data = live.feed(samples, platform, case.seq_len)
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        if optimizer is not None:
            optimizer.zero_grad()
        recorder = Recorder(wrapped, live.layout, grid) if case.activations else None
        reports = run_schedule(wrapped, data.rows, seq_len=case.seq_len)
        loss_sum, tokens, _ = reduce_losses(reports, grid, platform.device)
        departures = recorder.compare(data, case.reference, case.dtype) if recorder else {}
        gradients = collect_gradients(wrapped, live.tensors, grid, spec)
        if optimizer is not None:
            optimizer.prepare_grads()
            optimizer.step_with_ready_grads()
        if grid.rank == 0:
            flat = [s for row in samples for s in row]
            results.append(compare(case, spec, live.layout, loss_sum / tokens, gradients, flat, models) | departures)
            results[-1]["ok"] &= not departures.get("departs")
    return {"ok": all(r["ok"] for r in results), "steps": results}


def draw(rows: list[list[str]], spec: ModelSpec, step: int, given: str = "") -> list[list[Sample]]:
    """Samples of one step's rows; equal for every way of spreading the same kinds over rows."""
    drawn, number = [], 0
    stored = read_samples(Path(given)) if given else []
    for row in rows:
        drawn.append(
            [
                stored[int(kind.removeprefix("sample:"))]
                if kind.startswith("sample:")
                else make_sample(kind, spec, seed=100 * step + number + i)
                for i, kind in enumerate(row)
            ]
        )
        number += len(row)
    return drawn


def local_rows(samples: list[list[Sample]], grid: Grid, spec: ModelSpec, seq_len: int) -> list[Any]:
    share = len(samples) // grid.dp
    return [pack_row(row, spec, seq_len) for row in samples[grid.dp_rank * share : (grid.dp_rank + 1) * share]]


def collect_gradients(
    wrapped: list[Any], tensors: list[LiveTensor], grid: Grid, spec: ModelSpec
) -> dict[str, list[Mapping[int, Tensor]]]:
    """Name -> for each copy (of a tied tensor: one on each of two stages) -> part (see :meth:`Cut.part`) -> gradient.

    Of ranks that hold the same part for different data, the first gives its own. With the distributed optimizer each rank
    holds only its reduced slice of every bucket; the slices are joined first.
    """
    for chunk in wrapped:
        if chunk.ddp_config.use_distributed_optimizer:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    shards = bucket.grad_data.chunk(group.size())
                    dist.all_gather(list(shards), shards[group.rank()].clone(), group=group)
    table = tensor_table(spec)
    mine: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    copies: dict[str, int] = {}
    for name, parameter, expert in tensors:
        if not parameter.requires_grad or not grid.is_first_copy(table[name]):
            continue
        if expert is not None:
            stacks.setdefault(name, []).append(_main_grad(parameter))  # in the order of their numbers
            continue
        copy = copies[name] = copies.get(name, -1) + 1
        mine[f"{grid.pp_rank}/{copy}/{grid.part(table[name])}/{name}"] = _main_grad(parameter)
    mine |= {f"{grid.pp_rank}/0/{grid.part(table[name])}/{name}": torch.stack(stack) for name, stack in stacks.items()}
    places: dict[str, dict[str, dict[int, tuple[StoredTensors, str]]]] = {}
    for given in gather_on_first({(grid.rank,): mine} if mine else {}, grid).values():
        for key in given:
            stage, copy_number, part, name = key.split("/")
            places.setdefault(name, {}).setdefault(f"{stage}/{copy_number}", {})[int(part)] = (given, key)
    return {name: [StoredParts(parts) for parts in held.values()] for name, held in places.items()}


def _main_grad(parameter: Any) -> Tensor:
    """The fp32 gradient that Megatron-core's DDP accumulates, on the host."""
    return parameter.main_grad.detach().float().cpu().clone()


def compare(
    case: Case,
    spec: ModelSpec,
    layout: Layout,
    loss: float,
    gradients: dict[str, list[Mapping[int, Tensor]]],
    samples: list[Sample],
    models: Any,
) -> dict[str, Any]:
    """Loss and every gradient against the reference; every copy of a replicated or tied tensor is compared."""
    want_loss, want, noise = models(samples)
    errors: dict[str, float] = {}
    table = tensor_table(spec)
    for name, copies in gradients.items():
        info, scale = table[name], want[name].norm().item()
        for parts in copies:
            shards = [parts[part] for part in range(layout.cut.parts(info))]
            for candidate in shards if info.split == "replicated" else [unshard(shards, info, layout.cut)]:
                error = (candidate - want[name]).norm().item() / scale if scale else candidate.norm().item()
                errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)
    trained = {name for name in table if part_of(name) not in case.freeze}
    missing = sorted(trained - set(errors)) + sorted(set(errors) - trained)
    worst = sorted(errors, key=errors.__getitem__, reverse=True)[:3]
    loss_error = abs(loss - want_loss) / abs(want_loss)
    gradient_error = max(errors.values())
    bf16 = case.dtype == "bfloat16"
    near = gradient_error <= max(noise.values()) * BF16_GRADIENT_RATIO if bf16 else gradient_error <= GRADIENT_TOLERANCE
    return {
        "ok": not missing and loss_error <= (BF16_LOSS_TOLERANCE if bf16 else LOSS_TOLERANCE) and near,
        "loss": loss,
        "reference": want_loss,
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "worst": {name: errors[name] for name in worst},
        "transformers_bf16_gradient_error": max(noise.values()) if noise else None,
        "unexpected": missing,
        "compared": len(errors),
        "gradients": by_place(errors),
    }


def by_place(errors: dict[str, float]) -> dict[str, float]:
    """The worst error of the tensors of each layer."""
    places: dict[str, float] = {}
    for name, error in errors.items():
        places[place_of(name)] = max(places.get(place_of(name), 0.0), error)
    return places


def make_reference(case: Case, platform: Platform) -> Any:
    """What gives (loss, fp32 gradients, bf16 noise) of samples: computed here, or read where it is stored."""
    return StoredReference(Path(case.reference)) if case.reference else Reference(case, platform)


class StoredReference:
    """What :mod:`toolkit.parity.stored` computed, for the samples it computed it for."""

    def __init__(self, folder: Path) -> None:
        self.facts = json.loads((folder / "reference.json").read_text())
        self.gradients = StoredTensors(folder / "gradients.safetensors")

    def __call__(self, samples: list[Sample]) -> tuple[float, Mapping[str, Tensor], dict[str, float]]:
        """As :meth:`Reference.__call__`."""
        return self.facts["loss"], self.gradients, self.facts["gradient_noise"]


class Reference:
    """``transformers`` for one case: the loss in the case's type, gradients in fp32, and how far bf16 alone takes them."""

    def __init__(self, case: Case, platform: Platform) -> None:
        self.case, self.device = case, str(platform.device)

    @cached_property
    def exact(self) -> torch.nn.Module:
        return load_hf(self.case.hf, device=self.device)

    @cached_property
    def half(self) -> torch.nn.Module:
        return load_hf(self.case.hf, torch.bfloat16, self.device)

    def __call__(self, samples: list[Sample]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        """(loss, fp32 gradients, relative error of the bf16 gradients of transformers by tensor; empty in fp32)."""
        key = (self.case.hf, self.case.dtype, self.device, fingerprint(samples))
        return remembered(key, lambda: self._compute(samples))

    def _compute(self, samples: list[Sample]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        loss, want = reference(self.case.hf, samples, self.exact)
        if self.case.dtype != "bfloat16":
            return loss, want, {}
        loss, near = reference(self.case.hf, samples, self.half)
        return loss, want, {n: ((near[n] - w).norm() / w.norm().clamp(min=1e-30)).item() for n, w in want.items()}


def main(argv: list[str]) -> int:
    """Runs all cases of a file; a case that raises is reported and the next one runs where that is possible."""
    platform = get_platform(argv[2] if len(argv) > 2 else "cpu")
    torch.set_num_threads(1)
    faulthandler.enable()
    init_distributed(platform)
    cases = [Case(**fields) for fields in json.loads(Path(argv[0]).read_text())]
    results: dict[str, Any] = {}
    for case in cases:
        try:
            results[case.name] = run_case(case, platform)
        except Exception:
            results[case.name] = {"ok": False, "error": traceback.format_exc()}
            print(f"{case.name}: {results[case.name]['error']}", file=sys.stderr, flush=True)
        gc.collect()
        if dist.get_rank() == 0:
            Path(argv[1]).write_text(json.dumps(results, indent=1))
            print(case.name, "ok" if results[case.name]["ok"] else "FAILED", flush=True)
    end_distributed()
    return 0 if all(result["ok"] for result in results.values()) else 1


def write_cases(cases: list[Case], path: Path) -> None:
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
