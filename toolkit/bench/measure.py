"""Measures the steps of the trainer: their time, work, memory and parts."""

from __future__ import annotations

import contextlib
import gc
import itertools
import sys
import time
from collections import Counter
from typing import Any

import torch

from megatron_vl.models.moe.router import iterate_routers
from megatron_vl.system.errors import UserError
from megatron_vl.train import train
from megatron_vl.training.hooks import Hook
from megatron_vl.training.offload.build import chunked_state
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.step import StepResult, replicated_modules
from megatron_vl.training.trainer import Trainer

from . import report, step_parts
from .options import BenchRun
from .report import gather_to_all

GIB = 2**30


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
        self.end_times: list[float] = []
        self.fed_steps: list[StepBatch] = []

    def begin(self, trainer: Trainer) -> None:
        if self.options.even_routing:
            for router in iterate_routers(trainer.model_chunks):
                router.config.moe_router_force_load_balancing = True
        self.figures |= report.describe_run(self.bench_run, trainer)
        self.timer = step_parts.PartTimer(trainer)

    def before_step(self, trainer: Trainer) -> None:
        workload, step = self.bench_run.place_of(trainer.step)
        if step == -self.options.warm_up:
            trainer.read_rows_of(self.bench_run.workloads[workload])
            self.timer.time_method(trainer.batches, "next_batch", "data")
        if self.options.timed <= step < self.options.timed + self.options.part_steps:
            self.timer.begin_step()

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        workload, step = self.bench_run.place_of(trainer.step - 1)
        figures = self.figures["workloads"].setdefault(workload, {})
        self.end_times.append(time.perf_counter())
        self.fed_steps.append(step_batch)
        self.timer.end_step()
        # Memory and work are counted when the clock has stopped.
        if step == self.options.timed - 1:
            step_seconds = [end - begin for begin, end in itertools.pairwise(self.end_times)]
            figures |= report.speed_figures(self._work(trainer), step_seconds, self.figures["machine"])
            figures |= {"loss": step_result.loss, "memory": memory_figures(trainer)}
            self.fed_steps = []
        elif self.options.part_steps and step == self.options.timed + self.options.part_steps - 1:
            trainer.platform.synchronize()
            spans_by_rank = gather_to_all((self.timer.take_seconds(), trainer.grid.pp_rank))
            figures |= step_parts.summarize_parts(spans_by_rank, self.options.part_steps, self._work(trainer))
        elif step < 0:  # kernels are compiled, and memory is allocated
            if trainer.platform.name == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self.end_times, self.fed_steps = [time.perf_counter()], []

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        if trainer.stop_requested and trainer.step < trainer.last_step:
            raise UserError("a signal stopped the benchmark")

    def _work(self, trainer: Trainer) -> Counter[str]:
        """The work of the steps since the last phase, of all ranks."""
        return sum(gather_to_all(report.count_work(trainer, self.fed_steps)), Counter())


def memory_figures(trainer: Trainer) -> dict[str, Any]:
    """GiB of each part on the rank with the highest peak. Waits for copies of offloaded state. Collective."""
    memory: dict[str, Any] = {"peak_gib": trainer.platform.peak_memory_gib()}
    if trainer.platform.name == "cuda":
        if chunked_optimizer := chunked_state(trainer.optimizer):
            # The buffers of copies that are still under way would count as allocated.
            chunked_optimizer.chunk_streamer.wait_for_host_state()
        gc.collect()
        torch.cuda.synchronize()
        # What stays allocated between steps: weights, gradients and optimizer.
        steady_gib = torch.cuda.memory_allocated() / GIB
        modules = replicated_modules(trainer.model_chunks)
        buffers = [buffer for ddp in modules for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers)]
        weights = [weight for ddp in modules for weight in ddp.parameters()]
        memory["weights_gib"] = sum(weight.nbytes for weight in weights) / GIB
        memory["gradients_gib"] = sum(buffer.grad_data.nbytes for buffer in buffers) / GIB
        memory["optimizer_gib"] = steady_gib - memory["weights_gib"] - memory["gradients_gib"]
        memory["activations_gib"] = memory["peak_gib"] - steady_gib
        memory["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return max(gather_to_all(memory), key=lambda rank_memory: rank_memory["peak_gib"])
