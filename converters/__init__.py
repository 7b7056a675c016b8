"""Converts weights between Hugging Face and Megatron, with one table of rules per family for both directions.

The converters run on CPU and stream tensors. ``rules.py`` defines what a tensor consists of, ``qwen*.py`` are
the families' tables, ``hf_checkpoint.py`` reads HF folders, ``copy_jobs.py`` copies tensors in threads,
``output_folder.py`` continues an interrupted conversion, ``convert.py`` combines them for conversion,
splitting, merging and export, and ``compare.py`` compares checkpoints.
"""

from __future__ import annotations

from megatron_vl.spec.families import ModelSpec

from . import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from .rules import RELEASED_EXPERT_STYLE, ConversionRule, ExpertStyle, NameEntry, rules_from_entries

RULES_BY_FAMILY: dict[str, tuple[NameEntry, ...]] = {
    "qwen2_vl": qwen2_vl.RULES,
    "qwen2_5_vl": qwen2_5_vl.RULES,
    "qwen3_vl": qwen3_vl.RULES,
    "qwen3_vl_moe": qwen3_vl.RULES,
    "qwen3_5": qwen3_5.RULES,
    "qwen3_5_moe": qwen3_5.RULES,
}
"""Maps each family to its table, without the experts."""


def make_conversion_rules(spec: ModelSpec, expert_style: ExpertStyle | None = None) -> list[ConversionRule]:
    """The rules of a model, one for each canonical tensor.

    Args:
        expert_style: how the HF folder stores experts, if the model has any; None: as released.
    """
    style = expert_style or RELEASED_EXPERT_STYLE.get(spec.family, "apart")
    return rules_from_entries(spec, (*RULES_BY_FAMILY[spec.family], *qwen3_vl.EXPERTS[style]))
