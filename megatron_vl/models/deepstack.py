"""DeepStack: adds features of inner vision layers to the hidden states after the first decoder layers.

Reference: arXiv 2406.04334 and ``Qwen3VLTextModel`` of transformers, which adds level ``i`` at the medium's
tokens to the output of decoder layer ``i``.

The levels that are not added yet are concatenated to the hidden state along the sequence dimension: ``[(1 +
levels) * S, 1, H]``. Under sequence parallelism, each level is scattered like the hidden state. A layer adds
the first level and removes it. So gradients, recomputation, pipeline messages and the interleaved schedule
need no change, and any layer may be on any stage.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor


def remaining_deepstack_levels(layer_index: int, num_deepstack_levels: int) -> int:
    """How many of ``num_deepstack_levels`` are in the input of the decoder layer ``layer_index`` (from 0)."""
    return max(0, num_deepstack_levels - layer_index)


class DeepStackLayer(TransformerLayer):
    """A decoder layer of a model with ``deepstack`` levels.

    With n levels left, it maps [(1 + n) * s, 1, H] to [n * s, 1, H] if n > 0, else [s, 1, H] to [s, 1, H].
    """

    def __init__(self, *args: Any, deepstack: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remaining_levels = remaining_deepstack_levels(self.layer_number - 1, deepstack)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        if not self.remaining_levels:
            return super().forward(hidden_states, *args, **kwargs)

        local_seq_len = hidden_states.shape[0] // (1 + self.remaining_levels)
        layer_input, first_level, later_levels = hidden_states.split(
            [local_seq_len, local_seq_len, (self.remaining_levels - 1) * local_seq_len]
        )

        # The layer keeps its input for the backward pass. The copy lets the memory of all levels be freed.
        layer_output, context = super().forward(layer_input.clone(), *args, **kwargs)
        layer_output = layer_output + first_level
        if self.remaining_levels > 1:
            layer_output = torch.cat((layer_output, later_levels))
        return layer_output, context
