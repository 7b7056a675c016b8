"""The modules that layers are built from: Transformer Engine's on CUDA, Megatron-core's own on CPU.

Both compute the same function. :mod:`megatron_vl.models.parameter_names` gives their tensors the same names.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
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
from megatron_vl.models.fp8_linear import Fp8Rows
from megatron_vl.models.fused_layers import (
    FusedMLP,
    ResidualNorm,
    TowerSelfAttention,
    add_to_residual,
    postpone_addition,
    recomputes_norms,
)
from megatron_vl.models.gated_delta_net import GatedDeltaNet
from megatron_vl.models.moe.router import moe_layer
from megatron_vl.platform import Platform
from megatron_vl.spec.families import LinearAttentionSpec


def remaining_deepstack_levels(layer_index: int, num_deepstack_levels: int) -> int:
    """How many of ``num_deepstack_levels`` are in the input of the decoder layer ``layer_index`` (from 0)."""
    return max(0, num_deepstack_levels - layer_index)


class DeepStackLayer(TransformerLayer):
    """A decoder layer that adds features of an inner vision layer to its output (DeepStack).

    Reference: arXiv 2406.04334 and ``Qwen3VLTextModel`` of transformers, which adds level ``i`` at the
    medium's tokens to the output of decoder layer ``i``.

    The levels that are not added yet are concatenated to the hidden state along the sequence dimension. Under
    sequence parallelism, each level is scattered like the hidden state. A layer adds the first level and
    removes it: with n levels left, it maps [(1 + n) * s, 1, H] to [n * s, 1, H] if n > 0, else [s, 1, H] to
    [s, 1, H]. So gradients, recomputation, pipeline messages and the interleaved schedule need no change, and
    any layer may be on any stage.
    """

    def __init__(self, *args: Any, deepstack: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remaining_levels = remaining_deepstack_levels(self.layer_number - 1, deepstack)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if not self.remaining_levels:
            return super().forward(hidden_states, *args, **kwargs)

        local_seq_len = hidden_states.shape[0] // (1 + self.remaining_levels)
        layer_input, first_level, later_levels = hidden_states.split(
            [local_seq_len, local_seq_len, (self.remaining_levels - 1) * local_seq_len]
        )

        # The layer keeps its input for the backward pass. The copy lets the memory of all levels be freed.
        layer_output, context = super().forward(layer_input.clone(), *args, **kwargs)
        layer_output = layer_output + first_level
        if self.remaining_levels > 1:
            layer_output = torch.cat((layer_output, later_levels))
        return layer_output, context


class LocalRMSNorm(nn.Module):
    """RMSNorm with support for sequence parallelism, which core's local one lacks.

    Statistics are in fp32, as in HF.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        initial_values = torch.zeros if self.zero_centered else torch.ones
        self.weight = nn.Parameter(initial_values(hidden_size, dtype=config.params_dtype))
        # finalize_model_grads sums the gradients of marked parameters over the tensor-parallel group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        normalized = x.float()
        normalized = normalized * torch.rsqrt(normalized.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (normalized * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normalized.to(x.dtype)


class LocalLayerNorm(nn.LayerNorm):
    """LayerNorm with core's constructor, marked for sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def local_norm_class(config: TransformerConfig) -> type[nn.Module]:
    """The norm class of ``config.normalization`` that needs no Transformer Engine."""
    return LocalRMSNorm if config.normalization == "RMSNorm" else LocalLayerNorm


def make_norm(platform: Platform, config: TransformerConfig, hidden_size: int) -> nn.Module:
    """A stand-alone norm of ``config.normalization`` over ``hidden_size`` elements."""
    if platform.has_transformer_engine:
        from megatron.core.extensions.transformer_engine import TENorm

        return TENorm(config=config, hidden_size=hidden_size, eps=config.layernorm_epsilon)
    return local_norm_class(config)(config=config, hidden_size=hidden_size, eps=config.layernorm_epsilon)


def linear_classes(platform: Platform, *, fp8_rows: bool = False) -> tuple[Any, Any]:
    """The column-parallel and row-parallel linear classes, with core's constructor.

    Args:
        fp8_rows: whether their products are in FP8 with a scale for each row (CUDA; no sequence parallelism).
    """
    if platform.has_transformer_engine:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear

        if not fp8_rows:
            return TEColumnParallelLinear, TERowParallelLinear

        class ColumnLinear(Fp8Rows, TEColumnParallelLinear):
            pass

        class RowLinear(Fp8Rows, TERowParallelLinear):
            pass

        return ColumnLinear, RowLinear
    return ColumnParallelLinear, RowParallelLinear


def _build_mlp(
    config: TransformerConfig,
    pg_collection: Any,
    *,
    submodules: MLPSubmodules,
    recompute: bool,
    name: str | None = None,
    **_: Any,
) -> FusedMLP:
    """Core also says where the layer stands, which only experts ask."""
    return FusedMLP(config, submodules, tp_group=pg_collection.tp, recompute_activation=recompute, name=name)


class _LayerModules(NamedTuple):
    """The constructors of a platform's linears and norms within a layer."""

    column_linear: Any
    """The linear after a norm. Of Transformer Engine's, some include that norm."""
    row_linear: Any
    layer_norm: Any
    """The norm before ``column_linear``; the identity if that includes it."""
    expert_norm: Any
    """The norm before experts. It is always separate, because the router also reads its output."""
    head_norm: Any
    final_norm: Any
    add_attention: Any
    """Core's ``get_bias_dropout_add``, or what stands for it, after attention."""
    add_mlp: Any


def _layer_modules(platform: Platform, config: TransformerConfig, fp8_rows: bool) -> _LayerModules:
    column_linear, row_linear = linear_classes(platform, fp8_rows=fp8_rows)
    if not platform.has_transformer_engine:
        norm_class = local_norm_class(config)
        head_norm = norm_class if config.qk_layernorm else None
        norms, additions = (norm_class, norm_class, head_norm, norm_class), (get_bias_dropout_add,) * 2
        return _LayerModules(column_linear, row_linear, *norms, *additions)

    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear, TENorm
    from megatron.core.transformer.identity_op import IdentityOp

    add_attention: Any = add_to_residual
    if config.bf16:
        layer_norm, expert_norm = partial(ResidualNorm, fp8_rows=fp8_rows), ResidualNorm
        # Core keeps the input of a norm that it computes again, so that must be a tensor.
        if not recomputes_norms(config):
            add_attention = postpone_addition
    else:
        column_linear = TELayerNormColumnParallelLinear
        layer_norm, expert_norm = IdentityOp, TENorm

    return _LayerModules(
        column_linear=column_linear,
        row_linear=row_linear,
        layer_norm=layer_norm,
        expert_norm=expert_norm,
        head_norm=TENorm if config.qk_layernorm else None,
        final_norm=TENorm,
        add_attention=add_attention,
        add_mlp=add_to_residual,
    )


def transformer_block_spec(
    platform: Platform,
    config: TransformerConfig,
    num_layers: int,
    *,
    attention_backend: str,
    causal: bool,
    is_windowed_layer: Callable[[int], bool] = lambda layer: False,
    num_deepstack_levels: int = 0,
    fused_windows: bool = False,
    fp8_rows: bool = False,
    recompute_activation: bool = False,
    layers_with_experts: Sequence[bool] = (),
    layers_with_linear_attention: Sequence[bool] = (),
    linear_attention: LinearAttentionSpec | None = None,
    rope_scale: tuple[int, float] | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one TransformerBlock: pre-norm packed self-attention and an MLP (or experts).

    Args:
        attention_backend: a result of :func:`megatron_vl.models.attention.choose_backend`.
        is_windowed_layer: says whether a zero-based global layer attends within windows.
        fused_windows: whether window layers use the fused kernel (CUDA).
        fp8_rows: see :func:`linear_classes`.
        layers_with_experts, layers_with_linear_attention: for each layer of this block, whether it has
            experts instead of an MLP, and linear attention; empty if no layer has.
    """
    layer_modules = _layer_modules(platform, config, fp8_rows)
    core_attention = partial(
        PackedAttention,
        backend=attention_backend,
        causal=causal,
        windowed=is_windowed_layer,
        rope_scale=rope_scale,
    )
    # Our tower kernels rotate queries and keys themselves, so TowerSelfAttention replaces core's attention.
    takes_tower_kernels = fused_windows or attention_backend == "triton"
    self_attention = ModuleSpec(
        module=TowerSelfAttention if takes_tower_kernels else SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal if causal else AttnMaskType.no_mask}
        | ({"fused_windows": fused_windows} if takes_tower_kernels else {}),
        submodules=SelfAttentionSubmodules(
            linear_qkv=layer_modules.column_linear,
            core_attention=core_attention,
            linear_proj=layer_modules.row_linear,
            q_layernorm=layer_modules.head_norm,
            k_layernorm=layer_modules.head_norm,
        ),
    )
    layer_spec = ModuleSpec(
        module=DeepStackLayer if num_deepstack_levels else TransformerLayer,
        params={"deepstack": num_deepstack_levels} if num_deepstack_levels else {},
        submodules=TransformerLayerSubmodules(
            input_layernorm=layer_modules.layer_norm,
            self_attention=self_attention,
            self_attn_bda=layer_modules.add_attention,
            pre_mlp_layernorm=layer_modules.layer_norm,
            mlp=partial(
                _build_mlp,
                submodules=MLPSubmodules(
                    linear_fc1=layer_modules.column_linear, linear_fc2=layer_modules.row_linear
                ),
                recompute=recompute_activation,
            ),
            mlp_bda=layer_modules.add_mlp,
        ),
    )

    # A layer may have both experts and linear attention.
    layer_specs = [layer_spec] * num_layers
    if any(layers_with_experts):
        # The router reads the output of the norm too, so that norm cannot be part of the first linear.
        layer_specs = _replace_in_layers(
            layer_specs,
            layers_with_experts,
            pre_mlp_layernorm=layer_modules.expert_norm,
            mlp=moe_layer(platform, *linear_classes(platform), recompute_activation=recompute_activation),
        )
    if any(layers_with_linear_attention):
        linears = {"column": layer_modules.column_linear, "row": layer_modules.row_linear}
        delta_net = ModuleSpec(module=GatedDeltaNet, params={"spec": linear_attention, **linears})
        layer_specs = _replace_in_layers(layer_specs, layers_with_linear_attention, self_attention=delta_net)
    return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=layer_modules.final_norm)


def _replace_in_layers(
    layer_specs: list[ModuleSpec], is_chosen: Sequence[bool], **submodules: Any
) -> list[ModuleSpec]:
    return [
        replace(layer, submodules=replace(layer.submodules, **submodules)) if has_others else layer
        for layer, has_others in zip(layer_specs, is_chosen, strict=True)
    ]
