"""The update of an optimizer some of whose state is in chunks, and the copies of these chunks to the device
and back."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.optimizer.adam import (
    AdamCoefficients,
    LaunchTables,
    ParameterSlice,
    StepCoefficients,
    adam_step,
)
from megatron_vl.kernels.optimizer.master_halves import join_master, split_master
from megatron_vl.kernels.sizes import STATE_CHUNKS_ON_GPU
from megatron_vl.training.offload.state_chunks import AdamStateViews, ChunkedParameter, ChunkSlice, StateChunk

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
    # CUDA events of the ends of the copy to the device, of the update, and of the copy to host memory.
    fetched_event: Any
    updated_event: Any
    written_event: Any
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
                device_buffer = torch.empty(self.slot_bytes, dtype=torch.uint8, device=self.device)
                device_slot = DeviceSlot(device_buffer, *(torch.cuda.Event() for _ in range(3)))
                self.fetch_stream.wait_stream(torch.cuda.current_stream())  # which may still use this memory
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


class ChunkedStep:
    """Replaces ``step`` of one optimizer some of whose parameters have their state in chunks.

    Chunks with moments in fp32 are updated by the optimizer's own step, so that all bits are those of a run
    without chunks. Chunks with moments in bf16 are updated by :mod:`megatron_vl.kernels.optimizer.adam`.

    Args:
        adam_optimizer: Transformer Engine's FusedAdam, or torch's AdamW.
        chunked_parameters: this optimizer's parameters whose state is in chunks.
        device_chunks: this optimizer's chunks that stay on the device.
        chunk_numbers: numbers in ``chunk_streamer`` of this optimizer's chunks in host memory.
    """

    def __init__(
        self,
        adam_optimizer: Any,
        chunked_parameters: list[ChunkedParameter],
        device_chunks: list[StateChunk],
        chunk_streamer: ChunkStreamer,
        chunk_numbers: range,
    ) -> None:
        self.adam_optimizer, self.chunked_parameters = adam_optimizer, chunked_parameters
        self.device_chunks = device_chunks
        self.chunk_streamer, self.chunk_numbers = chunk_streamer, chunk_numbers
        self.optimizer_step: Callable[[], Any] = adam_optimizer.step
        self.has_group_counts = counts_steps_by_group(adam_optimizer)
        self._chunked_ids = {id(parameter.main_param) for parameter in chunked_parameters}
        slices = chunked_parameters[0].chunk_slices if chunked_parameters else []
        self.runs_own_kernel = bool(slices) and slices[0].state_chunk.moments_dtype != torch.float32
        """Whether moments are bf16: :mod:`megatron_vl.kernels.optimizer.adam` then updates all parameters."""
        self.gradient_scale = 1.0
        """Factor by which our kernel multiplies the gradients of the next update as it reads them."""
        self._tables_by_chunk: dict[int, LaunchTables] = {}
        """The tables of a chunk's kernel launches by the chunk's ``id()``."""

    @torch.no_grad()
    def __call__(self) -> None:
        """Updates all parameters of the optimizer: first those outside of chunks, then chunk by chunk."""
        groups = self.adam_optimizer.param_groups
        params = [group["params"] for group in groups]
        step_counts = [group.get("step", 0) for group in groups]

        # The first chunks are copied to the device while the optimizer updates the other parameters.
        self.chunk_streamer.fetch_chunks(STATE_CHUNKS_ON_GPU)
        try:
            unchunked = [[p for p in group if id(p) not in self._chunked_ids] for group in params]
            self._step_optimizer(groups, unchunked, step_counts)
            update = partial(self._update_chunk, groups, step_counts, self._step_coefficients())
            for chunk in self.device_chunks:
                update(chunk, chunk.state_views(chunk.home_buffer))
            for number in self.chunk_numbers:
                with self.chunk_streamer.chunk_on_device(number) as state:
                    update(self.chunk_streamer.state_chunks[number], state)
        finally:
            # Each step of the optimizer has put only the updated tensors into its groups.
            self.adam_optimizer.param_groups = groups
            for group, original_params in zip(groups, params, strict=True):
                group["params"] = original_params

        # One update counts once, however many chunks it has.
        for parameter in self.chunked_parameters:
            parameter.step_count += 1
        if self.has_group_counts:
            for group, step_count in zip(groups, step_counts, strict=True):
                if group["params"]:
                    group["step"] = step_count + 1

    def _step_optimizer(
        self, param_groups: list[dict[str, Any]], chosen_params: list[list[Tensor]], step_counts: list[int]
    ) -> None:
        """One step of the optimizer for some tensors of each group."""
        for group, tensors, step_count in zip(param_groups, chosen_params, step_counts, strict=True):
            group["params"] = tensors
            if self.has_group_counts and tensors:
                group["step"] = step_count
        self.adam_optimizer.param_groups = [group for group in param_groups if group["params"]]
        if self.adam_optimizer.param_groups:
            self.optimizer_step()

    def _step_coefficients(self) -> StepCoefficients | None:
        """The rates of all parameters by group and step count; None if no moments are bf16."""
        if not self.runs_own_kernel:
            return None

        gradient_scale, self.gradient_scale = self.gradient_scale, 1.0
        coefficients = {
            (id(p.param_group), p.step_count): AdamCoefficients.from_param_group(
                p.param_group, p.step_count + 1, gradient_scale
            )
            for p in self.chunked_parameters
        }
        return StepCoefficients(coefficients, self.chunk_streamer.device)

    def _update_chunk(
        self,
        param_groups: list[dict[str, Any]],
        step_counts: list[int],
        step_coefficients: StepCoefficients | None,
        state_chunk: StateChunk,
        chunk_state: AdamStateViews,
    ) -> None:
        if step_coefficients is None:
            self._update_with_optimizer(param_groups, step_counts, state_chunk, chunk_state)
        else:
            adam_step(
                [make_parameter_slice(each, step_coefficients) for each in state_chunk.chunk_slices],
                step_coefficients,
                chunk_state.exp_avg,
                chunk_state.exp_avg_sq,
                chunk_state.low_bits,
                self._tables_by_chunk.setdefault(id(state_chunk), LaunchTables()),
            )

    def _update_with_optimizer(
        self,
        param_groups: list[dict[str, Any]],
        step_counts: list[int],
        state_chunk: StateChunk,
        chunk_state: AdamStateViews,
    ) -> None:
        """Joins the halves of a chunk's master weights, takes the optimizer's step, and splits them again."""
        master_scratch = torch.empty(
            state_chunk.num_elements if state_chunk.has_split_master else 0, device=chunk_state.exp_avg.device
        )
        masters_by_group: dict[int, list[Tensor]] = {id(group): [] for group in param_groups}
        master_weights = []
        for chunk_slice in state_chunk.chunk_slices:
            parameter, slice_state = chunk_slice.parameter, chunk_slice.slice_of_state(chunk_state)
            master_weight = _join_slice(chunk_slice, slice_state, master_scratch)
            assert parameter.main_param.grad is not None
            master_weight.grad = chunk_slice.slice_of_shard(parameter.main_param.grad)
            adam_state = {"exp_avg": slice_state.exp_avg, "exp_avg_sq": slice_state.exp_avg_sq}
            if not self.has_group_counts:
                adam_state["step"] = torch.tensor(float(parameter.step_count))
            self.adam_optimizer.state[master_weight] = adam_state
            masters_by_group[id(parameter.param_group)].append(master_weight)
            master_weights.append(master_weight)

        self._step_optimizer(param_groups, list(masters_by_group.values()), step_counts)
        for chunk_slice, master_weight in zip(state_chunk.chunk_slices, master_weights, strict=True):
            del self.adam_optimizer.state[master_weight]
            if chunk_slice.parameter.model_weight is not None:
                slice_state = chunk_slice.slice_of_state(chunk_state)
                split_master(
                    master_weight,
                    chunk_slice.slice_of_shard(chunk_slice.parameter.model_weight),
                    slice_state.low_bits,
                    slice_state.exp_avg_sq,
                )


def _join_slice(chunk_slice: ChunkSlice, slice_state: AdamStateViews, master_scratch: Tensor) -> Tensor:
    """The master weight of a slice: part of the fp32 weight, or its halves joined in the scratch."""
    parameter = chunk_slice.parameter
    if parameter.model_weight is None:
        return chunk_slice.slice_of_shard(parameter.main_param)
    scratch_end = chunk_slice.chunk_offset + chunk_slice.end - chunk_slice.start
    master_weight = master_scratch[chunk_slice.chunk_offset : scratch_end]
    join_master(
        chunk_slice.slice_of_shard(parameter.model_weight),
        slice_state.low_bits,
        slice_state.exp_avg_sq,
        master_weight,
    )
    return master_weight


def make_parameter_slice(chunk_slice: ChunkSlice, step_coefficients: StepCoefficients) -> ParameterSlice:
    """The description of a slice for the kernel: its weight, gradient and coefficients."""
    parameter = chunk_slice.parameter
    assert parameter.main_param.grad is not None
    return ParameterSlice(
        parameter.main_param if parameter.model_weight is None else parameter.model_weight,
        parameter.main_param.grad,
        chunk_slice.start,
        chunk_slice.end - chunk_slice.start,
        chunk_slice.chunk_offset,
        step_coefficients.index_by_key[id(parameter.param_group), parameter.step_count],
    )


def counts_steps_by_group(adam_optimizer: Any) -> bool:
    """Whether an optimizer counts its steps by group (Transformer Engine), and not by parameter (torch)."""
    return type(adam_optimizer).__name__ == "FusedAdam"
