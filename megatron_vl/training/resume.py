"""Continues a run from its own checkpoint, and lists what a checkpoint records for that."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_vl.config import video_rule
from megatron_vl.data.sample.thinking import ThinkingRule
from megatron_vl.models.build import aux_loss_coefficient
from megatron_vl.training import checkpoint
from megatron_vl.training.metrics import MetricsLog, log_rank_0
from megatron_vl.training.optimizer import SCHEDULE_KEY, schedule_change_note, schedule_fields
from megatron_vl.training.preflight import BASE_DIGEST_KEY, START_ADAPTER_KEY, data_order_metadata
from megatron_vl.training.setup import TrainingRun, exit_if_stop_requested
from megatron_vl.training.step import SKIP_REASONS
from megatron_vl.weights.run_folder import saved_checkpoints

_SKIPPED_STEPS_KEY = "skipped_steps"
_AUX_LOSS_KEY = "moe_aux_loss"
_THINKING_KEY = "thinking_rule"
_SOURCES_KEY = "sources"
_MOMENTS_DTYPE_KEY = "moments_dtype"
"""Further entries of a checkpoint's ``run.json``, which need not be equal when resuming."""


def restore_run(training_run: TrainingRun) -> None:
    """Resumes from the chosen checkpoint, if there is one, and prints which one was chosen. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be used. The message says what to do.
        SystemExit: a signal asked a rank to stop, see :func:`exit_if_stop_requested`.
    """
    for start_note in training_run.resolved_run.run_start.start_notes:
        log_rank_0(training_run.grid, start_note)
    if training_run.resolved_run.is_resumed:
        _restore_checkpoint(training_run)
    exit_if_stop_requested(training_run.platform)  # building and loading take minutes with large models
    _start_missing_exports(training_run)


def _restore_checkpoint(training_run: TrainingRun) -> None:
    """Restores model, optimizer, loader and counts of the run, and prints what has changed since the save."""
    run_start = training_run.resolved_run.run_start
    assert run_start.source_checkpoint is not None
    restored_state = checkpoint.load_checkpoint(
        run_start.source_checkpoint.path,
        model_chunks=training_run.model_chunks,
        optimizer=training_run.optimizer,
        spec=training_run.spec,
        layout=training_run.layout,
        grid=training_run.grid,
        run_metadata=data_order_metadata(training_run.config, training_run.grid.dp),
        restart_data=run_start.restarts_data,
    )

    # Only ranks that own a loader have states. There are none if the data set is read from its start.
    if (
        training_run.data_loader is not None
        and restored_state.loader_states is not None
        and restored_state.loader_states.num_ranks
    ):
        _load_loader_state(training_run, restored_state.loader_states)

    training_run.completed_steps = run_start.source_checkpoint.step
    training_run.bad_samples = _continued_bad_sample_counts(training_run, restored_state.bad_sample_counts)

    # The notes name fields that may change between two starts. A user who did not mean to change one sees it.
    saved_metadata = checkpoint.read_run_metadata(run_start.source_checkpoint.path)
    try:
        training_run.skipped_steps = {
            reason: int(saved_metadata[_SKIPPED_STEPS_KEY][reason]) for reason in SKIP_REASONS
        }
        training_run.source_counts = dict(saved_metadata[_SOURCES_KEY])
        change_notes = [
            _aux_loss_change_note(training_run, saved_metadata),
            _thinking_change_note(training_run, saved_metadata),
            _moments_change_note(training_run, saved_metadata),
            schedule_change_note(
                training_run.config, saved_metadata[SCHEDULE_KEY], training_run.completed_steps
            ),
        ]
    except (KeyError, TypeError, ValueError) as error:
        error_text = f"{type(error).__name__}: {error}"
        raise checkpoint.CheckpointError(
            f"{run_start.source_checkpoint.path / 'run.json'} is damaged: {error_text}"
        ) from error

    log_rank_0(
        training_run.grid,
        f"resumed at step {training_run.completed_steps} from {training_run.config.checkpoint.dir}",
    )
    for change_note in filter(None, change_notes):
        log_rank_0(training_run.grid, f"NOTE: {change_note}")


def checkpoint_metadata(training_run: TrainingRun, metrics_log: MetricsLog) -> dict[str, Any]:
    """The entries of a checkpoint's ``run.json`` about the run; layout and files are added by the saver."""
    return data_order_metadata(training_run.config, training_run.grid.dp) | {
        _SKIPPED_STEPS_KEY: dict(training_run.skipped_steps),
        "video_rule": video_rule(training_run.config.data, training_run.spec.vision.video_timestamps),
        _THINKING_KEY: dataclasses.asdict(ThinkingRule.from_data_config(training_run.config.data)),
        BASE_DIGEST_KEY: training_run.resolved_run.base_digest,
        START_ADAPTER_KEY: training_run.resolved_run.start_adapter,
        _MOMENTS_DTYPE_KEY: training_run.config.optimizer.moments_dtype,
        SCHEDULE_KEY: schedule_fields(training_run.config),
        _AUX_LOSS_KEY: aux_loss_coefficient(training_run.spec, training_run.config.model)
        if training_run.spec.language.moe
        else None,
        _SOURCES_KEY: metrics_log.source_meter.state_dict(),
    }


