"""Keeps keys and values while text is generated, so that each step computes only the new token.

Megatron-core's inference contexts belong to its own attention, which packed rows with M-RoPE do not use (see
:mod:`megatron_vl.models.attention`). RoPE is applied before attention from explicit positions, so the kept
keys can be used as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class KVCache:
    """The keys and values of some prompts in this rank's decoder layers.

    Args:
        lengths: number of tokens of each prompt.
        room: largest number of tokens that may follow each prompt.
    """

    def __init__(self, lengths: list[int], room: int) -> None:
        self.used = list(lengths)
        self.room = room
        self._kept: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.states: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        """By layer with linear attention and prompt: the last inputs of its convolution and its state."""

    def fill(self, layer: nn.Module, prompt: int, key: Tensor, value: Tensor) -> None:
        """Keeps key and value [S, g, d] of a prompt's tokens. What follows them in the row is ignored."""
        n = self.used[prompt]
        kept = []
        for tensor in (key, value):
            buffer = tensor.new_empty(n + self.room, *tensor.shape[1:])
            buffer[:n] = tensor[:n]
            kept.append(buffer)
        self._kept[layer, prompt] = (kept[0], kept[1])

    def extend(self, layer: nn.Module, prompt: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds key and value [g, d] of one token.
        Returns all keys and values of the prompt so far, [n + 1, g, d]."""
        keys, values = self._kept[layer, prompt]
        n = self.used[prompt]
        keys[n], values[n] = key, value
        return keys[: n + 1], values[: n + 1]

    def advance(self, prompts: list[int]) -> None:
        """Counts one more token for each of these prompts, after all layers were extended."""
        for prompt in prompts:
            self.used[prompt] += 1


@dataclass
class CacheUse:
    """How a row uses a cache."""

    cache: KVCache
    prompts: list[int]
    """The prompt that the row begins with;
    or, in a row of new tokens, the prompt of each of its first tokens."""
    filling: bool

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[], Tensor]
    ) -> Tensor:
        """query [S, h, d], key and value [S, g, d] -> [S, h, d].
        The values of tokens outside prompts are undefined.

        Args:
            attend: the layer's own attention over the row.
        """
        if self.filling:
            self.cache.fill(layer, self.prompts[0], key, value)
            return attend()

        out = torch.zeros_like(query)
        for i, prompt in enumerate(self.prompts):
            keys, values = self.cache.extend(layer, prompt, key[i], value[i])
            q = query[i][None, :, None]
            k = keys.transpose(0, 1)[None]
            v = values.transpose(0, 1)[None]
            out[i] = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])[0, :, 0]
        return out
