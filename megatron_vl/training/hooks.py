"""What a run does once in a while, each in a hook of the trainer.

:class:`~megatron_vl.training.evaluation.Evaluate` and :class:`~megatron_vl.training.report.profiling.Profile`
are two others.
"""

from __future__ import annotations

import contextlib
from typing import Any

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
        bar = progress_bar.progress(
            trainer.last_step, "steps", "training", done=trainer.step, line_interval_s=60.0
        )
        self.advance = self.on_end.enter_context(bar)

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
