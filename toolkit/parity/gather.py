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

from megatron_vl.parallel.grid import ProcessGrid


def gather_on_first(
    mine: Mapping[tuple[int, ...], Mapping[str, Tensor]], grid: ProcessGrid
) -> dict[tuple[int, ...], StoredTensors]:
    """Gathers the tensors of all ranks on rank 0. Collective.

    The tensors go through files, and each is read when it is accessed: the gradients of a released model,
    from all ranks, would not fit into one process.

    Args:
        mine: this rank's tensors by key; no two ranks give the same key.

    Returns:
        On rank 0, the tensors of all ranks by key; empty on the other ranks.
    """
    folder: list[Any] = [tempfile.mkdtemp(prefix="parity-gathered-") if grid.rank == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        for key, tensors in mine.items():
            save_file(
                {n: t.contiguous() for n, t in tensors.items()},
                Path(folder[0]) / f"{'_'.join(map(str, key))}.safetensors",
            )

        dist.barrier()
        if grid.rank:
            return {}
        # Open files stay readable after their names are deleted.
        files = sorted(Path(folder[0]).glob("*.safetensors"))
        return {tuple(map(int, file.stem.split("_"))): StoredTensors(file) for file in files}

    finally:
        if grid.rank == 0:
            shutil.rmtree(folder[0])


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file; each is read when it is accessed."""

    def __init__(self, path: Path) -> None:
        self.file = safe_open(path, framework="pt")
        self.held = set(self.file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.held:
            raise KeyError(name)
        return self.file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def part(self, name: str, start: int, stop: int) -> Tensor:
        """Reads the slice [start:stop] of a tensor's first dimension."""
        return self.file.get_slice(name)[start:stop]


class StoredParts(Mapping[int, Tensor]):
    """The parts of one tensor by number; each is read when it is accessed."""

    def __init__(self, sources: Mapping[int, tuple[StoredTensors, str]]) -> None:
        self.sources = sources

    def __getitem__(self, part: int) -> Tensor:
        file, name = self.sources[part]
        return file[name]

    def __iter__(self) -> Iterator[int]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)
