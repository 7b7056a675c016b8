"""Matrix products of many experts, with one Triton kernel launch per product.

Rows are sorted by expert. Only the device knows how many rows each expert has, so nothing here waits for
these numbers. Weights stay separate tensors: kernels read their addresses from an int64 table
(:class:`AddressTable`). Products take bf16 and accumulate in fp32. The kernel that computes a weight gradient
also adds it to the expert's ``main_grad``. If a GPU holds many experts, a library that launches one product
after another spends more time on launches than on computation (figures: benchmarks/log/experts.md).

:class:`TilePlan` cuts the rows into tiles that each belong to one expert. There are at most ``rows / tile +
experts`` tiles. The grid has this size, and programs without a tile return at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_vl.kernels.sizes import cdiv, next_power_of_2

TILE_ROWS = 128
_PLAN_BLOCK_TILES = 128


@triton.jit(do_not_specialize=["experts", "bound"])
def _plan_tiles_kernel(
    rows_per_expert,
    expert_starts,
    tile_table,
    experts,
    bound,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program fills BLOCK tiles: expert (-1: no tile), first row, and end of the expert's rows."""
    expert = tl.arange(0, EXPERTS)
    expert_rows = tl.load(rows_per_expert + expert, mask=expert < experts, other=0).to(tl.int32)
    tiles_per_expert = (expert_rows + ROWS - 1) // ROWS
    tile_ends = tl.cumsum(tiles_per_expert, 0)
    if tl.program_id(0) == 0:
        tl.store(expert_starts, 0)
        tl.store(expert_starts + 1 + expert, tl.cumsum(expert_rows, 0), mask=expert < experts)

    tile_index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ends_before_tile = tile_ends[None, :] <= tile_index[:, None]
    tile_expert = tl.sum(ends_before_tile.to(tl.int32), 1)
    first_row = tl.sum(tl.where(ends_before_tile, expert_rows[None, :], 0), 1)
    end_row = first_row + tl.sum(
        tl.where(expert[None, :] == tile_expert[:, None], expert_rows[None, :], 0), 1
    )
    first_row += (tile_index - tl.sum(tl.where(ends_before_tile, tiles_per_expert[None, :], 0), 1)) * ROWS
    tile_mask = tile_index < bound
    tl.store(tile_table + tile_index, tl.where(tile_expert < experts, tile_expert, -1), mask=tile_mask)
    tl.store(tile_table + bound + tile_index, first_row, mask=tile_mask)
    tl.store(tile_table + 2 * bound + tile_index, end_row, mask=tile_mask)


