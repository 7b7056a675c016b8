"""Memory for chunks of state."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron_vl import progress
from megatron_vl.training.offload.state import Chunk


def allocate_on_device(chunks: list[Chunk], device: torch.device) -> None:
    """Allocates the memory of chunks that stay on the device, all zero."""
    for chunk in chunks:
        chunk.home = torch.zeros(chunk.bytes, dtype=torch.uint8, device=device)


def allocate(chunks: list[Chunk], pinned: bool) -> None:
    """Allocates the chunks' host memory, all zero; on the GPU's own NUMA node if it is known."""
    with near_gpu() if pinned else contextlib.nullcontext():
        for chunk in chunks:
            try:
                chunk.home = torch.empty(chunk.bytes, dtype=torch.uint8, pin_memory=pinned)
            except RuntimeError as error:
                total = sum(chunk.bytes for chunk in chunks) / 2**30
                raise MemoryError(
                    f"{total:.1f} GiB of host memory could not be pinned for optimizer.offload_fraction:"
                    f" {error}"
                ) from error
            chunk.home.zero_()
            progress.tick()


@contextlib.contextmanager
def near_gpu() -> Iterator[None]:
    """Runs on the cores of the GPU's NUMA node, so that memory comes from there, where that is known."""
    before = os.sched_getaffinity(0)
    try:
        facts: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
        bus = f"{facts.pci_domain_id:04x}:{facts.pci_bus_id:02x}:{facts.pci_device_id:02x}.0"
        node = int(Path(f"/sys/bus/pci/devices/{bus}/numa_node").read_text())
        listed = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text()
        os.sched_setaffinity(0, cores(listed) & before or before)
    except (OSError, ValueError, AttributeError):
        pass  # one node, or a container that hides it
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cores(listed: str) -> set[int]:
    """``0-3,8`` -> {0, 1, 2, 3, 8}."""
    found: set[int] = set()
    for span in filter(None, listed.strip().split(",")):
        first, _, last = span.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
