"""Continues a run from its own checkpoint, and lists what a checkpoint records for that."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig, field_types
from megatron_vl.models.build import aux_loss_coefficient
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training import checkpoint
from megatron_vl.training.metrics import MetricsLog, log_rank_0
from megatron_vl.training.optimizer import peak_learning_rates, scheduled_rate
from megatron_vl.training.preflight import START_ADAPTER_KEY, data_order_metadata
from megatron_vl.training.setup import TrainingRun, exit_if_stop_requested
from megatron_vl.training.step import SKIP_REASONS
from megatron_vl.weights.model_digest import AdapterBase
from megatron_vl.weights.run_folder import CheckpointError, saved_checkpoints

_SKIPPED_STEPS_KEY = "skipped_steps"
_FIELDS_KEY = "fields"
_SOURCES_KEY = "sources"
"""Further entries of a checkpoint's ``run.json``, which need not be equal when resuming."""

_RECORDED_SECTIONS = ("model", "fp8", "optimizer")
_RECORDED_FIELDS = ("data.path", "lora.dropout", "steps", "global_batch_size", "dtype", "seed")
_NOT_RECORDED = (
    "model.hf",
    "model.vision_attention",
    "model.window_attention",
    "model.language_attention",
    "optimizer.offload_fraction",
)
"""A checkpoint records the fields of these sections, and these fields, but not the last ones. They say where
something is read or how it is computed, and not what. Other fields of ``data`` come from the loader."""


def restore_run(training_run: TrainingRun) -> None:
    """Resumes from the latest checkpoint, if there is one. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be used. The message says what to do.
        SystemExit: a signal asked a rank to stop, see :func:`exit_if_stop_requested`.
    """
    if training_run.resolved_run.is_resumed:
        _restore_checkpoint(training_run)
    exit_if_stop_requested(training_run.platform)  # building and loading take minutes with large models
    _start_missing_exports(training_run)


def _restore_checkpoint(training_run: TrainingRun) -> None:
    """Restores model, optimizer, loader and counts of the run, and prints what has changed since the save."""
    source_checkpoint = training_run.resolved_run.source_checkpoint
    assert source_checkpoint is not None
    restored_state = checkpoint.load_checkpoint(
        source_checkpoint.path,
        model_chunks=training_run.model_chunks,
        optimizer=training_run.optimizer,
        spec=training_run.spec,
        layout=training_run.layout,
        grid=training_run.grid,
    )

    if restored_state.loader_state is not None:
        try:
            training_run.data_loader.load_state_dict(restored_state.loader_state)
        except ValueError as error:
            restart_command = f"megatron-vl checkpoint restart-data {training_run.config.checkpoint.dir}"
            raise CheckpointError(
                f"{error}. Or keep weights and optimizer and read the data set from its start: run"
                f" `{restart_command}`, then start again"
            ) from error

    training_run.completed_steps = source_checkpoint.step
    training_run.bad_samples = restored_state.bad_sample_counts

    # The notes name fields that may change between two starts. A user who did not mean to change one sees it.
    current_fields = _run_fields(training_run)
    if not restored_state.restarts_data:
        del current_fields["data.path"]  # the loader has refused another data set, wherever it lies
    saved_metadata = checkpoint.read_run_metadata(source_checkpoint.path)
    try:
        training_run.skipped_steps = {
            reason: int(saved_metadata[_SKIPPED_STEPS_KEY].get(reason, 0)) for reason in SKIP_REASONS
        }
        training_run.source_counts = dict(saved_metadata[_SOURCES_KEY])
        change_notes = field_change_notes(
            training_run.config,
            current_fields,
            dict(saved_metadata[_FIELDS_KEY]),
            training_run.completed_steps,
        )
    except (KeyError, TypeError, ValueError) as error:
        error_text = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{source_checkpoint.path / 'run.json'} is damaged: {error_text}") from error

    restart_text = "; the data set is read from its start" if restored_state.restarts_data else ""
    log_rank_0(
        training_run.grid,
        f"resumed at step {source_checkpoint.step} from {training_run.config.checkpoint.dir}{restart_text}",
    )
    for change_note in change_notes:
        log_rank_0(training_run.grid, f"NOTE: {change_note}")


def checkpoint_metadata(training_run: TrainingRun, metrics_log: MetricsLog) -> dict[str, Any]:
    """The entries of a checkpoint's ``run.json`` about the run; layout and files are added by the saver."""
    base_path = str(Path(training_run.config.model.checkpoint).resolve())
    base = AdapterBase(training_run.resolved_run.base_digest, base_path)
    return data_order_metadata(training_run.config, training_run.grid.dp) | {
        _SKIPPED_STEPS_KEY: dict(training_run.skipped_steps),
        **base.entry(),
        START_ADAPTER_KEY: training_run.resolved_run.start_adapter,
        _FIELDS_KEY: _run_fields(training_run),
        _SOURCES_KEY: metrics_log.source_meter.state_dict(),
    }


# --- What has changed since the checkpoint ------------------------------------------------------------------


