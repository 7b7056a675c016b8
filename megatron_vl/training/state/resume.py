"""The fields of a run that a checkpoint records, and what has changed since it was saved."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from typing import Any

from megatron_vl.config import TrainConfig, field_types
from megatron_vl.models.build import aux_loss
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.optimizer import peak_learning_rates, scheduled_rate

_RECORDED_SECTIONS = ("model", "mtp", "fp8", "optimizer")
_RECORDED_FIELDS = (
    *("data.path", "lora.adapter", "lora.dropout", "steps"),
    *("global_batch_size", "dtype", "seed"),
)
_NOT_RECORDED = ("model.hf", "model.attention", "optimizer.offload_fraction")
"""A checkpoint records the fields of these sections, and these fields, but not the last ones. They say where
something is read or how it is computed, and not what. Other fields of ``data`` come from the loader."""


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
        "model.moe_aux_loss": aux_loss(spec, config.model)[0],
        "model.rope_scaling": spec.language.yarn and spec.language.yarn.as_fields(),
        "optimizer.vision_lr": part_rates["vision"],
        "optimizer.merger_lr": part_rates["merger"],
    }
    is_used = {
        # With LoRA, a resumed run reads these weights and refuses others, but they may lie elsewhere.
        "model.checkpoint": not config.lora.rank,
        "lora.adapter": config.lora.rank,
        "lora.dropout": config.lora.rank,
        "mtp.trains": config.mtp.loss,
        "fp8.vision": config.fp8.recipe != "none",
        "optimizer.vision_lr": part_rates["vision"] is not None,
        "optimizer.merger_lr": part_rates["merger"] is not None,
        "optimizer.min_lr_ratio": config.optimizer.schedule != "constant",
        "optimizer.decay_steps": config.optimizer.schedule == "wsd",
    }
    return {name: value for name, value in fields.items() if is_used.get(name, True)}


def field_change_notes(
    config: TrainConfig, current_fields: dict[str, Any], saved_fields: dict[str, Any], step: int
) -> list[str]:
    """Notes on what a run trains under other fields than its checkpoint was trained with.

    Args:
        current_fields: the run's :func:`recorded_fields`.
        saved_fields: those that the checkpoint records. A field that one of the two leaves out is not named,
            apart from YaRN, which no checkpoint had before it was a field.
        step: the next step, zero-based.
    """
    saved_fields = {"model.rope_scaling": None, **saved_fields}
    effective_changes: list[str] = []
    changes_without_effect: list[str] = []
    for name, value in current_fields.items():
        # Of the chat template, its digest is named.
        if saved_fields.get(name, value) == value or name == "data.chat_template":
            continue
        # Weights come from the checkpoint, and only dropout draws further random numbers.
        has_effect = name not in ("model.checkpoint", "lora.adapter")
        if name == "seed":
            has_effect = bool(current_fields.get("lora.dropout"))
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
    for name in ("min_lr_ratio", "schedule", "warmup_steps", "decay_steps"):
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
    return [f"the learning rate continues at {current_rate:.3e}, and not at {saved_rate:.3e}"]
