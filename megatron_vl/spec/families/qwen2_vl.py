"""Qwen2-VL (2B, 7B, 72B).

The tower has LayerNorm, a quick-GELU MLP, and full attention within each frame. Reference:
``transformers.models.qwen2_vl`` (arXiv 2409.12191).
"""

from __future__ import annotations

from typing import Any

from megatron_vl.spec.families.base import ModelSpec, VisionSpec, assemble, read_language, require


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen2-VL ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    vision = require(config, "vision_config", "config.json")
    width = require(vision, "embed_dim", "vision_config")
    tower = VisionSpec(
        hidden_size=width,
        num_layers=vision.get("depth", 32),
        num_heads=vision.get("num_heads", 16),
        ffn_hidden_size=int(width * vision.get("mlp_ratio", 4)),
        patch_size=vision.get("patch_size", 14),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        spatial_merge_size=vision.get("spatial_merge_size", 2),
        in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
        out_hidden_size=require(vision, "hidden_size", "vision_config"),
        norm="LayerNorm",
        norm_eps=1e-6,
        activation="quick_gelu",
        gated_mlp=False,
    )

    return assemble("qwen2_vl", config, tower, read_language(config, norm_eps=1e-5, rope_theta=1e6))
