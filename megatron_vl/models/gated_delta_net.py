"""Gated DeltaNet, the linear attention of Qwen3.5 (arXiv 2412.06464), for packed rows.

The module replaces core's SelfAttention in a layer and has the parameter names of core's ``GatedDeltaNet``.
Core's own module is not used because, in version 0.19.2, it ignores the bounds of sequences unless rows are
in ``thd``, rounds the decays to bfloat16, cannot be built without flash-linear-attention, and does not sum
its norm's gradients over tensor-parallel ranks. Reference: ``Qwen3_5GatedDeltaNet`` of transformers.

The heads are divided among tensor-parallel ranks: each rank has some key heads and the value heads that they
serve. Context-parallel ranks each hold a shard of the row's tokens. They exchange the states of sequences
that cross an edge, and the last inputs of the convolution
(:mod:`megatron_vl.kernels.linear_attention.shard_exchange`).
"""

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

from megatron_vl.kernels.linear_attention.gated_delta_rule import (
    causal_conv,
    gated_delta_rule,
    gated_norm,
    make_segment_ids,
)
from megatron_vl.kernels.linear_attention.shard_exchange import ShardExchange
from megatron_vl.models.attention import PackedRow
from megatron_vl.spec.families import LinearAttentionSpec


class GatedDeltaNet(nn.Module):
    """One layer's linear attention.

    Args:
        spec: sizes of the whole layer, over all tensor-parallel ranks.
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
        tp_size = self.tp_group.size()
        self.key_heads, self.value_heads = spec.key_heads // tp_size, spec.value_heads // tp_size
        local_key_size, local_value_size = self.key_heads * spec.key_dim, self.value_heads * spec.value_dim
        self.channels = (local_key_size, local_key_size, local_value_size)
        self.sections = (sum(self.channels), local_value_size, self.value_heads, self.value_heads)

        common_arguments = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = column(
            config.hidden_size,
            sum(self.sections) * tp_size,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="fc1",
            **common_arguments,
        )
        # Random weights begin on the GPU, because core's generators of the tensor-parallel ranks are there.
        device = torch.cuda.current_device()
        self.conv1d: Any = nn.Module()  # it holds the weight [C, 1, W] of the depthwise convolution
        self.conv1d.weight = nn.Parameter(
            torch.empty(sum(self.channels), 1, spec.conv_width, dtype=config.params_dtype, device=device)
        )
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads, dtype=config.params_dtype, device=device))
        self.A_log = nn.Parameter(torch.zeros(self.value_heads, device=device))
        self.out_norm = GatedNorm(spec.value_dim, config.layernorm_epsilon, config.sequence_parallel)
        self.out_proj = row(
            spec.value_heads * spec.value_dim,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="fc2",
            **common_arguments,
        )
        self._initialize_weights()

        is_selective = config.recompute_granularity == "selective"
        self.recompute_mixing = is_selective and "core_attn" in (config.recompute_modules or [])

    @torch.no_grad()
    def _initialize_weights(self) -> None:
        """Draws random weights as ``transformers`` does, different ones on each tensor-parallel rank."""
        with get_cuda_rng_tracker().fork():
            conv_init_bound = 1 / math.sqrt(self.spec.conv_width)
            self.conv1d.weight.uniform_(-conv_init_bound, conv_init_bound)
            self.A_log.uniform_(0.01, 16).log_()
        self.A_log.keep_float32 = True  # type: ignore[attr-defined]
        for parameter in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)

    def forward(
        self, hidden_states: Tensor, *args: Any, packed_seq_params: PackedRow | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """[S (/ tp), 1, H] -> ([S (/ tp), 1, H], bias to add or None)

        Under context parallelism, S is the length of this rank's shard, whose segments count. Those of
        softmax attention may be of a larger part.
        """
        assert packed_seq_params is not None and packed_seq_params.full_segments is not None
        # One product computes queries, keys, values, the output gate, beta and the decay. Under sequence
        # parallelism it also gathers the tokens, because the recurrence needs all of them.
        projected, _ = self.in_proj(hidden_states)
        projected = projected.squeeze(1)  # a view in both directions, which an index is not

        segment_ids, exchange = self._segments_and_exchange(packed_seq_params, projected.shape[0])
        mix_tokens = partial(self._mix_tokens, exchange=exchange)
        # Selective recomputation leaves out the two products, as core's does for softmax attention.
        if self.recompute_mixing and self.training and torch.is_grad_enabled():
            mixed_states = checkpoint(mix_tokens, False, projected, segment_ids)
        else:
            mixed_states = mix_tokens(projected, segment_ids)

        # The bias is returned and not added, because core fuses it with dropout and the residual.
        return self.out_proj(mixed_states[:, None])

    def _segments_and_exchange(self, row: PackedRow, num_tokens: int) -> tuple[Tensor, ShardExchange | None]:
        """The sequence numbers of this rank's tokens, and the exchange if any sequence crosses an edge."""
        assert row.full_segments is not None
        if self.cp_group.size() == 1:
            return make_segment_ids(row.full_segments.cu_seqlens, num_tokens), None

        assert row.shard is not None
        route = row.shard.route
        assert route.length == num_tokens and route.rank == self.cp_group.rank()
        segment_ids = make_segment_ids(row.shard.segments.cu_seqlens, num_tokens)
        return segment_ids, ShardExchange(route, self.cp_group) if route.any_cut else None

    def _mix_tokens(
        self, projected: Tensor, segment_ids: Tensor, exchange: ShardExchange | None = None
    ) -> Tensor:
        """[S, sections] -> [S, value heads * V]"""
        qkv, output_gate, beta_input, decay_input = projected.split(self.sections, dim=-1)
        convolved_qkv = causal_conv(qkv, self.conv1d.weight[:, 0], segment_ids, exchange=exchange)
        # The logarithm of the decay is float32; both are [S, value heads].
        log_decay = -self.A_log.float().exp() * F.softplus(decay_input.float() + self.dt_bias)
        queries, keys, values = convolved_qkv.split(self.channels, dim=-1)
        head_outputs = gated_delta_rule(
            queries.unflatten(-1, (self.key_heads, -1)),
            keys.unflatten(-1, (self.key_heads, -1)),
            values.unflatten(-1, (self.value_heads, -1)),
            log_decay,
            beta_input.sigmoid(),
            segment_ids,
            exchange=exchange,
        )

        weight = self.out_norm.weight
        if not self.config.sequence_parallel:
            # Each rank has the gradient from its own heads. Core sums it only under sequence parallelism.
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        head_gates = output_gate.unflatten(-1, (self.value_heads, -1))
        return self.out_norm(head_outputs, head_gates, weight).flatten(1)


class GatedNorm(nn.Module):
    """RMSNorm of each head, times the SiLU of its gate: ``Qwen3_5RMSNormGated`` of transformers.

    The weight is not zero-centred and stays in float32.
    """

    def __init__(self, head_width: int, eps: float, sequence_parallel: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(head_width))
        self.weight.keep_float32 = True  # type: ignore[attr-defined]
        # finalize_model_grads sums the gradients of marked parameters over the tensor-parallel group.
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """x, gate [S, heads, V], weight [V] -> [S, heads, V]"""
        return gated_norm(x, gate, weight, self.eps)
