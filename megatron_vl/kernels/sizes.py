"""Sizes that kernels work with and that estimates need to know, and how they round. Imports nothing."""


def cdiv(dividend: int, divisor: int) -> int:
    """As Triton's, which takes 20 times as long on the host."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below ``number``, 1 or more. As Triton's, as above."""
    return 1 << (number - 1).bit_length()


TE_HEAD_DIMS = (64, 128)
"""Head sizes for which cuDNN's packed causal attention, which Transformer Engine calls, is correct. For heads
of 256, its gradients are wrong: ``tests.gpu.attention`` compares them on a GPU."""
FLASH_ATTENTION_HEAD_DIMS = (64, 96, 128, 256)
"""Head sizes for which FlashAttention-4's gradients were measured to be right (benchmarks/log/speed.md)."""
TOWER_HEAD_DIMS = range(16, 129, 8)
"""Head sizes that :mod:`megatron_vl.kernels.attention.tower_attention` supports. With RoPE and packing,
FlashAttention-2 takes 1.3 to 1.5 times as long, also for heads of 64 (benchmarks/log/speed.md)."""
DELTA_CHUNK = 64
"""Tokens that the kernels of linear attention compute together."""
STATE_CHUNK_BYTES = 256 << 20
"""Largest piece of offloaded optimizer state that is copied at once."""
STATE_CHUNKS_ON_GPU = 4
"""Number of such pieces that are on the GPU at once while weights are updated, whatever memory is free."""
MAX_STATE_RANKS = 16
"""Largest number of context-parallel ranks with linear attention. Each receives the states of all."""
LOSS_CHUNK_TOKENS = 8192
"""Largest number of tokens whose logits a rank holds at once."""
