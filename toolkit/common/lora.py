"""The settings of the adapters that a run begins with (``lora.adapter``)."""

from __future__ import annotations

from megatron_vl.config import TrainConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.training.lora import with_start_adapter
from megatron_vl.training.resolve import find_source_checkpoint


def with_adapter_settings(config: TrainConfig, spec: ModelSpec) -> TrainConfig:
    """The config of a run with the settings of its adapters: the checkpoint's if it resumes, as in training.

    Raises:
        RunConfigError, WeightsError: the run could not start with these adapters. The message names the field
            or file.
    """
    return with_start_adapter(config, spec, find_source_checkpoint(config)) if config.lora.adapter else config
