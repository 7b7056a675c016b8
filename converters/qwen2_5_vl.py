"""Qwen2.5-VL <-> Megatron: a SwiGLU vision MLP whose width (3420) is padded to a multiple of 128.

Names: ``Qwen2_5_VLForConditionalGeneration`` as released (``visual.*``, ``model.layers.*``).
"""

from megatron_vl.spec.families import ModelSpec

from .qwen2_vl import LANGUAGE, TOWER, VISION_LAYER
from .rules import ConversionRule, gated, name_entries, rules_from_entries, unchanged_tensor, vision_columns

TOWER_MLP = name_entries(
    VISION_LAYER,
    "visual.blocks.*.",
    (
        ("mlp.linear_fc1.weight", "mlp.gate_proj.weight mlp.up_proj.weight", gated),
        ("mlp.linear_fc1.bias", "mlp.gate_proj.bias mlp.up_proj.bias", gated),
        ("mlp.linear_fc2.weight", "mlp.down_proj.weight", vision_columns),
        ("mlp.linear_fc2.bias", "mlp.down_proj.bias", unchanged_tensor),
    ),
)


def make_rules(spec: ModelSpec) -> list[ConversionRule]:
    return rules_from_entries(spec, (*TOWER, *TOWER_MLP, *LANGUAGE))
