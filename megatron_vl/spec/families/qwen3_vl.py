"""Qwen3-VL (2B, 4B, 8B, 32B).

The tower has LayerNorm, a learned position table and DeepStack; the language model has QK-norm and
interleaved M-RoPE. Reference: ``transformers.models.qwen3_vl`` (arXiv 2511.21631).
"""

import dataclasses
from math import isqrt
from typing import Any

from megatron_vl.spec.families.base import (
    ConfigError,
    LanguageSpec,
    ModelSpec,
    VisionSpec,
    assemble_model_spec,
    read_language_spec,
    require_field,
)

ACTIVATION_NAMES = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "quick_gelu": "quick_gelu"}
"""HF ``hidden_act`` -> :attr:`VisionSpec.activation`."""


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3-VL ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    return assemble_model_spec("qwen3_vl", config, read_vision_spec(config), read_text_spec(config))


def read_vision_spec(config: dict[str, Any]) -> VisionSpec:
    """Reads the vision tower's fields. Raises ConfigError if one is missing or not supported."""
    vision_fields = require_field(config, "vision_config", "config.json")
    num_position_embeddings = require_field(vision_fields, "num_position_embeddings", "vision_config")
    hidden_act = vision_fields.get("hidden_act", "gelu_pytorch_tanh")
    if isqrt(num_position_embeddings) ** 2 != num_position_embeddings:
        raise ConfigError(
            f"config.json: num_position_embeddings {num_position_embeddings} is not the square of a whole"
            " number"
        )
    if hidden_act not in ACTIVATION_NAMES:
        raise ConfigError(
            f"config.json: vision hidden_act {hidden_act!r} is not supported; valid:"
            f" {', '.join(ACTIVATION_NAMES)}"
        )

    return VisionSpec(
        hidden_size=require_field(vision_fields, "hidden_size", "vision_config"),
        num_layers=vision_fields.get("depth", 27),
        num_heads=vision_fields.get("num_heads", 16),
        ffn_hidden_size=require_field(vision_fields, "intermediate_size", "vision_config"),
        patch_size=vision_fields.get("patch_size", 16),
        temporal_patch_size=vision_fields.get("temporal_patch_size", 2),
        spatial_merge_size=vision_fields.get("spatial_merge_size", 2),
        in_channels=vision_fields.get("in_channels", 3),
        out_hidden_size=require_field(vision_fields, "out_hidden_size", "vision_config"),
        norm="LayerNorm",
        norm_eps=1e-6,
        activation=ACTIVATION_NAMES[hidden_act],
        gated_mlp=False,
        patch_bias=True,
        position_table_side=isqrt(num_position_embeddings),
        deepstack_layers=tuple(vision_fields.get("deepstack_visual_indexes", (8, 16, 24))),
        video_timestamps=True,
    )


def read_text_spec(
    config: dict[str, Any], *, head_dim: int | None = 128, rope_theta: float = 5e5, **family_fields: Any
) -> LanguageSpec:
    """Reads the language model's fields.

    Args:
        head_dim, rope_theta, family_fields: as in
            :func:`~megatron_vl.spec.families.base.read_language_spec`.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    if require_field(config, "text_config", "config.json").get("attention_bias"):
        raise ConfigError("config.json: attention_bias=true is not supported; set it to false")
    # transformers reads only the top level of the file and ignores this field of the text config.
    language_spec = read_language_spec(
        config,
        norm_eps=1e-6,
        rope_theta=rope_theta,
        head_dim=head_dim,
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        **family_fields,
    )
    # transformers has only the interleaved order, whatever the config says.
    return dataclasses.replace(language_spec, qkv_bias=False, qk_norm=True, mrope_interleaved=True)
