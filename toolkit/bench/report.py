"""The figures of a benchmark: the work done and the rates, as JSON and as a table.

``benchmarks.fsdp2`` computes its figures here too, so its FLOPs are counted in the same way: from the true
lengths of documents, frames and windows, without padding, and with the output layer only for loss tokens (see
:mod:`megatron_vl.estimate.flops`). ``mfu_all_tokens`` counts the output layer for every token, as most
published figures do.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.estimate.flops import RowSizes, needed_flops
from megatron_vl.estimate.gpus import peak_tflops
from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.system.plurals import count_text
from megatron_vl.training.report.metrics import StepMetrics

from .options import BenchRun


def speed_figures(
    bench_run: BenchRun, totals: StepMetrics, loss_tokens: int, step_seconds: list[float], machine: Any
) -> dict[str, Any]:
    """The trainer's metrics of speed of the timed steps, and what they do not have.

    Args:
        totals: what all ranks did in these steps.
        loss_tokens: tokens for which they computed the output layer.
    """
    config, num_steps, seconds = bench_run.config, len(step_seconds), sum(step_seconds)
    speed = totals.speed_metrics(seconds, num_steps, machine["gpus"], machine["peak_tflops"])
    without, with_output = (
        needed_flops(bench_run.spec, config.model, config.lora, RowSizes(1, 1, count), config.mtp).output
        for count in (0, 1)
    )
    left_out = (totals.num_real_tokens - loss_tokens) * (with_output - without)
    share = left_out / (totals.language_flops + totals.vision_flops)
    work = {name: getattr(totals, name) for name in ("samples", "images", "patches")}
    work |= {"rows": num_steps * config.global_batch_size, "tokens": totals.num_real_tokens}
    return speed | {
        "step_s_min": min(step_seconds),
        "step_s_max": max(step_seconds),
        "images_per_s": totals.images / seconds,
        "mfu_all_tokens": speed["mfu"] and speed["mfu"] * (1 + share),
        "work": work | {"loss_tokens": loss_tokens},
    }


def describe_run(bench_run: BenchRun, platform_name: str, system: str, notes: list[str]) -> dict[str, Any]:
    """What is measured, and where. The model's parameters include the padding of the vision FFN, as in our
    checkpoints."""
    config, spec = bench_run.config, bench_run.spec
    device_name = torch.cuda.get_device_name() if platform_name == "cuda" else "cpu"
    peak = peak_tflops(device_name, config.log.peak_tflops) or None
    machine = {"device": device_name, "gpus": dist.get_world_size(), "peak_tflops": peak}
    machine |= {"torch": torch.__version__, "cuda": torch.version.cuda if platform_name == "cuda" else None}
    parameters, trained = count_parameters(config, spec)
    model = {"hf": config.model.hf, "family": spec.family, "parameters": parameters}
    model |= {"trained_parameters": trained, "language_layers": spec.language.num_layers}
    model |= {"vision_layers": spec.vision.num_layers}
    facts = {"system": system, "machine": machine, "model": model, "notes": notes}
    return facts | {"config": dataclasses.asdict(config)}


def finish_report(out: str, figures: dict[str, Any]) -> None:
    """On rank 0, writes ``out`` and prints the figures."""
    if dist.get_rank() != 0:
        return
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(figures, indent=2) + "\n")
    machine, model = figures["machine"], figures["model"]
    print(f"{figures['system']}: {model['family']}, {count_text(model['parameters'])} parameters", end="")
    print(f", {machine['gpus']} x {machine['device']}", *figures["notes"], sep="\n  ")
    for name, workload in figures["workloads"].items():
        print(f"  {name}:", *_workload_lines(workload), sep="\n    ", flush=True)


def _workload_lines(figures: dict[str, Any]) -> list[str]:
    lowest, mean, highest = (1e3 * figures[name] for name in ("step_s_min", "step_s", "step_s_max"))
    lines = [
        f"{figures['tokens_per_s_per_rank']:,.0f} tok/s/GPU, {figures['images_per_s']:.1f} images/s,"
        f" {figures['tflops_per_rank']:.3g} TFLOP/s/GPU, loss {figures['loss']:.4f},"
        f" {mean:.0f} ms per step ({lowest:.0f} to {highest:.0f}), {figures['memory_gib']:.1f} GiB"
    ]
    if figures["mfu"] is not None:
        lines.append(
            f"MFU {figures['mfu']:.1%}, with logits of every token {figures['mfu_all_tokens']:.1%};"
            f" {figures['vision_flops_share']:.1%} of its FLOPs are the tower's"
        )
    for stage, parts in enumerate(figures.get("parts_by_stage", ())):
        texts = [f"{name} {1e3 * seconds:.1f}" for name, seconds in parts.items()]
        lines.append(f"ms per step, stage {stage}: {', '.join(texts)}")
    return lines
