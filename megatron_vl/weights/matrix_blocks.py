"""Cuts tensors into shards and joins them again, by copying rectangles between matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vl.spec.tensors import Sharding, TensorInfo
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape


class MatrixBlock(NamedTuple):
    """A rectangle of ``rows`` x ``cols`` that a whole matrix and one of its parts have in common."""

    part_id: str | int
    rows: int
    cols: int
    row: int = 0
    """First row in the whole matrix; ``col`` is its first column. ``part_row`` and ``part_col`` are the first
    row and column in the part."""
    col: int = 0
    part_row: int = 0
    part_col: int = 0
    is_transposed: bool = False
    """Whether the part holds the rectangle transposed, as ``cols`` x ``rows``."""

    def inverse_block(self, whole_id: str | int) -> MatrixBlock:
        """The same rectangle with the roles swapped: ``whole_id`` becomes the part."""
        rows, cols = (self.cols, self.rows) if self.is_transposed else (self.rows, self.cols)
        return MatrixBlock(
            whole_id, rows, cols, self.part_row, self.part_col, self.row, self.col, self.is_transposed
        )


def gather_region(
    blocks: Sequence[MatrixBlock],
    region: MatrixRegion,
    read_part: Callable[[str | int, MatrixRegion], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Reads a region of a matrix that consists of ``blocks``. Elements that no block covers are zero.

    ``read_part`` returns a region of a part as a matrix. The result ``[rows, cols]`` of ``dtype`` is not a
    copy if one block covers the region and has that type.
    """
    gathered: Tensor | None = None
    for block in blocks:
        # Most blocks of a stack of experts lie elsewhere, and this is the cheapest way to skip them.
        if block.row >= region.row_end or block.row + block.rows <= region.row:
            continue
        shared_region = MatrixRegion(
            max(region.row, block.row),
            min(region.row_end, block.row + block.rows),
            max(region.col, block.col),
            min(region.col_end, block.col + block.cols),
        )
        if shared_region.is_empty:
            continue

        # A region inside one block of the right type is a view of the part. No memory is filled for it.
        block_data = _read_block(block, shared_region, read_part)
        if shared_region == region and block_data.dtype == dtype and not block.is_transposed:
            return block_data

        if gathered is None:
            gathered = _zero_matrix(region, dtype)
        target_view = gathered[
            shared_region.row - region.row : shared_region.row_end - region.row,
            shared_region.col - region.col : shared_region.col_end - region.col,
        ]
        # A transposed matrix is copied in strips that fit the cache, which is 4x faster.
        strip_width = 64 if block.is_transposed else max(1, block_data.shape[1])
        for target, source in zip(
            target_view.split(strip_width, 1), block_data.split(strip_width, 1), strict=True
        ):
            target.copy_(source)

    return _zero_matrix(region, dtype) if gathered is None else gathered  # all zero: it is padding


def _zero_matrix(region: MatrixRegion, dtype: torch.dtype) -> Tensor:
    return torch.zeros(region.row_end - region.row, region.col_end - region.col, dtype=dtype)


def _read_block(
    block: MatrixBlock, region: MatrixRegion, read_part: Callable[[str | int, MatrixRegion], Tensor]
) -> Tensor:
    """Reads a region, given in the whole matrix and within ``block``, from the part."""
    row, row_end = region.row - block.row, region.row_end - block.row
    col, col_end = region.col - block.col, region.col_end - block.col
    if block.is_transposed:
        row, row_end, col, col_end = col, col_end, row, row_end
    part_row, part_col = block.part_row, block.part_col
    part_region = MatrixRegion(part_row + row, part_row + row_end, part_col + col, part_col + col_end)
    part_data = read_part(block.part_id, part_region)
    return part_data.t() if block.is_transposed else part_data


