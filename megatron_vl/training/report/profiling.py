"""Traces chosen steps with torch.profiler (section ``profile`` of a run)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_vl.config import TrainConfig
from megatron_vl.training.hooks import Hook, Trainer
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.step import StepResult

PROFILE_DIR = "profile"


class Profile(Hook):
    """Traces this rank from the beginning of one step to the end of another, as a validated config says.

    The file is a Chrome trace, which Perfetto and TensorBoard read. It has fewer steps than requested if the
    run began or ended within them.
    """

    def __init__(self, config: TrainConfig, rank: int) -> None:
        traced_steps = config.profile.steps if rank in config.profile.ranks else None
        self.first_step, self.last_step = traced_steps or (0, 0)
        name = f"rank_{rank:05d}_steps_{self.first_step}_to_{self.last_step}.pt.trace.json.gz"
        self.path = Path(config.checkpoint.dir) / PROFILE_DIR / name
        self._trace: profile | None = None
        self._step_record = record_function("")

    def before_step(self, trainer: Trainer) -> None:
        step = trainer.step + 1
        if not self.first_step <= step <= self.last_step:
            return
        if self._trace is None:
            # Without a GPU, tracing CUDA would make Kineto warn that CUPTI is missing.
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            # Without acc_events, torch warns.
            self._trace = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._trace.start()
        self._step_record = record_function(f"step {step}")
        self._step_record.__enter__()

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        if self._trace is not None:
            self._step_record.__exit__(None, None, None)
            if trainer.step == self.last_step:
                trainer.metrics_log.exclude_seconds(self.finish_trace())

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        if not has_failed:
            self.finish_trace()

    def finish_trace(self) -> float:
        """Writes the trace, if one has begun. Returns the seconds that this took.

        If the trace cannot be written, a line says so, and the run continues.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return 0.0

        start = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that the trace includes the kernels of the last step
        trace.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.path))  # compressed, because of the name
            print(f"profile: {self.path}", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"NOTE: {self.path} could not be written: {error}", file=sys.stderr, flush=True)
        return time.perf_counter() - start
