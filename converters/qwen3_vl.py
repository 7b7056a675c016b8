"""Qwen3-VL <-> Megatron: a two-layer vision MLP padded from 4304 to a multiple of 128,
DeepStack mergers, QK-norm.

Qwen3-VL-MoE is the same with a router and experts in the decoder layers.
Names: ``Qwen3VLForConditionalGeneration`` and ``Qwen3VLMoeForConditionalGeneration`` as released
(``model.visual.*``, ``model.language_model.*``).
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec, VisionSpec
from megatron_vl.spec.tensors import tensor_table

from .rules import (
    RELEASED,
    ExpertStyle,
    Rule,
    language_rules,
    padded_columns,
    padded_rows,
    same,
    vision_rules,
)

MERGER = ("norm", "linear_fc1", "linear_fc2")


def rules(spec: ModelSpec, experts: ExpertStyle = RELEASED) -> list[Rule]:
    """Returns one rule for each tensor of the model. ``experts`` says how HF stores its experts, if any."""
    table = tensor_table(spec)

    def mlp(v: VisionSpec, ours: str, hf: str) -> list[Rule]:
        width, fc1, fc2 = v.ffn_hidden_size, "linear_fc1.", "linear_fc2."
        return [
            *(padded_rows(table[ours + fc1 + kind], hf + fc1 + kind, width) for kind in ("weight", "bias")),
            padded_columns(table[f"{ours}{fc2}weight"], f"{hf}{fc2}weight", width),
            same(table[f"{ours}{fc2}bias"], f"{hf}{fc2}bias"),
        ]

    vision = vision_rules(spec, table, mlp, prefix="model.visual.", merger=MERGER)
    return [*vision, *language_rules(spec, table, prefix="model.language_model.", experts=experts)]
