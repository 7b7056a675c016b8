"""Cuts tensors into shards and joins them again, by copying rectangles between matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_vl.spec.tensors import Cut, TensorInfo
from megatron_vl.weights.tensor_files import (
    Region,
    matrix_shape,
)


class Block(NamedTuple):
    """A rectangle of ``rows`` x ``cols`` that a whole matrix and one of its parts have in common."""

    part: str | int
    """The name or number of the part."""
    rows: int
    cols: int
    row: int = 0
    """First row in the whole matrix. ``col`` is the first column there; ``part_row`` and ``part_col`` are the
    first row and column in the part."""
    col: int = 0
    part_row: int = 0
    part_col: int = 0
    transposed: bool = False
    """Whether the part holds the rectangle transposed, as ``cols`` x ``rows``."""

    def inverted(self, whole: str | int) -> Block:
        """The same rectangle with the roles swapped: ``whole`` becomes the part."""
        if self.transposed:
            return Block(whole, self.cols, self.rows, self.part_row, self.part_col, self.row, self.col, True)
        return Block(whole, self.rows, self.cols, self.part_row, self.part_col, self.row, self.col)


def gather(
    blocks: Sequence[Block], region: Region, read: Callable[[str | int, Region], Tensor], dtype: torch.dtype
) -> Tensor:
    """Reads a region of a matrix that consists of ``blocks``. Elements that no block covers are zero.

    Args:
        read: returns a region of a part as a matrix.

    Returns:
        ``[rows, cols]`` of ``dtype``. It is not a copy if one block covers the region and has that type.
    """
    out: Tensor | None = None
    for block in blocks:
        top = max(region.row, block.row)
        bottom = min(region.row_end, block.row + block.rows)
        left = max(region.col, block.col)
        right = min(region.col_end, block.col + block.cols)
        if top >= bottom or left >= right:
            continue

        data = _read_block(block, Region(top, bottom, left, right), read)
        if (top, bottom, left, right) == region and data.dtype == dtype and not block.transposed:
            return data
        if out is None:
            out = torch.zeros(region.row_end - region.row, region.col_end - region.col, dtype=dtype)
        target = out[top - region.row : bottom - region.row, left - region.col : right - region.col]
        _copy(data, target, block.transposed)

    if out is None:
        return torch.zeros(region.row_end - region.row, region.col_end - region.col, dtype=dtype)
    return out


def _copy(data: Tensor, out: Tensor, transposed: bool) -> None:
    """Copies a matrix. A transposed matrix is copied in strips that fit the cache, which is 4x faster."""
    strip = 64 if transposed else max(1, data.shape[1])
    for col in range(0, data.shape[1], strip):
        out[:, col : col + strip] = data[:, col : col + strip]


def _read_block(block: Block, region: Region, read: Callable[[str | int, Region], Tensor]) -> Tensor:
    """Reads a region, given in the whole matrix and within ``block``, from the part."""
    if block.transposed:
        down, across = block.part_row - block.col, block.part_col - block.row
        turned = Region(
            region.col + down, region.col_end + down, region.row + across, region.row_end + across
        )
        return read(block.part, turned).t()
    down, across = block.part_row - block.row, block.part_col - block.col
    return read(
        block.part,
        Region(region.row + down, region.row_end + down, region.col + across, region.col_end + across),
    )


@lru_cache(maxsize=256)  # called for every region; a tensor of many experts has many blocks
def shard_blocks(info: TensorInfo, cut: Cut) -> tuple[Block, ...]:
    """The blocks that make up the full matrix. :attr:`Block.part` is a part's number (see :meth:`Cut.part`).

    A replicated tensor is read from part 0.
    """
    rows, cols = matrix_shape(info.shape)
    if info.experts:
        return tuple(_expert_blocks(info, cut))
    if info.split == "replicated":
        return (Block(0, rows, cols),)

    tp = cut.ways(info)
    if info.split == "row":
        width = cols // tp
        return tuple(Block(t, rows, width, col=t * width) for t in range(tp))
    if info.split == "column":
        height = rows // tp
        return tuple(Block(t, height, cols, row=t * height) for t in range(tp))

    blocks = []
    row = part_row = 0
    for section in _sections(info, rows):
        height = section // tp
        blocks += [Block(t, height, cols, row=row + t * height, part_row=part_row) for t in range(tp)]
        row += section
        part_row += height
    return tuple(blocks)


def _sections(info: TensorInfo, rows: int) -> tuple[int, ...]:
    """Number of rows of each section. Each section is cut separately."""
    return (rows // 2, rows // 2) if info.split == "gated" else info.sections


def _expert_blocks(info: TensorInfo, cut: Cut) -> list[Block]:
    """Repeats the blocks of one expert for each expert. Adjacent blocks of one part are joined."""
    one = dataclasses.replace(info, shape=info.shape[1:], experts=0)
    rows = one.shape[0]
    part_rows = one.shard_shape(Cut(cut.etp))[0]
    run = info.experts // cut.ep

    blocks = [
        block._replace(
            part=expert // run * cut.etp + int(block.part),
            row=block.row + expert * rows,
            part_row=block.part_row + expert % run * part_rows,
        )
        for expert in range(info.experts)
        for block in shard_blocks(one, Cut(cut.etp))
    ]

    joined: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.part, block.part_row)):
        if joined and (last := joined[-1])._replace(rows=0) == block._replace(
            rows=0, row=block.row - last.rows, part_row=block.part_row - last.rows
        ):
            joined[-1] = last._replace(rows=last.rows + block.rows)
        else:
            joined.append(block)
    return joined


def part_blocks(info: TensorInfo, part: int, cut: Cut) -> list[Block]:
    """The blocks of the full matrix that make up one part: the inverse of :func:`shard_blocks`."""
    source = 0 if info.split == "replicated" else part
    return [block.inverted(info.name) for block in shard_blocks(info, cut) if block.part == source]


def shard(tensor: Tensor, info: TensorInfo, part: int, cut: Cut) -> Tensor:
    """One part (see :meth:`Cut.part`) of a full tensor. It is a view if the cut allows it."""
    axis = 1 if info.split == "row" else 0
    ways = cut.ways(info)
    if info.experts:
        tensor = tensor.chunk(cut.ep)[part // cut.etp]
        axis += 1
        ways = cut.etp
        part = part % cut.etp

    if info.split == "replicated" or ways == 1:
        return tensor
    if info.split in ("gated", "sections"):
        sections = tensor.split(_sections(info, tensor.shape[axis]), axis)
        return torch.cat([section.chunk(ways, axis)[part] for section in sections], axis)
    return tensor.chunk(ways, axis)[part]


def unshard(shards: Sequence[Tensor], info: TensorInfo, cut: Cut) -> Tensor:
    """Joins all parts, in order, to the full tensor: the inverse of :func:`shard`."""
    if info.experts:
        one = dataclasses.replace(info, shape=info.shape[1:], experts=0)
        runs = [zip(*shards[at : at + cut.etp], strict=True) for at in range(0, len(shards), cut.etp)]
        return torch.stack([unshard(parts, one, Cut(cut.etp)) for run in runs for parts in run])
    if info.split == "replicated" or cut.ways(info) == 1:
        return shards[0]
    if info.split in ("gated", "sections"):
        sizes = [n // cut.tp for n in _sections(info, len(shards) * shards[0].shape[0])]
        parts = [part.split(sizes) for part in shards]
        return torch.cat([part[i] for i in range(len(sizes)) for part in parts])
    return torch.cat(list(shards), dim=1 if info.split == "row" else 0)
