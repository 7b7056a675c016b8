"""Qwen3-VL (2B, 4B, 8B, 32B).

The tower has LayerNorm, a learned position table and DeepStack; the language model has QK-norm and
interleaved M-RoPE. Reference: ``transformers.models.qwen3_vl`` (arXiv 2511.21631).
"""

from __future__ import annotations

import dataclasses
from math import isqrt
from typing import Any

from megatron_vl.spec.families.base import (
    ConfigError,
    LanguageSpec,
    ModelSpec,
    VisionSpec,
    assemble,
    read_language,
    require,
)

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "quick_gelu": "quick_gelu"}
"""HF ``hidden_act`` -> :attr:`VisionSpec.activation`."""


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3-VL ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    return assemble("qwen3_vl", config, read_vision(config), read_text(config))


def read_vision(config: dict[str, Any]) -> VisionSpec:
    """Reads the vision tower's fields.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    vision = require(config, "vision_config", "config.json")
    positions = require(vision, "num_position_embeddings", "vision_config")
    activation = vision.get("hidden_act", "gelu_pytorch_tanh")
    if isqrt(positions) ** 2 != positions:
        raise ConfigError(
            f"config.json: num_position_embeddings {positions} is not the square of a whole number"
        )
    if activation not in ACTIVATIONS:
        raise ConfigError(
            f"config.json: vision hidden_act {activation!r} is not supported; valid: {', '.join(ACTIVATIONS)}"
        )

    return VisionSpec(
        hidden_size=require(vision, "hidden_size", "vision_config"),
        num_layers=vision.get("depth", 27),
        num_heads=vision.get("num_heads", 16),
        ffn_hidden_size=require(vision, "intermediate_size", "vision_config"),
        patch_size=vision.get("patch_size", 16),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        spatial_merge_size=vision.get("spatial_merge_size", 2),
        in_channels=vision.get("in_channels", 3),
        out_hidden_size=require(vision, "out_hidden_size", "vision_config"),
        norm="LayerNorm",
        norm_eps=1e-6,
        activation=ACTIVATIONS[activation],
        gated_mlp=False,
        patch_bias=True,
        position_table_side=isqrt(positions),
        deepstack_layers=tuple(vision.get("deepstack_visual_indexes", (8, 16, 24))),
        video_timestamps=True,
    )


def read_text(config: dict[str, Any], head_dim: int | None = 128) -> LanguageSpec:
    """Reads the language model's fields. ``head_dim`` is passed to :func:`~.base.read_language`.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    text = require(config, "text_config", "config.json")
    if text.get("attention_bias"):
        raise ConfigError("config.json: attention_bias=true is not supported; set it to false")
    # transformers reads only the top level of the file and ignores this field of the text config.
    tied = bool(config.get("tie_word_embeddings"))
    language = read_language(config, norm_eps=1e-6, rope_theta=5e5, head_dim=head_dim, tied=tied)
    # transformers has only the interleaved order, whatever the config says.
    return dataclasses.replace(language, qkv_bias=False, qk_norm=True, mrope_interleaved=True)
