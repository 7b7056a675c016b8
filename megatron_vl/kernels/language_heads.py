"""Widths of heads for which cuDNN's packed causal attention, which Transformer Engine takes, is right.

Its gradients are wrong for heads of 256: ``tests.gpu.attention`` compares them on a GPU.
"""

TE_HEADS = (64, 128)
