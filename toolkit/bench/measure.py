"""Times the steps of the trainer and their parts, and reports the figures as JSON and as a table.

The trainer's own metrics give work, speed and memory. ``benchmarks.fsdp2`` computes its figures here too, so
its FLOPs are counted in the same way. ``mfu_all_tokens`` counts the output layer for every token, as most do.
"""

import contextlib
import itertools
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.estimate.flops import RowSizes, needed_flops
from megatron_vl.estimate.gpus import peak_tflops
from megatron_vl.estimate.parameters import count_parameters
from megatron_vl.models.moe.router import iterate_routers
from megatron_vl.system.plurals import count_text
from megatron_vl.train import train
from megatron_vl.training.hooks import Hook
from megatron_vl.training.report.metrics import MetricsLog, StepMetrics
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.run_messages import run_summary
from megatron_vl.training.step import StepResult
from megatron_vl.training.trainer import Trainer

from .options import PART_STEPS, WARM_UP, BenchRun
from .step_parts import PartTimer


def measure_benchmark(bench_run: BenchRun) -> dict[str, Any]:
    """Measures and reports. Every rank gets the same figures. Collective."""
    measure = Measure(bench_run)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # lines of the run; only figures go to standard output
            train(bench_run.config, bench_run.spec, [measure])
    finally:
        if measure.speeds and dist.get_rank() == 0:  # also if memory ran out in a later step
            report_figures(bench_run, measure.figures)
    return measure.figures


