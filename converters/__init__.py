"""Hugging Face <-> Megatron weights: one table of rules a family, used in both directions. CPU only,
streaming.

``rules.py`` says what a tensor is made of, ``qwen*.py`` are the families' tables, ``hf.py`` reads HF folders,
``stream.py`` moves bytes, ``convert.py`` joins them into convert, split, merge and export, ``verify.py``
compares.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_vl.spec.families import ModelSpec

from . import qwen2_5_vl, qwen2_vl, qwen3_vl
from .rules import RELEASED, ExpertStyle, Rule, check_cover

RULES: dict[str, Callable[..., list[Rule]]] = {
    "qwen2_vl": qwen2_vl.rules,
    "qwen2_5_vl": qwen2_5_vl.rules,
    "qwen3_vl": qwen3_vl.rules,
    "qwen3_vl_moe": qwen3_vl.rules,
}
"""Family -> the function that gives its rules."""


def rules_for(spec: ModelSpec, experts: ExpertStyle = RELEASED) -> list[Rule]:
    """The rules of a model, one for each of its canonical tensors; ``experts``: how HF stores them, where
    there are any."""
    rules = RULES[spec.family](spec, experts) if spec.language.moe else RULES[spec.family](spec)
    check_cover(spec, rules)
    return rules
