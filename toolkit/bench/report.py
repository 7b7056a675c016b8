"""The figures of a benchmark: the work done and the rates, as JSON and as a table.

The same code computes the trainer's figures and those of ``benchmarks.fsdp2``, so their FLOPs are counted
in the same way: from the true lengths of documents, frames and windows, without padding, and with the output
layer only for loss tokens (see :mod:`megatron_vl.estimate.flops`). ``mfu_all_tokens`` counts the output layer
for every token, as most published figures do.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.flops import recompute_flops, row_flops
from megatron_vl.estimate.gpus import peak_tflops
from megatron_vl.estimate.memory import count_parameters
from megatron_vl.plurals import trained_text
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.batch_broadcast import StepBatch
from megatron_vl.training.trainer import Trainer

from .options import BenchOptions, BenchRun

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations")


def row_work(
    spec: ModelSpec,
    config: TrainConfig,
    lengths: tuple[list[int], list[int], list[int]],
    loss_tokens: int,
    images: int = 0,
    whole_head: bool = False,
) -> dict[str, Any]:
    """The work of a row.

    Args:
        lengths: lengths of its documents, frames and windows.
        whole_head: whether the system computes the output layer for every token.
    """
    document_lengths, frame_lengths, _ = lengths
    tokens, decoupled = sum(document_lengths), config.vision.placement == "decoupled"
    needed_flops = row_flops(spec, config.model, *lengths, loss_tokens, config.lora)
    all_token_flops = row_flops(spec, config.model, *lengths, tokens, config.lora)
    recomputed_flops = recompute_flops(spec, config.model, config.recompute, *lengths, decoupled, config.lora)
    return {
        "rows": 1,
        "samples": len(document_lengths),
        "images": images,
        "tokens": tokens,
        "loss_tokens": loss_tokens,
        "patches": sum(frame_lengths),
        "model_flops": needed_flops,
        "model_flops_all_tokens": all_token_flops,
        "executed_flops": (all_token_flops if whole_head else needed_flops) + recomputed_flops,
    }


def add_work(works: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The sum of works, each number on its own."""
    total: dict[str, Any] = {}
    for work in works:
        total = {name: number + total[name] if name in total else number for name, number in work.items()}
    return total


def count_work(trainer: Trainer, step_batches: list[StepBatch]) -> dict[str, Any]:
    """The work of steps of this replica; that of no rows on a rank that does not own its loader."""
    works = [row_work(trainer.spec, trainer.config, ([], [], []), 0) | {"rows": 0}]
    for step_batch in step_batches if trainer.grid.owns_loader else ():
        rows = zip(step_batch.segment_lengths, step_batch.vision_lengths, step_batch.loss_tokens, strict=True)
        for documents, vision, loss_tokens in rows:
            works.append(row_work(trainer.spec, trainer.config, (documents, *vision), loss_tokens))
        works[-1]["images"] = step_batch.item_counts.get("images", 0)
    return add_work(works)


def gather_to_all(local_object: Any) -> list[Any]:
    """Gathers one object of each rank on every rank. Collective."""
    objects_by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects_by_rank, local_object)
    return objects_by_rank


