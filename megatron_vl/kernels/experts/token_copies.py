"""Copies each row to several rows and sums the copies again, to move tokens to experts within a rank.

``row_ids`` is an int32 table [T, K]: entry (t, k) is the row that the k-th copy of row t becomes, or -1.
:func:`scatter_rows` and :func:`sum_rows` are each other's gradient, so autograd keeps only the table. Triton
kernels run on a GPU and in Triton's interpreter, torch code elsewhere.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from megatron_vl.kernels.where_kernels_run import runs_on_kernels


def make_row_ids(copy_map: Tensor) -> Tensor:
    """Makes ``row_ids`` that order copies by column, then by row, as a stable sort by destination would.

    Args:
        copy_map: bool [T, K], whether row t has a copy for destination k.

    Returns:
        int32 [T, K]; -1 where there is no copy. The host does not wait for the device.
    """
    num_rows, num_destinations = copy_map.shape
    running_count = copy_map.T.reshape(-1).cumsum(0, dtype=torch.int32).view(num_destinations, num_rows).T
    return torch.where(copy_map, running_count - 1, -1).contiguous()


def scatter_rows(x: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    """Copies row i to the rows ``row_ids[i]``.

    Args:
        x: [T, H].
        row_ids: int32 [T, K], contiguous, all different except -1.
        num_rows: number of rows of the result. Rows that no row_id names are undefined, and their gradient is
            not read.

    Returns:
        [rows, H].
    """
    return _RowCopies.apply(x, row_ids, num_rows, _scatter_rows, _sum_rows)


def sum_rows(y: Tensor, row_ids: Tensor) -> Tensor:
    """Sums the rows ``row_ids[i]``, in float32 and in a fixed order, and rounds once.

    Args:
        y: [N, H].
        row_ids: int32 [T, K], contiguous, all different except -1.

    Returns:
        [T, H] in the type of ``y``.
    """
    return _RowCopies.apply(y, row_ids, row_ids.shape[0], _sum_rows, _scatter_rows)


def scatter_parts(x: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    """Copies part k of row i to the row ``row_ids[i, k]``.

    Args:
        x: [T, K * W].
        row_ids: int32 [T, K], contiguous, all different except -1.
        num_rows: number of rows of the result. Rows that no row_id names are undefined, and their gradient is
            not read.

    Returns:
        [rows, W].
    """
    return _RowCopies.apply(x, row_ids, num_rows, _scatter_parts, _gather_parts)


def _triton_kernels(x: Tensor) -> ModuleType | None:
    if not runs_on_kernels(x):
        return None
    from megatron_vl.kernels.experts import token_copies_triton as row_kernels

    return row_kernels


def _scatter_rows(x: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    if (kernels := _triton_kernels(x)) is not None:
        return kernels.scatter_rows(x, row_ids, num_rows)

    scattered_rows = x.new_empty(num_rows, x.shape[1])
    row, copy_index = (row_ids >= 0).nonzero(as_tuple=True)
    scattered_rows[row_ids[row, copy_index]] = x[row]
    return scattered_rows


def _sum_rows(y: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    if (kernels := _triton_kernels(y)) is not None:
        return kernels.sum_rows(y, row_ids)
    summed_rows = y.new_zeros(num_rows, y.shape[1], dtype=torch.promote_types(y.dtype, torch.float32))
    for column_row_ids in row_ids.unbind(1):
        row = (column_row_ids >= 0).nonzero()[:, 0]
        summed_rows[row] += y[column_row_ids[row]]
    return summed_rows.to(y.dtype)


def _scatter_parts(x: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    if (kernels := _triton_kernels(x)) is not None:
        return kernels.scatter_parts(x, row_ids, num_rows)
    all_parts = x.view(row_ids.numel(), x.shape[1] // row_ids.shape[1])
    return _scatter_rows(all_parts, row_ids.view(-1, 1), num_rows)


def _gather_parts(y: Tensor, row_ids: Tensor, num_rows: int) -> Tensor:
    if (kernels := _triton_kernels(y)) is not None:
        return kernels.gather_parts(y, row_ids)

    gathered_parts = y.new_zeros(row_ids.numel(), y.shape[1])
    has_part = (row_ids >= 0).flatten()
    gathered_parts[has_part] = y[row_ids.flatten()[has_part]]
    return gathered_parts.view(num_rows, row_ids.shape[1] * y.shape[1])


type _Copy = Callable[[Tensor, Tensor, int], Tensor]
"""(x, row_ids, number of rows of the result) -> result"""


class _RowCopies(torch.autograd.Function):
    """The result of ``copy``, whose gradient ``copy_back`` takes to the rows of ``x``."""

    @staticmethod
    def forward(ctx, x: Tensor, row_ids: Tensor, num_rows: int, copy: _Copy, copy_back: _Copy) -> Tensor:
        ctx.save_for_backward(row_ids)
        ctx.num_rows, ctx.copy_back = x.shape[0], copy_back
        return copy(x.contiguous(), row_ids, num_rows)

    @staticmethod
    def backward(ctx, output_grad: Tensor):
        return ctx.copy_back(output_grad.contiguous(), *ctx.saved_tensors, ctx.num_rows), *[None] * 4
