"""Qwen3.5 <-> Megatron: Gated DeltaNet, attention with an output gate, Qwen3-VL's tower without DeepStack.

Qwen3.5-MoE has a router, experts and a shared expert in its decoder layers. Names:
``Qwen3_5ForConditionalGeneration`` and ``Qwen3_5MoeForConditionalGeneration`` as released.
"""

from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import MTP_PREFIX

from . import qwen3_vl
from .qwen2_vl import DECODER_LAYER
from .qwen3_vl import HF_DECODER_LAYER
from .rules import (
    ConversionRule,
    ExpertStyle,
    NameEntry,
    gated,
    language_gated_qkv,
    linear_attention_input,
    name_entries,
    rules_from_entries,
    unchanged_tensor,
)

LANGUAGE = tuple(
    entry._replace(make_rule=language_gated_qkv) if entry.name.endswith(".linear_qkv.weight") else entry
    for entry in qwen3_vl.LANGUAGE
)

LINEAR_ATTENTION = name_entries(
    DECODER_LAYER,
    HF_DECODER_LAYER,
    (
        ("self_attention.in_proj.layer_norm_weight", "input_layernorm.weight", unchanged_tensor),
        (
            "self_attention.in_proj.weight",
            "linear_attn.in_proj_qkv.weight linear_attn.in_proj_z.weight "
            "linear_attn.in_proj_b.weight linear_attn.in_proj_a.weight",
            linear_attention_input,
        ),
        ("self_attention.conv1d.weight", "linear_attn.conv1d.weight", unchanged_tensor),
        ("self_attention.A_log", "linear_attn.A_log", unchanged_tensor),
        ("self_attention.dt_bias", "linear_attn.dt_bias", unchanged_tensor),
        ("self_attention.out_norm.weight", "linear_attn.norm.weight", unchanged_tensor),
        ("self_attention.out_proj.weight", "linear_attn.out_proj.weight", unchanged_tensor),
    ),
)
"""Layers with linear attention have these tensors instead of those of softmax attention."""

SHARED_EXPERT = name_entries(
    DECODER_LAYER,
    HF_DECODER_LAYER,
    (
        (
            "mlp.shared_experts.linear_fc1.weight",
            "mlp.shared_expert.gate_proj.weight mlp.shared_expert.up_proj.weight",
            gated,
        ),
        ("mlp.shared_experts.linear_fc2.weight", "mlp.shared_expert.down_proj.weight", unchanged_tensor),
        ("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", unchanged_tensor),
    ),
)


MTP = name_entries(
    MTP_PREFIX,
    MTP_PREFIX,
    (
        ("embedding_norm.weight", "pre_fc_norm_embedding.weight", unchanged_tensor),
        ("hidden_norm.weight", "pre_fc_norm_hidden.weight", unchanged_tensor),
        ("fc.weight", "fc.weight", unchanged_tensor),
        ("decoder.final_layernorm.weight", "norm.weight", unchanged_tensor),
    ),
)


def make_rules(
    spec: ModelSpec,
    expert_style: ExpertStyle = "output_first",
    mtp_expert_style: ExpertStyle = "output_first",
) -> list[ConversionRule]:
    """Returns one rule for each tensor of the model.

    Args:
        expert_style: how the HF folder stores experts, if the model has any.
        mtp_expert_style: how it stores those of multi-token prediction.
    """

    def layer_entries(style: ExpertStyle) -> tuple[NameEntry, ...]:
        return (*LANGUAGE, *LINEAR_ATTENTION, *qwen3_vl.ROUTER, *qwen3_vl.EXPERTS[style], *SHARED_EXPERT)

    mtp_entries = [
        entry._replace(
            name=entry.name.replace(DECODER_LAYER, f"{MTP_PREFIX}decoder.layers.*."),
            hf_names=tuple(
                name.replace(HF_DECODER_LAYER, f"{MTP_PREFIX}layers.*.") for name in entry.hf_names
            ),
        )
        for entry in layer_entries(mtp_expert_style)
        if entry.name.startswith(DECODER_LAYER)
    ]
    return rules_from_entries(spec, (*qwen3_vl.TOWER, *layer_entries(expert_style), *MTP, *mtp_entries))
