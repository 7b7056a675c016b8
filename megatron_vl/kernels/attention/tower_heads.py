"""The tower head sizes that our full-attention kernels support.

The module imports nothing, so that the memory estimate can use it.
"""

from __future__ import annotations


def has_kernels(head_dim: int) -> bool:
    """Whether :mod:`megatron_vl.kernels.attention.tower_attention` supports heads of this size.

    ``auto`` then chooses it on CUDA in bfloat16. With RoPE and packing, FlashAttention-2 takes 1.3 to 1.5
    times as long, also for heads of 64 (benchmarks/log/speed.md).
    """
    return head_dim % 8 == 0 and 16 <= head_dim <= 128