def speed_figures(work: dict[str, Any], step_seconds: list[float], machine: dict[str, Any]) -> dict[str, Any]:
    """The speed of timed steps, from the work of all ranks in them and the seconds of each. Without a known
    peak, MFU is null."""
    total_seconds, num_ranks, peak = sum(step_seconds), machine["gpus"], machine["peak_tflops"]

    def share_of_peak(flops: float) -> float | None:
        return flops / total_seconds / num_ranks / 1e12 / peak if peak else None

    model_flops = work["model_flops"]
    return {
        "step_s": total_seconds / len(step_seconds),
        "step_s_min": min(step_seconds),
        "step_s_max": max(step_seconds),
        "tokens_per_s_per_gpu": work["tokens"] / total_seconds / num_ranks,
        "images_per_s": work["images"] / total_seconds,
        "tflops_per_gpu": model_flops.total / total_seconds / num_ranks / 1e12,
        "mfu": share_of_peak(model_flops.total),
        "mfu_language": share_of_peak(model_flops.language),
        "mfu_vision": share_of_peak(model_flops.vision),
        "mfu_all_tokens": share_of_peak(work["model_flops_all_tokens"].total),
        "hfu": share_of_peak(work["executed_flops"].total),
        "work": {name: work[name] for name in ("rows", "samples", "images")}
        | {f"{name}_per_row": work[name] / work["rows"] for name in ("tokens", "loss_tokens", "patches")},
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
    context = f" x cp {grid.cp}" if grid.cp > 1 else ""
    experts = f" x ep {grid.sharding.ep} (etp {grid.sharding.etp})" if trainer.spec.language.moe else ""
    experts += ", experts chosen evenly" if bench_run.options.even_routing else ""
    recompute = f"recompute: language {config.recompute.language}, vision {config.recompute.vision}"
    recompute += ", inputs of layers in host memory" if config.recompute.offload_inputs else ""
    layout_note = (
        f"tp {grid.tp}{context} x pp {grid.pp} x vpp {grid.vpp} x dp {grid.dp}{experts},"
        f" {config.global_batch_size} rows of {config.data.seq_len} tokens per step, {config.dtype},"
        f" {recompute}"
    )
    return {
        "system": "megatron-vl",
        "machine": describe_machine(trainer.platform.name, config.log.peak_tflops),
        "model": describe_model(config, trainer.spec),
        "notes": [layout_note],
        "config": dataclasses.asdict(config),
    }


def finish_report(options: BenchOptions, figures: dict[str, Any]) -> None:
    """On rank 0, adds the ratio of image rows to text rows, writes ``out`` and prints the figures."""
    if dist.get_rank() != 0:
        return
    speeds = {name: workload["tflops_per_gpu"] for name, workload in figures["workloads"].items()}
    has_both = {"images", "text"} <= speeds.keys()
    figures["image_over_text"] = speeds["images"] / speeds["text"] if has_both else None
    figures_text = json.dumps(figures, indent=2)
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(figures_text + "\n")
    print(figures_text if options.json else format_figures(figures), flush=True)


def format_figures(figures: dict[str, Any]) -> str:
    """The machine, and a few lines per workload: speed, memory, parts."""
    machine, model = figures["machine"], figures["model"]
    peak_text = f"{machine['peak_tflops']:.0f} TFLOP/s peak" if machine["peak_tflops"] else "peak unknown"
    lines = [
        f"{figures['system']}: {model['family']}, {model['parameters'] / 1e9:.2f} B parameters,"
        f" {machine['gpus']} x {machine['device']} ({peak_text})"
    ]
    notes = [trained_text(model["parameters"], model["trained_parameters"]), *figures["notes"]]
    lines += [f"  {note}" for note in notes if note]
    for name, workload in figures["workloads"].items():
        lines += _workload_lines(name, workload)
    if ratio := figures["image_over_text"]:
        lines.append(f"  images / text: {ratio:.3f} of the text rows' MFU in the same run")
    return "\n".join(lines)


def _workload_lines(name: str, figures: dict[str, Any]) -> list[str]:
    speed_text = f"{figures['tflops_per_gpu']:.3f} TFLOP/s/GPU"
    if figures["mfu"] is not None:
        speed_text = (
            f"MFU {figures['mfu']:.1%} (language {figures['mfu_language']:.1%} + vision"
            f" {figures['mfu_vision']:.1%}; {figures['mfu_all_tokens']:.1%} with the output layer counted for"
            f" every token), HFU {figures['hfu']:.1%}, {figures['tflops_per_gpu']:.0f} TFLOP/s/GPU"
        )
    seconds, memory = (figures[f"step_s{kind}"] * 1e3 for kind in ("", "_min", "_max")), figures["memory"]
    lines = [
        f"  {name}: {figures['tokens_per_s_per_gpu']:,.0f} tok/s/GPU, {figures['images_per_s']:.1f} images/s,"
        f" {speed_text}, {{:.0f}} ms per step ({{:.0f}} to {{:.0f}}), {memory['peak_gib']:.1f} GiB, loss"
        f" {figures['loss']:.4f}".format(*seconds)
    ]
    memory_texts = [f"{part} {memory[f'{part}_gib']:.1f}" for part in MEMORY_PARTS if f"{part}_gib" in memory]
    lines += ["    memory (GiB): " + ", ".join(memory_texts)] if memory_texts else []
    return lines + (_parts_lines(figures) if "parts" in figures else [])


def _parts_lines(figures: dict[str, Any]) -> list[str]:
    part_texts = [f"{part} {times['mean_s'] * 1e3:.1f}" for part, times in figures["parts"].items()]
    collectives = zip(figures["communication"].values(), ("total", "with nothing else running"), strict=False)
    collective_texts = [f"{times['mean_s'] * 1e3:.1f} ms {kind}" for times, kind in collectives]
    halves = [f"{half} {share:.1%}" for half, share in figures["efficiency"].items() if share is not None]
    return [
        f"    ms per step, mean over ranks: {', '.join(part_texts)}",
        f"    collectives in one profiled step, including waiting: {', '.join(collective_texts)}",
        *([f"    share of the peak while it runs: {', '.join(halves)}"] if halves else []),
        f"    compute of the slowest data-parallel rank {figures['slowest_over_mean']:.3f} of the mean; idle"
        f" pipeline stages {figures['pipeline_idle_share']:.1%} of the step",
    ]
