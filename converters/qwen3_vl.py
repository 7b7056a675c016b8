"""Qwen3-VL <-> Megatron: a two-layer vision MLP padded from 4304 to a multiple of 128, DeepStack, QK-norm.

Qwen3-VL-MoE has a router and experts in its decoder layers. Names: ``Qwen3VLForConditionalGeneration`` and
``Qwen3VLMoeForConditionalGeneration`` as released (``model.visual.*``, ``model.language_model.*``).
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec

from .rules import (
    ConversionRule,
    ExpertStyle,
    NameEntry,
    conv3d_patch_embedding,
    each_expert,
    language_gated,
    language_qkv,
    rules_from_entries,
    stack_input_first,
    unchanged_tensor,
    vision_columns,
    vision_qkv,
    vision_rows,
)

TOWER = (
    NameEntry(
        "vision_model.patch_embed.proj.weight",
        ("model.visual.patch_embed.proj.weight",),
        conv3d_patch_embedding,
    ),
    NameEntry(
        "vision_model.patch_embed.proj.bias", ("model.visual.patch_embed.proj.bias",), unchanged_tensor
    ),
    NameEntry("vision_model.position_table.weight", ("model.visual.pos_embed.weight",), unchanged_tensor),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
        ("model.visual.blocks.*.norm1.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_bias",
        ("model.visual.blocks.*.norm1.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.weight",
        ("model.visual.blocks.*.attn.qkv.weight",),
        vision_qkv,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_qkv.bias",
        ("model.visual.blocks.*.attn.qkv.bias",),
        vision_qkv,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_proj.weight",
        ("model.visual.blocks.*.attn.proj.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.self_attention.linear_proj.bias",
        ("model.visual.blocks.*.attn.proj.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        ("model.visual.blocks.*.norm2.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.layer_norm_bias",
        ("model.visual.blocks.*.norm2.bias",),
        unchanged_tensor,
    ),
    NameEntry("vision_model.merger.norm.weight", ("model.visual.merger.norm.weight",), unchanged_tensor),
    NameEntry("vision_model.merger.norm.bias", ("model.visual.merger.norm.bias",), unchanged_tensor),
    NameEntry(
        "vision_model.merger.linear_fc1.weight", ("model.visual.merger.linear_fc1.weight",), unchanged_tensor
    ),
    NameEntry(
        "vision_model.merger.linear_fc1.bias", ("model.visual.merger.linear_fc1.bias",), unchanged_tensor
    ),
    NameEntry(
        "vision_model.merger.linear_fc2.weight", ("model.visual.merger.linear_fc2.weight",), unchanged_tensor
    ),
    NameEntry(
        "vision_model.merger.linear_fc2.bias", ("model.visual.merger.linear_fc2.bias",), unchanged_tensor
    ),
    NameEntry(
        "vision_model.deepstack_mergers.*.norm.weight",
        ("model.visual.deepstack_merger_list.*.norm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.deepstack_mergers.*.norm.bias",
        ("model.visual.deepstack_merger_list.*.norm.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.deepstack_mergers.*.linear_fc1.weight",
        ("model.visual.deepstack_merger_list.*.linear_fc1.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.deepstack_mergers.*.linear_fc1.bias",
        ("model.visual.deepstack_merger_list.*.linear_fc1.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.deepstack_mergers.*.linear_fc2.weight",
        ("model.visual.deepstack_merger_list.*.linear_fc2.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.deepstack_mergers.*.linear_fc2.bias",
        ("model.visual.deepstack_merger_list.*.linear_fc2.bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.weight",
        ("model.visual.blocks.*.mlp.linear_fc1.weight",),
        vision_rows,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc1.bias",
        ("model.visual.blocks.*.mlp.linear_fc1.bias",),
        vision_rows,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc2.weight",
        ("model.visual.blocks.*.mlp.linear_fc2.weight",),
        vision_columns,
    ),
    NameEntry(
        "vision_model.decoder.layers.*.mlp.linear_fc2.bias",
        ("model.visual.blocks.*.mlp.linear_fc2.bias",),
        unchanged_tensor,
    ),
)

LANGUAGE = (
    NameEntry(
        "language_model.embedding.word_embeddings.weight",
        ("model.language_model.embed_tokens.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.layer_norm_weight",
        ("model.language_model.layers.*.input_layernorm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_qkv.weight",
        (
            "model.language_model.layers.*.self_attn.q_proj.weight",
            "model.language_model.layers.*.self_attn.k_proj.weight",
            "model.language_model.layers.*.self_attn.v_proj.weight",
        ),
        language_qkv,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.q_layernorm.weight",
        ("model.language_model.layers.*.self_attn.q_norm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.k_layernorm.weight",
        ("model.language_model.layers.*.self_attn.k_norm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.linear_proj.weight",
        ("model.language_model.layers.*.self_attn.o_proj.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.linear_fc1.layer_norm_weight",
        ("model.language_model.layers.*.post_attention_layernorm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.linear_fc1.weight",
        (
            "model.language_model.layers.*.mlp.gate_proj.weight",
            "model.language_model.layers.*.mlp.up_proj.weight",
        ),
        language_gated,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.linear_fc2.weight",
        ("model.language_model.layers.*.mlp.down_proj.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.final_layernorm.weight",
        ("model.language_model.norm.weight",),
        unchanged_tensor,
    ),
    NameEntry("language_model.output_layer.weight", ("lm_head.weight",), unchanged_tensor),
)

ROUTER = (
    NameEntry(
        "language_model.decoder.layers.*.pre_mlp_layernorm.weight",
        ("model.language_model.layers.*.post_attention_layernorm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.router.weight",
        ("model.language_model.layers.*.mlp.gate.weight",),
        unchanged_tensor,
    ),
)
"""Layers with experts have these tensors, and :data:`EXPERTS`, instead of ``mlp.linear_fc1`` and
``mlp.linear_fc2``."""

EXPERTS: dict[ExpertStyle, tuple[NameEntry, ...]] = {
    "input_first": (
        NameEntry(
            "language_model.decoder.layers.*.mlp.experts.linear_fc1.weight",
            ("model.language_model.layers.*.mlp.experts.gate_up_proj",),
            stack_input_first,
        ),
        NameEntry(
            "language_model.decoder.layers.*.mlp.experts.linear_fc2.weight",
            ("model.language_model.layers.*.mlp.experts.down_proj",),
            stack_input_first,
        ),
    ),
    "output_first": (
        NameEntry(
            "language_model.decoder.layers.*.mlp.experts.linear_fc1.weight",
            ("model.language_model.layers.*.mlp.experts.gate_up_proj",),
            unchanged_tensor,
        ),
        NameEntry(
            "language_model.decoder.layers.*.mlp.experts.linear_fc2.weight",
            ("model.language_model.layers.*.mlp.experts.down_proj",),
            unchanged_tensor,
        ),
    ),
    "apart": (
        NameEntry(
            "language_model.decoder.layers.*.mlp.experts.linear_fc1.weight",
            (
                "model.language_model.layers.*.mlp.experts.*.gate_proj.weight",
                "model.language_model.layers.*.mlp.experts.*.up_proj.weight",
            ),
            each_expert,
        ),
        NameEntry(
            "language_model.decoder.layers.*.mlp.experts.linear_fc2.weight",
            ("model.language_model.layers.*.mlp.experts.*.down_proj.weight",),
            each_expert,
        ),
    ),
}


def make_rules(spec: ModelSpec, expert_style: ExpertStyle = "input_first") -> list[ConversionRule]:
    """Returns one rule for each tensor of the model.

    Args:
        expert_style: how the HF folder stores experts, if the model has any.
    """
    return rules_from_entries(spec, (*TOWER, *LANGUAGE, *ROUTER, *EXPERTS[expert_style]))
