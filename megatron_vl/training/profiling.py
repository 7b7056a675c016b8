"""Traces chosen steps with torch.profiler (section ``profile`` of a run)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_vl import durable
from megatron_vl.config import TrainConfig

FOLDER = "profile"
"""The subfolder of ``checkpoint.dir`` for traces, if ``profile.dir`` is empty."""


class StepProfiler:
    """Traces this rank from the beginning of one step to the end of another.

    The file is a Chrome trace, which Perfetto and TensorBoard read. Its name says which steps it holds. These
    are fewer than requested if the run began or ended within them.

    Args:
        config: a validated run, whose ``profile`` gives steps, ranks and folder.
        rank: rank of this process.
    """

    def __init__(self, config: TrainConfig, rank: int) -> None:
        chosen = config.profile.steps if rank in config.profile.ranks else None
        self.first, self.last = chosen or (0, 0)
        self.rank = rank
        self.folder = Path(config.profile.dir or Path(config.checkpoint.dir) / FOLDER)
        self._trace: profile | None = None
        self._step: record_function | None = None
        self._began = self._ended = 0

    def begin(self, step: int) -> None:
        """Call this before ``step`` (counted from 1) begins."""
        if not self.first <= step <= self.last:
            return
        if self._trace is None:
            self._began = step
            self._trace = profile(activities=_activities(), acc_events=True)  # without acc_events, it warns
            self._trace.start()

        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def end(self, step: int) -> float:
        """Call this when ``step`` is done. Returns the seconds that it took to write the trace, else 0."""
        if self._trace is None:
            return 0.0
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step, self._ended = None, step
        return self.finish() if step >= self.last else 0.0

    def finish(self) -> float:
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
        name = f"rank_{self.rank:05d}_steps_{self._began}_to_{self._ended}.pt.trace.json.gz"
        try:
            self._write(trace, self.folder / name)
            print(f"profile: {self.folder / name}", flush=True)
        except (OSError, RuntimeError) as error:
            print(f"NOTE: {self.folder / name} could not be written: {error}", file=sys.stderr, flush=True)
        return time.perf_counter() - start

    def drop(self) -> None:
        """Ends a trace without writing it."""
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()

    def _write(self, trace: profile, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # torch compresses the file if its name ends with .gz.
        partial = path.with_name(f".{path.name.removesuffix('.gz')}{durable.PARTIAL}.gz")
        trace.export_chrome_trace(str(partial))
        durable.put(partial, path)


def _activities() -> list[ProfilerActivity]:
    """The activities to trace. Without a GPU, tracing CUDA would make Kineto warn that CUPTI is missing."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]
