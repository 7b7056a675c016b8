"""Where Triton kernels run, and with how much shared memory; torch code runs elsewhere. Imports no Triton."""

import os
from typing import Any

import torch
from torch import Tensor

LARGE_SHARED_MEMORY = 160 << 10
"""Bytes of shared memory for a block that A100 (163 KiB), Hopper and data-center Blackwell (227 KiB) have and
other GPUs (99 KiB) do not."""


def runs_on_kernels(tensor: Tensor) -> bool:
    """Whether Triton kernels can take ``tensor``: it is on a GPU, or Triton interprets its kernels."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a block has :data:`LARGE_SHARED_MEMORY`. True on CPU, where kernels are only interpreted."""
    if device.type != "cuda":
        return True
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks the attribute
    return properties.shared_memory_per_block_optin >= LARGE_SHARED_MEMORY
