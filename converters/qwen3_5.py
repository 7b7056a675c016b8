"""Qwen3.5 <-> Megatron: Gated DeltaNet, attention with an output gate, Qwen3-VL's tower without DeepStack.

Qwen3.5-MoE has a router, experts and a shared expert in its decoder layers. Names:
``Qwen3_5ForConditionalGeneration`` and ``Qwen3_5MoeForConditionalGeneration`` as released.
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec

from . import qwen3_vl
from .rules import (
    ConversionRule,
    ExpertStyle,
    NameEntry,
    language_gated_qkv,
    linear_attention_input,
    rules_from_entries,
    shared_gated,
    unchanged_tensor,
)

GATED_ATTENTION = NameEntry(
    "language_model.decoder.layers.*.self_attention.linear_qkv.weight",
    (
        "model.language_model.layers.*.self_attn.q_proj.weight",
        "model.language_model.layers.*.self_attn.k_proj.weight",
        "model.language_model.layers.*.self_attn.v_proj.weight",
    ),
    language_gated_qkv,
)

LANGUAGE = (
    *(entry for entry in qwen3_vl.LANGUAGE if entry.name != GATED_ATTENTION.name),
    GATED_ATTENTION,
)

LINEAR_ATTENTION = (
    NameEntry(
        "language_model.decoder.layers.*.self_attention.in_proj.layer_norm_weight",
        ("model.language_model.layers.*.input_layernorm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.in_proj.weight",
        (
            "model.language_model.layers.*.linear_attn.in_proj_qkv.weight",
            "model.language_model.layers.*.linear_attn.in_proj_z.weight",
            "model.language_model.layers.*.linear_attn.in_proj_b.weight",
            "model.language_model.layers.*.linear_attn.in_proj_a.weight",
        ),
        linear_attention_input,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.conv1d.weight",
        ("model.language_model.layers.*.linear_attn.conv1d.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.A_log",
        ("model.language_model.layers.*.linear_attn.A_log",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.dt_bias",
        ("model.language_model.layers.*.linear_attn.dt_bias",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.out_norm.weight",
        ("model.language_model.layers.*.linear_attn.norm.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.self_attention.out_proj.weight",
        ("model.language_model.layers.*.linear_attn.out_proj.weight",),
        unchanged_tensor,
    ),
)
"""Layers with linear attention have these tensors instead of those of softmax attention."""

SHARED_EXPERT = (
    NameEntry(
        "language_model.decoder.layers.*.mlp.shared_experts.linear_fc1.weight",
        (
            "model.language_model.layers.*.mlp.shared_expert.gate_proj.weight",
            "model.language_model.layers.*.mlp.shared_expert.up_proj.weight",
        ),
        shared_gated,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.shared_experts.linear_fc2.weight",
        ("model.language_model.layers.*.mlp.shared_expert.down_proj.weight",),
        unchanged_tensor,
    ),
    NameEntry(
        "language_model.decoder.layers.*.mlp.shared_experts.gate_weight",
        ("model.language_model.layers.*.mlp.shared_expert_gate.weight",),
        unchanged_tensor,
    ),
)


def make_rules(spec: ModelSpec, expert_style: ExpertStyle = "output_first") -> list[ConversionRule]:
    """Returns one rule for each tensor of the model.

    Args:
        expert_style: how the HF folder stores experts, if the model has any.
    """
    decoder_entries = (
        *LANGUAGE,
        *LINEAR_ATTENTION,
        *qwen3_vl.ROUTER,
        *qwen3_vl.EXPERTS[expert_style],
        *SHARED_EXPERT,
    )
    return rules_from_entries(spec, (*qwen3_vl.TOWER, *decoder_entries))
