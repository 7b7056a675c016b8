"""Layers that add the bias of a product, and sum the columns of its gradient, in Triton.

The gradient of a bias is the sum of the columns of its product's gradient. If a linear computes it, cuBLASLt
does so in a kernel of its own, which reads that gradient at 1.7 of an H200's 4.8 TB/s. The product need not
know of its bias: the residual connection (:func:`biased_sum`) or the activation (:func:`biased_activation`)
adds it in the pass that it takes anyway.

A program takes a block of columns and every n-th block of rows. A second kernel adds the sums of the
programs, in a fixed order, so that gradients are deterministic. The arithmetic is in fp32, and results are
rounded once. The activation's backward kernel computes the gradient of its product, so it also sums that
gradient's columns, in registers and before it is rounded.

Between linears in FP8, the kernels of the activation write FP8 too, and the sum of columns does. Then a block
has whole rows, whose largest elements give their scales.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.layers.fp8_rows import ScaledRows, empty_rows, keep_empty_rows, store_in_fp8
from megatron_vl.kernels.sizes import cdiv, next_power_of_2

BLOCK_COLUMNS = 256
"""In bf16, a warp reads a row of such a block at once, 16 bytes a thread."""
BLOCK_ROWS = 8
NUM_WARPS = 4
NUM_PROGRAMS = 792
"""At most: six for each of the 132 processors of an H100 or H200. It is the same on every GPU, and so is the
order of the sums."""
NUM_STAGES = 3
"""How many blocks of a program are read at a time, the one in work included."""
FINAL_ROWS = 64
FINAL_COLUMNS = 32
"""The block of the second kernel. It is narrow, because one program adds all sums of a column."""


class WholeRows(NamedTuple):
    """Blocks of whole rows, so that a program knows each row's largest element."""

    num_elements: int
    """Of a block, if a row has no more."""
    num_programs: int
    num_warps: int
    num_stages: int

    def launch(self, num_rows: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
        """The grid and the block of a kernel."""
        columns = next_power_of_2(width)
        rows = max(self.num_elements // columns, 1)
        block = {"ROWS": rows, "BLOCK": columns, "STAGES": self.num_stages, "num_warps": self.num_warps}
        return (1, min(cdiv(num_rows, rows), self.num_programs)), {"WIDTH": width, **block}


WHOLE_ROWS_SUMS = WholeRows(8192, num_programs=264, num_warps=4, num_stages=3)


@triton.jit
def load_float32(pointers, mask):
    return tl.load(pointers, mask, 0.0).to(tl.float32)


@triton.jit
def block_of_program(WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows within a block [ROWS, 1], columns of this program [1, BLOCK], and which columns exist."""
    row_in_block = tl.arange(0, ROWS)[:, None]
    column_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    return row_in_block, column_index, column_index < WIDTH


@triton.jit
def rows_of_program(ROWS: tl.constexpr):
    """The first row of this program's first block, and the number of rows from there to its next one."""
    return tl.program_id(1).to(tl.int64) * ROWS, tl.num_programs(1) * ROWS


@triton.jit
def _sum_kernel(
    residual,
    output,
    bias,
    sum_pointer,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_in_block, column_index, column_mask = block_of_program(WIDTH, ROWS, BLOCK)
    offsets = row_in_block * WIDTH + column_index
    added_bias = load_float32(bias + column_index, column_mask)

    program_row, row_step = rows_of_program(ROWS)
    for first_row in tl.range(program_row, num_rows, row_step, num_stages=STAGES):
        row_index = first_row + row_in_block
        mask = (row_index < num_rows) & column_mask
        block_offsets = first_row * WIDTH + offsets
        total = load_float32(output + block_offsets, mask) + added_bias
        total += load_float32(residual + block_offsets, mask)
        tl.store(sum_pointer + block_offsets, total, mask)


@triton.jit
def _column_kernel(
    x,
    sums_pointer,
    values,
    scales,
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    IS_QUANTIZED: tl.constexpr = False,
):
    """``sums_pointer``, [programs of a column, WIDTH]: the sum of the rows of each program.

    ``IS_QUANTIZED``: writes ``x`` in FP8 too, as ``values`` and ``scales``.
    """
    row_in_block, column_index, column_mask = block_of_program(WIDTH, ROWS, BLOCK)
    offsets = row_in_block * WIDTH + column_index
    sums = tl.zeros((ROWS, BLOCK), tl.float32)

    program_row, row_step = rows_of_program(ROWS)
    for first_row in tl.range(program_row, num_rows, row_step, num_stages=STAGES):
        row_index = first_row + row_in_block
        row_mask = row_index < num_rows
        mask = row_mask & column_mask
        block_offsets = first_row * WIDTH + offsets
        elements = load_float32(x + block_offsets, mask)
        sums += elements
        if IS_QUANTIZED:
            largest = tl.max(tl.abs(elements), 1, keep_dims=True)
            store_in_fp8(elements, largest, mask, values + block_offsets, scales + row_index, row_mask)

    program_sum = tl.sum(sums, 0, keep_dims=True)
    program_offset = tl.program_id(1) * WIDTH
    tl.store(sums_pointer + program_offset + column_index, program_sum, column_mask)


class _BiasedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
        total = torch.empty_like(residual)
        width = residual.shape[-1]
        num_rows = residual.numel() // width
        if num_rows:
            grid, block = launch_columns(num_rows, width)
            _sum_kernel[grid](residual, output, bias, total, num_rows, **block)
        return total

    @staticmethod
    def backward(ctx, total_grad: Tensor):
        return total_grad, total_grad, column_sums(total_grad) if ctx.needs_input_grad[2] else None


def launch_columns(
    num_rows: int, width: int, block_rows: int = BLOCK_ROWS
) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and the block of a kernel: blocks of columns, and programs that share the rows of each."""
    num_column_blocks = cdiv(width, BLOCK_COLUMNS)
    num_row_programs = max(NUM_PROGRAMS // num_column_blocks, 1)
    block = {"ROWS": block_rows, "BLOCK": min(next_power_of_2(width), BLOCK_COLUMNS), "STAGES": NUM_STAGES}
    grid = num_column_blocks, min(cdiv(num_rows, block_rows), num_row_programs)
    return grid, {"WIDTH": width, **block, "num_warps": NUM_WARPS}


def biased_sum(residual: Tensor, output: Tensor, bias: Tensor) -> Tensor:
    """``residual + output + bias``, rounded once. Its backward pass sums the bias's gradient.

    Args:
        residual, output: [..., H].
        bias: [H]. If it is frozen, nothing is summed.

    Returns:
        [..., H] in the type of ``residual``.
    """
    return _BiasedSum.apply(residual.contiguous(), output.contiguous(), bias.contiguous())


def column_sums(x: Tensor) -> Tensor:
    """The sum of all rows of ``x`` [..., H], in fp32 and then rounded to its type: [H]"""
    x = x.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    grid, block = launch_columns(num_rows, width)
    program_sums = x.new_empty(grid[1], width, dtype=torch.float32)
    if num_rows:
        _column_kernel[grid](x, program_sums, None, None, num_rows, **block)
    return add_programs(program_sums, x.dtype)


def column_sums_and_rows(x: Tensor) -> tuple[Tensor, ScaledRows]:
    """:func:`column_sums` of contiguous ``x`` [rows, width] with at least one row, and ``x`` in FP8."""
    num_rows, width = x.shape
    rows = empty_rows(x)
    grid, block = WHOLE_ROWS_SUMS.launch(num_rows, width)
    program_sums = x.new_empty(grid[1], width, dtype=torch.float32)
    _column_kernel[grid](x, program_sums, *rows, num_rows, **block, IS_QUANTIZED=True)
    return add_programs(program_sums, x.dtype), rows


def add_programs(program_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of fp32 [programs, ...] over the programs, in ``dtype``: [...]"""
    sums = torch.empty(program_sums.shape[1:], dtype=dtype, device=program_sums.device)
    if width := sums.numel():
        _column_kernel[cdiv(width, FINAL_COLUMNS), 1](
            program_sums, sums, None, None, program_sums.shape[0],
            WIDTH=width, ROWS=FINAL_ROWS, BLOCK=FINAL_COLUMNS, STAGES=NUM_STAGES, num_warps=NUM_WARPS,
        )  # fmt: skip
    return sums


# --- An activation ------------------------------------------------------------------------------------------


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
WHOLE_ROWS_FORWARD = WholeRows(4096, num_programs=2112, num_warps=8, num_stages=3)
WHOLE_ROWS_BACKWARD = WholeRows(4096, num_programs=264, num_warps=16, num_stages=3)


@triton.jit
def _forward_kernel(
    x, bias, output_pointer, values, scales, num_rows,
    WIDTH: tl.constexpr, X_WIDTH: tl.constexpr, IS_GATED: tl.constexpr, LINEAR: tl.constexpr,
    CUBIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Columns: ``WIDTH`` of the output, ``X_WIDTH`` of ``x`` and ``bias``. ``IS_QUANTIZED``: as above."""
    row_in_block, column_index, column_mask = block_of_program(WIDTH, ROWS, BLOCK)
    x_offsets = row_in_block * X_WIDTH + column_index
    output_offsets = row_in_block * WIDTH + column_index
    gate_bias = load_float32(bias + column_index, column_mask)
    if IS_GATED:
        up_bias = load_float32(bias + WIDTH + column_index, column_mask)

    program_row, row_step = rows_of_program(ROWS)
    for first_row in tl.range(program_row, num_rows, row_step, num_stages=STAGES):
        row_index = first_row + row_in_block
        row_mask = row_index < num_rows
        mask = row_mask & column_mask
        gate_pointers = x + first_row * X_WIDTH + x_offsets
        gate = load_float32(gate_pointers, mask) + gate_bias
        y = gate * tl.sigmoid(gate * (LINEAR + CUBIC * gate * gate))
        if IS_GATED:
            y *= load_float32(gate_pointers + WIDTH, mask) + up_bias
        tl.store(output_pointer + first_row * WIDTH + output_offsets, y, mask)
        if IS_QUANTIZED:
            y = y.to(x.dtype.element_ty).to(tl.float32)  # as the output is rounded
            largest = tl.max(tl.abs(y), 1, keep_dims=True)
            row_values = values + first_row * WIDTH + output_offsets
            store_in_fp8(y, largest, mask, row_values, scales + row_index, row_mask)


@triton.jit
def _backward_kernel(
    x, bias, output_grad_pointer, x_grad_pointer, bias_grads, values, scales, num_rows,
    WIDTH: tl.constexpr, X_WIDTH: tl.constexpr, IS_GATED: tl.constexpr, LINEAR: tl.constexpr,
    CUBIC: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    IS_TRAINED: tl.constexpr, IS_QUANTIZED: tl.constexpr,
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
        row_index = first_row + row_in_block
        row_mask = row_index < num_rows
        mask = row_mask & column_mask
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
        if IS_QUANTIZED:
            gate_grad = gate_grad.to(x_grad_pointer.dtype.element_ty).to(tl.float32)
            largest = tl.max(tl.abs(gate_grad), 1, keep_dims=True)
            if IS_GATED:
                up_grad = up_grad.to(x_grad_pointer.dtype.element_ty).to(tl.float32)
                largest = tl.maximum(largest, tl.max(tl.abs(up_grad), 1, keep_dims=True))
                up_values = values + WIDTH + gate_offsets
                store_in_fp8(up_grad, largest, mask, up_values, scales + row_index, row_mask)
            gate_values = values + gate_offsets
            store_in_fp8(gate_grad, largest, mask, gate_values, scales + row_index, row_mask)

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
    def forward(ctx, x: Tensor, bias: Tensor, activation: tuple[str, bool, bool]) -> Tensor:
        # Here rows need no view of their own, which autograd would record.
        x, bias = x.contiguous(), bias.contiguous()
        activation_name, is_gated, is_quantized = activation
        linear, cubic = SIGMOID_COEFFICIENTS[activation_name]
        width = x.shape[-1] // (1 + is_gated)
        # With 4,304 of the 8,192 columns of a block, whole rows take longer than a cast of their own.
        ctx.is_quantized = is_quantized and 4 * width >= 3 * next_power_of_2(width)
        ctx.options = {"X_WIDTH": x.shape[-1], "IS_GATED": is_gated, "LINEAR": linear, "CUBIC": cubic}
        ctx.save_for_backward(x, bias)

        activated = x.new_empty(*x.shape[:-1], width)
        num_rows = activated.numel() // width
        fp8_rows: tuple[Tensor | None, Tensor | None] = None, None
        if ctx.is_quantized:
            fp8_rows = keep_empty_rows(activated)
            grid, block = WHOLE_ROWS_FORWARD.launch(num_rows, width)
        else:
            grid, block = launch_columns(num_rows, width, FORWARD_ROWS)
        if num_rows:
            _forward_kernel[grid](
                x, bias, activated, *fp8_rows, num_rows,
                **ctx.options, **block, IS_QUANTIZED=ctx.is_quantized,
            )  # fmt: skip
        return activated

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        x, bias = ctx.saved_tensors
        is_trained, width = ctx.needs_input_grad[1], output_grad.shape[-1]
        num_rows = output_grad.numel() // width
        x_grad = torch.empty_like(x)
        fp8_rows: tuple[Tensor | None, Tensor | None] = None, None
        if ctx.is_quantized:
            fp8_rows = keep_empty_rows(x_grad)
            grid, block = WHOLE_ROWS_BACKWARD.launch(num_rows, width)
        else:
            grid, block = launch_columns(num_rows, width, BACKWARD_ROWS)
        bias_grads = x.new_empty(grid[1] if is_trained else 0, x.shape[-1], dtype=torch.float32)
        if num_rows:
            _backward_kernel[grid](
                x, bias, output_grad.contiguous(), x_grad, bias_grads, *fp8_rows, num_rows,
                **ctx.options, **block, IS_TRAINED=is_trained, IS_QUANTIZED=ctx.is_quantized,
            )  # fmt: skip
        return x_grad, add_programs(bias_grads, bias.dtype) if is_trained else None, None


def biased_activation(
    x: Tensor, bias: Tensor, activation_name: str, *, is_gated: bool, is_quantized: bool = False
) -> Tensor:
    """``activation_name`` of ``x + bias``; gated, that of its first half times its second half.

    The sum with the bias is not rounded. Reference: ``torch.nn.functional.silu``, ``gelu`` with
    ``approximate="tanh"``, and Megatron-core's ``quick_gelu``.

    Args:
        x: [..., F], or [..., 2 * F] if it is gated.
        bias: [F] or [2 * F]. If it is frozen, nothing is summed.
        activation_name: a key of :data:`SIGMOID_COEFFICIENTS`.
        is_quantized: whether linears in FP8 read the result, and in the backward pass the gradient of ``x``.
            The kernels then write FP8 too, unless F is far below a power of two.

    Returns:
        [..., F] in the type of ``x``.
    """
    return _BiasedActivation.apply(x, bias, (activation_name, is_gated, is_quantized))
