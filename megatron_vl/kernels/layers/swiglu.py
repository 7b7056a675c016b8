"""SwiGLU as one Triton kernel for each direction, optionally weighted per row (mixture of experts).

Megatron-core leaves SwiGLU to torch.compile, whose backward pass writes the two halves through a masked
concatenation. On an H200, this is five times slower than memory bandwidth allows and takes 9 % of a training
step of Qwen2.5-VL-7B (benchmarks/log/speed.md). The arithmetic is in fp32, and results are rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.layers.biased_layers import load_float32
from megatron_vl.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def _store_block(row_pointer, column_index, column_mask, values):
    tl.store(row_pointer + column_index, values.to(row_pointer.dtype.element_ty), mask=column_mask)


@triton.jit
def _activate(silu, up_values, row_weights, row, WEIGHTED: tl.constexpr):
    """One block of a row's result. Both kernels compute it here, so that it is equal to the bit."""
    y = silu * up_values
    if WEIGHTED:
        y *= tl.load(row_weights + row).to(tl.float32)
    return y


@triton.jit
def gate_gradient(sigmoid, silu, up_values, output_grad):
    return output_grad * up_values * (sigmoid + silu * (1 - sigmoid))


@triton.jit
def _forward_kernel(
    x, row_weights, output_pointer, output_width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column_index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column_index < output_width
    gate_pointer = x + row * 2 * output_width
    gate_values = load_float32(gate_pointer + column_index, column_mask)
    up_values = load_float32(gate_pointer + output_width + column_index, column_mask)
    y = _activate(gate_values * tl.sigmoid(gate_values), up_values, row_weights, row, WEIGHTED)
    _store_block(output_pointer + row * output_width, column_index, column_mask, y)


@triton.jit
def _backward_kernel(
    x,
    row_weights,
    output_grad_pointer,
    x_grad_pointer,
    row_weight_grads,
    output_pointer,
    output_width,
    WEIGHTED: tl.constexpr,
    OUTPUT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of :func:`_forward_kernel`, with OUTPUT also its result.

    A weighted row is one block, so that the gradient of its weight is one sum.
    """
    row = tl.program_id(0).to(tl.int64)
    column_index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column_index < output_width
    gate_pointer = x + row * 2 * output_width
    gate_values = load_float32(gate_pointer + column_index, column_mask)
    up_values = load_float32(gate_pointer + output_width + column_index, column_mask)
    output_grad = load_float32(output_grad_pointer + row * output_width + column_index, column_mask)
    sigmoid = tl.sigmoid(gate_values)
    silu = gate_values * sigmoid
    if OUTPUT:
        y = _activate(silu, up_values, row_weights, row, WEIGHTED)
        _store_block(output_pointer + row * output_width, column_index, column_mask, y)
    if WEIGHTED:
        weight_grad = tl.sum(output_grad * silu * up_values, 0)
        tl.store(row_weight_grads + row, weight_grad)
        output_grad *= tl.load(row_weights + row).to(tl.float32)

    gate_grad = gate_gradient(sigmoid, silu, up_values, output_grad)
    gate_grad_pointer = x_grad_pointer + row * 2 * output_width
    _store_block(gate_grad_pointer, column_index, column_mask, gate_grad)
    _store_block(gate_grad_pointer + output_width, column_index, column_mask, output_grad * silu)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, row_weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, row_weights)
        return swiglu_forward(x, row_weights)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, row_weights = ctx.saved_tensors
        x_grad, row_weight_grads, _ = swiglu_backward(x, row_weights, output_grad, with_output=False)
        return x_grad, row_weight_grads


def swiglu_forward(x: Tensor, row_weights: Tensor | None) -> Tensor:
    """:func:`swiglu` of contiguous x [rows, 2 * F] and row_weights [rows], without autograd."""
    activated = x.new_empty(x.shape[0], x.shape[1] // 2)
    if activated.numel():
        grid, options = _grid_and_options(activated, row_weights is not None)
        _forward_kernel[grid](x, row_weights, activated, activated.shape[1], **options)
    return activated


def swiglu_backward(
    x: Tensor, row_weights: Tensor | None, output_grad: Tensor, *, with_output: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of :func:`swiglu_forward`'s arguments, and its result if ``with_output``.

    One kernel computes all three, so that whoever needs the result again in the backward pass need not keep
    it, and reads ``x`` once.
    """
    output_grad = output_grad.contiguous()
    x_grad = torch.empty_like(x)
    row_weight_grads = torch.empty_like(row_weights) if row_weights is not None else None
    output = torch.empty_like(output_grad) if with_output else None
    if output_grad.numel():
        grid, options = _grid_and_options(output_grad, row_weights is not None)
        _backward_kernel[grid](
            x, row_weights, output_grad, x_grad, row_weight_grads, output, output_grad.shape[1],
            OUTPUT=with_output, **options,
        )  # fmt: skip
    return x_grad, row_weight_grads, output


def _grid_and_options(output_like: Tensor, is_weighted: bool) -> tuple[tuple[int, int], dict[str, int]]:
    num_rows, width = output_like.shape
    block_columns = next_power_of_2(width if is_weighted else min(width, 2048))
    options = {
        "WEIGHTED": is_weighted,
        "BLOCK": block_columns,
        "num_warps": 4 if block_columns <= 2048 else 8,
    }
    return (num_rows, cdiv(width, block_columns)), options


def swiglu(x: Tensor, row_weights: Tensor | None = None) -> Tensor:
    """silu(first half) * second half of the last dimension, times the row's ``row_weights``.

    Args:
        x: [..., 2 * F], gate, then up.
        row_weights: one number for each row of ``x`` (any shape with as many elements), or None.

    Returns:
        [..., F] in the type of ``x``.
    """
    flat_rows = x.reshape(-1, x.shape[-1])
    activated = _SwiGLU.apply(
        flat_rows.contiguous(), None if row_weights is None else row_weights.reshape(-1).contiguous()
    )
    return activated.view(*x.shape[:-1], x.shape[-1] // 2)
