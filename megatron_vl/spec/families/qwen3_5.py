"""Qwen3.5 (0.8B, 2B, 4B, 9B, 27B), and Qwen3.6-27B and Qwen3.8-27B, which have the same architecture.

Three of four decoder layers have Gated DeltaNet in place of softmax attention. The others have an output gate
and rotate a quarter of each head. The RMS norms multiply by ``1 + weight``, except the one within Gated
DeltaNet. The tower is Qwen3-VL's without DeepStack. Reference: ``transformers.models.qwen3_5``.

Released checkpoints hold one more layer, ``mtp.*``, which predicts the token after the next one. A run may
train it (:mod:`megatron_vl.models.mtp`). Otherwise it is not part of the model, and exports copy it.
"""

import dataclasses
from typing import Any

from megatron_vl.spec.families.base import (
    TEXT_FIELDS_PLACE,
    ConfigError,
    LanguageSpec,
    LinearAttentionSpec,
    ModelSpec,
    VisionSpec,
    assemble_model_spec,
    read_rope_fields,
    require_field,
)
from megatron_vl.spec.families.qwen3_vl import read_text_spec as read_qwen3_vl_text
from megatron_vl.spec.families.qwen3_vl import read_vision_spec as read_qwen3_vl_vision

LINEAR_LAYER_TYPE = "linear_attention"
FULL_LAYER_TYPE = "full_attention"
SPECIAL_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3.5 ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    return assemble_model_spec(
        "qwen3_5", config, read_vision_spec(config), read_text_spec(config), SPECIAL_TOKENS
    )


def read_vision_spec(config: dict[str, Any]) -> VisionSpec:
    """Reads the vision tower's fields: those of Qwen3-VL without DeepStack.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    vision_fields = require_field(config, "vision_config", "config.json")
    if vision_fields.get("deepstack_visual_indexes"):
        raise ConfigError(
            f"config.json: deepstack_visual_indexes {vision_fields['deepstack_visual_indexes']} is not"
            " supported; this family has no DeepStack: set it to []"
        )
    return dataclasses.replace(read_qwen3_vl_vision(config), deepstack_layers=())


def read_text_spec(config: dict[str, Any], *, has_dense_layers: bool = True) -> LanguageSpec:
    """Reads the language model's fields.

    Args:
        has_dense_layers: as in :func:`~megatron_vl.spec.families.base.read_language_spec`.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    text_fields = require_field(config, "text_config", "config.json")
    if not text_fields.get("attn_output_gate", True):
        raise ConfigError("config.json: attn_output_gate=false is not supported; set it to true")

    text_fraction = text_fields.get("partial_rotary_factor", 0.25)
    language_spec = read_qwen3_vl_text(
        config,
        head_dim=256,
        rope_theta=1e4,
        rotary_fraction=float(read_rope_fields(config).get("partial_rotary_factor", text_fraction)),
        has_dense_layers=has_dense_layers,
    )
    return dataclasses.replace(
        language_spec,
        output_gate=True,
        zero_centered_norms=True,
        linear_attention=read_linear_attention(text_fields, language_spec.num_layers),
    )


def read_linear_attention(text_fields: dict[str, Any], num_layers: int) -> LinearAttentionSpec:
    """Reads the fields of the layers with linear attention from the text config ``text_fields``.

    Raises:
        ConfigError: a layer has an unknown type, or the numbers of heads do not fit each other.
    """
    layer_types = _read_layer_types(text_fields, num_layers)
    linear_layers = tuple(i for i, layer_type in enumerate(layer_types) if layer_type == LINEAR_LAYER_TYPE)
    head_sizes = {
        "key_heads": text_fields.get("linear_num_key_heads", 16),
        "value_heads": text_fields.get("linear_num_value_heads", 32),
        "key_dim": text_fields.get("linear_key_head_dim", 128),
        "value_dim": text_fields.get("linear_value_head_dim", 128),
        "conv_width": text_fields.get("linear_conv_kernel_dim", 4),
    }
    if min(head_sizes.values()) < 1 or head_sizes["value_heads"] % head_sizes["key_heads"]:
        raise ConfigError(
            f"config.json: linear_num_value_heads {head_sizes['value_heads']} must be a multiple of"
            f" linear_num_key_heads {head_sizes['key_heads']}, and all sizes of linear attention must"
            f" be at least 1 ({TEXT_FIELDS_PLACE})"
        )
    return LinearAttentionSpec(**head_sizes, linear_layers=linear_layers)


def _read_layer_types(text_fields: dict[str, Any], num_layers: int) -> list[str]:
    """The type of each layer: every fourth layer has full attention, unless the config says otherwise."""
    layer_types = text_fields.get("layer_types")
    if layer_types is None:
        full_attention_interval = text_fields.get("full_attention_interval", 4)
        if full_attention_interval < 1:
            raise ConfigError(
                f"config.json: full_attention_interval {full_attention_interval} must be at least 1"
            )
        layer_types = [
            LINEAR_LAYER_TYPE if number % full_attention_interval else FULL_LAYER_TYPE
            for number in range(1, num_layers + 1)
        ]
    if len(layer_types) != num_layers or set(layer_types) - {LINEAR_LAYER_TYPE, FULL_LAYER_TYPE}:
        raise ConfigError(
            f"config.json: layer_types must name {LINEAR_LAYER_TYPE!r} or {FULL_LAYER_TYPE!r} for each of the"
            f" {num_layers} layers"
        )
    return layer_types
