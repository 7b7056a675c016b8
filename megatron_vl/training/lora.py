"""LoRA of a run: the one it starts with (``lora.adapter``, a run or a folder of PEFT's) and that of its
checkpoint.

torch is imported only to look into files of weights.
"""

import dataclasses
import json
from pathlib import Path

from megatron_vl.config import LoraConfig, RunConfigError, TrainConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.lora import fused_lora, saved_modules
from megatron_vl.weights.run_folder import SavedCheckpoint


def with_start_lora(
    config: TrainConfig, spec: ModelSpec, source_checkpoint: SavedCheckpoint | None = None
) -> TrainConfig:
    """The config of a run with the settings of the LoRA in ``lora.adapter``, if it names one.

    Args:
        source_checkpoint: the checkpoint that the run resumes from. It holds the run's LoRA, and the
            settings of the one in ``lora.adapter`` are not read.
    """
    if not (adapter_dir := config.lora.adapter):
        return config

    from converters.lora import PeftAdapters, open_lora
    from megatron_vl.weights.weight_reader import WeightReader, WeightsError

    weight_reader: WeightReader | PeftAdapters
    if source_checkpoint is not None:
        from megatron_vl.training.state.load import suggest_remedy

        with suggest_remedy(source_checkpoint.path):
            weight_reader = WeightReader(source_checkpoint.path / "weights", takes_lora=True)
        if not weight_reader.lora.rank:
            return config  # check_same_lora refuses it
    else:
        try:
            weight_reader = open_lora(adapter_dir, spec)
        except FileNotFoundError as error:
            raise RunConfigError(
                f"lora.adapter: {error}; give a run with LoRA or a folder of adapters, or, to continue a run,"
                " its checkpoint.dir"
            ) from error
        except WeightsError as error:
            raise RunConfigError(f"lora.adapter: {error}") from error
    holder = f"checkpoint {source_checkpoint.path}" if source_checkpoint else f"lora.adapter {adapter_dir}"
    check_same_model(holder, weight_reader.spec, config, spec)
    return with_stored_lora(config, weight_reader.lora, holder)


def with_stored_lora(config: TrainConfig, stored_lora: LoraConfig, holder: str) -> TrainConfig:
    """The config of a run with the settings of the LoRA in ``holder``.

    Raises RunConfigError if a field of ``lora`` says something else.
    """
    # Dropout is no property of the matrices: each run chooses its own.
    lora = dataclasses.replace(stored_lora, adapter=config.lora.adapter, dropout=config.lora.dropout)
    for name, default in dataclasses.asdict(LoraConfig()).items():
        value, stored_value = getattr(config.lora, name), getattr(lora, name)
        if (value != default or name in config.lora.stated_fields) and value != stored_value:
            raise RunConfigError(
                f"lora.{name} is {value}, but the adapters in {holder} have {stored_value}; leave the field"
                " out"
            )
    return dataclasses.replace(config, lora=lora)


def check_lora_base(config: TrainConfig, spec: ModelSpec, base_digest: str) -> None:
    """Raises RunConfigError if the LoRA in ``lora.adapter`` was trained on other weights than the run's."""
    from converters.lora import open_lora

    if not (adapter_dir := config.lora.adapter):
        return
    start_dir = config.model.checkpoint or config.model.hf
    if difference := open_lora(adapter_dir, spec).lora_base.difference_text(base_digest, start_dir):
        raise RunConfigError(f"lora.adapter: the adapters in {adapter_dir} {difference}")


def check_same_lora(checkpoint_path: Path, saved: LoraConfig, config: TrainConfig, spec: ModelSpec) -> None:
    """Raises RunConfigError unless a checkpoint holds what the run trains: a model, or the same LoRA."""
    if bool(saved.rank) != bool(config.lora.rank):
        held = f"LoRA of rank {saved.rank}" if saved.rank else "a whole model"
        raise RunConfigError(
            f"checkpoint {checkpoint_path} holds {held}, but this run has lora.rank {config.lora.rank}; give"
            " another checkpoint.dir to begin a new run"
        )
    if all(facts(spec, saved) == facts(spec, config.lora) for facts in (saved_modules, fused_lora)):
        return

    before, now = vars(saved), vars(config.lora)
    differences = [
        f"lora.{name} was {before[name]}, is {now[name]}"
        for name in dataclasses.asdict(LoraConfig())
        # The two others decide no shape and no scale.
        if now[name] != before[name] and name not in ("dropout", "adapter")
    ]
    raise RunConfigError(
        f"the adapters in {checkpoint_path} have other shapes or scales than this run's"
        f" ({'; '.join(differences) or 'ranks or alphas of single matrices'}); give the settings or the"
        " lora.adapter that the run began with, or another checkpoint.dir to begin a new one"
    )


def check_same_model(
    weights_name: str, weights_spec: ModelSpec, config: TrainConfig, spec: ModelSpec
) -> None:
    """Raises RunConfigError unless weights, which the message names, are of the model in ``model.hf``."""
    if weights_spec.different_fields(spec):
        families = list(dict.fromkeys((weights_spec.family, spec.family)))
        difference = ", ".join(families) if families[1:] else f"both {spec.family}, other sizes"
        raise RunConfigError(
            f"{weights_name} holds another model than model.hf {config.model.hf} ({difference})"
        )
    yarn = weights_spec.language.yarn
    if yarn not in (None, spec.language.yarn) and not config.model.rope_scaling:
        raise RunConfigError(
            f"{weights_name} was trained with YaRN, which model.hf {config.model.hf} lacks or has otherwise;"
            f" give --model.rope_scaling '{json.dumps(yarn.as_fields())}', or '{{rope_type: default}}' to"
            " leave it out"
        )
