"""Model families. Each has one file and one line in :data:`FAMILIES`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_vl.spec.families import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_5_moe, qwen3_vl, qwen3_vl_moe
from megatron_vl.spec.families.base import (
    ConfigError,
    LanguageSpec,
    LinearAttentionSpec,
    ModelSpec,
    MoeSpec,
    VisionSpec,
)

FAMILIES = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
"""HF ``model_type`` -> the module that reads its config."""
MOST = {"num_hidden_layers": 10_000, "depth": 10_000, "num_experts": 100_000}
"""The largest value that is accepted for each of these fields."""


class MissingConfigError(ConfigError, FileNotFoundError):
    """There is no ``config.json``. The message says how to get one."""


def read_spec(config: dict[str, Any] | str | Path) -> ModelSpec:
    """Reads the :class:`ModelSpec` of an HF config.

    Args:
        config: the config as a dict, the path of a ``config.json``, or the folder that holds one.

    Raises:
        MissingConfigError: there is no ``config.json``.
        ConfigError: the ``model_type`` is unknown, or a field is missing or impossible.
    """
    if not isinstance(config, dict):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise MissingConfigError(
                f"{config} holds no config.json; give the folder of a downloaded checkpoint"
                " (`hf download REPOSITORY --local-dir FOLDER`; where no weights are needed,"
                " `hf download REPOSITORY config.json --local-dir FOLDER`)"
            )
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ConfigError(f"{path} does not hold a JSON object")

    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"config.json: model_type {kind!r} is not supported; valid: {', '.join(FAMILIES)}")
    _check_counts(config)
    return FAMILIES[kind].read(config)


def _check_counts(config: dict[str, Any]) -> None:
    """Raises ConfigError for counts of layers or experts that would exhaust memory.

    A config may come from an untrusted source.
    """
    for part in (config, config.get("text_config"), config.get("vision_config")):
        for name, most in MOST.items():
            if isinstance(part, dict) and isinstance(part.get(name), (int, float)) and part[name] > most:
                raise ConfigError(f"config.json: {name} {part[name]} is too large; the limit is {most}")


__all__ = [
    "FAMILIES",
    "ConfigError",
    "MissingConfigError",
    "LanguageSpec",
    "LinearAttentionSpec",
    "ModelSpec",
    "MoeSpec",
    "VisionSpec",
    "read_spec",
]
