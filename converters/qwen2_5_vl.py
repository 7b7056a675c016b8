"""Qwen2.5-VL <-> Megatron: a SwiGLU vision MLP whose width (3420) is padded to a multiple of 128.

Names: ``Qwen2_5_VLForConditionalGeneration`` as released (``visual.*``, ``model.layers.*``).
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec, VisionSpec
from megatron_vl.spec.tensors import tensor_table

from .rules import Rule, gated, language_rules, padded_columns, same, vision_rules


def rules(spec: ModelSpec) -> list[Rule]:
    """Returns one rule for each tensor of the model."""
    table = tensor_table(spec)

    def mlp(v: VisionSpec, ours: str, hf: str) -> list[Rule]:
        width = v.ffn_hidden_size
        return [
            *(
                gated(
                    table[f"{ours}linear_fc1.{kind}"], f"{hf}gate_proj.{kind}", f"{hf}up_proj.{kind}", width
                )
                for kind in ("weight", "bias")
            ),
            padded_columns(table[ours + "linear_fc2.weight"], hf + "down_proj.weight", width),
            same(table[ours + "linear_fc2.bias"], hf + "down_proj.bias"),
        ]

    return [*vision_rules(spec, table, mlp), *language_rules(spec, table)]
