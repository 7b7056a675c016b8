"""Qwen2-VL <-> Megatron: LayerNorm with bias and a two-layer MLP in the vision tower.

Names: ``Qwen2VLForConditionalGeneration`` as released (``visual.*``, ``model.layers.*``).
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec, VisionSpec
from megatron_vl.spec.tensors import tensor_table

from .rules import Rule, language_rules, padded_columns, padded_rows, same, vision_rules


def rules(spec: ModelSpec) -> list[Rule]:
    """Returns one rule for each tensor of the model."""
    table = tensor_table(spec)

    def mlp(v: VisionSpec, ours: str, hf: str) -> list[Rule]:
        width = v.ffn_hidden_size
        return [
            *(
                padded_rows(table[f"{ours}linear_fc1.{kind}"], f"{hf}fc1.{kind}", width)
                for kind in ("weight", "bias")
            ),
            padded_columns(table[ours + "linear_fc2.weight"], hf + "fc2.weight", width),
            same(table[ours + "linear_fc2.bias"], hf + "fc2.bias"),
        ]

    return [*vision_rules(spec, table, mlp), *language_rules(spec, table)]
