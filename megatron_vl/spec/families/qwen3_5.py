"""Qwen3.5 (0.8B, 2B, 4B, 9B, 27B), and Qwen3.6-27B and Qwen3.8-27B, which have the same architecture.

Three of four decoder layers have Gated DeltaNet in place of softmax attention. The others have an output gate
and rotate a quarter of each head. The RMS norms multiply by ``1 + weight``, except the one within Gated
DeltaNet. The tower is Qwen3-VL's without DeepStack. Reference: ``transformers.models.qwen3_5``.

Released checkpoints hold one more layer, ``mtp.*``, which predicts the token after the next one. Neither this
project nor ``transformers`` builds it. Conversion copies it unchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_vl.spec.families.base import (
    TEXT,
    ConfigError,
    LanguageSpec,
    LinearAttentionSpec,
    ModelSpec,
    VisionSpec,
    assemble,
    read_language,
    require,
)
from megatron_vl.spec.families.qwen3_vl import read_vision as read_qwen3_vl_vision

LINEAR, FULL = "linear_attention", "full_attention"
TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3.5 ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    return assemble("qwen3_5", config, read_vision(config), read_text(config), TOKENS)


def read_vision(config: dict[str, Any]) -> VisionSpec:
    """Reads the vision tower's fields: those of Qwen3-VL without DeepStack.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    vision = require(config, "vision_config", "config.json")
    if vision.get("deepstack_visual_indexes"):
        raise ConfigError(
            f"config.json: deepstack_visual_indexes {vision['deepstack_visual_indexes']} is not supported; "
            "this family has no DeepStack: set it to []"
        )
    return dataclasses.replace(read_qwen3_vl_vision(config), deepstack_layers=())


def read_text(config: dict[str, Any], *, dense: bool = True) -> LanguageSpec:
    """Reads the language model's fields. ``dense`` is passed to :func:`~.base.read_language`.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    text = require(config, "text_config", "config.json")
    for field, only in (("attention_bias", False), ("attn_output_gate", True)):
        if bool(text.get(field, only)) is not only:
            value, valid = (str(v).lower() for v in (not only, only))
            raise ConfigError(f"config.json: {field}={value} is not supported; set it to {valid}")

    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    fraction = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    language = read_language(
        config,
        norm_eps=1e-6,
        rope_theta=1e4,
        head_dim=256,
        # transformers reads only the top level of the file and ignores this field of the text config.
        tied=bool(config.get("tie_word_embeddings")),
        rotary_fraction=float(fraction),
        dense=dense,
    )

    return dataclasses.replace(
        language,
        qkv_bias=False,
        qk_norm=True,
        # transformers has only the interleaved order, whatever the config says.
        mrope_interleaved=True,
        output_gate=True,
        zero_centered_norms=True,
        linear_attention=read_linear_attention(text, language.num_layers),
    )


def read_linear_attention(text: dict[str, Any], num_layers: int) -> LinearAttentionSpec:
    """Reads the fields of the layers with linear attention from the text config ``text``.

    Raises:
        ConfigError: a layer has an unknown type, or the numbers of heads do not fit each other.
    """
    kinds = text.get("layer_types")
    if kinds is None:
        interval = text.get("full_attention_interval", 4)
        if interval < 1:
            raise ConfigError(f"config.json: full_attention_interval {interval} must be at least 1")
        kinds = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers)]
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise ConfigError(
            f"config.json: layer_types must name {LINEAR!r} or {FULL!r} for each of the {num_layers} layers"
        )

    spec = LinearAttentionSpec(
        key_heads=text.get("linear_num_key_heads", 16),
        value_heads=text.get("linear_num_value_heads", 32),
        key_dim=text.get("linear_key_head_dim", 128),
        value_dim=text.get("linear_value_head_dim", 128),
        conv_width=text.get("linear_conv_kernel_dim", 4),
        layers=tuple(i for i, kind in enumerate(kinds) if kind == LINEAR),
    )
    sizes = (spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.conv_width)
    if min(sizes) < 1 or spec.value_heads % spec.key_heads:
        raise ConfigError(
            f"config.json: linear_num_value_heads {spec.value_heads} must be a multiple of "
            f"linear_num_key_heads {spec.key_heads}, and all sizes of linear attention must be at least 1 "
            f"({TEXT})"
        )
    return spec
