"""Adapters that differ in rank or alpha, as a manifest records them."""

from typing import Any

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.lora import MixedLora, fused_lora


def mixed_lora(
    spec: ModelSpec, ranks: dict[str, int] | None = None, alphas: dict[str, float] | None = None, **lora: Any
) -> LoraConfig:
    """The adapters of ``lora``, with other ranks and alphas by the last word of a matrix's name."""
    config = LoraConfig(**lora)
    parts = [part for adapter in fused_lora(spec, config).values() for part in adapter.parts if part.rank]
    matrices = {}
    for part in parts:
        word = part.hf_name.rpartition(".")[2]
        matrices[part.hf_name] = (ranks or {}).get(word, part.rank), (alphas or {}).get(word, part.alpha)
    return MixedLora(**vars(config), matrices=matrices) if ranks or alphas else config
