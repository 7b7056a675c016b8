"""Times the steps of the trainer and their parts. The trainer's own metrics give work, speed and memory."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from typing import Any

import torch

from megatron_vl.models.moe.router import iterate_routers
from megatron_vl.system.errors import UserError
from megatron_vl.train import train
from megatron_vl.training.hooks import Hook
from megatron_vl.training.report.metrics import MetricsLog
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.run_messages import run_summary
from megatron_vl.training.step import StepResult
from megatron_vl.training.trainer import Trainer

from . import report
from .options import BenchRun
from .step_parts import PartTimer


def measure_benchmark(bench_run: BenchRun) -> dict[str, Any]:
    """Measures all workloads. Every rank gets the same figures. Collective."""
    measure = Measure(bench_run)
    with contextlib.redirect_stdout(sys.stderr):  # the lines of the run; the figures go to standard output
        train(bench_run.config, bench_run.spec, [measure])
    return measure.figures


class Measure(Hook):
    """Measures each workload in turn: warm-up, timed steps, and steps whose parts are timed.

    A step reads its loss and gradient norm, equal on all ranks, and then launches its update. So the time
    between the ends of two steps has exactly one update in it, and copies of offloaded state that go on
    beside passes are hidden as in training. Nothing waits for the device in timed steps: that would take them
    out of hiding.
    """

    def __init__(self, bench_run: BenchRun) -> None:
        self.bench_run, self.options = bench_run, bench_run.options
        self.figures: dict[str, Any] = {"workloads": {}}

    def begin(self, trainer: Trainer) -> None:
        if self.options.even_routing:
            for router in iterate_routers(trainer.model_chunks):
                router.config.moe_router_force_load_balancing = True
        notes = run_summary(trainer.resolved_run, trainer.platform, trainer.optimizer)
        notes += ["experts chosen evenly"] * self.options.even_routing
        self.figures |= report.describe_run(self.bench_run, trainer.platform.name, "megatron-vl", notes)
        self.timer = PartTimer(trainer)

    def before_step(self, trainer: Trainer) -> None:
        workload, step = self.bench_run.place_of(trainer.step)
        if step == -self.options.warm_up:
            trainer.read_rows_of(self.bench_run.workloads[workload])
            self.timer.time_method(trainer.batches, "next_batch", "data")
        if step <= 0:  # kernels are compiled and memory is allocated in earlier steps
            if trainer.platform.name == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.metrics = MetricsLog(trainer.config, trainer.spec, trainer.grid, trainer.platform)
            self.end_times, self.loss_tokens = [time.perf_counter()], 0
        elif step >= self.options.timed and self.options.part_steps:
            self.timer.begin_step()

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        workload, step = self.bench_run.place_of(trainer.step - 1)
        figures = self.figures["workloads"].setdefault(workload, {})
        self.end_times.append(time.perf_counter())
        self.timer.end_step()
        self.metrics.add_step(step_batch)
        self.loss_tokens += step_result.loss_tokens
        if step == self.options.timed - 1:
            # The clock has stopped: now the ranks may exchange what they counted.
            self.metrics.step_metrics.memory_gib = trainer.platform.peak_memory_gib()
            totals = self.metrics.step_metrics.reduce_over_ranks(trainer.platform.device)
            seconds = [end - begin for begin, end in itertools.pairwise(self.end_times)]
            figures |= report.speed_figures(
                self.bench_run, totals, self.loss_tokens, seconds, self.figures["machine"]
            )
            figures["loss"] = step_result.loss
        elif self.options.part_steps and step == self.options.timed + self.options.part_steps - 1:
            trainer.platform.synchronize()
            figures["parts_by_stage"] = self.timer.mean_parts(trainer.grid.pp_rank, self.options.part_steps)

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        # Memory may run out in a step after the timed ones; what they showed is not lost.
        measured = {name: w for name, w in self.figures["workloads"].items() if "loss" in w}
        if has_failed and measured:
            report.finish_report(self.options.out, self.figures | {"workloads": measured})
        if trainer.stop_requested and trainer.step < trainer.last_step:
            raise UserError("a signal stopped the benchmark")
