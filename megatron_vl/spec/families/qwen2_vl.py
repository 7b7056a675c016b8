"""Qwen2-VL (2B, 7B, 72B).

The tower has LayerNorm, a quick-GELU MLP, and full attention within each frame. Reference:
``transformers.models.qwen2_vl`` (arXiv 2409.12191).
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
    """The spec of a Qwen2-VL ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    vision_fields = require_field(config, "vision_config", "config.json")
    hidden_size = require_field(vision_fields, "embed_dim", "vision_config")
    vision_spec = VisionSpec(
        hidden_size=hidden_size,
        num_layers=vision_fields.get("depth", 32),
        num_heads=vision_fields.get("num_heads", 16),
        ffn_hidden_size=int(hidden_size * vision_fields.get("mlp_ratio", 4)),
        patch_size=vision_fields.get("patch_size", 14),
        temporal_patch_size=vision_fields.get("temporal_patch_size", 2),
        spatial_merge_size=vision_fields.get("spatial_merge_size", 2),
        in_channels=vision_fields.get("in_channels", vision_fields.get("in_chans", 3)),
        out_hidden_size=require_field(vision_fields, "hidden_size", "vision_config"),
        norm="LayerNorm",
        norm_eps=1e-6,
        activation="quick_gelu",
        gated_mlp=False,
        box_tokens=True,
    )

    return assemble_model_spec(
        "qwen2_vl", config, vision_spec, read_language_spec(config, norm_eps=1e-5, rope_theta=1e6)
    )
