"""The adapters that a run begins with (``lora.adapter``), in our own files or in PEFT's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from megatron_vl.config import TrainConfig
from megatron_vl.errors import UsageError
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.training.adapters import with_start_adapter, with_stored_lora
from megatron_vl.training.resolve import find_source_checkpoint


def with_adapter_settings(config: TrainConfig, spec: ModelSpec) -> TrainConfig:
    """The config of a run with the settings of its adapters: the checkpoint's if it resumes, as in training.

    Raises:
        RunConfigError, FileNotFoundError, WeightsError: the run could not start with these adapters. The
            message names the field or file.
    """
    adapter_dir = config.lora.adapter
    if not adapter_dir:
        return config
    from converters.adapters import PeftAdapters  # it imports torch
    from converters.peft_folder import is_peft_folder

    source_checkpoint = find_source_checkpoint(config)
    if source_checkpoint is None and is_peft_folder(adapter_dir):
        return with_stored_lora(config, PeftAdapters(adapter_dir, spec).lora, f"lora.adapter {adapter_dir}")
    return with_start_adapter(config, spec, source_checkpoint)


def with_megatron_adapter(config: TrainConfig, converted_parent: str) -> TrainConfig:
    """The config of a run with PEFT's files in ``lora.adapter`` converted: the library reads its own alone.

    Args:
        converted_parent: folder for the converted adapters; a run has its ``checkpoint.dir``.

    Raises:
        UsageError: there is no such folder.
        The errors of :func:`with_adapter_settings`.
    """
    adapter_dir = config.lora.adapter
    if not adapter_dir:
        return config
    from converters.convert import megatron_adapter  # it imports torch
    from converters.peft_folder import is_peft_folder

    if not is_peft_folder(adapter_dir):
        return config
    # Here, and not after the conversion, a message names the folder that the user gave.
    with_adapter_settings(config, read_spec(config.model.hf))
    if not converted_parent:
        raise UsageError(
            f"lora.adapter {adapter_dir} holds PEFT's files, which are converted into checkpoint.dir; give"
            " that too"
        )
    converted_dir = megatron_adapter(Path(adapter_dir), Path(config.model.hf), Path(converted_parent))
    return dataclasses.replace(config, lora=dataclasses.replace(config.lora, adapter=str(converted_dir)))