@lru_cache(maxsize=256)  # called for every region; a tensor of many experts has many blocks
def shard_blocks(tensor_info: TensorInfo, sharding: Sharding) -> tuple[MatrixBlock, ...]:
    """The blocks that make up the full matrix of a tensor. Their ids are numbers of parts
    (:meth:`~megatron_vl.spec.tensors.Sharding.shard_index`). A replicated tensor is read from part 0."""
    num_rows, num_cols = matrix_shape(tensor_info.shape)
    if tensor_info.num_experts:
        return tuple(_expert_blocks(tensor_info, sharding))
    if tensor_info.parallel_style == "replicated":
        return (MatrixBlock(0, num_rows, num_cols),)

    shard_count = sharding.tensor_parallel_ways(tensor_info)
    if tensor_info.parallel_style == "row":
        shard_cols = num_cols // shard_count
        return tuple(
            MatrixBlock(shard_index, num_rows, shard_cols, col=shard_index * shard_cols)
            for shard_index in range(shard_count)
        )

    blocks = []
    first_row = shard_row = 0
    for section_rows in _section_rows(tensor_info, num_rows):
        shard_rows = section_rows // shard_count
        for i in range(shard_count):
            row = first_row + i * shard_rows
            blocks.append(MatrixBlock(i, shard_rows, num_cols, row=row, part_row=shard_row))
        first_row += section_rows
        shard_row += shard_rows
    return tuple(blocks)


def _section_rows(tensor_info: TensorInfo, num_rows: int) -> tuple[int, ...]:
    """Number of rows of each section. Each section is cut separately."""
    if tensor_info.parallel_style == "gated":
        return (num_rows // 2, num_rows // 2)
    return tensor_info.section_rows or (num_rows,)


def _expert_blocks(tensor_info: TensorInfo, sharding: Sharding) -> list[MatrixBlock]:
    """Repeats the blocks of one expert for each expert. Adjacent blocks of one part are joined."""
    single_expert = tensor_info.single_expert
    expert_rows = single_expert.shape[0]
    expert_shard_rows = single_expert.shard_shape(Sharding(sharding.etp))[0]
    experts_per_rank = tensor_info.num_experts // sharding.ep

    blocks = [
        block._replace(
            part_id=expert // experts_per_rank * sharding.etp + int(block.part_id),
            row=block.row + expert * expert_rows,
            part_row=block.part_row + expert % experts_per_rank * expert_shard_rows,
        )
        for expert in range(tensor_info.num_experts)
        for block in shard_blocks(single_expert, Sharding(sharding.etp))
    ]

    joined_blocks: list[MatrixBlock] = []
    for block in sorted(blocks, key=lambda block: (block.part_id, block.part_row)):
        if joined_blocks and (last_block := joined_blocks[-1])._replace(rows=0) == block._replace(
            rows=0, row=block.row - last_block.rows, part_row=block.part_row - last_block.rows
        ):
            joined_blocks[-1] = last_block._replace(rows=last_block.rows + block.rows)
        else:
            joined_blocks.append(block)
    return joined_blocks


@lru_cache(maxsize=256)
def blocks_of_shard(tensor_info: TensorInfo, shard_index: int, sharding: Sharding) -> tuple[MatrixBlock, ...]:
    """The blocks of the full matrix that make up one part: the inverse of :func:`shard_blocks`."""
    # All tensor-parallel ranks hold a replicated tensor, and shard_blocks names only the first one's part.
    part_id = shard_index
    if tensor_info.parallel_style == "replicated":
        part_id = shard_index // sharding.etp * sharding.etp if tensor_info.num_experts else 0
    return tuple(
        block.inverse_block(tensor_info.name)
        for block in shard_blocks(tensor_info, sharding)
        if block.part_id == part_id
    )


def cut_shard(full_tensor: Tensor, tensor_info: TensorInfo, shard_index: int, sharding: Sharding) -> Tensor:
    """Part ``shard_index`` of a full tensor. It is a view if the cut allows it."""
    split_axis = 1 if tensor_info.parallel_style == "row" else 0
    shard_count = sharding.tensor_parallel_ways(tensor_info)
    if tensor_info.num_experts:
        full_tensor = full_tensor.chunk(sharding.ep)[shard_index // sharding.etp]
        split_axis += 1
        shard_count = sharding.etp
        shard_index = shard_index % sharding.etp

    if tensor_info.parallel_style == "replicated" or shard_count == 1:
        return full_tensor
    if tensor_info.parallel_style in ("gated", "sections"):
        sections = full_tensor.split(_section_rows(tensor_info, full_tensor.shape[split_axis]), split_axis)
        return torch.cat(
            [section.chunk(shard_count, split_axis)[shard_index] for section in sections], split_axis
        )
    return full_tensor.chunk(shard_count, split_axis)[shard_index]
