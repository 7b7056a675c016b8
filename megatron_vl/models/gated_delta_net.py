"""Gated DeltaNet, the linear attention of Qwen3.5 (arXiv 2412.06464), for packed rows.

The module replaces core's SelfAttention in a layer and has the parameter names of core's ``GatedDeltaNet``.
Core's own module is not used because, in version 0.19.2, it ignores the bounds of sequences unless rows are
in ``thd``, rounds the decays to bfloat16, cannot be built without flash-linear-attention, and does not sum
its norm's gradients over tensor-parallel ranks. Reference: ``Qwen3_5GatedDeltaNet`` of transformers.

The heads are divided among tensor-parallel ranks: each rank has some key heads and the value heads that they
serve. Context-parallel ranks each hold a shard of the row's tokens. They exchange the states of sequences
that cross an edge, and the last inputs of the convolution (:mod:`megatron_vl.kernels.shard_exchange`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.random import checkpoint, get_cuda_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_vl.kernels.gated_delta_rule import (
    causal_conv,
    gated_delta_rule,
    gated_norm,
    one_token,
    segment_numbers,
)
from megatron_vl.kernels.shard_exchange import ShardExchange
from megatron_vl.models.attention import PackedRow
from megatron_vl.models.kv_cache import CacheUse
from megatron_vl.spec.families import LinearAttentionSpec


class GatedDeltaNet(nn.Module):
    """One layer's linear attention.

    Args:
        spec: sizes of the whole layer.
        column, row: constructors of the two linear layers. ``column`` may include the layer's norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        spec: LinearAttentionSpec,
        column: Any,
        row: Any,
        pg_collection: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.spec, self.layer_number = spec, layer_number
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        tp = self.tp_group.size()
        self.key_heads, self.value_heads = spec.key_heads // tp, spec.value_heads // tp
        keys, values = self.key_heads * spec.key_dim, self.value_heads * spec.value_dim
        self.channels = (keys, keys, values)
        self.sections = (sum(self.channels), values, self.value_heads, self.value_heads)

        common = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = column(
            config.hidden_size,
            sum(self.sections) * tp,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common,
        )
        self.conv1d = _Convolution(sum(self.channels), spec.conv_width, config.params_dtype)
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, dtype=config.params_dtype))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.out_norm = GatedNorm(spec.value_dim, config.layernorm_epsilon, config.sequence_parallel)
        self.out_proj = row(
            spec.value_heads * spec.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common,
        )
        self._initialize()

        selective = config.recompute_granularity == "selective"
        self.recompute = selective and "core_attn" in (config.recompute_modules or [])

    @torch.no_grad()
    def _initialize(self) -> None:
        """Draws random weights as ``transformers`` does, different ones on each tensor-parallel rank."""
        with get_cuda_rng_tracker().fork():
            bound = 1 / math.sqrt(self.spec.conv_width)
            self.conv1d.weight.uniform_(-bound, bound)
            self.A_log.uniform_(0.01, 16).log_()
        self.A_log.keep_float32 = True  # type: ignore[attr-defined]
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRow | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S (/ tp), 1, H] -> ([S (/ tp), 1, H], bias to add or None)

        Under context parallelism, S is the length of this rank's shard. ``packed_seq_params`` has the
        segments of the whole row and the shard.
        """
        assert packed_seq_params is not None and packed_seq_params.full is not None
        projected, _ = self.in_proj(hidden_states)
        projected = projected[:, 0]

        cache = packed_seq_params.cache
        if cache is not None:
            out = self._with_cache(projected, cache)
        else:
            segments, exchange = self._shard(packed_seq_params, projected.shape[0])
            mix = partial(self._mix, exchange=exchange)
            if self.recompute and self.training and torch.is_grad_enabled():
                out = checkpoint(mix, False, projected, segments)
            else:
                out = mix(projected, segments)
        return self.out_proj(out[:, None])

    def _shard(self, row: PackedRow, length: int) -> tuple[Tensor, ShardExchange | None]:
        """The sequence numbers of this rank's tokens, and the exchange if any sequence crosses an edge."""
        assert row.full is not None
        if self.cp_group.size() == 1:
            return segment_numbers(row.full.cu_seqlens, length), None

        assert row.shard is not None
        route = row.shard.route
        assert route.length == length and route.rank == self.cp_group.rank()
        segments = segment_numbers(row.full.cu_seqlens, length, route.rank * length)
        return segments, ShardExchange(route, self.cp_group) if route.any_cut else None

    def _mix(self, projected: Tensor, segments: Tensor, exchange: ShardExchange | None = None) -> Tensor:
        """[S, sections] -> [S, value heads * V]"""
        return self._mix_with_state(projected, segments, exchange)[0]

    def _mix_with_state(
        self, projected: Tensor, segments: Tensor, exchange: ShardExchange | None = None
    ) -> tuple[Tensor, Tensor]:
        qkv, z, b, a = projected.split(self.sections, dim=-1)
        mixed = causal_conv(qkv, self.conv1d.weight[:, 0], segments, exchange=exchange)
        g, beta = self._gates(a, b)
        out, state = gated_delta_rule(*self._heads(mixed), g, beta, segments, exchange=exchange)
        return self._norm(out, z), state

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[S, channels] -> queries, keys [S, key heads, K] and values [S, value heads, V]"""
        q, k, v = mixed.split(self.channels, dim=-1)
        queries, keys = (t.unflatten(-1, (self.key_heads, -1)) for t in (q, k))
        return queries, keys, v.unflatten(-1, (self.value_heads, -1))

    def _gates(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithm of the decay, float32, and beta; [S, value heads] each."""
        g = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        return g, b.sigmoid()

    def _norm(self, out: Tensor, z: Tensor) -> Tensor:
        weight = self.out_norm.weight
        if not self.config.sequence_parallel:
            # Each rank has the gradient from its own heads. Core sums it only under sequence parallelism.
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        return self.out_norm(out, z.unflatten(-1, (self.value_heads, -1)), weight).flatten(1)

    def _with_cache(self, projected: Tensor, use: CacheUse) -> Tensor:
        """The same as :meth:`_mix`, during generation. Outputs of padding are zero."""
        if use.filling:
            (prompt,) = use.prompts
            length = use.cache.used[prompt]
            own = projected[:length]
            out, state = self._mix_with_state(own, own.new_zeros(length, dtype=torch.int32))

            # The convolution of the next token needs the last inputs, zeros before the prompt included.
            reach = self.spec.conv_width - 1
            inputs = F.pad(own[:, : self.sections[0]], (0, 0, reach, 0))[length:]
            use.cache.states[self, prompt] = (inputs, state)
            return F.pad(out, (0, 0, 0, projected.shape[0] - length))

        count = len(use.prompts)
        rest = projected.new_zeros(projected.shape[0] - count, self.sections[1])
        if not count:
            return rest

        kept = [use.cache.states[self, prompt] for prompt in use.prompts]
        qkv, z, b, a = projected[:count].split(self.sections, dim=-1)
        inputs = torch.cat((torch.stack([k[0] for k in kept]), qkv[:, None]), dim=1)
        mixed = F.silu((inputs * self.conv1d.weight[:, 0].t()).sum(1))
        g, beta = self._gates(a, b)
        out, states = one_token(*self._heads(mixed), g, beta, torch.stack([k[1] for k in kept]))

        for i, prompt in enumerate(use.prompts):
            use.cache.states[self, prompt] = (inputs[i, 1:], states[i])
        return torch.cat((self._norm(out, z), rest))


class _Convolution(nn.Module):
    """Holds the weight [C, 1, W] of the depthwise convolution."""

    def __init__(self, channels: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype))


class GatedNorm(nn.Module):
    """RMSNorm of each head, times the SiLU of its gate: ``Qwen3_5RMSNormGated`` of transformers.

    The weight is not zero-centred and stays in float32.
    """

    def __init__(self, width: int, eps: float, sequence_parallel: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.weight.keep_float32 = True  # type: ignore[attr-defined]
        # finalize_model_grads sums the gradients of marked parameters over the tensor-parallel group.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """x, gate [S, heads, V], weight [V] -> [S, heads, V]"""
        return gated_norm(x, gate, weight, self.eps)
