"""The figures of a benchmark: the work done and the rates, as JSON and as a table.

The same code computes the trainer's figures and those of ``benchmarks.fsdp2``, so their FLOPs are counted
in the same way: from the true lengths of documents, frames and windows, without padding, and with the output
layer only for loss tokens (see :mod:`megatron_vl.estimate.flops`). ``mfu_all_tokens`` counts the output layer
for every token, as most published figures do.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.flops import needed_flops, repeated_flops, row_sizes
from megatron_vl.estimate.gpus import peak_tflops
from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.spec.families import ModelSpec
from megatron_vl.system.plurals import count_text
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.trainer import Trainer
from toolkit.common.layouts import layout_sizes_text

from .options import BenchOptions, BenchRun

COUNTS = ("rows", "samples", "images", "patches", "tokens", "loss_tokens")


def row_work(
    spec: ModelSpec,
    config: TrainConfig,
    lengths: tuple[list[int], list[int], list[int]],
    loss_tokens: int,
    images: int = 0,
    whole_head: bool = False,
) -> Counter[str]:
    """The work of a row.

    Args:
        lengths: lengths of its documents, frames and windows.
        whole_head: whether the system computes the output layer for every token.
    """
    documents, frames, _ = lengths
    sizes = row_sizes(*lengths, loss_tokens)
    needed = needed_flops(spec, config.model, config.lora, sizes)
    all_tokens = needed_flops(spec, config.model, config.lora, sizes._replace(loss_tokens=sum(documents)))
    is_decoupled = config.vision.placement == "decoupled"
    again = repeated_flops(spec, config.model, config.lora, config.recompute, sizes, is_decoupled)
    work: Counter[str] = Counter(rows=1, samples=len(documents), images=images, patches=sum(frames))
    work.update(tokens=sum(documents), loss_tokens=loss_tokens)
    flops = {
        "language": needed.language,
        "tower": needed.tower,
        "all-token": all_tokens.total,
        "executed": (all_tokens if whole_head else needed).total + again.total,
        "output": needed.output,
        "experts": sum(layer.experts for layer in needed.layers),
        "decoder": sum(layer.dense for layer in needed.layers),
    }
    work.update({f"{name} flops": count for name, count in flops.items()})
    return work


def count_work(trainer: Trainer, step_batches: list[StepBatch]) -> Counter[str]:
    """The work of steps of this replica; none on a rank that does not own its loader."""
    work: Counter[str] = Counter()
    for step_batch in step_batches if trainer.grid.owns_loader else ():
        rows = zip(step_batch.segment_lengths, step_batch.vision_lengths, step_batch.loss_tokens, strict=True)
        for documents, vision, loss_tokens in rows:
            work += row_work(trainer.spec, trainer.config, (documents, *vision), loss_tokens)
        work["images"] += step_batch.item_counts.get("images", 0)
    return work


def gather_to_all(local_object: Any) -> list[Any]:
    """Gathers one object of each rank on every rank. Collective."""
    objects_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects_by_rank, local_object)
    return objects_by_rank


def speed_figures(work: Counter[str], step_seconds: list[float], machine: dict[str, Any]) -> dict[str, Any]:
    """The speed of timed steps, from the work of all ranks in them and the seconds of each. Without a known
    peak, MFU is null."""
    seconds, peak = sum(step_seconds), machine["peak_tflops"]
    flops = {
        "mfu": work["language flops"] + work["tower flops"],
        "mfu_language": work["language flops"],
        "mfu_vision": work["tower flops"],
        "mfu_all_tokens": work["all-token flops"],
        "hfu": work["executed flops"],
    }
    tflops = {name: count / seconds / machine["gpus"] / 1e12 for name, count in flops.items()}
    return {
        "step_s": seconds / len(step_seconds),
        "step_s_min": min(step_seconds),
        "step_s_max": max(step_seconds),
        "tokens_per_s_per_gpu": work["tokens"] / seconds / machine["gpus"],
        "images_per_s": work["images"] / seconds,
        "tflops_per_gpu": tflops["mfu"],
        **{name: reached / peak if peak else None for name, reached in tflops.items()},
        "work": {
            name: work[name] for name in ("rows", "samples", "images", "patches", "tokens", "loss_tokens")
        },
    }


def describe_machine(platform_name: str, stated_peak: float) -> dict[str, Any]:
    """The machine and the versions with which the figures were measured."""
    device_name = torch.cuda.get_device_name() if platform_name == "cuda" else "cpu"
    return {
        "device": device_name,
        "gpus": dist.get_world_size(),
        "peak_tflops": peak_tflops(device_name, stated_peak) or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if platform_name == "cuda" else None,
    }


def describe_model(config: TrainConfig, spec: ModelSpec) -> dict[str, Any]:
    """The measured model. Its parameters include the padding of the vision FFN, as in our checkpoints."""
    parameter_count, trained_count = count_parameters(config, spec)
    return {
        "hf": config.model.hf,
        "family": spec.family,
        "parameters": parameter_count,
        "trained_parameters": trained_count,
        "language_layers": spec.language.num_layers,
        "vision_layers": spec.vision.num_layers,
    }


def describe_run(bench_run: BenchRun, trainer: Trainer) -> dict[str, Any]:
    """Machine, model, layout and config of a benchmark."""
    grid, config = trainer.grid, trainer.config
    sizes = {name: getattr(grid, name) for name in ("tp", "cp", "pp", "vpp", "dp")}
    sizes |= {"ep": grid.sharding.ep, "etp": grid.sharding.etp}
    notes = [
        layout_sizes_text(sizes),
        f"{config.global_batch_size} rows of {config.data.seq_len} tokens per step",
        config.dtype,
        f"recompute: language {config.recompute.language}, vision {config.recompute.vision}",
        *["experts chosen evenly"] * bench_run.options.even_routing,
    ]
    return {
        "system": "megatron-vl",
        "machine": describe_machine(trainer.platform.name, config.log.peak_tflops),
        "model": describe_model(config, trainer.spec),
        "notes": [", ".join(notes)],
        "config": dataclasses.asdict(config),
    }


def finish_report(options: BenchOptions, figures: dict[str, Any]) -> None:
    """On rank 0, writes ``out`` and prints the figures."""
    if dist.get_rank() != 0:
        return
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps(figures, indent=2) + "\n")
    machine, model = figures["machine"], figures["model"]
    print(f"{figures['system']}: {model['family']}, {count_text(model['parameters'])} parameters", end="")
    print(f", {machine['gpus']} x {machine['device']}", *figures["notes"], sep="\n  ")
    for name, workload in figures["workloads"].items():
        print(f"  {name}:", *_workload_lines(workload), sep="\n    ", flush=True)


def _workload_lines(figures: dict[str, Any]) -> list[str]:
    shares = {name: figures[name] for name in ("mfu", "mfu_language", "mfu_vision", "mfu_all_tokens", "hfu")}
    lines = [
        f"{figures['tokens_per_s_per_gpu']:,.0f} tok/s/GPU, {figures['images_per_s']:.1f} images/s,"
        f" {figures['tflops_per_gpu']:.3g} TFLOP/s/GPU, loss {figures['loss']:.4f},"
        f" {1e3 * figures['step_s']:.0f} ms per step ({1e3 * figures['step_s_min']:.0f} to"
        f" {1e3 * figures['step_s_max']:.0f})",
        _table("memory", figures["memory"], "{:.1f}"),
    ]
    lines += [_table("of the peak", shares, "{:.1%}")] if figures["mfu"] is not None else []
    for stage, parts in enumerate(figures.get("parts_by_stage", ())):
        milliseconds = {name: 1e3 * seconds for name, seconds in parts.items()}
        lines.append(_table(f"ms per step, stage {stage}", milliseconds, "{:.1f}"))
    if "tflops_by_part" in figures:
        lines.append(_table("needed TFLOP/s while a part runs", figures["tflops_by_part"], "{:.3g}"))
    return lines


def _table(title: str, values: dict[str, float], form: str) -> str:
    return f"{title}: " + ", ".join(f"{name} {form.format(value)}" for name, value in values.items())
