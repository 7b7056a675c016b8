"""Megatron-core's config of a layer with small experts."""

from typing import Any

import torch.nn.functional as F


def expert_config(hidden: int, ffn: int, experts: int, **more: Any) -> Any:
    """SwiGLU experts without biases. Call ``get_platform`` first, since this imports Megatron-core."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=2,
        num_moe_experts=experts,
        moe_ffn_hidden_size=ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        **more,
    )
