"""The tower head sizes that our full-attention kernels support, and how heads are packed.

The module imports nothing, so that the memory estimate can use it.
"""

from __future__ import annotations


def has_kernels(head_dim: int) -> bool:
    """Whether :mod:`megatron_vl.kernels.tower_attention` supports heads of this size.

    ``auto`` then chooses it on CUDA in bfloat16. With RoPE and packing, FlashAttention-2 takes 1.3 to 1.5
    times as long, also for heads of 64 (docs/log/speed.md).
    """
    return head_dim % 8 == 0 and 16 <= head_dim <= 128


def packed_row_width(head_dim: int) -> int:
    """The distance between rows of a packed head, in elements of 16 bits.

    Rows begin with a sector of 32 bytes, the unit in which a GPU reads memory: heads of 72 lie 80 apart.
    """
    return (head_dim + 15) // 16 * 16
