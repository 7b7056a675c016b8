"""Memory for chunks of state."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_vl.system import progress
from megatron_vl.training.offload.state_chunks import StateChunk


def allocate_device_chunks(state_chunks: list[StateChunk], device: torch.device) -> None:
    """Allocates the memory of chunks that stay on the device, all zero."""
    for chunk in state_chunks:
        chunk.home_buffer = torch.zeros(chunk.size_bytes, dtype=torch.uint8, device=device)


def allocate_host_chunks(state_chunks: list[StateChunk], is_pinned: bool) -> None:
    """Allocates the chunks' host memory, all zero (:func:`allocate_host_bytes`)."""
    total_gib = sum(state_chunk.size_bytes for state_chunk in state_chunks) / 2**30
    refusal = f"{total_gib:.1f} GiB of host memory could not be pinned for optimizer.offload_fraction"
    for state_chunk in state_chunks:
        state_chunk.home_buffer = allocate_host_bytes(
            state_chunk.size_bytes, is_pinned, refusal, is_zeroed=True
        )
        progress.note_progress()


def allocate_host_bytes(num_bytes: int, is_pinned: bool, refusal: str, *, is_zeroed: bool = False) -> Tensor:
    """Host memory, uint8 [num_bytes].

    Raises:
        MemoryError: the host has too little memory that can be pinned. The message begins with ``refusal``.
    """
    try:
        make_tensor = torch.zeros if is_zeroed else torch.empty
        return make_tensor(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
    except RuntimeError as error:
        raise MemoryError(f"{refusal}: {error}") from error
