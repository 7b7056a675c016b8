"""Converts weights between Hugging Face and Megatron, with one table of rules per family for both directions.

The converters run on CPU and stream tensors. ``rules.py`` defines what a tensor consists of, ``qwen*.py`` are
the families' tables, ``hf_checkpoint.py`` reads HF folders, ``fp8.py`` reads and writes FP8 weights,
``output_folder.py`` holds what is written and copies tensors in threads, ``hf_output.py`` says what an export
holds, ``convert.py`` combines them for conversion, splitting, merging and export, ``add_tokens.py`` writes
folders with more rows, and ``compare.py`` compares checkpoints.
"""

from collections.abc import Callable

from megatron_vl.spec.families import ModelSpec

from . import qwen2_5_vl, qwen2_vl, qwen3_5, qwen3_vl
from .rules import RELEASED_EXPERT_STYLE, ConversionRule, ExpertStyle

RULES_BY_FAMILY: dict[str, Callable[..., list[ConversionRule]]] = {
    "qwen2_vl": qwen2_vl.make_rules,
    "qwen2_5_vl": qwen2_5_vl.make_rules,
    "qwen3_vl": qwen3_vl.make_rules,
    "qwen3_vl_moe": qwen3_vl.make_rules,
    "qwen3_5": qwen3_5.make_rules,
    "qwen3_5_moe": qwen3_5.make_rules,
}


def make_conversion_rules(
    spec: ModelSpec, expert_style: ExpertStyle | None = None, mtp_expert_style: ExpertStyle = "output_first"
) -> list[ConversionRule]:
    """The rules of a model, one for each canonical tensor.

    Args:
        expert_style: how the HF folder stores experts, if the model has any; None: as released.
        mtp_expert_style: the same for multi-token prediction, if that is part of the model.
    """
    mtp_options = {"mtp_expert_style": mtp_expert_style} if spec.language.has_mtp else {}
    styles = [expert_style or RELEASED_EXPERT_STYLE[spec.family]] if spec.language.moe else []
    return RULES_BY_FAMILY[spec.family](spec, *styles, **mtp_options)
