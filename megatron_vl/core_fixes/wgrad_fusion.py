"""Gradient-accumulation fusion without APEX (Megatron-core 0.19.2).

Core's config switch applies to all linears, and its own ColumnParallelLinear (the output layer of GPTModel)
then needs a CUDA extension of APEX. Transformer Engine's linears can add weight gradients to ``main_grad``
without it. So the switch stays off, and fusion is set on these linears only. This fix can go when GPTModel
takes a Transformer Engine output layer.
"""

from __future__ import annotations

from torch import nn


def fuse_weight_gradients(model: nn.Module) -> int:
    """Makes every Transformer Engine linear of ``model`` accumulate weight gradients into ``main_grad``.

    ``main_grad`` must exist before the first backward pass: wrap the model in Megatron-core's DDP.

    Returns:
        The number of these linears.
    """
    linear_count = 0
    for module in model.modules():
        base_modules = tuple(kind.__module__ for kind in type(module).__mro__)
        if hasattr(module, "fuse_wgrad_accumulation") and any(
            base_module.startswith("transformer_engine.") for base_module in base_modules
        ):
            module.fuse_wgrad_accumulation = True  # type: ignore[assignment]
            linear_count += 1
    return linear_count
