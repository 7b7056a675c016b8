"""The tower head sizes that our full-attention kernels support, and those for which ``auto`` chooses them.

The module imports nothing, so that the memory estimate can use it.
"""

from __future__ import annotations


def has_kernels(head_dim: int) -> bool:
    """Whether :mod:`megatron_vl.kernels.tower_attention` supports heads of this size."""
    return head_dim % 8 == 0 and 16 <= head_dim <= 128


def kernels_are_fastest(head_dim: int) -> bool:
    """Whether ``auto`` chooses our kernels on CUDA in bfloat16.

    Other kernels are optimised for heads of 64 and 128.
    """
    return has_kernels(head_dim) and head_dim % 64 > 0
