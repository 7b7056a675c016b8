"""The Triton kernels of :mod:`megatron_vl.kernels.experts.token_copies`.

A program handles one row, or 2,048 columns of it. It goes from copy to copy by looking for the smallest
row_id above the previous one. So missing copies cost neither memory traffic nor a step, and sums are always
in the order of the row_ids. There are no atomic operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.sizes import cdiv, next_power_of_2

_MAX_COLUMNS = 2048
"""Largest number of columns that one program handles. One warp can hold them, even in float32."""
_MIN_SLOTS = 32
"""Smallest number of slots for a row of the table: one for each lane of a warp, which finds the smallest
row_id in one instruction."""
_BLOCK_ELEMENTS = 1024
_END_ROW_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _scatter_kernel(
    x,
    row_ids,
    output_pointer,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies row i of x to the rows row_ids[i]."""
    row_index = tl.program_id(0).to(tl.int64)
    slot_index = tl.arange(0, SLOTS)
    column_index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column_index < WIDTH
    row_ids_of_row = tl.load(row_ids + row_index * COPIES + slot_index, mask=slot_index < COPIES, other=-1)
    row_values = tl.load(x + row_index * WIDTH + column_index, mask=column_mask)
    row_id = tl.min(tl.where(row_ids_of_row >= 0, row_ids_of_row, _END_ROW_ID), 0)
    for _ in range(tl.sum((row_ids_of_row >= 0).to(tl.int32), 0)):
        tl.store(output_pointer + row_id.to(tl.int64) * WIDTH + column_index, row_values, mask=column_mask)
        row_id = tl.min(tl.where(row_ids_of_row > row_id, row_ids_of_row, _END_ROW_ID), 0)


@triton.jit
def _sum_kernel(
    y,
    row_ids,
    output_pointer,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row i of out is the sum of y's rows row_ids[i], in float32."""
    row_index = tl.program_id(0).to(tl.int64)
    slot_index = tl.arange(0, SLOTS)
    column_index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column_mask = column_index < WIDTH
    row_ids_of_row = tl.load(row_ids + row_index * COPIES + slot_index, mask=slot_index < COPIES, other=-1)
    row_sum = tl.zeros((BLOCK,), tl.float32)
    row_id = tl.min(tl.where(row_ids_of_row >= 0, row_ids_of_row, _END_ROW_ID), 0)
    for _ in range(tl.sum((row_ids_of_row >= 0).to(tl.int32), 0)):
        row_sum += tl.load(y + row_id.to(tl.int64) * WIDTH + column_index, mask=column_mask, other=0.0).to(
            tl.float32
        )
        row_id = tl.min(tl.where(row_ids_of_row > row_id, row_ids_of_row, _END_ROW_ID), 0)
    tl.store(output_pointer + row_index * WIDTH + column_index, row_sum, mask=column_mask)


@triton.jit(do_not_specialize=["total"])
def _copy_parts_kernel(
    spread_pointer,
    row_ids,
    packed_pointer,
    total,
    WIDTH: tl.constexpr,
    PACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies parts of WIDTH numbers from spread [parts, WIDTH] to packed[row_ids], or back.

    On the way back, parts with the row_id -1 are zero.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_id = tl.load(row_ids + index // WIDTH, mask=index < total, other=-1)
    packed_pointers = packed_pointer + row_id.to(tl.int64) * WIDTH + index % WIDTH
    if PACK:
        tl.store(packed_pointers, tl.load(spread_pointer + index, mask=row_id >= 0), mask=row_id >= 0)
    else:
        tl.store(
            spread_pointer + index, tl.load(packed_pointers, mask=row_id >= 0, other=0.0), mask=index < total
        )


def _grid_and_sizes(row_ids: Tensor, row_width: int) -> tuple[tuple[int, int], dict[str, int]]:
    block_columns = min(next_power_of_2(row_width), _MAX_COLUMNS)
    sizes = {
        "WIDTH": row_width,
        "COPIES": row_ids.shape[1],
        "SLOTS": max(_MIN_SLOTS, next_power_of_2(row_ids.shape[1])),
        "BLOCK": block_columns,
        "num_warps": 1,
    }
    return (row_ids.shape[0], cdiv(row_width, block_columns)), sizes


def scatter_rows(x: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    """x [T, H], row_ids int32 [T, K], contiguous -> [rows, H]. Rows that no row_id names are undefined."""
    scattered_rows = x.new_empty(num_rows, x.shape[1])
    if x.numel() and num_rows:
        grid, sizes = _grid_and_sizes(row_ids, x.shape[1])
        _scatter_kernel[grid](x, row_ids, scattered_rows, **sizes)
    return scattered_rows


def sum_rows(y: Tensor, row_ids: Tensor) -> Tensor:
    """y [N, H], row_ids int32 [T, K], contiguous -> [T, H]."""
    summed_rows = y.new_empty(row_ids.shape[0], y.shape[1])
    if summed_rows.numel():
        grid, sizes = _grid_and_sizes(row_ids, y.shape[1])
        _sum_kernel[grid](y, row_ids, summed_rows, **sizes)
    return summed_rows


def scatter_parts(x: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    """x [T, K * W], row_ids int32 [T, K], contiguous -> [rows, W].

    Rows that no row_id names are undefined.
    """
    width = x.shape[1] // row_ids.shape[1]
    scattered_parts = x.new_empty(num_rows, width)
    if x.numel() and num_rows:
        _copy_parts_kernel[(cdiv(x.numel(), _BLOCK_ELEMENTS),)](
            x, row_ids, scattered_parts, x.numel(), WIDTH=width, PACK=True, BLOCK=_BLOCK_ELEMENTS
        )
    return scattered_parts


def gather_parts(y: Tensor, row_ids: Tensor) -> Tensor:
    """y [rows, W], row_ids int32 [T, K], contiguous -> [T, K * W]. Parts with the row_id -1 are zero."""
    gathered_parts = torch.empty(
        row_ids.shape[0], row_ids.shape[1] * y.shape[1], dtype=y.dtype, device=y.device
    )
    if gathered_parts.numel():
        _copy_parts_kernel[(cdiv(gathered_parts.numel(), _BLOCK_ELEMENTS),)](
            gathered_parts, row_ids, y, gathered_parts.numel(),
            WIDTH=y.shape[1], PACK=False, BLOCK=_BLOCK_ELEMENTS,
        )  # fmt: skip
    return gathered_parts
