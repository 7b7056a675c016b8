"""Converts weights between Hugging Face and Megatron: one table of rules per family serves both directions.

It runs on CPU and streams. ``rules.py`` defines what a tensor consists of, ``qwen*.py`` are the families'
tables, ``hf.py`` reads HF folders, ``stream.py`` moves bytes, ``convert.py`` combines them into convert,
split, merge and export, and ``verify.py`` compares.
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
    """The rules of a model, one for each canonical tensor. ``experts`` says how HF stores its
    experts, if any; None: as released."""
    of_family = RULES[spec.family]
    rules = of_family(spec, experts or RELEASED[spec.family]) if spec.language.moe else of_family(spec)
    check_cover(spec, rules)
    return rules
