"""What a run does once in a while, each in a hook of the trainer.

:class:`~megatron_vl.training.evaluation.Evaluate` is another one.
"""

import contextlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_vl.config import TrainConfig
from megatron_vl.system import progress, progress_bar
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.state.export_hf import HfExporter
from megatron_vl.training.state.save import CheckpointSaver
from megatron_vl.training.step import StepResult

type Trainer = Any
"""A :class:`~megatron_vl.training.trainer.Trainer`, whose module imports this one."""


class Hook:
    """Called by the trainer on every rank, one hook after the other. Its methods may be collective."""

    def begin(self, trainer: Trainer) -> None:
        """Before the first step of this start, which may have none."""

    def before_step(self, trainer: Trainer) -> None:
        """Before the rows of step ``trainer.step + 1`` are read."""

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        """After step ``trainer.step`` is counted and logged."""

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        """After the last step of this start. If it has failed, only this rank may be here."""


class ShowProgress(Hook):
    """Shows how many steps are done and how much time is left, in a log once a minute; on rank 0."""

    def begin(self, trainer: Trainer) -> None:
        self.on_end = contextlib.ExitStack()
        self.advance = self.on_end.enter_context(
            progress_bar.progress(
                trainer.last_step, "steps", "training", done=trainer.step, line_interval_s=60.0
            )
        )

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        self.advance(1)

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        self.on_end.close()


class SaveCheckpoints(Hook):
    """Saves every ``checkpoint.interval`` steps and at the end, and deletes old checkpoints."""

    def __init__(self, saver: CheckpointSaver, hf_exporter: HfExporter | None) -> None:
        self.saver, self.hf_exporter = saver, hf_exporter

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        self.saver.note_step(step_result.is_updated)
        if self.hf_exporter is not None:
            self.hf_exporter.advance()
        interval = trainer.config.checkpoint.interval
        if trainer.is_at_end or interval and trainer.step % interval == 0:
            trainer.save()
        elif interval and trainer.step == trainer.first_step + 1 and trainer.platform.name == "cuda":
            self.saver.reserve_memory(trainer.take_snapshot())  # the optimizer has its state now

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        if has_failed:
            if self.hf_exporter is not None:
                self.hf_exporter.stop_exports()
            return
        progress.enter_phase(progress.SAVING_CHECKPOINT)
        self.saver.wait_until_saved()
        # After a signal, the next start deletes them, once its first step is done.
        if trainer.step == trainer.last_step:
            self.saver.delete_old_checkpoints()


class Profile(Hook):
    """Traces this rank with torch.profiler from the beginning of one step to the end of another (section
    ``profile``), as a validated config says.

    The file is a Chrome trace, which Perfetto and TensorBoard read. It has fewer steps than requested if the
    run began or ended within them.
    """

    def __init__(self, config: TrainConfig, rank: int) -> None:
        self.first_step, self.last_step = (rank in config.profile.ranks and config.profile.steps) or (0, 0)
        name = f"rank_{rank:05d}_steps_{self.first_step}_to_{self.last_step}.pt.trace.json.gz"
        self.path = Path(config.checkpoint.dir) / "profile" / name
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
