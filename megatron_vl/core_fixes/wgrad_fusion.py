"""Gradient-accumulation fusion without APEX (Megatron-core 0.19.2).

Core's config switch applies to all linears, and its own ColumnParallelLinear (the output layer of GPTModel)
then needs a CUDA extension of APEX. Transformer Engine's linears can add weight gradients to ``main_grad``
without it, so the switch stays off and only they are set.
This fix can go when GPTModel takes a Transformer Engine output layer.
"""

from __future__ import annotations

from torch import nn


def fuse_weight_gradients(model: nn.Module) -> int:
    """Makes every Transformer Engine linear of ``model`` accumulate into ``main_grad``.

    Returns the number of these linears.

    ``main_grad`` must exist before the first backward pass: wrap the model in Megatron-core's DDP.
    """
    count = 0
    for module in model.modules():
        origins = tuple(kind.__module__ for kind in type(module).__mro__)
        if hasattr(module, "fuse_wgrad_accumulation") and any(
            o.startswith("transformer_engine.") for o in origins
        ):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
            count += 1
    return count
