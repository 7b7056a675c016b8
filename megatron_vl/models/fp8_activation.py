"""SwiGLU between two linears of Transformer Engine in FP8 with delayed scaling.

The linears would cast SwiGLU's result and its gradient in kernels of their own. Here SwiGLU hands them FP8,
as their quantizers would make it, to the bit.
"""

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


def takes_fp8_activation(config: TransformerConfig) -> bool:
    """Whether SwiGLU of an MLP of ``config`` may hand on FP8.

    A forward pass that is repeated needs the scales of the first one, which Transformer Engine restores only
    within its linears.
    """
    is_repeated = config.recompute_granularity == "full" or "mlp" in (config.recompute_modules or [])
    is_swiglu = config.gated_linear_unit and config.activation_func is torch.nn.functional.silu
    has_delayed_scaling = (config.fp8, config.fp8_recipe) == ("hybrid", "delayed")
    return has_delayed_scaling and is_swiglu and not config.add_bias_linear and not is_repeated


def activation_quantizers(linear_fc1: Any, linear_fc2: Any) -> list[Any]:
    """The quantizers of the input of ``linear_fc2``, and of the gradient of ``linear_fc1``'s output.

    Empty in the first pass, which makes them, and beside adapters, which read these tensors too.
    """
    if hasattr(linear_fc1, "adapter") or hasattr(linear_fc2, "adapter"):
        return []
    inputs, output_grads = linear_fc2.quantizers["scaling_fwd"], linear_fc1.quantizers["scaling_bwd"]
    return [inputs[0], output_grads[0]] if inputs and output_grads else []


class Fp8SwiGLU(torch.autograd.Function):
    """[S, 2 * F] -> [S, F] in FP8"""

    @staticmethod
    def forward(ctx, x: Tensor, quantizer: Any, grad_quantizer: Any) -> Tensor:
        ctx.save_for_backward(x)
        ctx.grad_quantizer = grad_quantizer
        return _quantized_swiglu(x, quantizer)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x_grad = _quantized_swiglu(ctx.saved_tensors[0], ctx.grad_quantizer, output_grad.contiguous())
        return x_grad, None, None


def _quantized_swiglu(x: Tensor, quantizer: Any, output_grad: Tensor | None = None) -> Tensor:
    from transformer_engine.pytorch import Float8Tensor

    from megatron_vl.kernels.layers.fp8_swiglu import swiglu_in_fp8

    values, transposed, inverse_scale = swiglu_in_fp8(x, quantizer.scale, quantizer.amax, output_grad)
    return Float8Tensor(
        shape=values.shape,
        dtype=x.dtype,
        data=values,
        data_transpose=transposed,
        fp8_scale_inv=inverse_scale,
        fp8_dtype=quantizer.dtype,
        quantizer=quantizer,
    )
