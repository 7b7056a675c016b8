"""Copies each row to several rows and sums the copies again, to move tokens to experts within a rank.

``row_ids`` is an int32 table [T, K]: entry (t, k) is the row that the k-th copy of row t becomes, or -1.
:func:`scatter_rows` and :func:`sum_rows` are each other's gradient, so autograd keeps only the table. Triton
kernels run on a GPU and in Triton's interpreter, torch code elsewhere.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor


def positions(chosen: Tensor) -> Tensor:
    """Makes ``row_ids`` that order copies by column, then by row.

    The order is that of a stable sort by destination, but nothing is sorted.

    Args:
        chosen: bool [T, K], whether row t has a copy for destination k.

    Returns:
        int32 [T, K]; -1 where there is no copy. The host does not wait for the device.
    """
    rows, columns = chosen.shape
    running = chosen.T.reshape(-1).cumsum(0, dtype=torch.int32).view(columns, rows).T
    return torch.where(chosen, running - 1, -1).contiguous()


def scatter_rows(x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """Copies row i to the rows ``row_ids[i]``.

    Args:
        x: [T, H].
        row_ids: int32 [T, K], contiguous, all different except -1.
        rows: number of rows of the result. Rows that no row_id names are undefined, and their gradient is not
            read.

    Returns:
        [rows, H].
    """
    return _Scatter.apply(x, row_ids, rows)


def sum_rows(y: Tensor, row_ids: Tensor) -> Tensor:
    """Sums the rows ``row_ids[i]``, in float32 and in a fixed order, and rounds once.

    Args:
        y: [N, H].
        row_ids: int32 [T, K], contiguous, all different except -1.

    Returns:
        [T, H] in the type of ``y``.
    """
    return _Sum.apply(y, row_ids)


def scatter_parts(x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    """Copies part k of row i to the row ``row_ids[i, k]``.

    Args:
        x: [T, K * W].
        row_ids: int32 [T, K], contiguous, all different except -1.
        rows: number of rows of the result. Rows that no row_id names are undefined, and their gradient is not
            read.

    Returns:
        [rows, W].
    """
    return _ScatterParts.apply(x, row_ids, rows)


def _kernels(x: Tensor) -> ModuleType | None:
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    from megatron_vl.kernels import token_copies_triton as row_kernels

    return row_kernels


def _scatter(x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    x, kernels = x.contiguous(), _kernels(x)
    if kernels is not None:
        return kernels.scatter_rows(x, row_ids, rows)

    out = x.new_empty(rows, x.shape[1])
    row, slot = (row_ids >= 0).nonzero(as_tuple=True)
    out[row_ids[row, slot]] = x[row]
    return out


def _sum(y: Tensor, row_ids: Tensor) -> Tensor:
    y, kernels = y.contiguous(), _kernels(y)
    if kernels is not None:
        return kernels.sum_rows(y, row_ids)
    out = y.new_zeros(row_ids.shape[0], y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for row_id in row_ids.unbind(1):
        row = (row_id >= 0).nonzero()[:, 0]
        out[row] += y[row_id[row]]
    return out.to(y.dtype)


def _scatter_parts(x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
    x, kernels = x.contiguous(), _kernels(x)
    if kernels is not None:
        return kernels.scatter_parts(x, row_ids, rows)

    out = x.new_empty(rows, x.shape[1] // row_ids.shape[1])
    part = (row_ids >= 0).flatten()
    out[row_ids.flatten()[part]] = x.view(part.numel(), out.shape[1])[part]
    return out


def _gather_parts(y: Tensor, row_ids: Tensor) -> Tensor:
    y, kernels = y.contiguous(), _kernels(y)
    if kernels is not None:
        return kernels.gather_parts(y, row_ids)

    out = y.new_zeros(row_ids.numel(), y.shape[1])
    part = (row_ids >= 0).flatten()
    out[part] = y[row_ids.flatten()[part]]
    return out.view(row_ids.shape[0], row_ids.shape[1] * y.shape[1])


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(row_ids)
        return _scatter(x, row_ids, rows)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _sum(dout, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, row_ids: Tensor) -> Tensor:
        ctx.rows = y.shape[0]
        ctx.save_for_backward(row_ids)
        return _sum(y, row_ids)

    @staticmethod
    def backward(ctx, dout: Tensor):
        (row_ids,) = ctx.saved_tensors
        return _scatter(dout, row_ids, ctx.rows), None


class _ScatterParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, row_ids: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(row_ids)
        return _scatter_parts(x, row_ids, rows)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _gather_parts(dout, *ctx.saved_tensors), None, None
