"""Runs cases in a real process group and compares each with the reference.

    torchrun --nproc-per-node 4 -m toolkit.parity.worker CASES.json OUT.json [cpu|cuda]

``CASES.json`` is a list of :class:`Case` fields. Every case runs the trainer's own schedule, DDP and gradient
finalisation; no part of the model is rebuilt for the comparison. ``megatron-vl parity`` and the tests run
this program. Rank 0 computes the reference, unless :mod:`toolkit.parity.stored` did so before the group
started.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.assemble import Sample
from megatron_vl.models.names import LiveTensor
from megatron_vl.parallel.grid import ProcessGrid, end_distributed, init_distributed
from megatron_vl.platform import Platform, get_platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import part_of, tensor_table
from megatron_vl.training.step import reduce_losses, replicated_modules, run_schedule
from megatron_vl.weights.blocks import unshard
from toolkit.parity.case import Case, build, draw

from .activations import Recorder
from .gather import StoredParts, StoredTensors, gather_on_first
from .locations import location_of
from .reference import fingerprint, load_hf, reference, remembered
from .tolerances import BF16_GRADIENT_RATIO, BF16_LOSS_TOLERANCE, GRADIENT_TOLERANCE, LOSS_TOLERANCE


def run_case(case: Case, platform: Platform) -> dict[str, Any]:
    """Runs the steps of a case and compares each with the reference. Collective.

    Returns:
        On rank 0, {"ok", "steps": [output of :func:`compare`, with that of :meth:`Recorder.compare`]}; on the
        other ranks, no steps. A training returns what :func:`.training.run_training` does.
    """
    if case.train:
        from .training import run_training

        return run_training(case, platform)

    live = build(case, platform)
    spec = live.spec
    grid = live.grid
    wrapped = live.wrapped
    optimizer = live.optimizer
    if optimizer is not None:
        # The weights must not change, so that every step matches the reference.
        for group in optimizer.param_groups:
            group["lr"] = group["weight_decay"] = 0.0

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
        loss_sum, tokens, *_ = reduce_losses(reports, grid, platform.device)
        departures = recorder.compare(data, case.reference, case.dtype) if recorder else {}
        gradients = collect_gradients(wrapped, live.tensors, grid, spec)
        if optimizer is not None:
            optimizer.prepare_grads()
            optimizer.step_with_ready_grads()

        if grid.rank == 0:
            flat = [s for row in samples for s in row]
            results.append(
                compare(case, spec, live.layout, loss_sum / tokens, gradients, flat, models) | departures
            )
            results[-1]["ok"] &= not departures.get("departs")

    return {"ok": all(r["ok"] for r in results), "steps": results}


def collect_gradients(
    wrapped: list[Any], tensors: list[LiveTensor], grid: ProcessGrid, spec: ModelSpec
) -> dict[str, list[Mapping[int, Tensor]]]:
    """Collects the gradients of all ranks on rank 0. Collective.

    The ranks of a data-parallel group hold equal gradients after the reduction; the first one contributes.

    Returns:
        Maps each name to its copies, and each copy maps parts (see :meth:`Cut.part`) to gradients. A tied
        tensor has a copy on each of two stages.
    """
    _gather_slices(wrapped)
    table = tensor_table(spec)
    mine: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    copies: dict[str, int] = {}
    for name, parameter, expert in tensors:
        if not parameter.requires_grad or not grid.is_first_copy(table[name]):
            continue
        if expert is not None:
            stacks.setdefault(name, []).append(_main_grad(parameter))  # in the order of the experts
            continue
        copy = copies[name] = copies.get(name, -1) + 1
        mine[f"{grid.pp_rank}/{copy}/{grid.part(table[name])}/{name}"] = _main_grad(parameter)

    mine |= {
        f"{grid.pp_rank}/0/{grid.part(table[name])}/{name}": torch.stack(stack)
        for name, stack in stacks.items()
    }

    gathered: dict[str, dict[str, dict[int, tuple[StoredTensors, str]]]] = {}
    for given in gather_on_first({(grid.rank,): mine} if mine else {}, grid).values():
        for key in given:
            stage, copy_number, part, name = key.split("/")
            gathered.setdefault(name, {}).setdefault(f"{stage}/{copy_number}", {})[int(part)] = (given, key)

    return {name: [StoredParts(parts) for parts in held.values()] for name, held in gathered.items()}


def _gather_slices(wrapped: list[Any]) -> None:
    """Completes the gradient buffers on every rank. Collective.

    With the distributed optimizer, each rank holds only its own slice of every bucket after the reduction.
    """
    for chunk in replicated_modules(wrapped):
        if not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = bucket.grad_data.chunk(group.size())
                dist.all_gather(list(shards), shards[group.rank()].clone(), group=group)


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
    """Compares loss and gradients with the reference, including every copy of a replicated or tied tensor.

    Args:
        loss: mean loss over all loss tokens.
        gradients: output of :func:`collect_gradients`.
        models: output of :func:`make_reference`.
    """
    want_loss, want, noise = models(samples)
    table = tensor_table(spec)
    errors: dict[str, float] = {}

    for name, copies in gradients.items():
        info = table[name]
        scale = want[name].norm().item()
        for parts in copies:
            shards = [parts[part] for part in range(layout.cut.parts(info))]
            for candidate in shards if info.split == "replicated" else [unshard(shards, info, layout.cut)]:
                error = (candidate - want[name]).norm().item() / scale if scale else candidate.norm().item()
                errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)

    trained = {name for name in table if part_of(name) not in case.freeze}
    unexpected = sorted(trained - set(errors)) + sorted(set(errors) - trained)
    worst = sorted(errors, key=errors.__getitem__, reverse=True)[:3]

    loss_error = abs(loss - want_loss) / abs(want_loss)
    gradient_error = max(errors.values())
    bf16 = case.dtype == "bfloat16"
    near = (
        gradient_error <= max(noise.values()) * BF16_GRADIENT_RATIO
        if bf16
        else gradient_error <= GRADIENT_TOLERANCE
    )

    return {
        "ok": not unexpected and loss_error <= (BF16_LOSS_TOLERANCE if bf16 else LOSS_TOLERANCE) and near,
        "loss": loss,
        "reference": want_loss,
        "loss_error": loss_error,
        "gradient_error": gradient_error,
        "worst": {name: errors[name] for name in worst},
        "transformers_bf16_gradient_error": max(noise.values()) if noise else None,
        "unexpected": unexpected,
        "compared": len(errors),
        "gradients": by_location(errors),
    }


def by_location(errors: dict[str, float]) -> dict[str, float]:
    """Maps each location to the largest error among its tensors."""
    locations: dict[str, float] = {}
    for name, error in errors.items():
        locations[location_of(name)] = max(locations.get(location_of(name), 0.0), error)
    return locations


def make_reference(case: Case, platform: Platform) -> Any:
    """Returns a function of the samples, which computes or reads their (loss, fp32 gradients, bf16 noise)."""
    return StoredReference(Path(case.reference)) if case.reference else ComputedReference(case, platform)


class StoredReference:
    """Reads what :mod:`toolkit.parity.stored` computed, for the samples that it used."""

    def __init__(self, folder: Path) -> None:
        self.facts = json.loads((folder / "reference.json").read_text())
        self.gradients = StoredTensors(folder / "gradients.safetensors")

    def __call__(self, samples: list[Sample]) -> tuple[float, Mapping[str, Tensor], dict[str, float]]:
        """Like :meth:`ComputedReference.__call__`."""
        return self.facts["loss"], self.gradients, self.facts["gradient_noise"]


class ComputedReference:
    """Computes the reference of one case with ``transformers``."""

    def __init__(self, case: Case, platform: Platform) -> None:
        self.case = case
        self.device = str(platform.device)

    @cached_property
    def exact(self) -> torch.nn.Module:
        return load_hf(self.case.hf, device=self.device)

    @cached_property
    def half(self) -> torch.nn.Module:
        return load_hf(self.case.hf, torch.bfloat16, self.device)

    def __call__(self, samples: list[Sample]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        """Returns (loss in the case's data type, fp32 gradients, bf16 noise).

        The noise maps each tensor to the relative error of transformers' bf16 gradient; it is empty in fp32.
        """
        key = (self.case.hf, self.case.dtype, self.device, fingerprint(samples))
        return remembered(key, lambda: self._compute(samples))

    def _compute(self, samples: list[Sample]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        loss, want = reference(self.case.hf, samples, self.exact)
        if self.case.dtype != "bfloat16":
            return loss, want, {}
        loss, rounded = reference(self.case.hf, samples, self.half)
        noise = {
            name: ((rounded[name] - exact).norm() / exact.norm().clamp(min=1e-30)).item()
            for name, exact in want.items()
        }
        return loss, want, noise


def main(argv: list[str]) -> int:
    """Runs all cases of a file. If a case raises, the error is reported and the next case runs."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
