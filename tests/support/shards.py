"""Joins the parts of a tensor by the rectangles that readers of weights use."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megatron_vl.spec.tensors import Sharding, TensorInfo
from megatron_vl.weights.matrix_blocks import gather_region, shard_blocks
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape


def join_shards(shards: Sequence[Tensor], tensor_info: TensorInfo, sharding: Sharding) -> Tensor:
    """The full tensor of all parts, in order: the inverse of ``cut_shard``."""

    def read_part(part: str | int, region: MatrixRegion) -> Tensor:
        shard = shards[int(part)]
        matrix = shard.reshape(matrix_shape(shard.shape))
        return matrix[region.row : region.row_end, region.col : region.col_end]

    rows, columns = matrix_shape(tensor_info.shape)
    whole = MatrixRegion(0, rows, 0, columns)
    blocks = shard_blocks(tensor_info, sharding)
    return gather_region(blocks, whole, read_part, shards[0].dtype).view(tensor_info.shape)
