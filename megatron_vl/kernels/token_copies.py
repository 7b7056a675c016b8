"""Copies rows to several places and sums them again, as needed to move tokens to experts within a rank.

Places are an int32 table [T, K] with the position of the k-th copy of row t, or -1. :func:`scatter_rows` and
:func:`sum_rows` are each other's gradient, so autograd keeps only the table. Triton kernels run on a GPU (and
in Triton's interpreter), torch elsewhere.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor


def positions(chosen: Tensor) -> Tensor:
    """Places that order copies by column, then by row: the result of a sort by destination, without sorting.

    Args:
        chosen: bool [T, K], whether row t has a copy for destination k.

    Returns:
        int32 [T, K], -1 where there is no copy. The host does not wait for the device.
    """
    rows, columns = chosen.shape
    running = chosen.T.reshape(-1).cumsum(0, dtype=torch.int32).view(columns, rows).T
    return torch.where(chosen, running - 1, -1).contiguous()


def scatter_rows(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Copies each row to its places.

    Args:
        x: [T, H].
        places: int32 [T, K], contiguous, all different except -1.
        rows: number of rows of the result. Rows without a place are undefined, and their gradient is not
            read.

    Returns:
        [rows, H].
    """
    return _Scatter.apply(x, places, rows)


def sum_rows(y: Tensor, places: Tensor) -> Tensor:
    """Sums the rows at each row's places, in float32 and in a fixed order, and rounds once.

    Args:
        y: [N, H].
        places: int32 [T, K], contiguous, all different except -1.

    Returns:
        [T, H] in the type of ``y``.
    """
    return _Sum.apply(y, places)


def scatter_parts(x: Tensor, places: Tensor, rows: int) -> Tensor:
    """Copies each of the K parts of a row to its own place.

    Args:
        x: [T, K * W].
        places: int32 [T, K], contiguous, all different except -1.
        rows: number of rows of the result. Rows without a place are undefined, and their gradient is not
            read.

    Returns:
        [rows, W].
    """
    return _ScatterParts.apply(x, places, rows)


def _kernels(x: Tensor) -> ModuleType | None:
    if not (x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    from megatron_vl.kernels import token_copies_triton as row_kernels

    return row_kernels


def _scatter(x: Tensor, places: Tensor, rows: int) -> Tensor:
    x, kernels = x.contiguous(), _kernels(x)
    if kernels is not None:
        return kernels.scatter_rows(x, places, rows)

    out = x.new_empty(rows, x.shape[1])
    row, slot = (places >= 0).nonzero(as_tuple=True)
    out[places[row, slot]] = x[row]
    return out


def _sum(y: Tensor, places: Tensor) -> Tensor:
    y, kernels = y.contiguous(), _kernels(y)
    if kernels is not None:
        return kernels.sum_rows(y, places)
    out = y.new_zeros(places.shape[0], y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for place in places.unbind(1):
        row = (place >= 0).nonzero()[:, 0]
        out[row] += y[place[row]]
    return out.to(y.dtype)


def _scatter_parts(x: Tensor, places: Tensor, rows: int) -> Tensor:
    x, kernels = x.contiguous(), _kernels(x)
    if kernels is not None:
        return kernels.scatter_parts(x, places, rows)

    out = x.new_empty(rows, x.shape[1] // places.shape[1])
    part = (places >= 0).flatten()
    out[places.flatten()[part]] = x.view(part.numel(), out.shape[1])[part]
    return out


def _gather_parts(y: Tensor, places: Tensor) -> Tensor:
    y, kernels = y.contiguous(), _kernels(y)
    if kernels is not None:
        return kernels.gather_parts(y, places)

    out = y.new_zeros(places.numel(), y.shape[1])
    part = (places >= 0).flatten()
    out[part] = y[places.flatten()[part]]
    return out.view(places.shape[0], places.shape[1] * y.shape[1])


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return _scatter(x, places, rows)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _sum(dout, *ctx.saved_tensors), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, places: Tensor) -> Tensor:
        ctx.rows = y.shape[0]
        ctx.save_for_backward(places)
        return _sum(y, places)

    @staticmethod
    def backward(ctx, dout: Tensor):
        (places,) = ctx.saved_tensors
        return _scatter(dout, places, ctx.rows), None


class _ScatterParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return _scatter_parts(x, places, rows)

    @staticmethod
    def backward(ctx, dout: Tensor):
        return _gather_parts(dout, *ctx.saved_tensors), None, None
