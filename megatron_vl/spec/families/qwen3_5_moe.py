"""Qwen3.5 with experts (35B-A3B, 122B-A10B, 397B-A17B), and Qwen3.6-35B-A3B.

Every decoder layer has routed experts and one shared expert, which processes every token. A linear layer
computes one number from the token. The shared expert's output is multiplied by the sigmoid of this number and
added to that of the routed experts. Routing is the same as in Qwen3-VL-MoE: a softmax over all experts in
float32, then the top k are divided by their sum.

Reference: ``transformers.models.qwen3_5_moe``. It has no dense layers and does not read ``mlp_only_layers``,
``decoder_sparse_step`` or ``norm_topk_prob``.
"""

import dataclasses
from typing import Any

from megatron_vl.spec.families.base import (
    TEXT_FIELDS_PLACE,
    ConfigError,
    ModelSpec,
    assemble_model_spec,
    require_field,
    text_config,
)
from megatron_vl.spec.families.qwen3_5 import SPECIAL_TOKENS, read_text_spec, read_vision_spec
from megatron_vl.spec.families.qwen3_vl_moe import read_moe_spec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3.5-MoE ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    text_fields = text_config(config)
    moe_spec = read_moe_spec(config)
    if moe_spec.dense_layers:
        raise ConfigError(
            f"config.json: dense layers {list(moe_spec.dense_layers)} (mlp_only_layers, decoder_sparse_step)"
            " are not supported; every layer of this family has experts"
        )

    shared_ffn_hidden_size = require_field(text_fields, "shared_expert_intermediate_size", TEXT_FIELDS_PLACE)
    if shared_ffn_hidden_size < 1:
        raise ConfigError(
            f"config.json: shared_expert_intermediate_size {shared_ffn_hidden_size} must be at least 1"
        )

    language_spec = dataclasses.replace(
        read_text_spec(config, has_dense_layers=False),
        moe=dataclasses.replace(moe_spec, shared_ffn_hidden_size=shared_ffn_hidden_size),
    )
    return assemble_model_spec("qwen3_5_moe", config, read_vision_spec(config), language_spec, SPECIAL_TOKENS)
