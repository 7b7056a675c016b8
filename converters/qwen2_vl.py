"""Qwen2-VL <-> Megatron: LayerNorm with bias and a two-layer MLP in the vision tower.

Names: ``Qwen2VLForConditionalGeneration`` as released (``visual.*``, ``model.layers.*``).
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec

from .rules import (
    Entry,
    Rule,
    as_it_is,
    conv3d,
    language_gated,
    language_qkv,
    rules_of,
    vision_columns,
    vision_qkv,
    vision_rows,
)

TOWER = (
    Entry("vision_model.patch_embed.proj.weight", ("visual.patch_embed.proj.weight",), conv3d),
    Entry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
        ("visual.blocks.*.norm1.weight",),
        as_it_is,
    ),
    Entry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_bias",
        ("visual.blocks.*.norm1.bias",),
        as_it_is,
    ),
    Entry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.weight",
        ("visual.blocks.*.attn.qkv.weight",),
        vision_qkv,
    ),
    Entry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.bias",
        ("visual.blocks.*.attn.qkv.bias",),
        vision_qkv,
    ),
    Entry(
        "vision_model.decoder.layers.*.self_attention.linear_proj.weight",
        ("visual.blocks.*.attn.proj.weight",),
        as_it_is,
    ),
    Entry(
        "vision_model.decoder.layers.*.self_attention.linear_proj.bias",
        ("visual.blocks.*.attn.proj.bias",),
        as_it_is,
    ),
    Entry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        ("visual.blocks.*.norm2.weight",),
        as_it_is,
    ),
    Entry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_bias",
        ("visual.blocks.*.norm2.bias",),
        as_it_is,
    ),
    Entry("vision_model.merger.norm.weight", ("visual.merger.ln_q.weight",), as_it_is),
    Entry("vision_model.merger.norm.bias", ("visual.merger.ln_q.bias",), as_it_is),
    Entry("vision_model.merger.linear_fc1.weight", ("visual.merger.mlp.0.weight",), as_it_is),
    Entry("vision_model.merger.linear_fc1.bias", ("visual.merger.mlp.0.bias",), as_it_is),
    Entry("vision_model.merger.linear_fc2.weight", ("visual.merger.mlp.2.weight",), as_it_is),
    Entry("vision_model.merger.linear_fc2.bias", ("visual.merger.mlp.2.bias",), as_it_is),
)
"""The tensors that Qwen2-VL and Qwen2.5-VL have in common. Qwen2.5-VL's norms have no bias."""

TOWER_MLP = (
    Entry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.weight",
        ("visual.blocks.*.mlp.fc1.weight",),
        vision_rows,
    ),
    Entry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.bias", ("visual.blocks.*.mlp.fc1.bias",), vision_rows
    ),
    Entry(
        "vision_model.decoder.layers.*.mlp.linear_fc2.weight",
        ("visual.blocks.*.mlp.fc2.weight",),
        vision_columns,
    ),
    Entry("vision_model.decoder.layers.*.mlp.linear_fc2.bias", ("visual.blocks.*.mlp.fc2.bias",), as_it_is),
)

LANGUAGE = (
    Entry("language_model.embedding.word_embeddings.weight", ("model.embed_tokens.weight",), as_it_is),
    Entry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
        ("model.layers.*.input_layernorm.weight",),
        as_it_is,
    ),
    Entry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.weight",
        (
            "model.layers.*.self_attn.q_proj.weight",
            "model.layers.*.self_attn.k_proj.weight",
            "model.layers.*.self_attn.v_proj.weight",
        ),
        language_qkv,
    ),
    Entry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.bias",
        (
            "model.layers.*.self_attn.q_proj.bias",
            "model.layers.*.self_attn.k_proj.bias",
            "model.layers.*.self_attn.v_proj.bias",
        ),
        language_qkv,
    ),
    Entry(
        "language_model.decoder.layers.*.self_attention.linear_proj.weight",
        ("model.layers.*.self_attn.o_proj.weight",),
        as_it_is,
    ),
    Entry(
        "language_model.decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        ("model.layers.*.post_attention_layernorm.weight",),
        as_it_is,
    ),
    Entry(
        "language_model.decoder.layers.*.mlp.linear_fc1.weight",
        ("model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight"),
        language_gated,
    ),
    Entry(
        "language_model.decoder.layers.*.mlp.linear_fc2.weight",
        ("model.layers.*.mlp.down_proj.weight",),
        as_it_is,
    ),
    Entry("language_model.decoder.final_layernorm.weight", ("model.norm.weight",), as_it_is),
    Entry("language_model.output_layer.weight", ("lm_head.weight",), as_it_is),
)


def rules(spec: ModelSpec) -> list[Rule]:
    """Returns one rule for each tensor of the model."""
    return rules_of(spec, (*TOWER, *TOWER_MLP, *LANGUAGE))
