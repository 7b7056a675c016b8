"""Traces chosen steps with torch.profiler (section ``profile`` of a run)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_vl.config import TrainConfig
from megatron_vl.system import durable_files

PROFILE_DIR = "profile"
"""The subfolder of ``checkpoint.dir`` for traces."""


class StepProfiler:
    """Traces this rank from the beginning of one step to the end of another, as a validated config says.

    The file is a Chrome trace, which Perfetto and TensorBoard read. Its name has the steps that it covers.
    They are fewer than requested if the run began or ended within them.
    """

    def __init__(self, config: TrainConfig, rank: int) -> None:
        traced_steps = config.profile.steps if rank in config.profile.ranks else None
        self.first_step, self.last_step = traced_steps or (0, 0)
        self.rank = rank
        self.trace_dir = Path(config.checkpoint.dir) / PROFILE_DIR
        self._running_trace: profile | None = None
        self._step_record: record_function | None = None
        self._first_traced = self._last_traced = 0

    def begin_step(self, step: int) -> None:
        """Call this before ``step`` (counted from 1) begins."""
        if not self.first_step <= step <= self.last_step:
            return
        if self._running_trace is None:
            self._first_traced = step
            # Without acc_events, torch warns.
            self._running_trace = profile(activities=_profiler_activities(), acc_events=True)
            self._running_trace.start()

        self._step_record = record_function(f"step {step}")
        self._step_record.__enter__()

    def end_step(self, step: int) -> float:
        """Call this when ``step`` is done. Returns the seconds that it took to write the trace, else 0."""
        if self._running_trace is None:
            return 0.0
        if self._step_record is not None:
            self._step_record.__exit__(None, None, None)
            self._step_record, self._last_traced = None, step
        return self.finish_trace() if step >= self.last_step else 0.0

    def finish_trace(self) -> float:
        """Writes the trace, if one has begun. Returns the seconds that this took.

        If the trace cannot be written, a line says so, and the run continues.
        """
        finished_trace, self._running_trace = self._running_trace, None
        if finished_trace is None:
            return 0.0

        start_time = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # so that the trace includes the kernels of the last step
        finished_trace.stop()
        file_name = f"rank_{self.rank:05d}_steps_{self._first_traced}_to_{self._last_traced}.pt.trace.json.gz"
        try:
            self._write_trace(finished_trace, self.trace_dir / file_name)
            print(f"profile: {self.trace_dir / file_name}", flush=True)
        except (OSError, RuntimeError) as error:
            print(
                f"NOTE: {self.trace_dir / file_name} could not be written: {error}",
                file=sys.stderr,
                flush=True,
            )
        return time.perf_counter() - start_time

    def drop_trace(self) -> None:
        """Ends a trace without writing it."""
        dropped_trace, self._running_trace = self._running_trace, None
        if dropped_trace is not None:
            dropped_trace.stop()

    def _write_trace(self, finished_trace: profile, trace_path: Path) -> None:
        trace_path.parent.mkdir(parents=True, exist_ok=True)
        # torch compresses the file if its name ends with .gz.
        partial_path = trace_path.with_name(
            f".{trace_path.name.removesuffix('.gz')}{durable_files.PARTIAL_SUFFIX}.gz"
        )
        finished_trace.export_chrome_trace(str(partial_path))
        durable_files.publish_file(partial_path, trace_path)


def _profiler_activities() -> list[ProfilerActivity]:
    """The activities to trace. Without a GPU, tracing CUDA would make Kineto warn that CUPTI is missing."""
    gpu_activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu_activities]
