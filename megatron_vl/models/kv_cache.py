"""Stores keys and values during generation, so that each step computes only the new token.

Megatron-core's inference contexts belong to its own attention, which packed rows with M-RoPE do not use (see
:mod:`megatron_vl.models.attention`). RoPE is applied before attention, from explicit positions, so stored
keys need no further rotation.
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
        """Number of tokens stored so far, by prompt."""
        self.room = room
        self._kept: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.states: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        """For each layer with linear attention and each prompt: the last inputs of the convolution
        [W - 1, channels], and the state [heads, K, V]."""

    def fill(self, layer: nn.Module, prompt: int, key: Tensor, value: Tensor) -> None:
        """Stores key and value [S, g, d] of a prompt's tokens. Later tokens of the row are ignored."""
        n = self.used[prompt]
        kept = []
        for tensor in (key, value):
            buffer = tensor.new_empty(n + self.room, *tensor.shape[1:])
            buffer[:n] = tensor[:n]
            kept.append(buffer)
        self._kept[layer, prompt] = (kept[0], kept[1])

    def extend(self, layer: nn.Module, prompt: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds key and value [g, d] of one token.

        Returns:
            All keys and values of the prompt so far, [n + 1, g, d].
        """
        keys, values = self._kept[layer, prompt]
        n = self.used[prompt]
        keys[n], values[n] = key, value
        return keys[: n + 1], values[: n + 1]

    def advance(self, prompts: list[int]) -> None:
        """Counts one more token for each of these prompts. Call it after all layers were extended."""
        for prompt in prompts:
            self.used[prompt] += 1


@dataclass
class CacheUse:
    """How a row uses a cache: to fill it with one prompt, or to add one token to each of some prompts."""

    cache: KVCache
    prompts: list[int]
    """When filling, the one prompt that the row begins with. Otherwise, the prompt of each of the row's first
    tokens, which are new tokens."""
    filling: bool
    """Whether the row is a prompt that fills the cache."""

    def attend(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attend: Callable[[], Tensor]
    ) -> Tensor:
        """query [S, h, d], key and value [S, g, d] -> [S, h, d]. Outputs of padding are undefined.

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
