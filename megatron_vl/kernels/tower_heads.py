"""For which heads of a vision tower our full-attention kernels are made and taken. Imports nothing, for the
memory estimate."""

from __future__ import annotations


def has_kernels(head_dim: int) -> bool:
    """Whether :mod:`megatron_vl.kernels.tower_attention` takes heads of this size."""
    return head_dim % 8 == 0 and 16 <= head_dim <= 128


def kernels_are_fastest(head_dim: int) -> bool:
    """Whether they are what ``auto`` means on CUDA in bfloat16; heads of 64 and 128 are what others are made
    for."""
    return has_kernels(head_dim) and head_dim % 64 > 0
