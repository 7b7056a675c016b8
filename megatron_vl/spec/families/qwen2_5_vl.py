"""Qwen2.5-VL (3B, 7B, 32B, 72B).

The tower has RMSNorm, a SwiGLU MLP, and 112-pixel windows with full attention in four layers. Reference:
``transformers.models.qwen2_5_vl`` (arXiv 2502.13923).
"""

from __future__ import annotations

from typing import Any

from megatron_vl.spec.families.base import ModelSpec, VisionSpec, assemble, read_language, require


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen2.5-VL ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    vision = require(config, "vision_config", "config.json")
    tower = VisionSpec(
        hidden_size=require(vision, "hidden_size", "vision_config"),
        num_layers=vision.get("depth", 32),
        num_heads=vision.get("num_heads", 16),
        ffn_hidden_size=vision.get("intermediate_size", 3420),
        patch_size=vision.get("patch_size", 14),
        temporal_patch_size=vision.get("temporal_patch_size", 2),
        spatial_merge_size=vision.get("spatial_merge_size", 2),
        in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
        out_hidden_size=require(vision, "out_hidden_size", "vision_config"),
        norm="RMSNorm",
        norm_eps=1e-6,
        activation="silu",
        gated_mlp=True,
        window_size=vision.get("window_size", 112),
        full_attention_layers=tuple(vision.get("fullatt_block_indexes", (7, 15, 23, 31))),
        tokens_per_second=float(vision.get("tokens_per_second", 4)),
    )

    return assemble("qwen2_5_vl", config, tower, read_language(config, norm_eps=1e-5, rope_theta=1e6))
