"""Qwen3-VL <-> Megatron: a two-layer vision MLP padded from 4304 to a multiple of 128, DeepStack, QK-norm.

Qwen3-VL-MoE has a router and experts in its decoder layers. Names: ``Qwen3VLForConditionalGeneration`` and
``Qwen3VLMoeForConditionalGeneration`` as released (``model.visual.*``, ``model.language_model.*``).
"""

from megatron_vl.spec.families import ModelSpec

from .qwen2_vl import DECODER_LAYER, OUTPUT_LAYER, VISION_LAYER, decoder_entries, tower_layer_entries
from .rules import (
    DOWN_STACK,
    GATE_UP_STACK,
    ConversionRule,
    ExpertStyle,
    NameEntry,
    RuleMaker,
    conv3d_patch_embedding,
    each_expert,
    name_entries,
    rules_from_entries,
    stack_input_first,
    unchanged_tensor,
    vision_columns,
    vision_rows,
)

HF_LANGUAGE = "model.language_model."
HF_DECODER_LAYER = HF_LANGUAGE + "layers.*."
MERGER_TENSORS = [
    *("norm.weight", "norm.bias", "linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight"),
    "linear_fc2.bias",
]

TOWER = (
    *name_entries(
        "vision_model.",
        "model.visual.",
        (
            ("patch_embed.proj.weight", "patch_embed.proj.weight", conv3d_patch_embedding),
            ("patch_embed.proj.bias", "patch_embed.proj.bias", unchanged_tensor),
            ("position_table.weight", "pos_embed.weight", unchanged_tensor),
        ),
    ),
    *(
        entry
        for name, hf_name in (("merger.", "merger."), ("deepstack_mergers.*.", "deepstack_merger_list.*."))
        for entry in name_entries(
            "vision_model." + name,
            "model.visual." + hf_name,
            [(each, each, unchanged_tensor) for each in MERGER_TENSORS],
        )
    ),
    *tower_layer_entries("model.visual."),
    *name_entries(
        VISION_LAYER,
        "model.visual.blocks.*.",
        (
            ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight", vision_rows),
            ("mlp.linear_fc1.bias", "mlp.linear_fc1.bias", vision_rows),
            ("mlp.linear_fc2.weight", "mlp.linear_fc2.weight", vision_columns),
            ("mlp.linear_fc2.bias", "mlp.linear_fc2.bias", unchanged_tensor),
        ),
    ),
)

LANGUAGE = (
    *decoder_entries(HF_LANGUAGE),
    *name_entries(
        DECODER_LAYER,
        HF_DECODER_LAYER,
        (
            ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight", unchanged_tensor),
            ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight", unchanged_tensor),
        ),
    ),
    OUTPUT_LAYER,
)

ROUTER = name_entries(
    DECODER_LAYER,
    HF_DECODER_LAYER,
    (
        ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", unchanged_tensor),
        ("mlp.router.weight", "mlp.gate.weight", unchanged_tensor),
    ),
)
"""Layers with experts have these tensors, and :data:`EXPERTS`, instead of ``mlp.linear_fc1`` and
``mlp.linear_fc2``."""


def _expert_entries(gate_up_names: str, down_name: str, make_rule: RuleMaker) -> tuple[NameEntry, ...]:
    return name_entries(
        DECODER_LAYER,
        HF_DECODER_LAYER,
        (
            ("mlp.experts.linear_fc1.weight", gate_up_names, make_rule),
            ("mlp.experts.linear_fc2.weight", down_name, make_rule),
        ),
    )


EXPERTS: dict[ExpertStyle, tuple[NameEntry, ...]] = {
    "input_first": _expert_entries(GATE_UP_STACK, DOWN_STACK, stack_input_first),
    "output_first": _expert_entries(GATE_UP_STACK, DOWN_STACK, unchanged_tensor),
    "apart": _expert_entries(
        "mlp.experts.*.gate_proj.weight mlp.experts.*.up_proj.weight",
        "mlp.experts.*.down_proj.weight",
        each_expert,
    ),
}


def make_rules(spec: ModelSpec, expert_style: ExpertStyle = "input_first") -> list[ConversionRule]:
    """Returns one rule for each tensor of the model.

    Args:
        expert_style: how the HF folder stores experts, if the model has any.
    """
    return rules_from_entries(spec, (*TOWER, *LANGUAGE, *ROUTER, *EXPERTS[expert_style]))