def _run_fields(training_run: TrainingRun) -> dict[str, Any]:
    """The fields of a run to record. They are complete on ranks that own a loader, of which rank 0 is one."""
    data_loader = training_run.data_loader
    row_settings = data_loader.row_settings if data_loader is not None else {}
    run_fields = recorded_fields(training_run.config, training_run.spec, row_settings)
    if data_loader is not None:
        # Only a run that restarts its data may have others.
        run_fields |= data_loader.model_folder_settings
    return run_fields


def recorded_fields(config: TrainConfig, spec: ModelSpec, row_settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run that decide what it trains, by dotted name, as a checkpoint records them.

    If the model or other fields decide about a field, it has the value that results. Fields without effect
    beside the others are left out.

    Args:
        row_settings: see :attr:`~megatron_vl.data.row_loader.RowLoader.row_settings`.
    """
    fields = {f"data.{name}": value for name, value in row_settings.items()}
    for name in field_types():
        is_recorded = name.partition(".")[0] in _RECORDED_SECTIONS or name in _RECORDED_FIELDS
        if is_recorded and name not in _NOT_RECORDED:
            fields[name] = operator.attrgetter(name)(config)

    part_rates = peak_learning_rates(config)
    fields |= {
        "model.moe_aux_loss": aux_loss_coefficient(spec, config.model),
        "optimizer.vision_lr": part_rates["vision"],
        "optimizer.merger_lr": part_rates["merger"],
    }
    is_used = {
        # With LoRA, a resumed run reads these weights and refuses others, but they may lie elsewhere.
        "model.checkpoint": not config.lora.rank,
        "lora.dropout": config.lora.rank,
        "fp8.vision": config.fp8.recipe != "none",
        "optimizer.vision_lr": part_rates["vision"] is not None,
        "optimizer.merger_lr": part_rates["merger"] is not None,
        "optimizer.min_lr_ratio": config.optimizer.schedule != "constant",
    }
    return {name: value for name, value in fields.items() if is_used.get(name, True)}


def field_change_notes(
    config: TrainConfig, current_fields: dict[str, Any], saved_fields: dict[str, Any], step: int
) -> list[str]:
    """Notes on what a run trains under other fields than its checkpoint was trained with.

    Args:
        current_fields: the run's :func:`recorded_fields`.
        saved_fields: those that the checkpoint records. A field that one of the two leaves out is not named.
        step: the next step, zero-based.
    """
    effective_changes: list[str] = []
    changes_without_effect: list[str] = []
    for name, value in current_fields.items():
        if saved_fields.get(name, value) == value:
            continue
        # Weights come from the checkpoint, and only dropout draws further random numbers.
        has_effect = name != "model.checkpoint" and (name != "seed" or current_fields.get("lora.dropout"))
        field_changes = effective_changes if has_effect else changes_without_effect
        field_changes.append(f"{name} was {saved_fields[name]!r}, is {value!r}")

    change_notes = []
    if effective_changes:
        change_notes.append(f"fields have changed since the checkpoint: {'; '.join(effective_changes)}")
    if changes_without_effect:
        changes_text = "; ".join(changes_without_effect)
        change_notes.append(f"fields without effect on a resumed run have changed: {changes_text}")
    # A checkpoint may come from anybody, with values that no schedule has.
    with contextlib.suppress(TypeError, ValueError, ArithmeticError):
        change_notes += _rate_change_notes(config, saved_fields, step)
    return change_notes


def _rate_change_notes(config: TrainConfig, saved_fields: dict[str, Any], step: int) -> list[str]:
    """A note if the next step has another learning rate than under the saved fields; otherwise empty.

    It is the rate of the first part of the model that is trained: language, vision or merger.
    """
    schedule_fields = {}
    for name in ("min_lr_ratio", "schedule", "warmup_steps"):
        current_value = getattr(config.optimizer, name)
        schedule_fields[name] = saved_fields.get(f"optimizer.{name}", current_value)
    saved_config = dataclasses.replace(
        config,
        steps=saved_fields.get("steps", config.steps),
        optimizer=dataclasses.replace(config.optimizer, **schedule_fields),
    )

    trained_rates = {part: rate for part, rate in peak_learning_rates(config).items() if rate is not None}
    part, peak_rate = next(iter(trained_rates.items()))
    peak_field = "optimizer.lr" if part == "language" else f"optimizer.{part}_lr"
    saved_rate = scheduled_rate(saved_config, step, saved_fields.get(peak_field, peak_rate))
    current_rate = scheduled_rate(config, step, peak_rate)
    if saved_rate == current_rate:
        return []
    return [f"the learning rate goes on at {current_rate:.3e}, and was to be {saved_rate:.3e}"]


def _start_missing_exports(training_run: TrainingRun) -> None:
    """Starts the exports that an earlier start of the run did not finish. Only rank 0 exports."""
    if training_run.hf_exporter is not None:
        run_dir = Path(training_run.config.checkpoint.dir)
        training_run.hf_exporter.enqueue_missing_exports(saved_checkpoints(run_dir))
