"""Optimizer state in chunks: parameters, their slices, the chunks that hold the slices, and their memory."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.optimizer.master_halves import join_master, split_master
from megatron_vl.system import progress

_LAUNCH_LOCK = threading.Lock()
SLICE_ALIGNMENT = 64
"""Each slice begins at a multiple of this number of elements in its chunk."""


@dataclass(eq=False)
class ChunkedParameter:
    """A rank's shard of a parameter, whose optimizer state is in chunks."""

    main_param: Tensor
    """The fp32 tensor in the optimizer's groups. It has no storage unless it is the model's weight itself."""
    model_weight: Tensor | None
    """The weight in the model, bf16 [N]; None if ``main_param`` is the model's weight."""
    param_group: dict[str, Any]
    step_count: int = 0
    chunk_slices: list[ChunkSlice] = field(default_factory=list)
    wait_for_host_state: Callable[[], None] = lambda: None
    """Waits until the chunks hold the state of the last update."""

    def state_tensors(self) -> Iterator[Tensor]:
        """The tensors that hold the state. Between two updates, they do not change."""
        yield self.main_param if self.model_weight is None else self.model_weight
        for piece in self.chunk_slices:
            yield piece.state_chunk.home_buffer

    def state_dtype(self, state_kind: str) -> torch.dtype:
        return torch.float32 if state_kind == "main" else self.chunk_slices[0].state_chunk.moments_dtype

    def read_state(self, state_kind: str, copies: Callable[[Tensor], Tensor], start: int, end: int) -> Tensor:
        """Elements ``start:end`` of one kind of state in host memory: ``main`` in fp32, or a moment in its
        dtype.

        Args:
            copies: gives the flat host copies of :meth:`state_tensors`.
        """
        if state_kind == "main" and self.model_weight is None:
            return copies(self.main_param)[start:end]

        output = torch.empty(end - start, dtype=self.state_dtype(state_kind))
        for piece in filter(None, (each.overlap(start, end) for each in self.chunk_slices)):
            chunk, part = piece.state_chunk, output[piece.start - start : piece.end - start]
            state = piece.slice_of_state(chunk.state_views(copies(chunk.home_buffer)))
            if state_kind == "main":
                weight = copies(self.model_weight)[piece.start : piece.end]  # type: ignore[arg-type]
                join_master(weight, state.low_bits, float32_copy(state.exp_avg_sq), part)
            elif state_kind == "exp_avg":
                part.copy_(state.exp_avg)
            else:
                part.copy_(state.exp_avg_sq).abs_()  # its sign belongs to the master weight
        return output

    def write_state(self, state_kind: str, new_value: Tensor) -> None:
        """Replaces one kind of state (``main``, ``exp_avg`` or ``exp_avg_sq``) with fp32 [N] in host memory.

        Moments are rounded to the nearest number of their dtype. With ``main``, this rank's shard of the
        model's weight is replaced too.
        """
        new_value = new_value.view(-1)
        if state_kind == "main" and self.model_weight is None:
            self.main_param.copy_(new_value.view_as(self.main_param))
            return

        self.wait_for_host_state()
        for piece in self.chunk_slices:
            chunk = piece.state_chunk
            state = piece.slice_of_state(chunk.state_views(chunk.home_buffer))  # between two updates
            # State on the GPU is computed there: one core takes a second for 150 million weights.
            value = new_value[piece.start : piece.end].to(chunk.home_buffer.device)
            if state_kind == "main":
                weight, low_bits = (torch.empty_like(value, dtype=d) for d in (torch.bfloat16, torch.int16))
                second_moment = float32_copy(state.exp_avg_sq).abs_()
                # Triton loads a kernel at its first launch, during which other threads must not launch it.
                with _LAUNCH_LOCK if value.is_cuda else contextlib.nullcontext():
                    split_master(value.contiguous(), weight, low_bits, second_moment)
                piece.slice_of_shard(self.model_weight).copy_(weight)  # type: ignore[arg-type]
                state.low_bits.copy_(low_bits)
                state.exp_avg_sq.copy_(second_moment)
            elif state_kind == "exp_avg":
                state.exp_avg.copy_(value)
            else:
                state.exp_avg_sq.copy_(torch.copysign(value, float32_copy(state.exp_avg_sq)))


def float32_copy(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32, copy=True)


@dataclass(frozen=True, eq=False)
class AdamStateViews:
    """Adam's state of a range of elements, as views of a chunk's bytes."""

    exp_avg: Tensor
    """fp32 or bf16 [N]."""
    exp_avg_sq: Tensor
    """fp32 or bf16 [N]. Its sign bit belongs to the master weight
    (see :mod:`megatron_vl.kernels.optimizer.master_halves`)."""
    low_bits: Tensor
    """Lower half of the master weights, int16 [N]; empty if the model's weights are fp32."""