# --- What has changed since the checkpoint ------------------------------------------------------------------


def _moments_change_note(training_run: TrainingRun, saved_metadata: dict[str, Any]) -> str:
    """A note if Adam's moments were saved in another type; otherwise empty."""
    saved_dtype = saved_metadata[_MOMENTS_DTYPE_KEY]
    current_dtype = training_run.config.optimizer.moments_dtype
    if saved_dtype == current_dtype:
        return ""
    conversion_text = (
        "rounded to the nearest bfloat16" if current_dtype == "bfloat16" else "converted without loss"
    )
    return (
        f"Adam's moments were saved in {saved_dtype} and are {conversion_text}, because"
        f" optimizer.moments_dtype is {current_dtype} from here on"
    )


def _thinking_change_note(training_run: TrainingRun, saved_metadata: dict[str, Any]) -> str:
    """A note if the rule for the loss of answers with thinking has changed; otherwise empty.

    A loader that continues in its data refuses such a change. One that restarts its data does not.
    """
    if training_run.data_loader is None or not training_run.data_loader.thinking_rule:
        return ""

    saved_rules = saved_metadata[_THINKING_KEY]
    changed_fields = [
        f"data.{name} was {saved_rules[name]}, is {rule}"
        for name, rule in training_run.data_loader.thinking_rule.items()
        if saved_rules[name] != rule
    ]
    if not changed_fields:
        return ""
    return f"answers with thinking bear loss under another rule from here on: {'; '.join(changed_fields)}"


def _aux_loss_change_note(training_run: TrainingRun, saved_metadata: dict[str, Any]) -> str:
    """A note if the coefficient of the experts' load-balancing loss has changed; otherwise empty."""
    if training_run.spec.language.moe is None or training_run.config.model.freeze_language:
        return ""
    saved_coefficient = saved_metadata[_AUX_LOSS_KEY]
    current_coefficient = aux_loss_coefficient(training_run.spec, training_run.config.model)
    if saved_coefficient == current_coefficient:
        return ""
    return (
        f"the experts' load-balancing loss had the coefficient {saved_coefficient}; from here on it is"
        f" {current_coefficient}"
    )


# --- Data and exports ---------------------------------------------------------------------------------------


def _load_loader_state(training_run: TrainingRun, loader_states: checkpoint.LoaderStates) -> None:
    """Lets the loader continue where the checkpoint stopped in the data.

    Raises:
        CheckpointError: the loader refuses the state. The message says how to restart the data instead.
    """
    try:
        training_run.data_loader.load_state_dict(
            loader_states.read_state(training_run.grid.dp_rank % loader_states.num_ranks),
            loader_states.read_state,
        )
    except ValueError as error:
        source_checkpoint = training_run.resolved_run.run_start.source_checkpoint
        earlier_restart = source_checkpoint.lineage.data_restart if source_checkpoint is not None else None
        restart_option = "--checkpoint.restart_data true"
        restart_options = (
            f"{restart_option} --checkpoint.attempt {earlier_restart.attempt + 1}"
            if earlier_restart
            else restart_option
        )
        if restart_option in str(error):
            raise checkpoint.CheckpointError(str(error).replace(restart_option, restart_options)) from error
        raise checkpoint.CheckpointError(
            f"{error}. Or keep weights and optimizer and read the data set from its start: {restart_options}"
        ) from error


def _continued_bad_sample_counts(
    training_run: TrainingRun, saved_counts: dict[str, Any] | None
) -> dict[str, Any] | None:
    """The checkpoint's counts of bad samples; None if the run continues with another data set.

    Collective if the data was restarted.
    """
    if saved_counts is None or not training_run.resolved_run.run_start.restarts_data:
        return saved_counts
    is_same_dataset = [
        training_run.data_loader is not None
        and training_run.data_loader.is_same_dataset(saved_counts.get("dataset"))
    ]
    if training_run.grid.world_size > 1:
        dist.broadcast_object_list(is_same_dataset)  # rank 0 owns a loader
    return saved_counts if is_same_dataset[0] else None


def _start_missing_exports(training_run: TrainingRun) -> None:
    """Starts the exports that an earlier start of the run did not finish. Only rank 0 exports."""
    run_start = training_run.resolved_run.run_start
    if training_run.hf_exporter is None or run_start.source_checkpoint is None:
        return

    ancestor_checkpoints = []
    for saved_checkpoint in saved_checkpoints(Path(training_run.config.checkpoint.dir)):
        if run_start.lineage.contains_checkpoint(
            run_start.source_checkpoint.step, saved_checkpoint.checkpoint_point
        ):
            ancestor_checkpoints.append(saved_checkpoint)
    training_run.hf_exporter.enqueue_missing_exports(sorted(ancestor_checkpoints, key=lambda c: c.step))
