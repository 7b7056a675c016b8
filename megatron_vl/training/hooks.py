"""What a run does once in a while, each in a hook of the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.system import progress
from megatron_vl.training.evaluation import Evaluator
from megatron_vl.training.report.profiling import StepProfiler
from megatron_vl.training.report.sinks import is_evaluated
from megatron_vl.training.rows.batch_broadcast import StepBatch
from megatron_vl.training.state.checkpoint import CheckpointSaver
from megatron_vl.training.state.export_hf import HfExporter
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


class Profile(Hook):
    """Traces the steps that the run's section ``profile`` names."""

    def __init__(self, step_profiler: StepProfiler) -> None:
        self.step_profiler = step_profiler

    def before_step(self, trainer: Trainer) -> None:
        self.step_profiler.begin_step(trainer.step + 1)

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        trainer.metrics_log.exclude_seconds(self.step_profiler.end_step(trainer.step))

    def end(self, trainer: Trainer, has_failed: bool) -> None:
        if has_failed:
            self.step_profiler.drop_trace()
        else:
            self.step_profiler.finish_trace()


class SaveCheckpoints(Hook):
    """Saves every ``checkpoint.interval`` steps and at the end, and deletes old checkpoints."""

    def __init__(self, saver: CheckpointSaver, hf_exporter: HfExporter | None) -> None:
        self.saver, self.hf_exporter = saver, hf_exporter

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        self.saver.note_step(step_result.is_updated)
        interval = trainer.config.checkpoint.interval
        if trainer.is_at_end or interval and trainer.step % interval == 0:
            trainer.save()

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


class Evaluate(Hook):
    """Evaluates every ``eval.interval`` steps: before the first step, and at the end."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator

    def begin(self, trainer: Trainer) -> None:
        # Later losses are compared with that of the start weights. An evaluation that a kill or a stop
        # prevented, even the last one, is made now.
        run_dir = trainer.config.checkpoint.dir
        if trainer.step == 0 or (
            run_dir and not broadcast_from_rank_0(lambda: is_evaluated(Path(run_dir), trainer.step))
        ):
            self._evaluate_if_due(trainer)

    def after_step(self, trainer: Trainer, step_batch: StepBatch, step_result: StepResult) -> None:
        # A run that was asked to stop has little time left.
        if not trainer.stop_requested or trainer.step == trainer.last_step:
            self._evaluate_if_due(trainer)

    def _evaluate_if_due(self, trainer: Trainer) -> None:
        if self.evaluator.is_due(trainer.step, trainer.last_step):
            progress.enter_phase(progress.RUNNING_EVALUATION)
            validation_result = self.evaluator.evaluate(trainer.model_chunks)
            trainer.metrics_log.log_evaluation(trainer.step, validation_result)
