"""DeepStack: features of inner vision layers are added to the hidden states after the first decoder layers.

Reference: arXiv 2406.04334 and ``Qwen3VLTextModel`` of transformers, which adds level ``i`` at the medium's
tokens to the output of decoder layer ``i``.

The levels that are still to be added follow the hidden state along the sequence dimension: ``[(1 + levels) *
S, 1, H]``. Under sequence parallelism, each part is scattered like the hidden state. A layer that adds a
level removes the first one. So gradients, recomputation, pipeline messages and the interleaved schedule need
no change, and any layer may be on any stage.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def levels_before(layer: int, deepstack: int) -> int:
    """Number of levels in the input of the zero-based decoder ``layer``,
    out of ``deepstack`` levels in all."""
    return max(0, deepstack - layer)


class DeepStackLayer(TransformerLayer):
    """A decoder layer of a model with ``deepstack`` levels:
    [(1 + n) * s, 1, H] -> [n * s, 1, H] for n > 0."""

    def __init__(self, *args: Any, deepstack: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.levels = levels_before(self.layer_number - 1, deepstack)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if not self.levels:
            return super().forward(hidden_states, *args, **kwargs)
        length = hidden_states.shape[0] // (1 + self.levels)
        # The copy prevents what the layer keeps for its backward pass from holding all levels in memory.
        own, level, later = hidden_states.split([length, length, (self.levels - 1) * length])
        out, context = super().forward(own.clone(), *args, **kwargs)
        out = out + level
        return (torch.cat((out, later)) if self.levels > 1 else out), context
