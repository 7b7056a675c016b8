"""Head sizes for which cuDNN's packed causal attention, which Transformer Engine calls, is correct.

For heads of 256, its gradients are wrong: ``tests.gpu.attention`` compares them on a GPU.
"""

TE_HEADS = (64, 128)
