"""Matrix products of many experts, with one Triton kernel launch per product.

Rows are sorted by expert. Only the device knows how many rows each expert has, so nothing here waits for
these numbers. Weights stay separate tensors: kernels read their addresses from an int64 table
(:class:`Addresses`). Products take bf16 and accumulate in fp32. The kernel that computes a weight gradient
also adds it to the expert's ``main_grad``. If a GPU holds many experts, a library that launches one product
after another spends more time on launches than on computation (figures: docs/log/experts.md).

:class:`Plan` cuts the rows into tiles that each belong to one expert. There are at most ``rows / tile +
experts`` tiles. The grid has this size, and programs without a tile return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE_ROWS = 128
"""Number of rows in a tile of a forward product or of its input gradient."""
_PLAN_BLOCK = 128


@triton.jit(do_not_specialize=["experts", "bound"])
def _plan(
    counts, starts, tiles, experts, bound, ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program fills BLOCK tiles: expert (-1: no tile), first row, and end of the expert's rows."""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert, mask=expert < experts, other=0).to(tl.int32)
    blocks = (count + ROWS - 1) // ROWS
    ends = tl.cumsum(blocks, 0)
    if tl.program_id(0) == 0:
        tl.store(starts, 0)
        tl.store(starts + 1 + expert, tl.cumsum(count, 0), mask=expert < experts)

    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = ends[None, :] <= tile[:, None]
    mine = tl.sum(before.to(tl.int32), 1)
    first = tl.sum(tl.where(before, count[None, :], 0), 1)
    end = first + tl.sum(tl.where(expert[None, :] == mine[:, None], count[None, :], 0), 1)
    first += (tile - tl.sum(tl.where(before, blocks[None, :], 0), 1)) * ROWS
    mask = tile < bound
    tl.store(tiles + tile, tl.where(mine < experts, mine, -1), mask=mask)
    tl.store(tiles + bound + tile, first, mask=mask)
    tl.store(tiles + 2 * bound + tile, end, mask=mask)


@triton.jit(do_not_specialize=["bound"])
def _row_product(
    x, addresses, tiles, out, bound, IN: tl.constexpr, OUT: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies one tile of x [rows, IN] by its expert's weight, [OUT, IN] if TRANSPOSED, else [IN, OUT]."""
    EVEN: tl.constexpr = IN % BLOCK_K == 0 and OUT % BLOCK_N == 0
    columns = tl.cdiv(OUT, BLOCK_N)
    tile = tl.program_id(0) // columns
    column = tl.program_id(0) % columns * BLOCK_N
    expert = tl.load(tiles + tile)
    if expert < 0:
        return

    first, end = tl.load(tiles + bound + tile), tl.load(tiles + 2 * bound + tile)
    weight = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    row = first + tl.arange(0, BLOCK_M)
    n = column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last row and are not stored.
    left = x + tl.minimum(row, end - 1).to(tl.int64)[:, None] * IN + k[None, :]
    right = weight + k[:, None] + n[None, :] * IN if TRANSPOSED else weight + k[:, None] * OUT + n[None, :]
    tl.multiple_of(left, [16, 16])
    tl.multiple_of(right, [16, 16])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    for start in range(0, IN, BLOCK_K):
        if EVEN:
            a, b = tl.load(left), tl.load(right)
        else:
            a = tl.load(left, mask=(start + k < IN)[None, :], other=0.0)
            b = tl.load(right, mask=(start + k < IN)[:, None] & (n < OUT)[None, :], other=0.0)
        acc = tl.dot(a, b, acc)
        left += BLOCK_K
        right += BLOCK_K if TRANSPOSED else BLOCK_K * OUT

    pointers = out + row.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(row < end)[:, None] & (n < OUT)[None, :])


