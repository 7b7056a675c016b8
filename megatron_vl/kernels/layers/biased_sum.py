"""The sum of a residual, a product and its bias, and sums of columns, in Triton.

The gradient of a bias is the sum of the columns of its product's gradient. If a linear computes it, cuBLASLt
does so in a kernel of its own, which reads that gradient at 1.7 of an H200's 4.8 TB/s. The product need not
know of its bias: the residual connection adds it in the pass that it takes anyway.

A program takes a block of columns and every n-th block of rows. A second kernel adds the sums of the
programs, in a fixed order, so that gradients are deterministic. The arithmetic is in fp32, and results are
rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    num_rows,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``sums_pointer``, [programs of a column, WIDTH]: the sum of the rows of each program."""
    row_in_block, column_index, column_mask = block_of_program(WIDTH, ROWS, BLOCK)
    offsets = row_in_block * WIDTH + column_index
    sums = tl.zeros((ROWS, BLOCK), tl.float32)

    program_row, row_step = rows_of_program(ROWS)
    for first_row in tl.range(program_row, num_rows, row_step, num_stages=STAGES):
        row_index = first_row + row_in_block
        mask = (row_index < num_rows) & column_mask
        sums += load_float32(x + first_row * WIDTH + offsets, mask)

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
            grid = launch_grid(num_rows, BLOCK_ROWS, width)
            _sum_kernel[grid](residual, output, bias, total, num_rows, **_launch_options(width))
        return total

    @staticmethod
    def backward(ctx, total_grad: Tensor):
        is_trained = ctx.needs_input_grad[2]
        bias_grad = column_sums(total_grad) if is_trained else None
        return total_grad, total_grad, bias_grad


def launch_grid(num_rows: int, block_rows: int, width: int) -> tuple[int, int]:
    """Numbers of blocks of columns, and of programs that share the rows of each."""
    num_column_blocks = triton.cdiv(width, BLOCK_COLUMNS)
    num_row_programs = max(NUM_PROGRAMS // num_column_blocks, 1)
    num_row_blocks = triton.cdiv(num_rows, block_rows)
    return num_column_blocks, min(num_row_blocks, num_row_programs)


def _launch_options(width: int) -> dict[str, int]:
    return {
        "WIDTH": width,
        "ROWS": BLOCK_ROWS,
        "BLOCK": min(triton.next_power_of_2(width), BLOCK_COLUMNS),
        "STAGES": NUM_STAGES,
        "num_warps": NUM_WARPS,
    }


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
    grid = launch_grid(num_rows, BLOCK_ROWS, width)
    program_sums = x.new_empty(grid[1], width, dtype=torch.float32)
    if num_rows:
        _column_kernel[grid](x, program_sums, num_rows, **_launch_options(width))
    return add_programs(program_sums, x.dtype)


def add_programs(program_sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of fp32 [programs, ...] over the programs, in ``dtype``: [...]"""
    sums = torch.empty(program_sums.shape[1:], dtype=dtype, device=program_sums.device)
    width = sums.numel()
    if width:
        num_column_blocks = triton.cdiv(width, FINAL_COLUMNS)
        _column_kernel[num_column_blocks, 1](
            program_sums,
            sums,
            program_sums.shape[0],
            WIDTH=width,
            ROWS=FINAL_ROWS,
            BLOCK=FINAL_COLUMNS,
            STAGES=NUM_STAGES,
            num_warps=NUM_WARPS,
        )
    return sums