@dataclass(frozen=True, eq=False)
class ChunkSlice:
    """Elements ``start:end`` of a parameter's shard, in a chunk from ``chunk_offset`` on."""

    parameter: ChunkedParameter
    start: int
    end: int
    state_chunk: StateChunk
    chunk_offset: int

    def overlap(self, start: int, end: int) -> ChunkSlice | None:
        """The part of this slice within elements ``start:end`` of the shard; None if there is none."""
        first, last = max(start, self.start), min(end, self.end)
        if first >= last:
            return None
        offset = self.chunk_offset + first - self.start
        return dataclasses.replace(self, start=first, end=last, chunk_offset=offset)

    def slice_of_state(self, chunk_state: AdamStateViews) -> AdamStateViews:
        elements = slice(self.chunk_offset, self.chunk_offset + self.end - self.start)
        return AdamStateViews(
            chunk_state.exp_avg[elements], chunk_state.exp_avg_sq[elements], chunk_state.low_bits[elements]
        )

    def slice_of_shard(self, shard_tensor: Tensor) -> Tensor:
        return shard_tensor.detach().view(-1)[self.start : self.end]


@dataclass(eq=False)
class StateChunk:
    """State of ``num_elements`` elements that is copied and updated together."""

    has_split_master: bool
    moments_dtype: torch.dtype
    num_elements: int = 0
    home_buffer: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """The chunk's bytes between two updates, uint8. They are in host memory if the chunk is offloaded, and
    otherwise on the device."""
    chunk_slices: list[ChunkSlice] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        return self.num_elements * bytes_per_element(self.has_split_master, self.moments_dtype)

    def state_views(self, byte_buffer: Tensor) -> AdamStateViews:
        """Views of a buffer that begins with this chunk's bytes."""
        n = self.num_elements
        moments_bytes = n * bytes_per_element(False, self.moments_dtype)
        low_bits = (
            byte_buffer[moments_bytes : moments_bytes + 2 * n] if self.has_split_master else byte_buffer[:0]
        )
        moment_values = byte_buffer[:moments_bytes].view(self.moments_dtype)
        return AdamStateViews(moment_values[:n], moment_values[n:], low_bits.view(torch.int16))


def bytes_per_element(has_split_master: bool, moments_dtype: torch.dtype) -> int:
    return 2 * moments_dtype.itemsize + (2 if has_split_master else 0)


def lay_out_chunks(
    parameters: list[ChunkedParameter], chunk_bytes: int, moments_dtype: torch.dtype
) -> list[StateChunk]:
    """Lays the parameters out one after another in chunks of up to ``chunk_bytes`` bytes.

    Parameters with and without split master weights do not share a chunk.
    """
    chunks: list[StateChunk] = []
    for has_split_master in (True, False):
        element_bytes = bytes_per_element(has_split_master, moments_dtype)
        max_elements = chunk_bytes // element_bytes // SLICE_ALIGNMENT * SLICE_ALIGNMENT
        room = 0
        for parameter in [p for p in parameters if (p.model_weight is not None) == has_split_master]:
            start, num_elements = 0, parameter.main_param.numel()
            while start < num_elements:
                if not room:
                    chunks.append(StateChunk(has_split_master, moments_dtype))
                    room = max_elements
                chunk, end = chunks[-1], min(num_elements, start + room)
                chunk_slice = ChunkSlice(parameter, start, end, chunk, chunk.num_elements)
                chunk.chunk_slices.append(chunk_slice)
                parameter.chunk_slices.append(chunk_slice)
                chunk.num_elements += -(-(end - start) // SLICE_ALIGNMENT) * SLICE_ALIGNMENT
                room, start = max_elements - chunk.num_elements, end
    return chunks


def allocate_device_chunks(state_chunks: list[StateChunk], device: torch.device) -> None:
    """Allocates the memory of chunks that stay on the device, all zero."""
    for chunk in state_chunks:
        chunk.home_buffer = torch.zeros(chunk.size_bytes, dtype=torch.uint8, device=device)


def allocate_host_chunks(state_chunks: list[StateChunk], is_pinned: bool) -> None:
    """Allocates the chunks' host memory, all zero (:func:`allocate_host_bytes`)."""
    total_gib = sum(chunk.size_bytes for chunk in state_chunks) / 2**30
    refusal = f"{total_gib:.1f} GiB of host memory could not be pinned for optimizer.offload_fraction"
    for chunk in state_chunks:
        chunk.home_buffer = allocate_host_bytes(chunk.size_bytes, is_pinned, refusal).zero_()
        progress.note_progress()


def allocate_host_bytes(num_bytes: int, is_pinned: bool, refusal: str) -> Tensor:
    """Host memory, uint8 [num_bytes].

    Raises:
        MemoryError: the host has too little memory that can be pinned. The message begins with ``refusal``.
    """
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError(f"{refusal}: {error}") from error
