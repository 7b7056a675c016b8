"""Model families. Each has one file and one line in :data:`FAMILIES`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.spec.families import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe
from megatron_vl.spec.families.base import (
    ConfigError,
    LanguageSpec,
    LinearAttentionSpec,
    ModelSpec,
    MoeSpec,
    VisionSpec,
)
from megatron_vl.spec.families.hf_folder import read_config
from megatron_vl.spec.families.rope import with_rope_scaling
from megatron_vl.system.folder_kind import why_no_model

FAMILIES = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
FIELD_LIMITS = {"num_hidden_layers": 10_000, "depth": 10_000, "num_experts": 100_000}
"""Largest accepted value of each of these fields."""


def read_spec(
    config: dict[str, Any] | str | Path, rope_scaling: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Reads the :class:`ModelSpec` of an HF config.

    Args:
        config: the config as a dict, the path of a ``config.json``, or the folder that holds one.
        rope_scaling: ``model.rope_scaling`` of a run, which stands for the config's own; empty: none.

    Raises:
        ConfigError: there is no ``config.json``, its ``model_type`` is unknown, a field is missing or
            impossible, or the folder contradicts itself (:mod:`.hf_folder`).
    """
    spec = _read_spec(config) if isinstance(config, dict) else _read_folder(Path(config))
    if not rope_scaling:
        return spec
    try:
        return _read_spec(with_rope_scaling(spec.hf_config, rope_scaling))
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"model.rope_scaling: {str(error).removeprefix('config.json: ')}") from error


def run_spec(config: TrainConfig, spec: ModelSpec | None = None) -> ModelSpec:
    """The model of a run, from ``spec`` or ``model.hf``: with multi-token prediction if the run trains it."""
    spec = spec or read_spec(config.model.hf, config.model.rope_scaling)
    return spec.with_mtp(bool(config.mtp.loss))


def _read_folder(path: Path) -> ModelSpec:
    config_path = path / "config.json" if path.is_dir() else path
    if not config_path.is_file():
        raise ConfigError(why_no_model(path))
    try:
        return _read_spec(read_config(config_path))
    except ConfigError as error:
        if str(config_path.parent) in str(error):
            raise
        raise ConfigError(f"{config_path.parent}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(f"{config_path} is invalid: {type(error).__name__}: {error}") from error


def _read_spec(config: dict[str, Any]) -> ModelSpec:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type {model_type!r} is not supported; valid: {', '.join(FAMILIES)}"
        )
    # A config may come from an untrusted source, and larger counts would exhaust memory.
    for config_section in (config, config.get("text_config"), config.get("vision_config")):
        for name, field_limit in FIELD_LIMITS.items():
            value = config_section.get(name) if isinstance(config_section, dict) else None
            if isinstance(value, int | float) and value > field_limit:
                raise ConfigError(f"config.json: {name} {value} is too large; the limit is {field_limit}")
    return FAMILIES[model_type].read(config)


__all__ = [
    "FAMILIES",
    "ConfigError",
    "LanguageSpec",
    "LinearAttentionSpec",
    "ModelSpec",
    "MoeSpec",
    "VisionSpec",
    "read_spec",
    "run_spec",
]
