"""Makes Megatron-core's TransformerConfig for the language model and the vision tower from a ModelSpec."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_vl.config import RunConfigError, TrainConfig
from megatron_vl.config.checks import check_fp8
from megatron_vl.models.fused_layers import ACTIVATIONS
from megatron_vl.models.moe.router import moe_core_settings
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout


def _common_settings(
    platform: Platform, spec: ModelSpec, layout: Layout, config: TrainConfig
) -> dict[str, Any]:
    is_cuda, dtype = platform.name == "cuda", getattr(torch, config.dtype)
    return {
        "tensor_model_parallel_size": layout.tp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": spec.initializer_range,
        # Fusions are CUDA kernels, or torch.compile, which only makes the CPU path slower.
        "apply_rope_fusion": is_cuda,
        "masked_softmax_fusion": False,
        # This is set only on Transformer Engine's linears; megatron_vl/core_fixes/wgrad_fusion.py says why.
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": is_cuda,
        "calculate_per_token_loss": True,
        "use_cpu_initialization": False,
        "batch_p2p_comm": is_cuda,
        # Under pipeline parallelism, the output of a stage is freed once it is sent, while its autograd graph
        # stays.
        "deallocate_pipeline_outputs": True,
        "variable_seq_lengths": False,
    }


def language_config(
    platform: Platform, spec: ModelSpec, layout: Layout, config: TrainConfig, *, aux_loss_coefficient: float
) -> TransformerConfig:
    """The language model's config, which also controls the pipeline schedules and gradient finalisation."""
    language_spec, recompute = spec.language, config.recompute

    expert_settings: dict[str, Any] = (
        moe_core_settings(platform, language_spec, layout, aux_loss_coefficient=aux_loss_coefficient)
        if language_spec.moe
        else {}
    )
    transformer_config = TransformerConfig(
        bias_activation_fusion=platform.name == "cuda",
        sequence_parallel=config.parallel.sequence_parallel,
        context_parallel_size=layout.cp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        # Core's notation: E is the embedding, t a decoder layer, | the end of a chunk, L the loss.
        pipeline_model_parallel_layout=(
            f"E{'|'.join('t' * num_layers for num_layers in layout.layers_per_chunk)}L"
            if layout.pp > 1
            else None
        ),
        cross_entropy_loss_fusion=platform.name == "cuda",
        cross_entropy_fusion_impl="te" if platform.name == "cuda" else "native",
        num_layers=language_spec.num_layers,
        hidden_size=language_spec.hidden_size,
        # Core needs a width even if there are no dense layers.
        ffn_hidden_size=language_spec.ffn_hidden_size or language_spec.moe_ffn_hidden_size,
        num_attention_heads=language_spec.num_heads,
        num_query_groups=language_spec.num_kv_heads,
        kv_channels=language_spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=language_spec.norm_eps,
        add_bias_linear=False,
        add_qkv_bias=language_spec.qkv_bias,
        qk_layernorm=language_spec.qk_norm,
        attention_output_gate=language_spec.output_gate,
        layernorm_zero_centered_gamma=language_spec.zero_centered_norms,
        gated_linear_unit=True,
        activation_func=ACTIVATIONS["silu"],
        mrope_section=list(language_spec.mrope_section),
        **expert_settings,
        **_recompute_settings(
            platform, recompute.language, recompute.language_modules, has_experts=bool(expert_settings)
        ),
        **_fp8_settings(platform, config),
        **_common_settings(platform, spec, layout, config),
    )

    # The interleaved schedule's overlapped p2p needs unbatched sends. On CUDA, 1F1B uses batched ones.
    if layout.vpp > 1:
        transformer_config.batch_p2p_comm = False
        transformer_config.overlap_p2p_comm = platform.name == "cuda"

    return transformer_config


def vision_config(
    platform: Platform, spec: ModelSpec, layout: Layout, config: TrainConfig
) -> TransformerConfig:
    """The vision tower's config: one pipeline stage and no sequence parallelism.

    Sequence parallelism needs a fixed length, but the number of patches differs from row to row.
    """
    vision_spec = spec.vision
    return TransformerConfig(
        num_layers=vision_spec.num_layers,
        hidden_size=vision_spec.hidden_size,
        ffn_hidden_size=vision_spec.padded_ffn_hidden_size,
        num_attention_heads=vision_spec.num_heads,
        kv_channels=vision_spec.head_dim,
        normalization=vision_spec.norm,
        layernorm_epsilon=vision_spec.norm_eps,
        add_bias_linear=True,
        gated_linear_unit=vision_spec.gated_mlp,
        activation_func=ACTIVATIONS[vision_spec.activation],
        sequence_parallel=False,
        pipeline_model_parallel_size=1,
        **_recompute_settings(platform, config.recompute.vision, []),
        **_common_settings(platform, spec, layout, config),
    )


FP8_CAPABILITY = (9, 0)
"""Hopper. FP8 of Ada (8.9) was never tried."""


def _fp8_settings(platform: Platform, config: TrainConfig) -> dict[str, Any]:
    fp8_recipe = config.fp8.recipe
    if fp8_recipe == "none":
        return {}
    check_fp8(config, on_cpu=not platform.has_transformer_engine)
    if platform.capability < FP8_CAPABILITY:
        raise RunConfigError(
            f"fp8.recipe {fp8_recipe} needs Hopper (compute capability 9.0) or later, and this GPU has"
            f" {platform.capability[0]}.{platform.capability[1]}; set fp8.recipe to none"
        )
    return {"fp8": "hybrid", "fp8_recipe": fp8_recipe}


def _recompute_settings(
    platform: Platform, recompute_mode: str, recompute_modules: Sequence[str], has_experts: bool = False
) -> dict[str, Any]:
    if (
        recompute_mode == "selective"
        and "layernorm" in recompute_modules
        and not platform.has_transformer_engine
    ):
        # In core 0.19.2, the backward pass of CheckpointWithoutOutput fails without Transformer Engine.
        raise RunConfigError(
            "recompute.language_modules: layernorm needs Transformer Engine; on cpu use core_attn and mlp"
        )
    if recompute_mode == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

    # FusedMLP and GroupedExperts implement the recomputation of "activation". Core refuses its own for
    # experts (moe_act) with delayed scaling.
    core_modules = [module for module in recompute_modules if module != "activation"]
    if has_experts and "mlp" in recompute_modules:
        core_modules.append("moe")

    if recompute_mode == "selective" and core_modules:
        return {"recompute_granularity": "selective", "recompute_modules": core_modules}
    return {}
