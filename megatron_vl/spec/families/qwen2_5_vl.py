"""Qwen2.5-VL (3B, 7B, 32B, 72B).

The tower has RMSNorm, a SwiGLU MLP, and 112-pixel windows with full attention in four layers. Reference:
``transformers.models.qwen2_5_vl`` (arXiv 2502.13923).
"""

from typing import Any

from megatron_vl.spec.families.base import (
    ModelSpec,
    VisionSpec,
    assemble_model_spec,
    read_language_spec,
    require_field,
)


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen2.5-VL ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    vision_fields = require_field(config, "vision_config", "config.json")
    vision_spec = VisionSpec(
        hidden_size=require_field(vision_fields, "hidden_size", "vision_config"),
        num_layers=vision_fields.get("depth", 32),
        num_heads=vision_fields.get("num_heads", 16),
        ffn_hidden_size=vision_fields.get("intermediate_size", 3420),
        patch_size=vision_fields.get("patch_size", 14),
        temporal_patch_size=vision_fields.get("temporal_patch_size", 2),
        spatial_merge_size=vision_fields.get("spatial_merge_size", 2),
        in_channels=vision_fields.get("in_channels", vision_fields.get("in_chans", 3)),
        out_hidden_size=require_field(vision_fields, "out_hidden_size", "vision_config"),
        norm="RMSNorm",
        norm_eps=1e-6,
        activation="silu",
        gated_mlp=True,
        window_size=vision_fields.get("window_size", 112),
        full_attention_layers=tuple(vision_fields.get("fullatt_block_indexes", (7, 15, 23, 31))),
        tokens_per_second=float(vision_fields.get("tokens_per_second", 4)),
        box_frame="resized",
    )

    return assemble_model_spec(
        "qwen2_5_vl", config, vision_spec, read_language_spec(config, norm_eps=1e-5, rope_theta=1e6)
    )
