"""The adapters of a run: those it starts with (``lora.adapter``) and those in its checkpoint.

torch is imported only to look into files of weights.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_vl.config import LoraConfig, RunConfigError, TrainConfig
from megatron_vl.spec.adapters import fused_adapters, saved_modules
from megatron_vl.spec.families import ModelSpec
from megatron_vl.weights.run_folder import SavedCheckpoint

START_ADAPTER_KEY = "lora_start"
"""The entry that says with which adapters the run began, see :func:`read_start_adapter`."""


def with_start_adapter(
    config: TrainConfig, spec: ModelSpec, source_checkpoint: SavedCheckpoint | None = None
) -> TrainConfig:
    """The config of a run with the settings of the adapters in ``lora.adapter``, if it names any.

    Args:
        source_checkpoint: the checkpoint that the run resumes from. It holds the run's adapters, and the
            settings of those in ``lora.adapter`` are not read.

    Raises:
        RunConfigError: there are no weights, they are those of a whole model or cannot be read, the adapters
            belong to another model, or another field of ``lora`` says something else. The message names the
            field.
        WeightsError: the adapters in ``source_checkpoint`` cannot be read.
    """
    adapter_dir = config.lora.adapter
    if not adapter_dir:
        return config

    from megatron_vl.weights.weight_reader import WeightReader, WeightsError, read_adapters

    if source_checkpoint is None and (Path(adapter_dir) / "adapter_config.json").is_file():
        raise RunConfigError(
            f"lora.adapter {adapter_dir} holds PEFT's files; convert them first: `megatron-vl convert --hf"
            f" {config.model.hf} --adapter {adapter_dir} --out DIR`"
        )

    if source_checkpoint is not None:
        from megatron_vl.training.checkpoint import suggest_remedy

        with suggest_remedy(source_checkpoint.path):
            weight_reader = WeightReader(source_checkpoint.path / "weights", takes_adapters=True)
        if not weight_reader.lora.rank:
            return config  # check_same_adapters refuses it
    else:
        try:
            weight_reader = read_adapters(adapter_dir)
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
    """The config of a run with the settings of the adapters in ``holder``.

    Raises RunConfigError if a field of ``lora`` says something else.
    """
    # Dropout is no property of the adapters: each run chooses its own.
    lora = dataclasses.replace(stored_lora, adapter=config.lora.adapter, dropout=config.lora.dropout)
    for name, default in dataclasses.asdict(LoraConfig()).items():
        value, stored_value = getattr(config.lora, name), getattr(lora, name)
        is_stated = value != default or name in config.lora.stated_fields
        if is_stated and value != stored_value:
            raise RunConfigError(
                f"lora.{name} is {value}, but the adapters in {holder} have {stored_value}; leave the field"
                " out"
            )
    return dataclasses.replace(config, lora=lora)


def read_start_adapter(config: TrainConfig, base_digest: str) -> dict[str, str]:
    """The ``path`` and ``digest`` of the adapters in ``lora.adapter``; both are empty without any.

    Args:
        base_digest: see :attr:`~megatron_vl.training.resolved_run.ResolvedRun.base_digest`.

    Raises:
        RunConfigError: the adapters were trained on other weights than the run's.
    """
    adapter_dir = config.lora.adapter
    if not adapter_dir:
        return {"path": "", "digest": ""}

    from megatron_vl.weights.model_digest import model_digest  # it imports torch
    from megatron_vl.weights.weight_reader import WeightReader

    weight_reader = WeightReader(adapter_dir, takes_adapters=True, should_verify=False)
    if base_difference := weight_reader.adapter_base.difference_text(
        base_digest, config.model.checkpoint or config.model.hf
    ):
        raise RunConfigError(f"lora.adapter: the adapters in {adapter_dir} {base_difference}")
    return {"path": str(Path(adapter_dir).resolve()), "digest": model_digest(weight_reader)}


def check_start_adapter(
    checkpoint_path: Path, start_adapter: dict[str, str] | None, config: TrainConfig
) -> None:
    """Raises RunConfigError if ``lora.adapter`` of a resumed run names others than the run began with.

    The adapters continue from the checkpoint in any case. So nothing is refused if the folder that the run
    began with has moved, is gone, or belongs to a run that went on, or if the given folder has no weights.

    Args:
        start_adapter: the result of :func:`read_start_adapter` at the run's first start; None: not recorded.
    """
    adapter_dir = config.lora.adapter
    if start_adapter is None or not adapter_dir:
        return

    start_dir, start_digest = start_adapter["path"], start_adapter["digest"]
    if str(Path(adapter_dir).resolve()) == start_dir:
        return
    given_digest = _adapter_digest(adapter_dir)
    if given_digest in (None, start_digest) or start_dir and _adapter_digest(start_dir) != start_digest:
        return
    began_with = start_dir or "new adapters"
    remedy = f"give lora.adapter {start_dir}" if start_dir else "leave lora.adapter out"
    raise RunConfigError(
        f"lora.adapter names {adapter_dir}, but the run in {checkpoint_path.parent} began with {began_with}:"
        f" {remedy} to continue that run, or give another checkpoint.dir to begin a new one"
    )


def _adapter_digest(adapter_dir: str) -> str | None:
    """The digest of the adapters in a folder; None if it holds no weights of ours."""
    from megatron_vl.weights.model_digest import model_digest
    from megatron_vl.weights.weight_reader import WeightReader, WeightsError

    try:
        return model_digest(WeightReader(adapter_dir, takes_adapters=True, should_verify=False))
    except (OSError, WeightsError):
        return None


def check_same_adapters(
    checkpoint_path: Path, saved: LoraConfig, config: TrainConfig, spec: ModelSpec
) -> None:
    """Raises RunConfigError unless a checkpoint holds what the run trains: a model, or the same adapters."""
    if bool(saved.rank) != bool(config.lora.rank):
        held = f"adapters of rank {saved.rank}" if saved.rank else "a whole model"
        raise RunConfigError(
            f"checkpoint {checkpoint_path} holds {held}, but this run has lora.rank {config.lora.rank}; give"
            " another checkpoint.dir to begin a new run"
        )
    has_same_modules = saved_modules(spec, saved) == saved_modules(spec, config.lora)
    if has_same_modules and fused_adapters(spec, saved) == fused_adapters(spec, config.lora):
        return

    other_run = "give another checkpoint.dir to begin a new one"
    # These two decide no shape and no scale.
    current = dataclasses.replace(config.lora, dropout=saved.dropout, adapter=saved.adapter)
    for field_name in dataclasses.asdict(LoraConfig()):
        value, saved_value = getattr(current, field_name), getattr(saved, field_name)
        if value != saved_value:
            raise RunConfigError(
                f"lora.{field_name} is {value}, but {checkpoint_path} was saved with {saved_value}; its"
                f" adapters have other shapes or scales. Set lora.{field_name} to {saved_value} to continue"
                f" this run, or {other_run}"
            )
    raise RunConfigError(
        f"the adapters in {checkpoint_path} have other ranks or alphas; give the lora.adapter that this run"
        f" began with to continue it, or {other_run}"
    )


def check_same_model(
    weights_name: str, weights_spec: ModelSpec, config: TrainConfig, spec: ModelSpec
) -> None:
    """Raises RunConfigError unless weights, which the message names, are of the model in ``model.hf``."""
    if weights_spec.different_fields(spec):
        difference_text = f"{weights_spec.family}, {spec.family}"
        if weights_spec.family == spec.family:
            difference_text = f"both {spec.family}, other sizes"
        raise RunConfigError(
            f"{weights_name} holds another model than model.hf {config.model.hf} ({difference_text})"
        )
