"""The modules that layers are built from: Transformer Engine's on CUDA, Megatron-core's own on CPU.

Both compute the same function. :mod:`megatron_vl.models.names` gives their tensors the same names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.activations import quick_gelu
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from megatron_vl.models.attention import PackedAttention
from megatron_vl.models.deepstack import DeepStackLayer
from megatron_vl.models.fused_layers import FusedMLP, TowerSelfAttention, with_bias
from megatron_vl.models.gated_delta_net import GatedDeltaNet
from megatron_vl.models.moe.router import moe_layer
from megatron_vl.platform import Platform
from megatron_vl.spec.families import LinearAttentionSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "quick_gelu": quick_gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


class LocalRMSNorm(nn.Module):
    """RMSNorm with support for sequence parallelism, which core's local one lacks.

    Statistics are in fp32, as in HF.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        start = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(start(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of marked parameters over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (x32 * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * x32.to(x.dtype)


class LocalLayerNorm(nn.LayerNorm):
    """LayerNorm with core's constructor, marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def local_norm(config: TransformerConfig) -> type[nn.Module]:
    """The norm class of ``config.normalization`` that needs no Transformer Engine."""
    return LocalRMSNorm if config.normalization == "RMSNorm" else LocalLayerNorm


def norm(platform: Platform, config: TransformerConfig, hidden_size: int) -> nn.Module:
    """A stand-alone norm of ``config.normalization`` over ``hidden_size`` elements."""
    if platform.transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(config=config, hidden_size=hidden_size, eps=config.layernorm_epsilon)
    return local_norm(config)(config=config, hidden_size=hidden_size, eps=config.layernorm_epsilon)


def linears(platform: Platform) -> tuple[Any, Any]:
    """The column-parallel and row-parallel linear classes, with core's constructor."""
    if platform.transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        return TEColumnParallelLinear, TERowParallelLinear
    return ColumnParallelLinear, RowParallelLinear


def _mlp(
    config: TransformerConfig,
    pg_collection: Any,
    *,
    submodules: MLPSubmodules,
    recompute: bool,
    **kwargs: Any,
) -> FusedMLP:
    """The function that core calls to build a layer's MLP."""
    kwargs.pop("is_mtp_layer", None)
    return FusedMLP(config, submodules, tp_group=pg_collection.tp, recompute=recompute, **kwargs)


class _Parts(NamedTuple):
    """The constructors of a platform's linears and norms within a layer."""

    column: Any
    """The linear after a norm. With Transformer Engine, it includes that norm."""
    row: Any
    layer_norm: Any
    """The norm before ``column``; with Transformer Engine, the identity."""
    expert_norm: Any
    """The norm before experts. It is always separate, because the router also reads its output."""
    head_norm: Any
    """The norm of queries and keys; None if the model has none."""
    final_norm: Any
    """The norm after the last layer."""


def _parts(platform: Platform, config: TransformerConfig) -> _Parts:
    column, row = linears(platform)
    if not platform.transformer_engine:
        local = local_norm(config)
        return _Parts(column, row, local, local, local if config.qk_layernorm else None, local)

    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm
    from megatron.core.transformer.identity_op import IdentityOp

    return _Parts(
        column=with_bias(TELayerNormColumnParallelLinear),
        row=with_bias(row),
        layer_norm=IdentityOp,
        expert_norm=TENorm,
        head_norm=TENorm if config.qk_layernorm else None,
        final_norm=TENorm,
    )


def block_spec(
    platform: Platform,
    config: TransformerConfig,
    num_layers: int,
    *,
    attention_backend: str,
    causal: bool,
    windowed: Callable[[int], bool] = lambda layer: False,
    deepstack: int = 0,
    fused_windows: bool = False,
    recompute_activation: bool = False,
    experts: Sequence[bool] = (),
    linear: Sequence[bool] = (),
    linear_attention: LinearAttentionSpec | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one TransformerBlock: pre-norm packed self-attention and an MLP (or experts).

    Args:
        num_layers: number of layers in this block, which belong to one pipeline chunk.
        attention_backend: one of :data:`megatron_vl.models.attention.BACKENDS`.
        windowed: says whether a zero-based global layer attends within windows.
        deepstack: number of levels of visual features that the model's first layers add to their output.
        fused_windows: whether window layers use the fused kernel (CUDA).
        recompute_activation: whether activations of the MLP are recomputed in the backward pass.
        experts: for each layer of this block, whether it has experts instead of an MLP; empty: none has.
        linear: for each layer of this block, whether it has linear attention; empty: none has.
        linear_attention: the sizes of linear attention, for models that have it.
    """
    parts = _parts(platform, config)
    own_kernels = fused_windows or attention_backend == "triton"
    attention = partial(PackedAttention, backend=attention_backend, causal=causal, windowed=windowed)
    layer = ModuleSpec(
        module=DeepStackLayer if deepstack else TransformerLayer,
        params={"deepstack": deepstack} if deepstack else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.layer_norm,
            self_attention=ModuleSpec(
                module=TowerSelfAttention if own_kernels else SelfAttention,
                params={
                    "attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask,
                    **({"fused_windows": fused_windows} if own_kernels else {}),
                },
                submodules=SelfAttentionSubmodules(
                    linear_qkv=parts.column,
                    core_attention=attention,
                    linear_proj=parts.row,
                    q_layernorm=parts.head_norm,
                    k_layernorm=parts.head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.layer_norm,
            mlp=partial(
                _mlp,
                submodules=MLPSubmodules(linear_fc1=parts.column, linear_fc2=parts.row),
                recompute=recompute_activation,
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )

    layers = [layer] * num_layers
    if any(experts):
        submodules = replace(layer.submodules, pre_mlp_layernorm=parts.expert_norm, mlp=moe_layer(platform))
        layers = [replace(layer, submodules=submodules) if has_experts else layer for has_experts in experts]

    if any(linear):
        mixer = ModuleSpec(
            module=GatedDeltaNet,
            params={"spec": linear_attention, "column": parts.column, "row": parts.row},
        )
        layers = [
            replace(layer, submodules=replace(layer.submodules, self_attention=mixer)) if is_linear else layer
            for layer, is_linear in zip(layers, linear, strict=True)
        ]

    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=parts.final_norm)
