"""Qwen2-VL <-> Megatron: LayerNorm with bias and a two-layer MLP in the vision tower.

Names: ``Qwen2VLForConditionalGeneration`` as released (``visual.*``, ``model.layers.*``).
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec

from .rules import (
    ConversionRule,
    NameEntry,
    conv3d_patch_embedding,
    language_gated,
    language_qkv,
    rules_from_entries,
    unchanged_tensor,
    vision_columns,
    vision_qkv,
    vision_rows,
)

TOWER = (
    NameEntry(
        "vision_model.patch_embed.proj.weight", ("visual.patch_embed.proj.weight",), conv3d_patch_embedding
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
        ("visual.blocks.*.norm1.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_bias",
        ("visual.blocks.*.norm1.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.weight",
        ("visual.blocks.*.attn.qkv.weight",),
        vision_qkv,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.bias",
        ("visual.blocks.*.attn.qkv.bias",),
        vision_qkv,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_proj.weight",
        ("visual.blocks.*.attn.proj.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_proj.bias",
        ("visual.blocks.*.attn.proj.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        ("visual.blocks.*.norm2.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_bias",
        ("visual.blocks.*.norm2.bias",),
        unchanged_tensor,
    ),
    NameEntry("vision_model.merger.norm.weight", ("visual.merger.ln_q.weight",), unchanged_tensor),
    NameEntry("vision_model.merger.norm.bias", ("visual.merger.ln_q.bias",), unchanged_tensor),
    NameEntry("vision_model.merger.linear_fc1.weight", ("visual.merger.mlp.0.weight",), unchanged_tensor),
    NameEntry("vision_model.merger.linear_fc1.bias", ("visual.merger.mlp.0.bias",), unchanged_tensor),
    NameEntry("vision_model.merger.linear_fc2.weight", ("visual.merger.mlp.2.weight",), unchanged_tensor),
    NameEntry("vision_model.merger.linear_fc2.bias", ("visual.merger.mlp.2.bias",), unchanged_tensor),
)
"""The tensors that Qwen2-VL and Qwen2.5-VL have in common. Qwen2.5-VL's norms have no bias."""

TOWER_MLP = (
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.weight",
        ("visual.blocks.*.mlp.fc1.weight",),
        vision_rows,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.bias", ("visual.blocks.*.mlp.fc1.bias",), vision_rows
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc2.weight",
        ("visual.blocks.*.mlp.fc2.weight",),
        vision_columns,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc2.bias",
        ("visual.blocks.*.mlp.fc2.bias",),
        unchanged_tensor,
    ),
)

LANGUAGE = (
    NameEntry(
        "language_model.embedding.word_embeddings.weight", ("model.embed_tokens.weight",), unchanged_tensor
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
        ("model.layers.*.input_layernorm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.weight",
        (
            "model.layers.*.self_attn.q_proj.weight",
            "model.layers.*.self_attn.k_proj.weight",
            "model.layers.*.self_attn.v_proj.weight",
        ),
        language_qkv,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.bias",
        (
            "model.layers.*.self_attn.q_proj.bias",
            "model.layers.*.self_attn.k_proj.bias",
            "model.layers.*.self_attn.v_proj.bias",
        ),
        language_qkv,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_proj.weight",
        ("model.layers.*.self_attn.o_proj.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        ("model.layers.*.post_attention_layernorm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.linear_fc1.weight",
        ("model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"),
        language_gated,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.linear_fc2.weight",
        ("model.layers.*.mlp.down_proj.weight",),
        unchanged_tensor,
    ),
    NameEntry("language_model.decoder.final_layernorm.weight", ("model.norm.weight",), unchanged_tensor),
    NameEntry("language_model.output_layer.weight", ("lm_head.weight",), unchanged_tensor),
)


def make_rules(spec: ModelSpec) -> list[ConversionRule]:
    """Returns one rule for each tensor of the model."""
    return rules_from_entries(spec, (*TOWER, *TOWER_MLP, *LANGUAGE))