@triton.jit
def _put(grad, acc, m0, n0, OUT, IN, ADD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Writes or adds a tile of an expert's gradient."""
    m, n = m0 + tl.arange(0, HEIGHT), n0 + tl.arange(0, WIDTH)
    pointers = grad + m[:, None] * IN + n[None, :]
    tl.multiple_of(pointers, [16, 16])
    inside = (m < OUT)[:, None] & (n < IN)[None, :]
    if ADD:
        acc += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _weight_product(
    dy, x, starts, addresses, like, OUT, IN, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes one tile [BLOCK_M, BLOCK_N] of an expert's dy^T [OUT, rows] times x [rows, IN].

    The result has the type of ``like``. The tensor memory accelerator loads the blocks. It fills rows past
    the expert's last one with zeros, so no mask is needed.
    """
    across = tl.cdiv(IN, BLOCK_N)
    tiles = tl.cdiv(OUT, BLOCK_M) * across
    expert = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    m0 = tile // across * BLOCK_M
    n0 = tile % across * BLOCK_N
    first, end = tl.load(starts + expert), tl.load(starts + expert + 1)
    if ADD and first == end:
        return

    grad = tl.load(addresses + expert).to(tl.pointer_type(like.dtype.element_ty))
    ys = tl.make_tensor_descriptor(dy, [end, OUT], [OUT, 1], [BLOCK_K, BLOCK_M])
    xs = tl.make_tensor_descriptor(x, [end, IN], [IN, 1], [BLOCK_K, BLOCK_N])
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(first, end, BLOCK_K):
        acc = tl.dot(ys.load([row, m0]).T, xs.load([row, n0]), acc)

    # The tile is stored in two halves, which needs half of the shared memory.
    halves = tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    acc0, acc1 = tl.split(halves)
    _put(grad, acc0, m0, n0, OUT, IN, ADD, BLOCK_M, BLOCK_N // 2)
    _put(grad, acc1, m0, n0 + BLOCK_N // 2, OUT, IN, ADD, BLOCK_M, BLOCK_N // 2)


class Config(NamedTuple):
    """How a product is cut: each program computes m x n elements and reduces over k elements at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        sizes = {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k}
        return sizes | {"num_warps": self.warps, "num_stages": self.stages}


ROWS_CONFIG = Config(TILE_ROWS, 256, 64, 8, 3)
WEIGHT_CONFIG = Config(128, 256, 64, 8, 3)


class Plan(NamedTuple):
    """The assignment of rows to experts, on the device."""

    starts: Tensor
    """int32 [experts + 1]: cumulative counts."""
    tiles: Tensor
    """int32 [3, bound]: expert (or -1), first row, end of the expert's rows."""


def plan(counts: Tensor, rows: int) -> Plan:
    """Cuts rows that are sorted by expert into tiles.

    Args:
        counts: int32 or int64 [experts], number of rows of each expert, on the device.
        rows: at least the sum of counts. No tile covers rows after those of the last expert.
    """
    experts = counts.numel()
    bound = rows // TILE_ROWS + min(experts, rows)
    starts = counts.new_empty(experts + 1, dtype=torch.int32)
    tiles = counts.new_empty(3, bound, dtype=torch.int32)
    grid = (max(1, triton.cdiv(bound, _PLAN_BLOCK)),)
    padded = triton.next_power_of_2(experts)
    _plan[grid](counts, starts, tiles, experts, bound, ROWS=TILE_ROWS, EXPERTS=padded, BLOCK=_PLAN_BLOCK)
    return Plan(starts, tiles)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocates the memory for the tensor descriptors that a kernel makes."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def row_product(
    x: Tensor,
    addresses: Tensor,
    where: Plan,
    out_features: int,
    *,
    transposed: bool,
    config: Config = ROWS_CONFIG,
) -> Tensor:
    """Multiplies each row by its expert's weight.

    Args:
        x: [rows, features in], contiguous. Rows must be a multiple of 16 bytes, here and in the result.
        addresses: int64 [experts], addresses of contiguous weights in the type of ``x``.
        transposed: whether weights are [out_features, in] (a forward product)
            or [in, out_features] (its input gradient).

    Returns:
        [rows, out_features].
    """
    out = x.new_empty(x.shape[0], out_features)
    if out.numel():
        bound = where.tiles.shape[1]
        _row_product[(bound * triton.cdiv(out_features, config.n),)](
            x,
            addresses,
            where.tiles,
            out,
            bound,
            x.shape[1],
            out_features,
            TRANSPOSED=transposed,
            **config.options(),
        )
    return out


def weight_product(
    dy: Tensor,
    x: Tensor,
    addresses: Tensor,
    where: Plan,
    like: Tensor,
    *,
    add: bool,
    config: Config = WEIGHT_CONFIG,
) -> None:
    """Computes weight gradients and writes or adds them to the tensors at ``addresses``.

    Args:
        dy, x: [rows, features out] and [rows, features in], contiguous. Rows must be a multiple of 16 bytes.
        addresses: int64 [experts], addresses of contiguous tensors [out, in] in the type of ``like``.
        like: a tensor with the gradients' type.
        add: whether to add to the old values. If so, the gradient of an expert without rows does not change.
            If not, it becomes zero.
    """
    if not x.shape[0] and add:
        return
    triton.set_allocator(_scratch)
    tiles = triton.cdiv(dy.shape[1], config.m) * triton.cdiv(x.shape[1], config.n)
    _weight_product[(addresses.numel() * tiles,)](
        dy, x, where.starts, addresses, like, dy.shape[1], x.shape[1], ADD=add, **config.options()
    )


class Addresses:
    """A table of tensors' addresses on the device. It is copied again only when an address has changed."""

    def __init__(self) -> None:
        self._known: list[int] = []
        self._table: Tensor | None = None

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """The addresses of ``tensors``, int64 [tensors], on their device."""
        now = [t.data_ptr() for t in tensors]
        if self._table is None or now != self._known:
            self._known = now
            self._table = torch.tensor(now, dtype=torch.int64).to(tensors[0].device)
        return self._table
