"""The weights of a model under their canonical names, whatever stores them."""

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import Tensor

from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import UNSHARDED, Sharding, TensorInfo, check_sharding
from megatron_vl.weights.matrix_blocks import blocks_of_shard, gather_region
from megatron_vl.weights.tensor_files import MatrixRegion, matrix_shape, row_regions


class CanonicalWeights(ABC):
    """Megatron weights of any layout, or other files that are read as such.

    Attributes:
        path: the folder that is read.
        lora: the adapters whose factors these weights are; its rank is 0 for a whole model.
        tensor_infos: canonical name -> :class:`~megatron_vl.spec.tensors.TensorInfo`.
    """

    path: Path
    spec: ModelSpec
    lora: LoraConfig
    tensor_infos: dict[str, TensorInfo]

    @abstractmethod
    def dtype(self, tensor_name: str) -> torch.dtype:
        """The type of a stored tensor."""

    @abstractmethod
    def read_region(self, tensor_name: str, region: MatrixRegion) -> Tensor:
        """A region of the full tensor as a matrix. It may be a view of a file: do not write to it."""

    def verify_tensor(self, tensor_name: str) -> None:  # noqa: B027
        """Raises WeightsError if a tensor is not what was written. Only Megatron weights have hashes."""

    def expect_scattered_reads(self, is_scattered: bool) -> None:  # noqa: B027
        """Tells the system whether small regions far from each other are read next."""

    def read_shard(
        self,
        tensor_name: str,
        shard_index: int = 0,
        sharding: Sharding = UNSHARDED,
        expert_index: int | None = None,
    ) -> Tensor:
        """Reads a copy of a part of a tensor, whatever layout is on disk, in ``info.shard_shape(sharding)``.

        Args:
            shard_index: number of the part (see :meth:`~megatron_vl.spec.tensors.Sharding.shard_index`).
            sharding: how to cut the model. By default, the part is the full tensor.
            expert_index: index within the part of the only expert to return, without the leading dimension;
                None: all experts of the part.
        """
        check_sharding(self.spec, sharding)
        dtype = self.dtype(tensor_name)
        shard_shape = self.tensor_infos[tensor_name].shard_shape(sharding)

        # As a matrix, a stack [E, rows, cols] has E * rows rows, so an expert is a range of rows.
        first_row = 0
        if expert_index is not None:
            first_row = range(shard_shape[0])[expert_index] * shard_shape[1]
            shard_shape = shard_shape[1:]

        # Region by region, so that only a few megabytes are in memory besides the result.
        shard_tensor = torch.empty(matrix_shape(shard_shape), dtype=dtype)
        for region in row_regions(shard_shape, dtype.itemsize):
            source_region = region._replace(row=region.row + first_row, row_end=region.row_end + first_row)
            shard_tensor[region.row : region.row_end] = self._read_shard_region(
                tensor_name, shard_index, sharding, source_region
            )
        return shard_tensor.view(shard_shape)

    def _read_shard_region(
        self, tensor_name: str, shard_index: int, sharding: Sharding, region: MatrixRegion
    ) -> Tensor:
        return gather_region(
            blocks_of_shard(self.tensor_infos[tensor_name], shard_index, sharding),
            region,
            lambda _, full_region: self.read_region(tensor_name, full_region),
            self.dtype(tensor_name),
        )
