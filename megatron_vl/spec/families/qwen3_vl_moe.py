"""Qwen3-VL-MoE (30B-A3B, 235B-A22B): Qwen3-VL with experts instead of the decoder layers' MLPs.

The reference is ``transformers.models.qwen3_vl_moe`` (arXiv 2511.21631) of transformers 5.17:

* The router is a linear layer without bias, computed in the hidden states' type (bfloat16 in a bfloat16
  model). Its logits go through a softmax over *all* experts in float32. The top k are divided by their sum
  and cast back to the logits' type. (A softmax over only the top k logits gives the same numbers up to
  rounding.)
* transformers ignores ``norm_topk_prob`` and always divides the weights by their sum. Released configs set it
  to true. This project refuses false, because there is no reference for it.
* The load-balancing loss is added only if ``output_router_logits`` is true, which it is not in the released
  configs. They do not have ``router_aux_loss_coef`` either; its default is 0.001.
* There are no shared experts. A layer is dense if ``mlp_only_layers`` names it or ``decoder_sparse_step``
  does not divide its number, counted from 1. The released models have no dense layers.
* ``save_pretrained`` writes ``num_experts`` as ``num_local_experts``; both are read.
"""

import dataclasses
from functools import partial
from typing import Any

from megatron_vl.spec.families.base import (
    TEXT_FIELDS_PLACE,
    ConfigError,
    ModelSpec,
    MoeSpec,
    assemble_model_spec,
    require_field,
    text_config,
)
from megatron_vl.spec.families.qwen3_vl import read_text_spec, read_vision_spec


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3-VL-MoE ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    language_spec = dataclasses.replace(read_text_spec(config, head_dim=None), moe=read_moe_spec(config))
    return assemble_model_spec("qwen3_vl_moe", config, read_vision_spec(config), language_spec)


def read_moe_spec(config: dict[str, Any]) -> MoeSpec:
    """Reads the experts' fields.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    text_fields = text_config(config)
    required_field = partial(require_field, text_fields, section_name=TEXT_FIELDS_PLACE)
    num_experts = text_fields.get("num_local_experts") or required_field("num_experts")
    top_k = required_field("num_experts_per_tok")
    if not 1 <= top_k <= num_experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {top_k} must be between 1 and num_experts {num_experts}"
        )
    if not text_fields.get("norm_topk_prob", True):
        raise ConfigError("config.json: norm_topk_prob=false is not supported; set it to true")

    sparse_step = text_fields.get("decoder_sparse_step", 1)
    if sparse_step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step {sparse_step} must be at least 1")
    mlp_layers, num_layers = text_fields.get("mlp_only_layers") or (), required_field("num_hidden_layers")
    router_logits = text_fields.get("output_router_logits", config.get("output_router_logits", False))
    return MoeSpec(
        num_experts=num_experts,
        top_k=top_k,
        ffn_hidden_size=required_field("moe_intermediate_size"),
        aux_loss_coef=float(text_fields.get("router_aux_loss_coef", 0.001)),
        dense_layers=tuple(i for i in range(num_layers) if i in mlp_layers or (i + 1) % sparse_step),
        output_router_logits=bool(router_logits),
    )
