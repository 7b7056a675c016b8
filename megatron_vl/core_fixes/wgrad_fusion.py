"""Weight gradients that are added to ``main_grad`` where they are computed (Megatron-core 0.19.2).

Core's config switch for gradient-accumulation fusion applies to all linears, and its own
ColumnParallelLinear (the output layer of GPTModel) then needs a CUDA extension of APEX. Transformer Engine's
linears and its matrix product can add to ``main_grad`` without it. So the switch stays off, and fusion is set
here. This fix can go when GPTModel takes a Transformer Engine output layer.

Biases of Transformer Engine's linears (2.20.2): in bf16, the weight gradient's product is asked for the bias
gradient too. cuBLASLt then reads the output's gradient once more, at 1.7 of an H200's 4.8 TB/s. With FP8,
torch sums it before the cast. Here our kernel does so in both. This fix can go when cuBLASLt sums columns
within the product.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel import layers as core_layers
from torch import Tensor, nn


def fuse_weight_gradients(model: nn.Module) -> None:
    """Makes every Transformer Engine linear of ``model`` accumulate weight gradients into ``main_grad``.

    ``main_grad`` must exist before the first backward pass: wrap the model in Megatron-core's DDP.
    """
    for module in model.modules():
        is_of_te = any(kind.__module__.startswith("transformer_engine.") for kind in type(module).__mro__)
        if is_of_te and hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]


def fuse_output_layer(output_layer: ColumnParallelLinear) -> None:
    """Makes GPTModel's output layer accumulate its weight's gradient into ``main_grad``, which must exist."""
    core_layers.fused_weight_gradient_mlp_cuda = WeightGradientProducts
    core_layers.get_dummy_wgrad = placeholder_gradient  # Transformer Engine would keep one for each shape
    output_layer.gradient_accumulation_fusion = True


class WeightGradientProducts:
    """Stands in for APEX's ``fused_weight_gradient_mlp_cuda``."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, output_grads: Tensor, main_grad: Tensor) -> None:
        """Adds the product of output_grads [N, out] and inputs [N, in] to main_grad, float32 [out, in]."""
        if inputs.dtype == main_grad.dtype or not main_grad.is_cuda:
            # In float32, Transformer Engine would multiply in TF32.
            main_grad.add_(output_grads.t().matmul(inputs))
            return

        from transformer_engine.pytorch.cpp_extensions import general_gemm

        general_gemm(
            inputs, output_grads, main_grad.dtype, layout="NT", out=main_grad, grad=True, accumulate=True
        )


def placeholder_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> Tensor:
    """What autograd gets as the gradient, so that DDP's hook runs. The hook does not read it."""
    return torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())


Prepared = tuple[Any, Tensor | None]
"""The gradient of a linear's output [N, out], gathered or quantised, and the bias gradient if it is known."""


def use_column_sums() -> None:
    """Makes all linears of Transformer Engine compute bias gradients with our kernel. Idempotent."""
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

    prepare = TransformerEngineBaseModule.grad_output_preprocess
    if not isinstance(prepare, partial):
        TransformerEngineBaseModule.grad_output_preprocess = staticmethod(partial(_prepare, prepare))


def _prepare(
    prepare: Callable[..., Prepared], ctx: Any, output_grad: Tensor, is_row: bool, quantizer: Any
) -> Prepared:
    """Transformer Engine's ``prepare``, with the bias gradient [out] from our kernel."""
    from megatron_vl.kernels.layers.biased_layers import column_sums

    # A linear with a frozen weight has no bias gradient. Gathered gradients are summed by what gathers them.
    has_weight_gradient = getattr(ctx, "requires_wgrad", False)  # layers of two linears have none
    if not ctx.use_bias or not has_weight_gradient or (is_row and ctx.sequence_parallel):
        return prepare(ctx, output_grad, is_row, quantizer)

    bias_grad = column_sums(output_grad)
    ctx.use_bias = False
    prepared_grad, _ = prepare(ctx, output_grad, is_row, quantizer)
    ctx.use_bias = True
    return prepared_grad, bias_grad
