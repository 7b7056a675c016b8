"""Memory for chunks of state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    """Host memory, uint8 [num_bytes]; if it is pinned, on the GPU's own NUMA node if that is known.

    Raises:
        MemoryError: the host has too little memory that can be pinned. The message begins with ``refusal``.
    """
    # The GPU's node also writes the zeros.
    with run_near_gpu() if is_pinned else contextlib.nullcontext():
        try:
            make_tensor = torch.zeros if is_zeroed else torch.empty
            return make_tensor(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
        except RuntimeError as error:
            raise MemoryError(f"{refusal}: {error}") from error


@contextlib.contextmanager
def run_near_gpu() -> Iterator[None]:
    """A context that runs on the cores of the GPU's NUMA node, so that memory is allocated there.

    If the node is not known, the context changes nothing.
    """
    affinity = os.sched_getaffinity(0)
    try:
        device: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        address = f"{device.pci_domain_id:04x}:{device.pci_bus_id:02x}:{device.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{address}/numa_node").read_text())
        cpus = parse_cpu_list(Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
        os.sched_setaffinity(0, cpus & affinity or affinity)
    except (OSError, ValueError, AttributeError):
        pass  # one node, or a container that hides it
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)


def parse_cpu_list(cpu_list: str) -> set[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for cpu_range in filter(None, cpu_list.strip().split(",")):
        first, _, last = cpu_range.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus
