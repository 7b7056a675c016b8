"""Copies of offloaded state to the device ahead of its update, and back after it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.sizes import STATE_CHUNKS_ON_GPU
from megatron_vl.training.offload.state import Chunk, State

MOST_SLOTS = 32
"""Largest number of chunks on the device at once."""
KEPT_FREE = 0.125
"""Share of the peak that copies outside of the update leave free, for what is used before they look again."""
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

    Copies begin in the last backward pass of a step and end in the first forward pass of the next, as far as
    the device has memory that the activations of this moment do not use: the peak so far is never exceeded.

    Args:
        chunks: in the order of the update.
        memory: (bytes in use on the device, most bytes that were in use).
    """

    def __init__(
        self, chunks: list[Chunk], device: torch.device, memory: Callable[[], tuple[int, int]]
    ) -> None:
        self.chunks, self.device, self.memory = chunks, device, memory
        self.slot_bytes = max((chunk.bytes for chunk in chunks), default=0)
        self.to_device = torch.cuda.Stream(priority=_FETCH)
        self.to_host = torch.cuda.Stream(priority=_WRITE)
        self.hides = False
        """Whether copies may go on after the update, because :meth:`release` will be called."""
        self._next = 0
        self._here: dict[int, Slot] = {}
        """Fetched chunks by number."""
        self._leaving: deque[Slot] = deque()
        """Slots whose chunks are on their way back, oldest first."""

    @property
    def on_the_way(self) -> int:
        """Number of chunks on the device."""
        return len(self._here) + len(self._leaving)

    def fetch(self, least: int = 0) -> None:
        """Begins to copy the next chunks, as far as there is room.

        Args:
            least: number of slots that may be used whether there is room or not.
        """
        while self._next < len(self.chunks):
            if self.on_the_way < least or self.on_the_way < MOST_SLOTS and self._has_room():
                slot = self._new_slot()
            elif self._leaving:
                slot = self._leaving.popleft()
            else:
                return

            if self._next == 0:
                self.to_device.wait_stream(self.to_host)  # which may still write what is now to be read
            self.to_device.wait_event(slot.written)
            chunk = self.chunks[self._next]
            with torch.cuda.stream(self.to_device):
                slot.buffer[: chunk.bytes].copy_(chunk.home[: chunk.bytes], non_blocking=True)
                slot.fetched.record(self.to_device)

            self._here[self._next] = slot
            self._next += 1

    def _has_room(self) -> bool:
        now, peak = self.memory()
        return now + self.slot_bytes + KEPT_FREE * peak <= peak

    def _new_slot(self) -> Slot:
        slot = Slot(
            torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device),
            *(torch.cuda.Event() for _ in range(3)),
        )
        self.to_device.wait_stream(torch.cuda.current_stream())  # which may still use this memory
        return slot

    @contextlib.contextmanager
    def on_device(self, number: int) -> Iterator[State]:
        """The state of a chunk on the device; it goes back to host memory at the end of the block."""
        self.fetch(STATE_CHUNKS_ON_GPU)
        slot, chunk = self._here[number], self.chunks[number]
        compute = torch.cuda.current_stream()
        compute.wait_event(slot.fetched)
        yield chunk.state(slot.buffer)

        slot.updated.record(compute)
        self.to_host.wait_event(slot.updated)
        with torch.cuda.stream(self.to_host):
            chunk.home[: chunk.bytes].copy_(slot.buffer[: chunk.bytes], non_blocking=True)
            slot.written.record(self.to_host)
        del self._here[number]
        self._leaving.append(slot)
        self.fetch(STATE_CHUNKS_ON_GPU)
        if number + 1 == len(self.chunks):
            self._next = 0
            if not self.hides:
                self.drop()

    def release(self) -> None:
        """Frees the slots whose chunks are back in host memory, and waits for others if memory gets tight.

        The host does not wait: the device does, before it uses the memory.
        """
        while self._leaving:
            if not self._leaving[0].written.query():
                now, peak = self.memory()
                if now + KEPT_FREE * peak <= peak:
                    return
            torch.cuda.current_stream().wait_event(self._leaving.popleft().written)

    def drop(self) -> None:
        """Frees all slots; what was fetched and not updated is still in host memory."""
        compute = torch.cuda.current_stream()
        for slot in (*self._here.values(), *self._leaving):
            compute.wait_event(slot.fetched)
            compute.wait_event(slot.written)
        self._here.clear()
        self._leaving.clear()
        self._next = 0

    def settle(self) -> None:
        """Waits until host memory holds the state of the last update."""
        self.drop()
        self.to_host.synchronize()