class Measure(Hook):
    """Measures each kind of rows: warm-up, timed steps, and steps whose parts are timed.

    A step reads its loss and gradient norm, equal on all ranks, and then launches its update. So the time
    between the ends of two steps has exactly one update in it, and copies of offloaded state that go on
    beside passes are hidden as in training. Nothing waits for the device in timed steps: that would take them
    out of hiding.
    """

    def __init__(self, bench_run: BenchRun) -> None:
        self.bench_run, self.speeds = bench_run, dict[str, Any]()

    def begin(self, trainer: Trainer) -> None:
        notes = run_summary(trainer.resolved_run, trainer.platform, trainer.optimizer)
        if self.bench_run.options.even_routing:
            notes.append("experts chosen evenly")
            for router in iterate_routers(trainer.model_chunks):
                router.config.moe_router_force_load_balancing = True
        self.figures = describe_run(self.bench_run, trainer.platform.name, "megatron-vl", notes)
        self.figures["workloads"] = self.speeds
        self.timer = PartTimer(trainer)

    def before_step(self, trainer: Trainer) -> None:
        workloads = self.bench_run.workloads
        workload, self.number = divmod(trainer.step, trainer.last_step // len(workloads))
        if self.number == 0:
            self.name = list(workloads)[workload]
            trainer.read_rows_of(workloads[self.name])
            self.timer.time_method(trainer.batches, "next_batch", "data")
        if self.number <= WARM_UP:  # kernels are compiled and memory is allocated in earlier steps
            torch.cuda.reset_peak_memory_stats()
            self.metrics = MetricsLog(trainer.config, trainer.spec, trainer.grid, trainer.platform)
            self.end_times, self.loss_tokens = [time.perf_counter()], 0
        elif 0 <= self.number - WARM_UP - self.bench_run.options.timed < PART_STEPS:
            dist.barrier()
            self.timer.begin("step")

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        self.end_times.append(time.perf_counter())
        self.timer.end("step")
        self.metrics.add_step(step_batch)
        self.loss_tokens += step_result.loss_tokens
        part_steps = self.number + 1 - WARM_UP - self.bench_run.options.timed
        if part_steps == 0:
            # The clock has stopped: now the ranks may exchange what they counted.
            self.metrics.step_metrics.memory_gib = trainer.platform.peak_memory_gib()
            totals = self.metrics.step_metrics.reduce_over_ranks(trainer.platform.device)
            seconds = [end - begin for begin, end in itertools.pairwise(self.end_times)]
            speed = speed_figures(self.bench_run, totals, self.loss_tokens, seconds, self.figures["machine"])
            self.speeds[self.name] = speed | {"loss": step_result.loss}
        elif part_steps == PART_STEPS:
            trainer.platform.synchronize()
            self.speeds[self.name]["parts_by_stage"] = self.timer.mean_parts(trainer.grid, PART_STEPS)


def speed_figures(
    bench_run: BenchRun, totals: StepMetrics, loss_tokens: int, step_seconds: list[float], machine: Any
) -> dict[str, Any]:
    """The trainer's metrics of speed of the timed steps, of which ``totals`` and ``loss_tokens`` have the
    work of all ranks, and what these metrics lack."""
    config, seconds = bench_run.config, sum(step_seconds)
    speed = totals.speed_metrics(seconds, len(step_seconds), machine["gpus"], machine["peak_tflops"])
    one_token = RowSizes(tokens=0, token_pairs=0, loss_tokens=1)
    output_flops = needed_flops(bench_run.spec, config, one_token).output
    all_flops, left_out = totals.language_flops + totals.vision_flops, totals.num_real_tokens - loss_tokens
    return speed | {
        "step_s_min": min(step_seconds),
        "step_s_max": max(step_seconds),
        "images_per_s": totals.images / seconds,
        "mfu_all_tokens": speed["mfu"] and speed["mfu"] * (1 + left_out * output_flops / all_flops),
    }


def describe_run(bench_run: BenchRun, platform_name: str, system: str, notes: list[str]) -> dict[str, Any]:
    """What is measured, and where. Parameters include the padding of the vision FFN, as in checkpoints."""
    config, spec = bench_run.config, bench_run.spec
    device_name = torch.cuda.get_device_name() if platform_name == "cuda" else "cpu"
    machine = {
        "device": device_name,
        "gpus": dist.get_world_size(),
        "peak_tflops": peak_tflops(device_name, config.log.peak_tflops) or None,
    }
    model = {
        "hf": config.model.hf,
        "family": spec.family,
        "parameters": count_parameters(config, spec)[0],
        "language_layers": spec.language.num_layers,
        "vision_layers": spec.vision.num_layers,
    }
    return {"system": system, "machine": machine, "model": model, "notes": notes, "config": asdict(config)}


def report_figures(bench_run: BenchRun, figures: dict[str, Any]) -> None:
    if out := bench_run.options.out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(figures, indent=2) + "\n")
    machine, model = figures["machine"], figures["model"]
    print(f"{figures['system']}: {model['family']}, {count_text(model['parameters'])} parameters", end="")
    print(f", {machine['gpus']} x {machine['device']}", *figures["notes"], sep="\n  ")
    for name, speed in figures["workloads"].items():
        print(f"  {name}:", *_speed_lines(speed), sep="\n    ", flush=True)


def _speed_lines(speed: dict[str, Any]) -> list[str]:
    lowest, mean, highest = (1e3 * speed[name] for name in ("step_s_min", "step_s", "step_s_max"))
    lines = [
        f"{speed['tokens_per_s_per_rank']:,.0f} tok/s/GPU, {speed['images_per_s']:.1f} images/s,"
        f" {speed['tflops_per_rank']:.3g} TFLOP/s/GPU, loss {speed['loss']:.4f},"
        f" {mean:.0f} ms per step ({lowest:.0f} to {highest:.0f}), {speed['memory_gib']:.1f} GiB"
    ]
    if speed["mfu"] is not None:
        lines.append(
            f"MFU {speed['mfu']:.1%}, with logits of every token {speed['mfu_all_tokens']:.1%};"
            f" {speed['vision_flops_share']:.1%} of its FLOPs are the tower's"
        )
    for stage, parts in enumerate(speed.get("parts_by_stage", ())):
        parts_text = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in parts.items())
        lines.append(f"ms per step, stage {stage}: {parts_text}")
    return lines
