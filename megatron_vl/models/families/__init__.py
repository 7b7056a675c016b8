"""Model families: one file each, one line each in :data:`FAMILIES`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import qwen2_5_vl, qwen2_vl, qwen3_vl, qwen3_vl_moe
from .base import ConfigError, LanguageSpec, ModelSpec, MoeSpec, VisionSpec

FAMILIES = {
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}
"""HF ``model_type`` -> the module that reads its config."""


def read_spec(config: dict[str, Any] | str | Path) -> ModelSpec:
    """The :class:`ModelSpec` of an HF config: a dict, a ``config.json`` file, or a folder that holds one.

    Raises:
        FileNotFoundError: there is no ``config.json``.
        ConfigError: the ``model_type`` is unknown or a field is missing or impossible.
    """
    if not isinstance(config, dict):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ConfigError(f"{path} does not hold a JSON object")
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"config.json: model_type {kind!r} is not supported; valid: {', '.join(FAMILIES)}")
    return FAMILIES[kind].read(config)


__all__ = ["FAMILIES", "ConfigError", "LanguageSpec", "ModelSpec", "MoeSpec", "VisionSpec", "read_spec"]
