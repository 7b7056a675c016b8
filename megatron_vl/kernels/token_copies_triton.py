"""The Triton kernels of :mod:`megatron_vl.kernels.token_copies`.

A program handles one row, or 2,048 columns of it. It goes from copy to copy by looking for the smallest
row_id above the previous one. So missing copies cost neither memory traffic nor a step, and sums are always
in the order of the row_ids. There are no atomic operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048
"""Largest number of columns that one program handles. One warp can hold them, even in float32."""
_SLOTS = 32
"""Smallest number of slots for a row of the table: one for each lane of a warp, which finds the smallest
row_id in one instruction."""
_ELEMENTS = 1024
"""Number of elements that one program of :func:`_parts` copies."""
_END = tl.constexpr(2**31 - 1)
"""Larger than any row_id."""


@triton.jit
def _scatter(
    x, row_ids, out, WIDTH: tl.constexpr, COPIES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Copies row i of x to the rows row_ids[i]."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    mine = tl.load(row_ids + row * COPIES + slot, mask=slot < COPIES, other=-1)
    value = tl.load(x + row * WIDTH + column, mask=mask)
    row_id = tl.min(tl.where(mine >= 0, mine, _END), 0)
    for _ in range(tl.sum((mine >= 0).to(tl.int32), 0)):
        tl.store(out + row_id.to(tl.int64) * WIDTH + column, value, mask=mask)
        row_id = tl.min(tl.where(mine > row_id, mine, _END), 0)


@triton.jit
def _sum(
    y, row_ids, out, WIDTH: tl.constexpr, COPIES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Row i of out is the sum of y's rows row_ids[i], in float32."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    mine = tl.load(row_ids + row * COPIES + slot, mask=slot < COPIES, other=-1)
    acc = tl.zeros((BLOCK,), tl.float32)
    row_id = tl.min(tl.where(mine >= 0, mine, _END), 0)
    for _ in range(tl.sum((mine >= 0).to(tl.int32), 0)):
        acc += tl.load(y + row_id.to(tl.int64) * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        row_id = tl.min(tl.where(mine > row_id, mine, _END), 0)
    tl.store(out + row * WIDTH + column, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["total"])
def _parts(spread, row_ids, packed, total, WIDTH: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr):
    """Copies parts of WIDTH numbers from spread [parts, WIDTH] to packed[row_ids], or back.

    On the way back, parts with the row_id -1 are zero.
    """
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row_id = tl.load(row_ids + index // WIDTH, mask=index < total, other=-1)
    there = packed + row_id.to(tl.int64) * WIDTH + index % WIDTH
    if PACK:
        tl.store(there, tl.load(spread + index, mask=row_id >= 0), mask=row_id >= 0)
    else:
        tl.store(spread + index, tl.load(there, mask=row_id >= 0, other=0.0), mask=index < total)


def _cut(row_ids: Tensor, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and the constants of a kernel over rows."""
    block = min(triton.next_power_of_2(width), _COLUMNS)
    slots = max(_SLOTS, triton.next_power_of_2(row_ids.shape[1]))
    sizes = {"WIDTH": width, "COPIES": row_ids.shape[1], "SLOTS": slots, "BLOCK": block, "num_warps": 1}
    return (row_ids.shape[0], triton.cdiv(width, block)), sizes


def scatter_rows(x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """x [T, H], row_ids int32 [T, K], contiguous -> [rows, H]. Rows that no row_id names are undefined."""
    out = x.new_empty(rows, x.shape[1])
    if x.numel() and rows:
        grid, sizes = _cut(row_ids, x.shape[1])
        _scatter[grid](x, row_ids, out, **sizes)
    return out


def sum_rows(y: Tensor, row_ids: Tensor) -> Tensor:
    """y [N, H], row_ids int32 [T, K], contiguous -> [T, H]."""
    out = y.new_empty(row_ids.shape[0], y.shape[1])
    if out.numel():
        grid, sizes = _cut(row_ids, y.shape[1])
        _sum[grid](y, row_ids, out, **sizes)
    return out


def scatter_parts(x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """x [T, K * W], row_ids int32 [T, K], contiguous -> [rows, W].

    Rows that no row_id names are undefined.
    """
    width = x.shape[1] // row_ids.shape[1]
    out = x.new_empty(rows, width)
    if x.numel() and rows:
        grid = (triton.cdiv(x.numel(), _ELEMENTS),)
        _parts[grid](x, row_ids, out, x.numel(), WIDTH=width, PACK=True, BLOCK=_ELEMENTS)
    return out


def gather_parts(y: Tensor, row_ids: Tensor) -> Tensor:
    """y [rows, W], row_ids int32 [T, K], contiguous -> [T, K * W]. Parts with the row_id -1 are zero."""
    out = torch.empty(row_ids.shape[0], row_ids.shape[1] * y.shape[1], dtype=y.dtype, device=y.device)
    if out.numel():
        grid = (triton.cdiv(out.numel(), _ELEMENTS),)
        _parts[grid](out, row_ids, y, out.numel(), WIDTH=y.shape[1], PACK=False, BLOCK=_ELEMENTS)
    return out
