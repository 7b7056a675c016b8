"""Copies of offloaded state to the device ahead of its update, and back after it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vl.planning.memory import SLOTS
from megatron_vl.training.offload.state import Chunk, State

_FETCH, _WRITE = -2, -1
"""Priorities of the two streams of copies. Streams of different priorities have different queues on the GPU.
With CUDA_DEVICE_MAX_CONNECTIONS=1, those of one priority share a queue, where a copy would wait for kernels,
and kernels for copies."""


@dataclass(eq=False)
class Slot:
    """Device memory for a chunk on its way."""

    buffer: Tensor
    fetched: Any
    """Event: the state has arrived."""
    updated: Any
    written: Any
    """Event: it is back in host memory."""


class Traffic:
    """Copies chunks to the device in their order, ahead of their update, and back after it.

    Args:
        chunks: in the order of the update.
        slots: how many may be on the device at once.
    """

    def __init__(self, chunks: list[Chunk], device: torch.device, slots: int = SLOTS) -> None:
        self.chunks, self.device, self.slots = chunks, device, slots
        self.to_device = torch.cuda.Stream(priority=_FETCH)
        self.to_host = torch.cuda.Stream(priority=_WRITE)
        self._next = 0
        self._here: dict[int, Slot] = {}
        """Fetched chunks by number."""
        self._leaving: deque[Slot] = deque()
        """Slots whose chunks are on their way back, oldest first."""
        self._count = 0

    @property
    def on_the_way(self) -> int:
        """Number of chunks on the device."""
        return len(self._here) + len(self._leaving)

    def fetch(self) -> None:
        """Begins to copy the next chunks, as far as there are slots."""
        while self._next < len(self.chunks):
            if self._count < self.slots:
                slot = self._new_slot()
            elif self._leaving:
                slot = self._leaving.popleft()
                self.to_device.wait_event(slot.written)
            else:
                return
            chunk = self.chunks[self._next]
            with torch.cuda.stream(self.to_device):
                slot.buffer[: chunk.bytes].copy_(chunk.host[: chunk.bytes], non_blocking=True)
                slot.fetched.record(self.to_device)
            self._here[self._next] = slot
            self._next += 1

    def _new_slot(self) -> Slot:
        largest = max(chunk.bytes for chunk in self.chunks)
        slot = Slot(
            torch.empty(largest, dtype=torch.uint8, device=self.device),
            *(torch.cuda.Event() for _ in range(3)),
        )
        self.to_device.wait_stream(torch.cuda.current_stream())  # which may still use this memory
        self._count += 1
        return slot

    @contextlib.contextmanager
    def on_device(self, number: int) -> Iterator[State]:
        """The state of a chunk on the device; it goes back to host memory at the end of the block."""
        self.fetch()
        slot, chunk = self._here.pop(number), self.chunks[number]
        compute = torch.cuda.current_stream()
        compute.wait_event(slot.fetched)
        yield chunk.state(slot.buffer)

        slot.updated.record(compute)
        self.to_host.wait_event(slot.updated)
        with torch.cuda.stream(self.to_host):
            chunk.host[: chunk.bytes].copy_(slot.buffer[: chunk.bytes], non_blocking=True)
            slot.written.record(self.to_host)
        self._leaving.append(slot)
        if number + 1 == len(self.chunks):
            self.end()
        else:
            self.fetch()

    def end(self) -> None:
        """Frees the slots when the last chunk is back; the host does not wait."""
        compute = torch.cuda.current_stream()
        for slot in (*self._here.values(), *self._leaving):
            compute.wait_event(slot.fetched)
            compute.wait_event(slot.written)
        self._here.clear()
        self._leaving.clear()
        self._next = self._count = 0

    def settle(self) -> None:
        """Waits until host memory holds the state of the last update."""
        self.end()
        self.to_host.synchronize()
