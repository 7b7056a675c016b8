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

    There is room for ``prompt_lengths`` tokens of each prompt, and ``max_new_tokens`` more.
    """

    def __init__(self, prompt_lengths: list[int], max_new_tokens: int) -> None:
        self.sequence_lengths = list(prompt_lengths)
        """Number of tokens stored so far, by prompt."""
        self.max_new_tokens = max_new_tokens
        self._keys_and_values: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        self.linear_attention_states: dict[tuple[nn.Module, int], tuple[Tensor, Tensor]] = {}
        """For each layer with linear attention and each prompt: the last inputs of the convolution
        [W - 1, channels], and the state [heads, K, V]."""

    def store_prompt(self, layer: nn.Module, prompt_index: int, key: Tensor, value: Tensor) -> None:
        """Stores key and value [S, g, d] of a prompt's tokens. Later tokens of the row are ignored."""
        prompt_length = self.sequence_lengths[prompt_index]
        buffers = []
        for tensor in (key, value):
            token_buffer = tensor.new_empty(prompt_length + self.max_new_tokens, *tensor.shape[1:])
            token_buffer[:prompt_length] = tensor[:prompt_length]
            buffers.append(token_buffer)
        self._keys_and_values[layer, prompt_index] = (buffers[0], buffers[1])

    def append_token(
        self, layer: nn.Module, prompt_index: int, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds key and value [g, d] of one token.

        Returns:
            All keys and values of the prompt so far, [n + 1, g, d].
        """
        keys, values = self._keys_and_values[layer, prompt_index]
        token_count = self.sequence_lengths[prompt_index]
        keys[token_count], values[token_count] = key, value
        return keys[: token_count + 1], values[: token_count + 1]

    def advance_lengths(self, prompt_indices: list[int]) -> None:
        """Counts one more token for each of these prompts. Call it after all layers were extended."""
        for prompt_index in prompt_indices:
            self.sequence_lengths[prompt_index] += 1


@dataclass
class CacheAccess:
    """How a row uses a cache: to fill it with one prompt, or to add one token to each of some prompts."""

    cache: KVCache
    prompt_indices: list[int]
    """When filling, the one prompt that the row begins with. Otherwise, the prompt of each of the row's first
    tokens, which are new tokens."""
    is_prefill: bool
    """Whether the row is a prompt that fills the cache."""

    def attend_with_cache(
        self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, attend_to_row: Callable[[], Tensor]
    ) -> Tensor:
        """query [S, h, d], key and value [S, g, d] -> [S, h, d]. Outputs of padding are undefined.

        Args:
            attend_to_row: computes the layer's attention over the row, without a cache.
        """
        if self.is_prefill:
            self.cache.store_prompt(layer, self.prompt_indices[0], key, value)
            return attend_to_row()

        attention_output = torch.zeros_like(query)
        for i, prompt_index in enumerate(self.prompt_indices):
            cached_keys, cached_values = self.cache.append_token(layer, prompt_index, key[i], value[i])
            query_batch = query[i][None, :, None]
            key_batch = cached_keys.transpose(0, 1)[None]
            value_batch = cached_values.transpose(0, 1)[None]
            attention_output[i] = F.scaled_dot_product_attention(
                query_batch, key_batch, value_batch, enable_gqa=query_batch.shape[1] != key_batch.shape[1]
            )[0, :, 0]
        return attention_output
