"""An activation, gated or not, of the sum of a product and its bias, in Triton.

A linear that adds its bias also computes the bias gradient. For wide linears, cuBLASLt does so in a kernel of
its own, which reads the whole output gradient once more. Here the backward kernel of the activation, which
computes that gradient, also sums its columns.

A program takes a block of columns and every n-th block of rows, and sums in registers. The sums of the
programs are added in a fixed order, so that gradients are deterministic. The arithmetic is in fp32, and
results are rounded once. The bias gradient sums the gradient of ``x`` before that is rounded.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.layers.biased_sum import (
    BLOCK_COLUMNS,
    NUM_STAGES,
    NUM_WARPS,
    add_programs,
    block_of_program,
    launch_grid,
    load_float32,
    rows_of_program,
)

SIGMOID_COEFFICIENTS = {
    "silu": (1.0, 0.0),
    "quick_gelu": (1.702, 0.0),
    "gelu_tanh": (math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715),
}
"""Coefficients a and b of each activation: it is x * sigmoid(a * x + b * x^3).

For the tanh approximation of GELU, this follows from (1 + tanh(u)) / 2 = sigmoid(2 * u).
"""

FORWARD_ROWS = 8
BACKWARD_ROWS = 4
"""Rows of a block. The backward pass has fewer, because its sums stay in registers."""


@triton.jit
def _forward_kernel(
    x, bias, output_pointer, num_rows,
    WIDTH: tl.constexpr, X_WIDTH: tl.constexpr, IS_GATED: tl.constexpr, LINEAR: tl.constexpr,
    CUBIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Columns: ``WIDTH`` of the output, ``X_WIDTH`` of ``x`` and ``bias``."""
    row_in_block, column_index, column_mask = block_of_program(WIDTH, ROWS, BLOCK)
    x_offsets = row_in_block * X_WIDTH + column_index
    output_offsets = row_in_block * WIDTH + column_index
    gate_bias = load_float32(bias + column_index, column_mask)
    if IS_GATED:
        up_bias = load_float32(bias + WIDTH + column_index, column_mask)

    program_row, row_step = rows_of_program(ROWS)
    for first_row in tl.range(program_row, num_rows, row_step, num_stages=STAGES):
        mask = (first_row + row_in_block < num_rows) & column_mask
        gate_pointers = x + first_row * X_WIDTH + x_offsets
        gate = load_float32(gate_pointers, mask) + gate_bias
        y = gate * tl.sigmoid(gate * (LINEAR + CUBIC * gate * gate))
        if IS_GATED:
            y *= load_float32(gate_pointers + WIDTH, mask) + up_bias
        tl.store(output_pointer + first_row * WIDTH + output_offsets, y, mask)


