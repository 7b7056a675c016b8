"""Converts weights between Hugging Face and Megatron, with one table of rules per family for both directions.

The converters run on CPU and stream tensors. ``rules.py`` defines what a tensor consists of, ``qwen*.py`` are
the families' tables, ``hf.py`` reads HF folders, ``stream.py`` copies bytes, ``convert.py`` combines them for
conversion, splitting, merging and export, and ``verify.py`` compares checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_vl.spec.families import ModelSpec

from . import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from .rules import RELEASED, ExpertStyle, Rule, check_cover

RULES: dict[str, Callable[..., list[Rule]]] = {
    "qwen2_vl": qwen2_vl.rules,
    "qwen2_5_vl": qwen2_5_vl.rules,
    "qwen3_vl": qwen3_vl.rules,
    "qwen3_vl_moe": qwen3_vl.rules,
    "qwen3_5": qwen3_5.rules,
    "qwen3_5_moe": qwen3_5.rules,
}
"""Maps each family to the function that returns its rules."""


def rules_for(spec: ModelSpec, experts: ExpertStyle | None = None) -> list[Rule]:
    """The rules of a model, one for each canonical tensor.

    Args:
        experts: how the HF folder stores experts, if the model has any; None: as released.
    """
    of_family = RULES[spec.family]
    rules = of_family(spec, experts or RELEASED[spec.family]) if spec.language.moe else of_family(spec)
    check_cover(spec, rules)
    return rules
