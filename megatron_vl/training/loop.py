"""The loop over steps: read a batch, train on it, and once in a while log, save, evaluate or trace."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megatron_vl import progress
from megatron_vl.errors import UserError
from megatron_vl.models.adapters import seed_dropout
from megatron_vl.parallel import failures
from megatron_vl.parallel.process_groups import broadcast_from_rank_0
from megatron_vl.signals import requested_stop_signal
from megatron_vl.training import checkpoint
from megatron_vl.training.batch_broadcast import BatchBroadcast, StepBatch
from megatron_vl.training.metrics import MetricsLog, log_rank_0
from megatron_vl.training.metrics_sinks import is_evaluated
from megatron_vl.training.optimizer import PartLearningRates, set_learning_rates
from megatron_vl.training.resume import checkpoint_metadata
from megatron_vl.training.setup import TrainingRun, print_run_summary
from megatron_vl.training.source_counts import SourceCounts
from megatron_vl.training.step import NO_GRADIENT, NO_LOSS_TOKENS, NOT_FINITE, StepResult, train_step
from megatron_vl.weights.run_folder import saved_checkpoints

MAX_SKIPPED_STEPS = 10
"""A run stops after this many consecutive steps that were skipped. At the end of a run, two are enough."""


class TrainingStopped(UserError, RuntimeError):
    """The run cannot continue. The message says why."""


def run_steps(training_run: TrainingRun) -> None:
    """Runs the remaining steps of a run, and saves the last one. Collective.

    It raises TrainingStopped or CheckpointError if the run cannot continue.
    """
    config, last_step = training_run.config, training_run.resolved_run.last_step
    print_run_summary(training_run)
    training_run.metrics_log = _open_metrics_log(training_run)
    batch_broadcast = BatchBroadcast(
        training_run.grid,
        training_run.platform,
        training_run.data_loader,
        config.global_batch_size // training_run.grid.dp,
        vision_spec=training_run.spec.vision,
    )
    consecutive_skips: list[str] = []
    stop_requested = False

    # The weights that a new run starts from are evaluated too. Later losses are compared with theirs. An
    # evaluation that a kill or a stop prevented, be it the last one, is made now.
    run_dir, first_step = Path(config.checkpoint.dir), training_run.completed_steps
    if first_step == 0 or (
        training_run.evaluator is not None
        and config.checkpoint.dir
        and not broadcast_from_rank_0(lambda: is_evaluated(run_dir, first_step))
    ):
        evaluate_if_due(training_run)

    while training_run.completed_steps < last_step and not stop_requested:
        step_result = _run_step(training_run, batch_broadcast)
        stop_requested, skip_reason = step_result.stop_requested, step_result.skip_reason
        if skip_reason != NO_GRADIENT:  # a few rows without images, which are harmless
            consecutive_skips = [*consecutive_skips, skip_reason] if skip_reason else []

        # A run that cannot continue saves nothing more, so that its last checkpoint is a good one.
        _stop_if_unrecoverable(training_run, step_result, consecutive_skips)
        if training_run.checkpoint_saver is not None:
            training_run.checkpoint_saver.note_step(step_result.is_updated)
        is_last_step = training_run.completed_steps == last_step or stop_requested
        if config.checkpoint.dir and (
            is_last_step or _is_due(training_run.completed_steps, config.checkpoint.interval)
        ):
            save_checkpoint(training_run)

        # A run that was asked to stop has little time left.
        if not stop_requested or training_run.completed_steps == last_step:
            evaluate_if_due(training_run)

    _finish_run(training_run, stop_requested)


def _run_step(training_run: TrainingRun, batch_broadcast: BatchBroadcast) -> StepResult:
    """Reads a batch, trains on it, and logs the step if its line is due. Collective."""
    config, checkpoint_saver = training_run.config, training_run.checkpoint_saver
    progress.enter_phase(progress.LOADING_ROWS, training_run.completed_steps + 1)
    training_run.step_profiler.begin_step(training_run.completed_steps + 1)
    step_batch = batch_broadcast.next_batch()
    learning_rates = set_learning_rates(training_run.optimizer, config, training_run.completed_steps)
    local_source_counts = None
    if training_run.blend_sources:
        local_source_counts = SourceCounts.from_rows(
            step_batch.source_loss_tokens, len(training_run.blend_sources)
        )
    if config.lora.dropout:
        seed_dropout(config.seed, training_run.completed_steps)

    # Every rank learns with the loss whether any rank failed to save, or was asked to stop.
    step_result = train_step(
        training_run.model_chunks,
        training_run.optimizer,
        step_batch.rows,
        training_run.grid,
        config.data.seq_len,
        has_failed=checkpoint_saver is not None and checkpoint_saver.save_error() is not None,
        stop_requested=bool(requested_stop_signal()),
        local_source_counts=local_source_counts,
    )
    _count_step(training_run, step_batch, step_result, learning_rates)
    return step_result


def _count_step(
    training_run: TrainingRun,
    step_batch: StepBatch,
    step_result: StepResult,
    learning_rates: PartLearningRates,
) -> None:
    """Counts a step, which is done whether or not its update was skipped, and logs it if that is due."""
    metrics_log = training_run.metrics_log
    assert metrics_log is not None
    training_run.completed_steps += 1
    progress.note_step_done()
    metrics_log.exclude_seconds(training_run.step_profiler.end_step(training_run.completed_steps))
    metrics_log.add_step(step_batch, step_result.source_counts)
    if step_result.skip_reason:
        training_run.skipped_steps[step_result.skip_reason] += 1

    is_last_step = training_run.completed_steps == training_run.resolved_run.last_step
    is_line_due = training_run.completed_steps % training_run.config.log.interval == 0
    if is_line_due or is_last_step or step_result.stop_requested or step_result.skip_reason:
        metrics_log.log_step(
            training_run.completed_steps, step_result, learning_rates, training_run.skipped_steps
        )


def _open_metrics_log(training_run: TrainingRun) -> MetricsLog:
    metrics_log = MetricsLog(
        training_run.config,
        training_run.spec,
        training_run.grid,
        training_run.platform,
        training_run.blend_sources,
    )
    metrics_log.source_meter.load_state_dict(training_run.source_counts)
    if training_run.bad_samples is not None:
        metrics_log.bad_sample_meter.load_state_dict(training_run.bad_samples)
    return metrics_log


def _is_due(step: int, interval: int) -> bool:
    """Whether something that happens every ``interval`` steps is due after ``step``. 0: it never is."""
    return interval > 0 and step % interval == 0


def save_checkpoint(training_run: TrainingRun) -> None:
    """Starts to save a checkpoint of the current step, and waits for it unless saves run in the background.

    Collective.
    """
    assert training_run.checkpoint_saver is not None and training_run.metrics_log is not None
    metrics_log, data_loader = training_run.metrics_log, training_run.data_loader
    progress.enter_phase(progress.SAVING_CHECKPOINT)
    bad_sample_counts, unlogged_counts = metrics_log.bad_sample_state()

    def take_run_snapshot() -> checkpoint.CheckpointSnapshot:
        return checkpoint.take_snapshot(
            training_run.completed_steps,
            model_chunks=training_run.model_chunks,
            optimizer=training_run.optimizer,
            spec=training_run.spec,
            layout=training_run.layout,
            grid=training_run.grid,
            loader_state=data_loader.state_dict() if training_run.grid.rank == 0 else None,
            run_metadata=checkpoint_metadata(training_run, metrics_log) | {"bad_samples": bad_sample_counts},
            unlogged_counts=unlogged_counts,
        )

    training_run.checkpoint_saver.start_save(take_run_snapshot, training_run.completed_steps)
    if not training_run.config.checkpoint.background:
        training_run.checkpoint_saver.wait_until_saved()


def evaluate_if_due(training_run: TrainingRun) -> None:
    """Evaluates the current weights if an evaluation is due. Collective."""
    evaluator, step = training_run.evaluator, training_run.completed_steps
    if evaluator is not None and evaluator.is_due(step, training_run.resolved_run.last_step):
        assert training_run.metrics_log is not None
        progress.enter_phase(progress.RUNNING_EVALUATION)
        training_run.metrics_log.log_evaluation(step, evaluator.evaluate(training_run.model_chunks))


def _finish_run(training_run: TrainingRun, stop_requested: bool) -> None:
    """Waits until all files are written, and prints which checkpoints exist. Collective."""
    progress.enter_phase(progress.SAVING_CHECKPOINT)
    training_run.step_profiler.finish_trace()
    if training_run.checkpoint_saver is not None:
        training_run.checkpoint_saver.wait_until_saved()
        # After a signal, the next start deletes them, once its first step is done.
        if training_run.completed_steps == training_run.resolved_run.last_step:
            training_run.checkpoint_saver.delete_old_checkpoints()

    progress.enter_phase(progress.ENDING_RUN)
    dist.barrier()  # no rank ends before rank 0 has named the checkpoint
    run_dir = training_run.config.checkpoint.dir
    if run_dir and training_run.grid.rank == 0:  # other nodes may see an older state of the folder
        steps = [saved.step for saved in saved_checkpoints(Path(run_dir))]
        print(f"checkpoints in {run_dir}: {steps}", flush=True)
    if stop_requested and training_run.completed_steps < training_run.resolved_run.last_step:
        log_rank_0(
            training_run.grid,
            f"a signal stopped the run after step {training_run.completed_steps} of"
            f" {training_run.config.steps}; "
            + ("start it again to continue" if run_dir else "nothing is saved, as checkpoint.dir is empty"),
        )
    failures.stop_watching()


# --- Why a run cannot continue ------------------------------------------------------------------------------


def _stop_if_unrecoverable(
    training_run: TrainingRun, step_result: StepResult, consecutive_skips: list[str]
) -> None:
    """Raises TrainingStopped, on all ranks at once, if data, weights or checkpoints are of no use."""
    assert training_run.metrics_log is not None
    # More than data.max_bad_share of the samples could not be used. This is equal on all ranks.
    if bad_sample_problem := training_run.metrics_log.bad_sample_meter.stop_reason():
        run_dir = training_run.config.checkpoint.dir
        list_name = Path(run_dir) / "quarantine.jsonl" if run_dir else "a run with checkpoint.dir"
        raise TrainingStopped(f"{bad_sample_problem}; {list_name} lists them")

    # At the end of the run, two skipped steps are enough. One may be chance, but nobody looks at the skipped
    # steps of a run that seems to have ended well.
    is_last_step = training_run.completed_steps == training_run.config.steps
    if len(consecutive_skips) >= (2 if is_last_step else MAX_SKIPPED_STEPS):
        raise TrainingStopped(skipped_steps_message(consecutive_skips, training_run.completed_steps))

    if step_result.any_rank_failed:
        raise TrainingStopped(_save_failure_message(training_run))


def skipped_steps_message(skip_reasons: list[str], step: int) -> str:
    """The message of a run that ends because its last steps were all skipped for ``skip_reasons``."""
    steps_text = f"in {len(skip_reasons)} steps in a row, the last one step {step}"
    reason_texts = {
        NOT_FINITE: ("loss or gradient was not finite", ""),
        NO_LOSS_TOKENS: (
            "no token bore loss",
            "; only answers of the assistant do, so look for them in the data set",
        ),
    }
    found = [texts for reason, texts in reason_texts.items() if reason in skip_reasons]
    return f"{' or '.join(text for text, _ in found)} {steps_text}{found[0][1]}"


def _save_failure_message(training_run: TrainingRun) -> str:
    """Why a checkpoint could not be written, as reported by the rank that failed."""
    checkpoint_saver = training_run.checkpoint_saver
    own_error = checkpoint_saver.save_error() if checkpoint_saver is not None else None
    if own_error is None and (reported_failure := failures.first_failure_message()):
        return reported_failure
    latest_text = checkpoint.last_good_text(Path(training_run.config.checkpoint.dir))
    return f"{own_error or 'another rank could not write its checkpoint'}; {latest_text}"