@triton.jit
def _backward_kernel(
    x, bias, output_grad_pointer, x_grad_pointer, bias_grads, num_rows,
    WIDTH: tl.constexpr, X_WIDTH: tl.constexpr, IS_GATED: tl.constexpr, LINEAR: tl.constexpr,
    CUBIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    IS_TRAINED: tl.constexpr,
):  # fmt: skip
    """``bias_grads``, fp32 [programs of a column, X_WIDTH]: the sum of the rows of each program."""
    row_in_block, column_index, column_mask = block_of_program(WIDTH, ROWS, BLOCK)
    x_offsets = row_in_block * X_WIDTH + column_index
    output_offsets = row_in_block * WIDTH + column_index
    gate_bias = load_float32(bias + column_index, column_mask)
    gate_sums = tl.zeros((ROWS, BLOCK), tl.float32)
    if IS_GATED:
        up_bias = load_float32(bias + WIDTH + column_index, column_mask)
        up_sums = tl.zeros((ROWS, BLOCK), tl.float32)

    program_row, row_step = rows_of_program(ROWS)
    for first_row in tl.range(program_row, num_rows, row_step, num_stages=STAGES):
        mask = (first_row + row_in_block < num_rows) & column_mask
        gate_offsets = first_row * X_WIDTH + x_offsets
        gate = load_float32(x + gate_offsets, mask) + gate_bias
        gate_grad = load_float32(output_grad_pointer + first_row * WIDTH + output_offsets, mask)
        sigmoid = tl.sigmoid(gate * (LINEAR + CUBIC * gate * gate))
        activated = gate * sigmoid
        if IS_GATED:
            up_grad = gate_grad * activated
            gate_grad *= load_float32(x + WIDTH + gate_offsets, mask) + up_bias
            tl.store(x_grad_pointer + WIDTH + gate_offsets, up_grad, mask)
            up_sums += up_grad

        slope = LINEAR + 3 * CUBIC * gate * gate
        gate_grad *= sigmoid + activated * (1 - sigmoid) * slope
        tl.store(x_grad_pointer + gate_offsets, gate_grad, mask)
        gate_sums += gate_grad

    # Sums that are not stored are not computed.
    if IS_TRAINED:
        sum_pointers = bias_grads + tl.program_id(1) * X_WIDTH + column_index
        gate_sum = tl.sum(gate_sums, 0, keep_dims=True)
        tl.store(sum_pointers, gate_sum, column_mask)
        if IS_GATED:
            up_sum = tl.sum(up_sums, 0, keep_dims=True)
            tl.store(sum_pointers + WIDTH, up_sum, column_mask)


class _BiasedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor, activation_name: str, is_gated: bool) -> Tensor:
        num_rows, num_columns = x.shape
        linear, cubic = SIGMOID_COEFFICIENTS[activation_name]
        width = num_columns // (1 + is_gated)
        ctx.options = {
            "WIDTH": width,
            "X_WIDTH": num_columns,
            "IS_GATED": is_gated,
            "LINEAR": linear,
            "CUBIC": cubic,
            "BLOCK": min(triton.next_power_of_2(width), BLOCK_COLUMNS),
            "STAGES": NUM_STAGES,
            "num_warps": NUM_WARPS,
        }
        ctx.save_for_backward(x, bias)
        activated = x.new_empty(num_rows, width)
        if activated.numel():
            grid = launch_grid(num_rows, FORWARD_ROWS, width)
            _forward_kernel[grid](x, bias, activated, num_rows, **ctx.options, ROWS=FORWARD_ROWS)
        return activated

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, bias = ctx.saved_tensors
        x_grad = torch.empty_like(x)
        is_trained = ctx.needs_input_grad[1]
        grid = launch_grid(x.shape[0], BACKWARD_ROWS, ctx.options["WIDTH"])
        num_sums = grid[1] if is_trained else 0
        bias_grads = x.new_empty(num_sums, x.shape[1], dtype=torch.float32)
        if x.numel():
            _backward_kernel[grid](
                x,
                bias,
                output_grad.contiguous(),
                x_grad,
                bias_grads,
                x.shape[0],
                **ctx.options,
                ROWS=BACKWARD_ROWS,
                IS_TRAINED=is_trained,
            )
        bias_grad = add_programs(bias_grads, bias.dtype) if is_trained else None
        return x_grad, bias_grad, None, None


def biased_activation(x: Tensor, bias: Tensor, activation_name: str, *, is_gated: bool) -> Tensor:
    """``activation_name`` of ``x + bias``; gated, that of its first half times its second half.

    The sum with the bias is not rounded. Reference: ``torch.nn.functional.silu``, ``gelu`` with
    ``approximate="tanh"``, and Megatron-core's ``quick_gelu``.

    Args:
        x: [..., F], or [..., 2 * F] if it is gated.
        bias: [F] or [2 * F]. If it is frozen, nothing is summed.
        activation_name: a key of :data:`SIGMOID_COEFFICIENTS`.

    Returns:
        [..., F] in the type of ``x``.
    """
    flat_rows = x.reshape(-1, x.shape[-1]).contiguous()
    activated = _BiasedActivation.apply(flat_rows, bias.contiguous(), activation_name, is_gated)
    return activated.view(*x.shape[:-1], activated.shape[1])
