"""Gathers tensors of all ranks on rank 0 through files of this machine."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_vl.parallel.process_grid import ProcessGrid


def gather_to_rank_0(
    local_tensors: Mapping[tuple[int, ...], Mapping[str, Tensor]], grid: ProcessGrid
) -> dict[tuple[int, ...], LazyTensorFile]:
    """Gathers the tensors of all ranks on rank 0. Collective.

    The tensors go through files, and each is read when it is accessed: the gradients of a released model,
    from all ranks, would not fit into one process.

    Args:
        local_tensors: this rank's tensors by key; no two ranks give the same key.

    Returns:
        On rank 0, the tensors of all ranks by key; empty on the other ranks.
    """
    shared_dir: list[Any] = [tempfile.mkdtemp(prefix="parity-gathered-") if grid.rank == 0 else None]
    dist.broadcast_object_list(shared_dir)
    try:
        for rank_key, tensors in local_tensors.items():
            save_file(
                {tensor_name: local_tensor.contiguous() for tensor_name, local_tensor in tensors.items()},
                Path(shared_dir[0]) / f"{'_'.join(map(str, rank_key))}.safetensors",
            )

        dist.barrier()
        if grid.rank:
            return {}
        # Open files stay readable after their names are deleted.
        tensor_files = sorted(Path(shared_dir[0]).glob("*.safetensors"))
        return {tuple(map(int, file.stem.split("_"))): LazyTensorFile(file) for file in tensor_files}

    finally:
        if grid.rank == 0:
            shutil.rmtree(shared_dir[0])


class LazyTensorFile(Mapping[str, Tensor]):
    """The tensors of a safetensors file; each is read when it is accessed."""

    def __init__(self, tensors_path: Path) -> None:
        self.tensor_file = safe_open(tensors_path, framework="pt")
        self.tensor_names = set(self.tensor_file.keys())

    def __getitem__(self, tensor_name: str) -> Tensor:
        if tensor_name not in self.tensor_names:
            raise KeyError(tensor_name)
        return self.tensor_file.get_tensor(tensor_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensor_names)

    def __len__(self) -> int:
        return len(self.tensor_names)

    def read_slice(self, tensor_name: str, slice_start: int, slice_stop: int) -> Tensor:
        """Reads the slice [start:stop] of a tensor's first dimension."""
        return self.tensor_file.get_slice(tensor_name)[slice_start:slice_stop]
