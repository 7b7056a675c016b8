"""Qwen2-VL <-> Megatron: LayerNorm with bias and a two-layer MLP in the vision tower.

Names: ``Qwen2VLForConditionalGeneration`` as released (``visual.*``, ``model.layers.*``).
"""

from megatron_vl.spec.families import ModelSpec

from .rules import (
    HF_OUTPUT,
    ConversionRule,
    NameEntry,
    conv3d_patch_embedding,
    gated,
    language_qkv,
    name_entries,
    rules_from_entries,
    unchanged_tensor,
    vision_columns,
    vision_qkv,
    vision_rows,
)

VISION_LAYER = "vision_model.decoder.layers.*."
DECODER_LAYER = "language_model.decoder.layers.*."


def tower_layer_entries(hf_prefix: str) -> tuple[NameEntry, ...]:
    """The norms and the attention of a vision layer, which have the same names in all families."""
    return name_entries(
        VISION_LAYER,
        hf_prefix + "blocks.*.",
        (
            ("self_attention.linear_qkv.layer_norm_weight", "norm1.weight", unchanged_tensor),
            ("self_attention.linear_qkv.layer_norm_bias", "norm1.bias", unchanged_tensor),
            ("self_attention.linear_qkv.weight", "attn.qkv.weight", vision_qkv),
            ("self_attention.linear_qkv.bias", "attn.qkv.bias", vision_qkv),
            ("self_attention.linear_proj.weight", "attn.proj.weight", unchanged_tensor),
            ("self_attention.linear_proj.bias", "attn.proj.bias", unchanged_tensor),
            ("mlp.linear_fc1.layer_norm_weight", "norm2.weight", unchanged_tensor),
            ("mlp.linear_fc1.layer_norm_bias", "norm2.bias", unchanged_tensor),
        ),
    )


def decoder_entries(hf_prefix: str) -> tuple[NameEntry, ...]:
    """The tensors of a dense language model that all families have, apart from the output layer's."""
    qkv_names = "self_attn.q_proj.weight self_attn.k_proj.weight self_attn.v_proj.weight"
    layer_lines = (
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight", unchanged_tensor),
        ("self_attention.linear_qkv.weight", qkv_names, language_qkv),
        ("self_attention.linear_proj.weight", "self_attn.o_proj.weight", unchanged_tensor),
        ("mlp.linear_fc1.layer_norm_weight", "post_attention_layernorm.weight", unchanged_tensor),
        ("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", gated),
        ("mlp.linear_fc2.weight", "mlp.down_proj.weight", unchanged_tensor),
    )
    other_lines = (
        ("embedding.word_embeddings.weight", "embed_tokens.weight", unchanged_tensor),
        ("decoder.final_layernorm.weight", "norm.weight", unchanged_tensor),
    )
    return (
        *name_entries("language_model.", hf_prefix, other_lines),
        *name_entries(DECODER_LAYER, hf_prefix + "layers.*.", layer_lines),
    )


OUTPUT_LAYER = NameEntry("language_model.output_layer.weight", (HF_OUTPUT,), unchanged_tensor)

TOWER = (
    *name_entries(
        "vision_model.",
        "visual.",
        (
            ("patch_embed.proj.weight", "patch_embed.proj.weight", conv3d_patch_embedding),
            ("merger.norm.weight", "merger.ln_q.weight", unchanged_tensor),
            ("merger.norm.bias", "merger.ln_q.bias", unchanged_tensor),
            ("merger.linear_fc1.weight", "merger.mlp.0.weight", unchanged_tensor),
            ("merger.linear_fc1.bias", "merger.mlp.0.bias", unchanged_tensor),
            ("merger.linear_fc2.weight", "merger.mlp.2.weight", unchanged_tensor),
            ("merger.linear_fc2.bias", "merger.mlp.2.bias", unchanged_tensor),
        ),
    ),
    *tower_layer_entries("visual."),
)
"""The tensors that Qwen2-VL and Qwen2.5-VL have in common. Qwen2.5-VL's norms have no bias."""

TOWER_MLP = name_entries(
    VISION_LAYER,
    "visual.blocks.*.",
    (
        ("mlp.linear_fc1.weight", "mlp.fc1.weight", vision_rows),
        ("mlp.linear_fc1.bias", "mlp.fc1.bias", vision_rows),
        ("mlp.linear_fc2.weight", "mlp.fc2.weight", vision_columns),
        ("mlp.linear_fc2.bias", "mlp.fc2.bias", unchanged_tensor),
    ),
)

QKV_BIAS_NAMES = "self_attn.q_proj.bias self_attn.k_proj.bias self_attn.v_proj.bias"
LANGUAGE = (
    *decoder_entries("model."),
    *name_entries(
        DECODER_LAYER, "model.layers.*.", [("self_attention.linear_qkv.bias", QKV_BIAS_NAMES, language_qkv)]
    ),
    OUTPUT_LAYER,
)


def make_rules(spec: ModelSpec) -> list[ConversionRule]:
    return rules_from_entries(spec, (*TOWER, *TOWER_MLP, *LANGUAGE))