@triton.jit(do_not_specialize=["bound"])
def _row_product_kernel(
    x, source_rows, addresses, tile_table, output_pointer, bound, IN: tl.constexpr, OUT: tl.constexpr,
    TRANSPOSED: tl.constexpr, GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies one tile of x [rows, IN] by its expert's weight, [OUT, IN] if TRANSPOSED, else [IN, OUT].

    With GATHER, row i of the product is that of x's row source_rows[i].
    """
    EVEN: tl.constexpr = IN % BLOCK_K == 0 and OUT % BLOCK_N == 0
    num_column_tiles = tl.cdiv(OUT, BLOCK_N)
    tile_index = tl.program_id(0) // num_column_tiles
    first_column = tl.program_id(0) % num_column_tiles * BLOCK_N
    expert = tl.load(tile_table + tile_index)
    if expert < 0:
        return

    first_row, end_row = (
        tl.load(tile_table + bound + tile_index),
        tl.load(tile_table + 2 * bound + tile_index),
    )
    weight_pointer = tl.load(addresses + expert).to(tl.pointer_type(x.dtype.element_ty))
    row_index = first_row + tl.arange(0, BLOCK_M)
    n = first_column + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end repeat the last row and are not stored.
    left_row = tl.minimum(row_index, end_row - 1)
    if GATHER:
        left_row = tl.load(source_rows + left_row)
    left_pointers = x + left_row.to(tl.int64)[:, None] * IN + k[None, :]
    right_pointers = (
        weight_pointer + k[:, None] + n[None, :] * IN
        if TRANSPOSED
        else weight_pointer + k[:, None] * OUT + n[None, :]
    )
    tl.multiple_of(left_pointers, [16, 16])
    tl.multiple_of(right_pointers, [16, 16])
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)

    for reduction_start in range(0, IN, BLOCK_K):
        if EVEN:
            left_block, right_block = tl.load(left_pointers), tl.load(right_pointers)
        else:
            left_block = tl.load(left_pointers, mask=(reduction_start + k < IN)[None, :], other=0.0)
            right_block = tl.load(
                right_pointers, mask=(reduction_start + k < IN)[:, None] & (n < OUT)[None, :], other=0.0
            )
        accumulator = tl.dot(left_block, right_block, accumulator)
        left_pointers += BLOCK_K
        right_pointers += BLOCK_K if TRANSPOSED else BLOCK_K * OUT

    output_pointers = output_pointer + row_index.to(tl.int64)[:, None] * OUT + n[None, :]
    tl.store(output_pointers, accumulator, mask=(row_index < end_row)[:, None] & (n < OUT)[None, :])


@triton.jit
def _store_grad_tile(
    grad_pointer,
    accumulator,
    first_row,
    first_column,
    OUT,
    IN,
    ADD: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    m, n = first_row + tl.arange(0, HEIGHT), first_column + tl.arange(0, WIDTH)
    tile_pointers = grad_pointer + m[:, None] * IN + n[None, :]
    tl.multiple_of(tile_pointers, [16, 16])
    is_inside = (m < OUT)[:, None] & (n < IN)[None, :]
    if ADD:
        accumulator += tl.load(tile_pointers, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(tile_pointers, accumulator, mask=is_inside)


@triton.jit
def _weight_product_kernel(
    output_grad, x, expert_starts, addresses, dtype_pointer, OUT, IN, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes one tile [BLOCK_M, BLOCK_N] of an expert's dy^T [OUT, rows] times x [rows, IN].

    The result has the type of ``dtype_pointer``. The tensor memory accelerator loads the blocks. It fills
    rows past the expert's last one with zeros, so no mask is needed.
    """
    num_column_tiles = tl.cdiv(IN, BLOCK_N)
    tiles_per_expert = tl.cdiv(OUT, BLOCK_M) * num_column_tiles
    expert = tl.program_id(0) // tiles_per_expert
    tile_index = tl.program_id(0) % tiles_per_expert
    first_row = tile_index // num_column_tiles * BLOCK_M
    first_column = tile_index % num_column_tiles * BLOCK_N
    first_token_row, end_token_row = tl.load(expert_starts + expert), tl.load(expert_starts + expert + 1)
    if ADD and first_token_row == end_token_row:
        return

    grad_pointer = tl.load(addresses + expert).to(tl.pointer_type(dtype_pointer.dtype.element_ty))
    output_grad_descriptor = tl.make_tensor_descriptor(
        output_grad, [end_token_row, OUT], [OUT, 1], [BLOCK_K, BLOCK_M]
    )
    input_descriptor = tl.make_tensor_descriptor(x, [end_token_row, IN], [IN, 1], [BLOCK_K, BLOCK_N])
    accumulator = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for token_row in range(first_token_row, end_token_row, BLOCK_K):
        accumulator = tl.dot(
            output_grad_descriptor.load([token_row, first_row]).T,
            input_descriptor.load([token_row, first_column]),
            accumulator,
        )

    # The tile is stored in two halves, which needs half of the shared memory.
    accumulator_halves = tl.permute(tl.reshape(accumulator, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    first_half, second_half = tl.split(accumulator_halves)
    _store_grad_tile(grad_pointer, first_half, first_row, first_column, OUT, IN, ADD, BLOCK_M, BLOCK_N // 2)
    _store_grad_tile(
        grad_pointer, second_half, first_row, first_column + BLOCK_N // 2, OUT, IN, ADD, BLOCK_M, BLOCK_N // 2
    )


class GemmTileConfig(NamedTuple):
    """How a product is cut: each program computes m x n elements and reduces over k elements at a time."""

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int

    def launch_options(self) -> dict[str, int]:
        sizes = {"BLOCK_M": self.tile_m, "BLOCK_N": self.tile_n, "BLOCK_K": self.tile_k}
        return sizes | {"num_warps": self.num_warps, "num_stages": self.num_stages}


ROW_TILE_CONFIG = GemmTileConfig(TILE_ROWS, 256, 64, 8, 3)
WEIGHT_TILE_CONFIG = GemmTileConfig(128, 256, 64, 8, 3)


class TilePlan(NamedTuple):
    """The assignment of rows to experts, on the device.

    Products take either one row of ``x`` for each of the experts' rows, or tokens, from which they gather.
    """

    expert_starts: Tensor
    """int32 [experts + 1]: cumulative counts."""
    tile_table: Tensor
    """int32 [3, bound]: expert (or -1), first row, end of the expert's rows."""
    source_rows: Tensor | None = None
    """int32 [rows]: the token of each of the experts' rows; None: ``x`` has these rows themselves."""
    row_ids: Tensor | None = None
    """int32 [tokens, experts]: the experts' rows of a token, or -1
    (:func:`~megatron_vl.kernels.experts.token_copies.make_row_ids`)."""

    def without_gather(self) -> TilePlan:
        """The plan of a product whose input has the experts' rows."""
        return TilePlan(self.expert_starts, self.tile_table)


def plan_tiles(rows_per_expert: Tensor, num_rows: int) -> TilePlan:
    """Cuts rows that are sorted by expert into tiles.

    Args:
        rows_per_expert: int32 or int64 [experts], number of rows of each expert, on the device.
        num_rows: at least the sum of counts. No tile covers rows after those of the last expert.
    """
    num_experts = rows_per_expert.numel()
    max_tiles = num_rows // TILE_ROWS + min(num_experts, num_rows)
    expert_starts = rows_per_expert.new_empty(num_experts + 1, dtype=torch.int32)
    tile_table = rows_per_expert.new_empty(3, max_tiles, dtype=torch.int32)
    _plan_tiles_kernel[(max(1, cdiv(max_tiles, _PLAN_BLOCK_TILES)),)](
        rows_per_expert, expert_starts, tile_table, num_experts, max_tiles,
        ROWS=TILE_ROWS, EXPERTS=next_power_of_2(num_experts), BLOCK=_PLAN_BLOCK_TILES,
    )  # fmt: skip
    return TilePlan(expert_starts, tile_table)


def _allocate_scratch(size_bytes: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.int8, device="cuda")


def row_product(
    x: Tensor,
    weight_addresses: Tensor,
    tile_plan: TilePlan,
    out_features: int,
    *,
    is_transposed: bool,
    tile_config: GemmTileConfig = ROW_TILE_CONFIG,
) -> Tensor:
    """Multiplies each row by its expert's weight.

    Args:
        x: [rows or tokens, features in], contiguous. Rows must be a multiple of 16 bytes, here and in the
            result.
        weight_addresses: int64 [experts], addresses of contiguous weights in the type of ``x``.
        is_transposed: whether weights are [out_features, in], as in a forward product. Otherwise they are
            [in, out_features], as in its input gradient.

    Returns:
        [rows, out_features].
    """
    source_rows = tile_plan.source_rows
    output_rows = x.new_empty((x if source_rows is None else source_rows).shape[0], out_features)
    if output_rows.numel() and x.numel():
        max_tiles = tile_plan.tile_table.shape[1]
        _row_product_kernel[(max_tiles * cdiv(out_features, tile_config.tile_n),)](
            x, source_rows, weight_addresses, tile_plan.tile_table, output_rows, max_tiles, x.shape[1],
            out_features,
            TRANSPOSED=is_transposed, GATHER=source_rows is not None, **tile_config.launch_options(),
        )  # fmt: skip
    return output_rows


def weight_product(
    output_grad: Tensor,
    x: Tensor,
    grad_addresses: Tensor,
    tile_plan: TilePlan,
    dtype_like: Tensor,
    *,
    accumulate: bool,
    tile_config: GemmTileConfig = WEIGHT_TILE_CONFIG,
) -> None:
    """Computes weight gradients and writes or adds them to the tensors at ``grad_addresses``.

    Args:
        output_grad, x: [rows, features out] and [rows, features in], contiguous. Rows must be a multiple of
            16 bytes.
        grad_addresses: int64 [experts], addresses of contiguous tensors [out, in] of ``dtype_like``'s type.
        accumulate: whether to add to the old values. If so, the gradient of an expert without rows does not
            change. If not, it becomes zero.
    """
    if not x.shape[0] and accumulate:
        return
    triton.set_allocator(_allocate_scratch)
    row_tiles = cdiv(output_grad.shape[1], tile_config.tile_m)
    column_tiles = cdiv(x.shape[1], tile_config.tile_n)
    _weight_product_kernel[(grad_addresses.numel() * row_tiles * column_tiles,)](
        output_grad, x, tile_plan.expert_starts, grad_addresses, dtype_like, output_grad.shape[1],
        x.shape[1],
        ADD=accumulate, **tile_config.launch_options(),
    )  # fmt: skip


class AddressTable:
    """A table of tensors' addresses on the device. It is copied again only when an address has changed."""

    def __init__(self) -> None:
        self._known_addresses: list[int] = []
        self._device_table: Tensor | None = None

    def device_addresses(self, tensors: Sequence[Tensor]) -> Tensor:
        """The addresses of ``tensors``, int64 [tensors], on their device."""
        current_addresses = [tensor.data_ptr() for tensor in tensors]
        if self._device_table is None or current_addresses != self._known_addresses:
            self._known_addresses = current_addresses
            self._device_table = torch.tensor(current_addresses, dtype=torch.int64).to(tensors[0].device)
        return self._device_table
