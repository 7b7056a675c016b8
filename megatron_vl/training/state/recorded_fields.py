"""The fields of a run that a checkpoint records, and what has changed since it was saved."""

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
"""Recorded beside the sections. Other fields of ``data`` come from the loader."""
_NOT_RECORDED = ("model.hf", "model.attention", "optimizer.offload_fraction")
"""They say where something is read or how it is computed, not what."""


def recorded_fields(config: TrainConfig, spec: ModelSpec, row_settings: dict[str, Any]) -> dict[str, Any]:
    """The fields of a run that decide what it trains, by dotted name, as a checkpoint records them.

    If the model or other fields decide about a field, it has the value that results. Fields without effect
    beside the others are left out.
    """
    part_rates = peak_learning_rates(config)
    fields = {f"data.{name}": value for name, value in row_settings.items()}
    fields |= {
        name: operator.attrgetter(name)(config)
        for name in field_types()
        if name.partition(".")[0] in _RECORDED_SECTIONS or name in _RECORDED_FIELDS
        if name not in _NOT_RECORDED
    }
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


def field_change_notes(current_fields: dict[str, Any], saved_fields: dict[str, Any]) -> list[str]:
    """A note if a run trains under other fields than its checkpoint was trained with; otherwise empty.

    Args:
        current_fields: the run's :func:`recorded_fields`.
        saved_fields: those that the checkpoint records. A field that one of the two leaves out is not named,
            apart from YaRN, which no checkpoint had before it was a field.
    """
    saved_fields = {"model.rope_scaling": None, **saved_fields}
    # Weights come from the checkpoint. Of the chat template, its digest is named.
    unnamed = {"model.checkpoint", "lora.adapter", "data.chat_template"}
    if not current_fields.get("lora.dropout"):
        unnamed.add("seed")  # nothing else draws random numbers after the start
    changes = [
        f"{name} was {saved_fields[name]!r}, is {value!r}"
        for name, value in current_fields.items()
        if name not in unnamed and saved_fields.get(name, value) != value
    ]
    return [f"fields have changed since the checkpoint: {'; '.join(changes)}"] if changes else []


def learning_rate_notes(config: TrainConfig, saved_fields: dict[str, Any], step: int) -> list[str]:
    """A note if the next step, zero-based, has another learning rate than the checkpoint's run planned."""
    names = ("schedule", "min_lr_ratio", "warmup_steps", "decay_steps")
    saved = {name: saved_fields.get(f"optimizer.{name}", getattr(config.optimizer, name)) for name in names}
    saved_config = dataclasses.replace(
        config,
        steps=saved_fields.get("steps", config.steps),
        optimizer=dataclasses.replace(config.optimizer, **saved),
    )
    # All parts follow one schedule, so the first one that is trained stands for them.
    part, peak = next((part, peak) for part, peak in peak_learning_rates(config).items() if peak is not None)
    saved_peak = saved_fields.get("optimizer.lr" if part == "language" else f"optimizer.{part}_lr", peak)
    rate, planned = (
        f"{scheduled_rate(*each):.2e}" for each in ((config, step, peak), (saved_config, step, saved_peak))
    )
    return [f"the learning rate continues at {rate} (planned: {planned})"] if rate != planned else []
