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

from __future__ import annotations

import dataclasses
from typing import Any

from megatron_vl.spec.families.base import (
    TEXT,
    ConfigError,
    ModelSpec,
    MoeSpec,
    assemble,
    require,
    text_config,
)
from megatron_vl.spec.families.qwen3_vl import read_text, read_vision


def read(config: dict[str, Any]) -> ModelSpec:
    """The spec of a Qwen3-VL-MoE ``config.json``. Raises :class:`ConfigError` for an invalid field."""
    language = dataclasses.replace(read_text(config, head_dim=None), moe=read_moe(config))
    return assemble("qwen3_vl_moe", config, read_vision(config), language)


def read_moe(config: dict[str, Any]) -> MoeSpec:
    """Reads the experts' fields.

    Raises:
        ConfigError: a field is missing, or its value is not supported.
    """
    text = text_config(config)
    where = TEXT
    experts = text.get("num_local_experts") or require(text, "num_experts", where)
    top_k = require(text, "num_experts_per_tok", where)
    if not 1 <= top_k <= experts:
        raise ConfigError(
            f"config.json: num_experts_per_tok {top_k} must be between 1 and num_experts {experts}"
        )
    if not text.get("norm_topk_prob", True):
        raise ConfigError("config.json: norm_topk_prob=false is not supported; set it to true")

    layers = range(require(text, "num_hidden_layers", where))
    step = text.get("decoder_sparse_step", 1)
    if step < 1:
        raise ConfigError(f"config.json: decoder_sparse_step {step} must be at least 1")
    named = text.get("mlp_only_layers") or ()

    return MoeSpec(
        num_experts=experts,
        top_k=top_k,
        ffn_hidden_size=require(text, "moe_intermediate_size", where),
        norm_topk_prob=True,
        aux_loss_coef=float(text.get("router_aux_loss_coef", 0.001)),
        dense_layers=tuple(i for i in layers if i in named or (i + 1) % step),
        output_router_logits=bool(
            text.get("output_router_logits", config.get("output_router_logits", False))
        ),
    )
