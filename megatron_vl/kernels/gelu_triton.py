"""x * sigmoid(a x + b x^3) as one Triton kernel for each direction; see :mod:`megatron_vl.kernels.gelu`.

The arithmetic is in fp32, and results are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Elements of one program."""


@triton.jit
def _forward_kernel(
    x,
    output_pointer,
    num_elements,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first_element = tl.program_id(0).to(tl.int64) * BLOCK
    element_index = first_element + tl.arange(0, BLOCK)
    element_mask = element_index < num_elements
    x_fp32 = tl.load(x + element_index, mask=element_mask).to(tl.float32)

    sigmoid_input = x_fp32 * (LINEAR + CUBIC * x_fp32 * x_fp32)
    y = x_fp32 * tl.sigmoid(sigmoid_input)
    rounded_y = y.to(output_pointer.dtype.element_ty)
    tl.store(output_pointer + element_index, rounded_y, mask=element_mask)


@triton.jit
def _backward_kernel(
    x,
    output_grad_pointer,
    x_grad_pointer,
    num_elements,
    LINEAR: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first_element = tl.program_id(0).to(tl.int64) * BLOCK
    element_index = first_element + tl.arange(0, BLOCK)
    element_mask = element_index < num_elements
    x_fp32 = tl.load(x + element_index, mask=element_mask).to(tl.float32)
    output_grad = tl.load(output_grad_pointer + element_index, mask=element_mask)

    cubic_part = CUBIC * x_fp32 * x_fp32
    sigmoid = tl.sigmoid(x_fp32 * (LINEAR + cubic_part))
    sigmoid_slope = sigmoid * (1 - sigmoid) * (LINEAR + 3 * cubic_part)
    x_grad = output_grad.to(tl.float32) * (sigmoid + x_fp32 * sigmoid_slope)
    rounded_grad = x_grad.to(x_grad_pointer.dtype.element_ty)
    tl.store(x_grad_pointer + element_index, rounded_grad, mask=element_mask)


class _SigmoidGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, linear: float, cubic: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.constants = {
            "LINEAR": linear,
            "CUBIC": cubic,
            "BLOCK": _BLOCK,
        }
        activated = torch.empty_like(x)
        num_programs = triton.cdiv(x.numel(), _BLOCK)
        if num_programs:
            _forward_kernel[num_programs,](x, activated, x.numel(), **ctx.constants)
        return activated

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        (x,) = ctx.saved_tensors
        output_grad = output_grad.contiguous()
        x_grad = torch.empty_like(x)
        num_programs = triton.cdiv(x.numel(), _BLOCK)
        if num_programs:
            _backward_kernel[num_programs,](x, output_grad, x_grad, x.numel(), **ctx.constants)
        return x_grad, None, None


def sigmoid_gelu(x: Tensor, linear: float, cubic: float) -> Tensor:
    """x * sigmoid(linear x + cubic x^3), of the shape and type of ``x``."""
    return _SigmoidGelu.apply(x.contiguous(), linear, cubic)
