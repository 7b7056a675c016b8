"""Copies of a rank's state in host memory, made in the background while training continues."""

import contextlib

import torch
from torch import Tensor

from megatron_vl.system import host_memory, progress
from megatron_vl.training.offload.state_chunks import allocate_host_bytes

_BLOCK_BYTES = 4 << 30
"""Memory is allocated in blocks of this size, as torch rounds pinned memory up to powers of two. The end of a
block into which the next tensor does not fit is lost: with tensors of 600 MiB a seventh."""
_ALIGNMENT = 64
_COPY_PRIORITY = -3
"""Priority of the stream of copies. With CUDA_DEVICE_MAX_CONNECTIONS=1, streams of one priority share a queue
on the GPU: this one with the inputs of layers (:mod:`megatron_vl.training.offload.layer_inputs`), so only one
copy is in it at a time."""


class HostBlocks:
    """Host memory for the copies of one checkpoint after another.

    Memory that is pinned for a GPU is kept, because pinning takes longer than copying.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def regions(self, sizes: list[int], is_pinned: bool) -> list[Tensor]:
        """A region, uint8, for each size in bytes. The regions of an earlier call are used again.

        Raises MemoryError.
        """
        regions: list[Tensor] = []
        number, used, left = 0, 0, sum(sizes) + _ALIGNMENT * len(sizes)
        for size in sizes:
            while number < len(self._blocks) and used + size > len(self._blocks[number]):
                number, used = number + 1, 0
            if number == len(self._blocks):
                self._blocks.append(_allocate(max(size, min(left, _BLOCK_BYTES)), is_pinned))
                progress.note_progress()
            regions.append(self._blocks[number][used : used + size])
            used += -(-size // _ALIGNMENT) * _ALIGNMENT
            left -= size
        return regions

    def release(self) -> None:
        """Frees the memory that is not pinned."""
        self._blocks = [block for block in self._blocks if block.is_pinned()]


def _allocate(num_bytes: int, is_pinned: bool) -> Tensor:
    if is_pinned:
        with contextlib.suppress(MemoryError):  # the limit on pinned memory may be lower
            return allocate_host_bytes(num_bytes, True, "")
    return allocate_host_bytes(
        num_bytes, False, f"the copy of a checkpoint needs {num_bytes / 2**30:.1f} GiB more"
    )


class HostCopies:
    """Copies of tensors on any device. Create it where the tensors are up to date, then :meth:`add` them.

    The tensors must not change until :meth:`copy` has returned, which another thread may call.
    """

    def __init__(self) -> None:
        self._sources: dict[tuple[int, ...], tuple[Tensor, ...]] = {}
        self._copies: dict[tuple[int, ...], Tensor] = {}
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(priority=_COPY_PRIORITY)
        self._stream.wait_stream(torch.cuda.current_stream())  # whose last update is what is copied

    @property
    def is_pinned(self) -> bool:
        """Whether the copies go to pinned memory: only if the host has twice as much left."""
        tensors = [tensor for sources in self._sources.values() for tensor in sources]
        needed_gib = sum(tensor.nbytes for tensor in tensors) / host_memory.GIB
        has_room = 2 * needed_gib < host_memory.available_gib_per_rank()
        return has_room and any(tensor.is_cuda for tensor in tensors)

    def add(self, *sources: Tensor) -> None:
        """Adds a tensor, or several of one type whose copies lie one after another."""
        self._sources[tuple(map(id, sources))] = sources

    def __call__(self, *sources: Tensor) -> Tensor:
        """The flat copy of tensors that were added together."""
        return self._copies[tuple(map(id, sources))]

    def reserve(self, memory: HostBlocks) -> list[Tensor]:
        torch.cuda.set_device(self._device)  # a thread begins on the first GPU
        return memory.regions(
            [sum(tensor.nbytes for tensor in sources) for sources in self._sources.values()], self.is_pinned
        )

    @torch.no_grad()
    def copy(self, memory: HostBlocks) -> None:
        regions = self.reserve(memory)
        with torch.cuda.stream(self._stream):
            for region, (key, sources) in zip(regions, self._sources.items(), strict=True):
                self._copies[key] = region.view(sources[0].dtype)
                for part, source in zip(
                    self._copies[key].split([source.numel() for source in sources]), sources, strict=True
                ):
                    part.view(source.shape).copy_(source, non_blocking=True)
                self._stream.synchronize()  # so that peers see progress after each
                progress.note_progress()
