"""Copies offloaded state to the device before its update, and back after it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.sizes import STATE_CHUNKS_ON_GPU
from megatron_vl.training.offload.state_chunks import AdamStateViews, StateChunk

FREE_MEMORY_SHARE = 0.125
"""Share of the peak that copies outside of the update leave free. Passes may use it until the next check."""
_FETCH_PRIORITY, _WRITE_PRIORITY = -2, -1
"""Priorities of the two streams of copies. With CUDA_DEVICE_MAX_CONNECTIONS=1, streams of one priority share
a queue on the GPU, where copies would wait for kernels, and kernels for copies."""


class SlotPhase(Enum):
    """What the host has last launched for a slot. Events order the work on the device."""

    FREE = "free"
    FETCHING = "fetching"
    UPDATING = "updating"
    LEAVING = "leaving"


_NEXT_PHASES = {
    SlotPhase.FREE: {SlotPhase.FETCHING},
    SlotPhase.FETCHING: {SlotPhase.UPDATING, SlotPhase.FREE},  # free: the step is skipped
    SlotPhase.UPDATING: {SlotPhase.LEAVING},  # a chunk that is dropped here would lose its update
    SlotPhase.LEAVING: {SlotPhase.FREE},
}


@dataclass(eq=False)
class DeviceSlot:
    """Device memory for a chunk that is being fetched, updated or written back."""

    device_buffer: Tensor
    fetched_event: Any
    """CUDA event of the end of the copy to the device."""
    updated_event: Any
    """CUDA event of the end of the update."""
    written_event: Any
    """CUDA event of the end of the copy to host memory."""
    phase: SlotPhase = field(default=SlotPhase.FREE, init=False)

    def enter(self, phase: SlotPhase) -> None:
        """Begins a phase; asserts that it may follow the current one."""
        assert phase in _NEXT_PHASES[self.phase], f"a slot goes from {self.phase} to {phase}"
        self.phase = phase


class ChunkStreamer:
    """Copies chunks to the device in their order before their update, and back after it.

    Copies begin in the last backward pass of a step and end in the first forward pass of the next step. They
    only use memory that activations do not need at that moment, so that the peak so far is never exceeded.

    Args:
        state_chunks: the chunks in the order of the update.
        memory_usage: returns (bytes in use on the device, most bytes that were in use).
    """

    def __init__(
        self,
        state_chunks: list[StateChunk],
        device: torch.device,
        memory_usage: Callable[[], tuple[int, int]],
    ) -> None:
        self.state_chunks, self.device, self.memory_usage = state_chunks, device, memory_usage
        self.slot_bytes = max((chunk.size_bytes for chunk in state_chunks), default=0)
        self.fetch_stream = torch.cuda.Stream(priority=_FETCH_PRIORITY)
        self.write_stream = torch.cuda.Stream(priority=_WRITE_PRIORITY)
        self.overlaps_passes = False
        """Whether copies may go on after the update, because :meth:`release_slots` will be called."""
        self._next_chunk = 0
        self._slots_by_chunk: dict[int, DeviceSlot] = {}
        """Fetched chunks by number."""
        self._leaving_slots: deque[DeviceSlot] = deque()
        """Slots whose chunks are on their way back, oldest first."""

    @property
    def num_chunks_on_device(self) -> int:
        return len(self._slots_by_chunk) + len(self._leaving_slots)

    def fetch_chunks(self, min_slots: int = 0) -> None:
        """Begins to copy the next chunks, as far as there is memory.

        Args:
            min_slots: number of slots that the update may use even if there is no free memory; 0 in passes,
                which may need more memory until the next check.
        """
        if self._next_chunk == len(self.state_chunks):
            return
        # Once a call, because torch collects many numbers for it.
        used_bytes, peak_bytes = self.memory_usage()
        free_bytes = peak_bytes - used_bytes
        if not min_slots:
            free_bytes -= round(FREE_MEMORY_SHARE * peak_bytes)

        while self._next_chunk < len(self.state_chunks):
            if self.num_chunks_on_device < min_slots or self.slot_bytes <= free_bytes:
                device_slot = self._new_slot()
                free_bytes -= self.slot_bytes
            elif self._leaving_slots:
                device_slot = self._leaving_slots.popleft()
                device_slot.enter(SlotPhase.FREE)
            else:
                return

            # The write stream may still write the chunk of the last step that is read now.
            if self._next_chunk == 0:
                self.fetch_stream.wait_stream(self.write_stream)
            device_slot.enter(SlotPhase.FETCHING)
            self.fetch_stream.wait_event(device_slot.written_event)  # the slot's last chunk has left it
            state_chunk = self.state_chunks[self._next_chunk]
            with torch.cuda.stream(self.fetch_stream):
                device_slot.device_buffer[: state_chunk.size_bytes].copy_(
                    state_chunk.home_buffer[: state_chunk.size_bytes], non_blocking=True
                )
                device_slot.fetched_event.record(self.fetch_stream)

            self._slots_by_chunk[self._next_chunk] = device_slot
            self._next_chunk += 1

    def _new_slot(self) -> DeviceSlot:
        device_buffer = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device)
        device_slot = DeviceSlot(device_buffer, torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event())
        self.fetch_stream.wait_stream(torch.cuda.current_stream())  # which may still use this memory
        return device_slot

    @contextlib.contextmanager
    def chunk_on_device(self, chunk_number: int) -> Iterator[AdamStateViews]:
        """A context with the state of a chunk on the device. It ends with the copy back to host memory."""
        self.fetch_chunks(STATE_CHUNKS_ON_GPU)
        device_slot, state_chunk = self._slots_by_chunk[chunk_number], self.state_chunks[chunk_number]
        device_slot.enter(SlotPhase.UPDATING)
        compute_stream = torch.cuda.current_stream()
        compute_stream.wait_event(device_slot.fetched_event)  # the update reads what was fetched
        yield state_chunk.state_views(device_slot.device_buffer)

        # The host waits for nothing here: events order the copy after the update.
        device_slot.enter(SlotPhase.LEAVING)
        device_slot.updated_event.record(compute_stream)
        self.write_stream.wait_event(device_slot.updated_event)
        with torch.cuda.stream(self.write_stream):
            state_chunk.home_buffer[: state_chunk.size_bytes].copy_(
                device_slot.device_buffer[: state_chunk.size_bytes], non_blocking=True
            )
            device_slot.written_event.record(self.write_stream)
        del self._slots_by_chunk[chunk_number]
        self._leaving_slots.append(device_slot)
        self.fetch_chunks(STATE_CHUNKS_ON_GPU)
        if chunk_number + 1 == len(self.state_chunks):
            self._next_chunk = 0
            if not self.overlaps_passes:
                self.drop_slots()

    def release_slots(self) -> None:
        """Frees the slots whose chunks are back in host memory, and waits for others if memory gets tight.

        The host does not wait: the device does, before it uses the memory.
        """
        while self._leaving_slots:
            if not self._leaving_slots[0].written_event.query():
                used_bytes, peak_bytes = self.memory_usage()
                if used_bytes + FREE_MEMORY_SHARE * peak_bytes <= peak_bytes:
                    return
            released_slot = self._leaving_slots.popleft()
            released_slot.enter(SlotPhase.FREE)
            torch.cuda.current_stream().wait_event(released_slot.written_event)

    def drop_slots(self) -> None:
        """Frees all slots. Chunks that were fetched and not updated are unchanged in host memory."""
        compute_stream = torch.cuda.current_stream()
        for device_slot in (*self._slots_by_chunk.values(), *self._leaving_slots):
            device_slot.enter(SlotPhase.FREE)
            # The allocator gives the memory to what comes next on the compute stream.
            compute_stream.wait_event(device_slot.fetched_event)
            compute_stream.wait_event(device_slot.written_event)
        self._slots_by_chunk.clear()
        self._leaving_slots.clear()
        self._next_chunk = 0

    def wait_for_host_state(self) -> None:
        """Waits until host memory holds the state of the last update."""
        self.drop_slots()
        self.write_stream.synchronize()  # a save reads it on the host
