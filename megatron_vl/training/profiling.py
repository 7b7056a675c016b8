"""Traces of chosen steps by torch.profiler (the section ``profile`` of a run)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_vl import durable
from megatron_vl.config import TrainConfig

FOLDER = "profile"
"""Where traces go in the folder of the checkpoints."""


class StepProfiler:
    """Traces this rank from the beginning of one step to the end of another.

    The file is a Chrome trace, which Perfetto and TensorBoard read. Its name says which steps are in it:
    fewer than were asked for where the run began, or ended, between them.

    Args:
        config: steps, ranks and folder; those of :func:`megatron_vl.config.validate`.
        rank: this process's.
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
        """Called before anything of ``step`` (from 1) is done."""
        if not self.first <= step <= self.last:
            return
        if self._trace is None:
            self._began = step
            self._trace = profile(activities=_activities(), acc_events=True)  # one cycle; else it warns
            self._trace.start()

        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def end(self, step: int) -> float:
        """Called when ``step`` is done. After the last step to trace, returns the seconds that writing
        took."""
        if self._trace is None:
            return 0.0
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step, self._ended = None, step
        return self.finish() if step >= self.last else 0.0

    def finish(self) -> float:
        """Writes what was traced, where a trace has begun. Returns the seconds that it took.

        A folder that cannot be written costs the trace, not the run.
        """
        trace, self._trace = self._trace, None
        if trace is None:
            return 0.0

        start = time.perf_counter()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels of the last step are in the trace, too
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
        partial = path.with_name(
            f".{path.name.removesuffix('.gz')}{durable.PARTIAL}.gz"
        )  # torch packs by suffix
        trace.export_chrome_trace(str(partial))
        durable.put(partial, path)


def _activities() -> list[ProfilerActivity]:
    """Without GPUs, Kineto would look for CUPTI and complain."""
    gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    return [ProfilerActivity.CPU, *gpu]
