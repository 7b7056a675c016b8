"""The time of each part of a step on one GPU: FLOPs and bytes divided by calibrated rates.

The parts are decoder layers, the vision tower, the embedding, the output layer with the loss, messages
between stages, the reduction of gradients, and the update of the weights. Rows have a fixed length, so
decoder layers compute ``seq_len`` tokens with padding. The tower computes only real patches, and the output
layer only tokens with loss.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from megatron_vl.config import ModelConfig, ParallelConfig, RecomputeConfig, TrainConfig
from megatron_vl.kernels.sizes import DELTA_CHUNK
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.memory import ParameterCounts, offloaded_fraction, optimizer_state_bytes
from megatron_vl.planning.row_statistics import RowStatistics
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, key_value_copies

GPUS_PER_NODE = 8
DELTA_RULE_RATE_SHARE = 0.12
"""Share of attention's rate that the delta rule's small products reach. With our kernels, 8192 tokens of 32
heads of 128 took 0.79 ms forward on an H200."""
HIDDEN_COPY_SHARE, HIDDEN_COPY_BYTES = 0.5, 5.4e9
"""Largest share and number of bytes of the copies of offloaded state that passes hide before and after an
update. On H200, they hid half of 10 GB, and 5 to 12 GB of 20 to 41 GB. Passes shorter than 0.1 s would hide
less."""
BF16_MOMENTS_FACTOR = 0.57
"""Time of an update on the GPU with moments in bf16, relative to fp32. On an H200, our kernel takes 4.7 ms
for 10^9 parameters, and Transformer Engine's 8.3 ms."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of a forward and a backward pass. The backward pass includes recomputation."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, repeat_count: float) -> PassTime:
        return PassTime(self.forward * repeat_count, self.backward * repeat_count)

    @property
    def total_seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Network:
    """How the GPUs are connected."""

    gpus_per_node: int = GPUS_PER_NODE

    def collective_bandwidth(self, calibration: Calibration, rank_count: int, rank_stride: int) -> float:
        """Bytes that leave a GPU in a second in a collective of ``rank_count`` ranks ``rank_stride`` apart.

        Between nodes, the ranks of one node share the adapters of the GPUs that lie between them.
        """
        if rank_count * rank_stride <= self.gpus_per_node:
            return calibration.nvlink_gb_s * 1e9
        ranks_per_node = max(1, self.gpus_per_node // rank_stride)
        return min(calibration.nvlink_gb_s, calibration.network_gb_s * ranks_per_node) * 1e9

    def message_bandwidth(self, calibration: Calibration, rank_stride: int) -> float:
        """Bytes per second of a message to the rank whose number is ``rank_stride`` higher."""
        if 2 * rank_stride <= self.gpus_per_node:
            return calibration.send_gb_s * 1e9
        return min(calibration.send_gb_s, calibration.network_gb_s) * 1e9


@dataclass(frozen=True)
class _LayerSeconds:
    """Seconds of the parts of a decoder layer, ``elementwise`` and ``activation`` for both passes."""

    projection: float
    attention: float
    elementwise: float
    mlp_matmul: float
    activation: float
    collective: float

    def pass_time(self, trains_weights: bool) -> PassTime:
        """The passes without recomputation."""
        # Each product has two gradients, of its input and of its weight. Frozen weights need only the first.
        gradient_products = 2 if trains_weights else 1
        # The forward pass has a third of the elementwise work, and 3 of 8 parts of an activation's traffic.
        return PassTime(
            self.projection
            + self.attention
            + self.elementwise / 3
            + self.mlp_matmul
            + 3 / 8 * self.activation
            + self.collective,
            gradient_products * (self.projection + self.mlp_matmul)
            + 2.5 * self.attention
            + self.elementwise * 2 / 3
            + 5 / 8 * self.activation
            + self.collective,
        )


@dataclass(frozen=True)
class _TowerSeconds:
    """Seconds of the parts of the tower's layers, windows, elementwise and activation for both passes."""

    matmul: float
    full_attention: float
    elementwise: float
    window_attention: float
    activation: float
    collective: float

    def pass_time(self) -> PassTime:
        """The passes without recomputation."""
        return PassTime(
            self.matmul
            + self.full_attention
            + self.elementwise / 3
            + self.window_attention / 3
            + self.activation * 3 / 8
            + self.collective,
            2 * self.matmul
            + 2 * self.full_attention
            + self.elementwise * 2 / 3
            + self.window_attention * 2 / 3
            + self.activation * 5 / 8
            + self.collective,
        )


@dataclass(frozen=True)
class StepCosts:
    """The times of the parts of a run's step.

    They depend on the layout's sizes, and not on its split of the layers.
    """

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    data_parallel_size: int
    row_statistics: RowStatistics
    calibration: Calibration
    network: Network = Network()

    @cached_property
    def seq_len(self) -> int:
        """Tokens of a row on one rank."""
        return self.config.data.seq_len // self.layout.cp

    @cached_property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.layout.cp * self.data_parallel_size

    @cached_property
    def model_config(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def parallel_config(self) -> ParallelConfig:
        return self.config.parallel

    @cached_property
    def recompute_config(self) -> RecomputeConfig:
        return self.config.recompute

    # --- Rates ----------------------------------------------------------------------------------------------

    def matmul_seconds(self, token_count: float, k: float, n: float) -> float:
        """Seconds of a matrix product [tokens, k] x [k, n]."""
        if not k * n:  # a model without dense layers
            return 0.0
        calibration = self.calibration
        width = math.sqrt(k * n)
        flops_per_second = calibration.product_tflops * 1e12 * width / (width + calibration.product_width)
        return 2 * token_count * k * n / flops_per_second

    def elementwise_seconds(self, element_count: float) -> float:
        """Seconds to move ``element_count`` elements of the model's dtype through the GPU's memory."""
        return self.bytes_per_element * element_count / (self.calibration.memory_tb_s * 1e12)

    def collective_seconds(self, total_bytes: float, rank_count: int, rank_stride: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``total_bytes`` bytes in all."""
        if rank_count == 1:
            return 0.0
        bytes_per_second = self.network.collective_bandwidth(self.calibration, rank_count, rank_stride)
        return total_bytes * (rank_count - 1) / rank_count / bytes_per_second + self.calibration.collective_s

    @cached_property
    def bytes_per_element(self) -> int:
        return 2 if self.config.dtype == "bfloat16" else 4

    @cached_property
    def _sequence_parallel_size(self) -> int:
        return self.layout.tp if self.parallel_config.sequence_parallel else 1

    # --- Language model -------------------------------------------------------------------------------------

    @cached_property
    def _times_by_layer_kind(self) -> dict[tuple[bool, bool], PassTime]:
        """The times of a decoder layer: (with experts, with linear attention)."""
        layer_kinds = itertools.product((False, True), repeat=2)
        return {
            (experts, linear): self._compute_layer_time(experts, linear) for experts, linear in layer_kinds
        }

    def decoder_layer_time(self, layer_index: int) -> PassTime:
        """A decoder layer on one row."""
        language_spec = self.spec.language
        return self._times_by_layer_kind[
            language_spec.has_experts(layer_index), language_spec.has_linear_attention(layer_index)
        ]

    def decoder_layers_time(self, layer_range: range) -> PassTime:
        """Consecutive decoder layers on one row."""
        total_time = PassTime()
        for kind, cumulative_counts in self._layer_kind_counts.items():
            if count := cumulative_counts[layer_range.stop] - cumulative_counts[layer_range.start]:
                total_time += self._times_by_layer_kind[kind] * count
        return total_time

    @cached_property
    def _layer_kind_counts(self) -> dict[tuple[bool, bool], list[int]]:
        """For each kind, the number of its layers before each layer, and as the last entry before the end."""
        language_spec = self.spec.language
        layer_kinds = [
            (language_spec.has_experts(layer), language_spec.has_linear_attention(layer))
            for layer in range(language_spec.num_layers)
        ]
        return {
            kind: [0, *itertools.accumulate(layer_kind == kind for layer_kind in layer_kinds)]
            for kind in self._times_by_layer_kind
        }

    def _compute_layer_time(self, has_experts: bool, is_linear: bool) -> PassTime:
        """The time of a decoder layer of one kind on one row; zero if the model has no such layers."""
        language_spec = self.spec.language
        if (has_experts and language_spec.moe is None) or (
            is_linear and language_spec.linear_attention is None
        ):
            return PassTime()

        hidden_elements = self.seq_len * language_spec.hidden_size
        layer_seconds = _LayerSeconds(
            *(self._linear_attention_seconds() if is_linear else self._softmax_attention_seconds()),
            self.elementwise_seconds(
                self.calibration.decoder_widths * hidden_elements / self._sequence_parallel_size
            ),
            *(
                self._expert_seconds()
                if has_experts
                else self._mlp_seconds(self.seq_len, language_spec.ffn_hidden_size)
            ),
            # The four all-gathers and reduce-scatters (or two all-reduces) of a layer in one pass.
            4 * self.collective_seconds(self.bytes_per_element * hidden_elements, self.layout.tp)
            + (self._state_exchange() if is_linear else self._head_exchange()),
        )

        pass_time = layer_seconds.pass_time(trains_weights=not self.model_config.freeze_language)
        if has_experts:
            # A layer with experts takes at least the host's time to launch its many kernels.
            calibration, dispatch_seconds = self.calibration, self._dispatch_seconds()
            least_forward, least_backward = (
                calibration.expert_host_s if self.layout.ep > 1 else calibration.expert_host_alone_s
            )
            pass_time = PassTime(
                max(pass_time.forward + dispatch_seconds, least_forward),
                max(pass_time.backward + dispatch_seconds, least_backward),
            )
        return PassTime(pass_time.forward, self._backward_with_recompute(layer_seconds, pass_time))

    def _backward_with_recompute(self, layer_seconds: _LayerSeconds, pass_time: PassTime) -> float:
        """Seconds of a decoder layer's backward pass with all that it computes again."""
        recompute_config = self.recompute_config
        if recompute_config.language == "full":
            return pass_time.backward + pass_time.forward
        if recompute_config.language == "none":
            return pass_time.backward

        # Selective recompute repeats the forward passes of some modules.
        modules = recompute_config.language_modules
        activation_seconds = 3 / 8 * layer_seconds.activation
        return (
            pass_time.backward
            + (
                layer_seconds.attention * ("core_attn" in modules)
                + layer_seconds.elementwise / 6 * ("layernorm" in modules)
            )
            + (layer_seconds.mlp_matmul + activation_seconds) * ("mlp" in modules)
            + activation_seconds * ("activation" in modules)
        )

    def _softmax_attention_seconds(self) -> tuple[float, float]:
        """Seconds of the forward pass of softmax attention: (its projections, the attention itself)."""
        language_spec, tp = self.spec.language, self.layout.tp
        query_width = language_spec.num_heads * language_spec.head_dim
        input_width = (
            query_width * (2 if language_spec.output_gate else 1)
            + 2 * language_spec.num_kv_heads * language_spec.head_dim
        )
        projection_seconds = self.matmul_seconds(
            self.seq_len,
            language_spec.hidden_size,
            input_width / tp,
        ) + self.matmul_seconds(
            self.seq_len,
            query_width / tp,
            language_spec.hidden_size,
        )
        return projection_seconds, self._attention_seconds(query_width / tp / self.layout.cp)

    def _attention_seconds(self, head_width: float) -> float:
        """Seconds of the forward pass of causal attention. The backward pass takes 2.5 times as long.

        Args:
            head_width: elements of all query heads of a token on this rank.
        """
        calibration, rows = self.calibration, self.row_statistics
        if not rows.mean_tokens:
            return 0.0
        length = rows.mean_token_pairs / rows.mean_tokens
        flops_per_second = (
            calibration.attention_tflops * 1e12 * length / (length + calibration.attention_length)
        )
        return 2.0 * head_width * rows.mean_token_pairs / flops_per_second

    def _linear_attention_seconds(self) -> tuple[float, float]:
        """Seconds of the forward pass of linear attention: (its projections, all that lies between them).

        The chunks of the delta rule compute more than the recurrence, because each token is multiplied with
        the other tokens of its chunk. Convolution, gates and norm are limited by memory.
        """
        language_spec, tp, token_count = self.spec.language, self.layout.tp, self.seq_len
        linear_attention = language_spec.linear_attention
        assert linear_attention is not None
        value_width = linear_attention.value_heads * linear_attention.value_dim
        input_width = linear_attention.conv_channels + value_width + 2 * linear_attention.value_heads
        projection_seconds = self.matmul_seconds(
            token_count,
            language_spec.hidden_size,
            input_width / tp,
        ) + self.matmul_seconds(
            token_count,
            value_width / tp,
            language_spec.hidden_size,
        )

        chunk_flops_per_head = (
            DELTA_CHUNK * (3 * linear_attention.key_dim + 2 * linear_attention.value_dim)
            + 3 * linear_attention.key_dim * linear_attention.value_dim
        )
        delta_rule_flops = 2.0 * token_count * linear_attention.value_heads / tp * chunk_flops_per_head
        return projection_seconds, delta_rule_flops / (
            self.calibration.attention_tflops * 1e12 * DELTA_RULE_RATE_SHARE
        ) + self.elementwise_seconds(
            (2 * linear_attention.conv_channels + 3 * value_width) / tp * token_count
        )

    def _mlp_seconds(self, token_count: float, ffn_width: int) -> tuple[float, float]:
        """Seconds of a gated MLP: (its products in the forward pass, its activation in both passes)."""
        hidden_size, tp = self.spec.language.hidden_size, self.layout.tp
        return (
            self.matmul_seconds(
                token_count,
                hidden_size,
                2 * ffn_width / tp,
            )
            + self.matmul_seconds(
                token_count,
                ffn_width / tp,
                hidden_size,
            ),
            self.elementwise_seconds(self.calibration.activation_widths * ffn_width / tp * token_count),
        )

    def _expert_seconds(self) -> tuple[float, float]:
        """:meth:`_mlp_seconds` of router and experts, evenly loaded."""
        language_spec, calibration, layout = self.spec.language, self.calibration, self.layout
        moe_spec = language_spec.moe
        assert moe_spec is not None
        tokens_per_rank = self.seq_len / self._sequence_parallel_size
        # Ranks that share experts also share the rows: each expert gets those of all of them.
        expert_rows = tokens_per_rank * moe_spec.top_k * layout.etp
        rows_per_expert = tokens_per_rank * moe_spec.top_k * layout.ep * layout.etp / moe_spec.num_experts
        flops_per_second = (
            calibration.expert_tflops * 1e12 * rows_per_expert / (rows_per_expert + calibration.expert_rows)
        )
        product_flops = 2 * expert_rows * 3 * language_spec.hidden_size * moe_spec.ffn_hidden_size
        matmul_seconds = product_flops / layout.etp / flops_per_second
        matmul_seconds += self.matmul_seconds(
            tokens_per_rank,
            language_spec.hidden_size,
            moe_spec.num_experts,
        )
        if moe_spec.shared_ffn_hidden_size:
            matmul_seconds += self._mlp_seconds(self.seq_len, moe_spec.shared_ffn_hidden_size)[0]
        return matmul_seconds, self.elementwise_seconds(
            calibration.activation_widths * moe_spec.ffn_hidden_size / layout.etp * expert_rows
        )

    def _dispatch_seconds(self) -> float:
        """Seconds to send tokens to the ranks of their experts and back, in one pass."""
        moe_spec, ep, etp = self.spec.language.moe, self.layout.ep, self.layout.etp
        assert moe_spec is not None
        hidden_elements = self.seq_len / self._sequence_parallel_size * self.spec.language.hidden_size
        copies_per_token = mean_ranks_per_token(moe_spec.num_experts, moe_spec.top_k, ep)
        dispatch_seconds = self.elementwise_seconds(hidden_elements * (18 + 4 * copies_per_token))
        if ep > 1:
            bytes_sent = self.bytes_per_element * hidden_elements * copies_per_token * (ep - 1) / ep
            dispatch_seconds += 2 * (
                self._exchange_seconds(bytes_sent, ep, etp) + self.calibration.collective_s
            )
        return dispatch_seconds + 2 * self.collective_seconds(
            self.bytes_per_element * hidden_elements * etp, etp
        )

    def _exchange_seconds(self, bytes_sent: float, rank_count: int, rank_stride: int) -> float:
        """Seconds of an all-to-all in which each rank sends ``bytes_sent`` bytes, without its latency."""
        bandwidth = self.network.collective_bandwidth(self.calibration, rank_count, rank_stride)
        return bytes_sent / (bandwidth * self.calibration.exchange_share)

    def _head_exchange(self) -> float:
        """Seconds to exchange heads before and after attention, in one pass, under context parallelism."""
        language_spec, tp, cp = self.spec.language, self.layout.tp, self.layout.cp
        if cp == 1:
            return 0.0
        local_heads = max(1, language_spec.num_kv_heads // tp)
        key_width = local_heads * key_value_copies(local_heads, cp) * language_spec.head_dim
        query_width = language_spec.num_heads * language_spec.head_dim
        total_bytes = self.bytes_per_element * self.seq_len * (2 * query_width / tp + 2 * key_width)
        return self._exchange_seconds(total_bytes * (cp - 1) / cp, cp, tp) + 2 * self.calibration.collective_s

    def _state_exchange(self) -> float:
        """Seconds of two all-gathers of linear attention in one pass, under context parallelism.

        One gathers states and matrices, under the assumption that a sequence crosses a whole shard. The other
        one gathers the last inputs of the convolution.
        """
        linear_attention, tp, cp = self.spec.language.linear_attention, self.layout.tp, self.layout.cp
        assert linear_attention is not None
        state_bytes = 4 * linear_attention.state_exchange_size
        input_bytes = (
            self.bytes_per_element * (linear_attention.conv_width - 1) * linear_attention.conv_channels
        )
        return sum(self.collective_seconds(cp * size / tp, cp, tp) for size in (state_bytes, input_bytes))

    def embedding_time(self) -> PassTime:
        """Looking up tokens and placing features. The gradient of the table is added in float32."""
        seconds = self.elementwise_seconds(4 * self.spec.language.hidden_size * self.seq_len)
        return PassTime(seconds, seconds + self._vocabulary_gradient_seconds())

    def _vocabulary_gradient_seconds(self) -> float:
        """Seconds to add a gradient of the vocabulary's size in float32; 0 if its weights are frozen."""
        if self.model_config.freeze_language:
            return 0.0
        weight_count = 10.0 * self.spec.language.hidden_size * self.spec.language.vocab_size
        return weight_count / self.layout.tp / (self.calibration.memory_tb_s * 1e12)

    def output_layer_time(self) -> PassTime:
        """The final norm, the output layer and the loss on one row."""
        language_spec, tp = self.spec.language, self.layout.tp
        token_count = self.row_statistics.head_tokens(self.seq_len)
        local_vocabulary = language_spec.vocab_size / tp
        matmul_seconds = self.matmul_seconds(
            token_count,
            language_spec.hidden_size,
            local_vocabulary,
        )
        loss_seconds = self.elementwise_seconds(
            self.calibration.logits_widths * language_spec.vocab_size / tp * token_count
        )
        gather_seconds = self.collective_seconds(
            self.bytes_per_element * self.seq_len * language_spec.hidden_size, tp
        )
        return PassTime(
            matmul_seconds + loss_seconds / 3 + gather_seconds,
            (1 + (not self.model_config.freeze_language)) * matmul_seconds
            + loss_seconds * 2 / 3
            + self._vocabulary_gradient_seconds()
            + gather_seconds,
        )

    # --- Vision tower ---------------------------------------------------------------------------------------

    @cached_property
    def vision_tower_time(self) -> PassTime:
        """The whole tower with its mergers on a rank's pictures of a row."""
        return self.tower_time_at(self.layout.tp) * (1 / self.layout.cp)

    def tower_time_at(self, tp: int) -> PassTime:
        """The tower with its mergers on a row's pictures, on ``tp`` ranks together."""
        vision_spec, patch_count = self.spec.vision, self.row_statistics.mean_patches
        if not patch_count:
            return PassTime()

        block_seconds = self._tower_block_seconds(tp)
        blocks_time = block_seconds.pass_time()
        embed_seconds = self.matmul_seconds(patch_count, vision_spec.patch_dim, vision_spec.hidden_size)
        merger_width = vision_spec.merge_unit * vision_spec.hidden_size
        merged_units = (1 + len(vision_spec.deepstack_layers)) * patch_count / vision_spec.merge_unit
        merger_seconds = self.matmul_seconds(
            merged_units,
            merger_width,
            merger_width / tp,
        ) + self.matmul_seconds(
            merged_units,
            merger_width / tp,
            vision_spec.out_hidden_size,
        )

        trains_merger = not self.model_config.freeze_merger
        # A frozen tower has no backward pass, because nothing before it is trained.
        if self.model_config.freeze_vision:
            backward_seconds = 2 * merger_seconds * trains_merger
        else:
            recomputed_seconds = {"full": blocks_time.forward, "activation": block_seconds.activation * 3 / 8}
            backward_seconds = (
                blocks_time.backward
                + embed_seconds
                + recomputed_seconds.get(self.recompute_config.vision, 0.0)
                + (1 + trains_merger) * merger_seconds
            )
        return PassTime(embed_seconds + blocks_time.forward + merger_seconds, backward_seconds)

    def _tower_block_seconds(self, tp: int) -> _TowerSeconds:
        """The parts of all layers of the tower. Only full and window attention differ between layers."""
        vision_spec, calibration, num_layers = self.spec.vision, self.calibration, self.spec.vision.num_layers
        patch_count, hidden_size = self.row_statistics.mean_patches, vision_spec.hidden_size
        full_attention_layers = sum(map(vision_spec.is_full_attention, range(num_layers)))
        full_attention_flops = 4.0 * hidden_size / tp * self.row_statistics.mean_frame_pairs
        mlp_widths = calibration.activation_widths * (1 if vision_spec.gated_mlp else 0.6)
        hidden_bytes = self.bytes_per_element * patch_count * hidden_size
        return _TowerSeconds(
            num_layers * self._tower_matmul_seconds(tp),
            full_attention_layers * (full_attention_flops / (calibration.tower_attention_tflops * 1e12)),
            num_layers * self.elementwise_seconds(calibration.tower_widths * hidden_size * patch_count),
            (num_layers - full_attention_layers)
            * self.elementwise_seconds(calibration.window_widths * hidden_size / tp * patch_count),
            num_layers
            * self.elementwise_seconds(mlp_widths * vision_spec.padded_ffn_hidden_size / tp * patch_count),
            num_layers * (4 * self.collective_seconds(hidden_bytes, tp) / calibration.all_reduce_share),
        )

    def _tower_matmul_seconds(self, tp: int) -> float:
        """Seconds of the products of one layer of the tower in the forward pass, without attention."""
        vision_spec, patch_count = self.spec.vision, self.row_statistics.mean_patches
        hidden_size, ffn_width = vision_spec.hidden_size, vision_spec.padded_ffn_hidden_size
        fc1_width = (2 if vision_spec.gated_mlp else 1) * ffn_width
        attention_seconds = self.matmul_seconds(
            patch_count,
            hidden_size,
            3 * hidden_size / tp,
        ) + self.matmul_seconds(
            patch_count,
            hidden_size / tp,
            hidden_size,
        )
        mlp_seconds = self.matmul_seconds(
            patch_count,
            hidden_size,
            fc1_width / tp,
        ) + self.matmul_seconds(
            patch_count,
            ffn_width / tp,
            hidden_size,
        )
        return attention_seconds + mlp_seconds

    # --- Between stages and at the end of a step ------------------------------------------------------------

    def stage_message_seconds(self) -> float:
        """Seconds for a hidden state (and DeepStack's levels) to the next stage."""
        if self.layout.pp == 1:
            return 0.0
        state_width = (1 + len(self.spec.vision.deepstack_layers)) * self.spec.language.hidden_size
        message_bytes = self.bytes_per_element * self.seq_len * state_width / self._sequence_parallel_size
        return message_bytes / self.network.message_bandwidth(
            self.calibration, self.layout.tp * self.gradient_ranks
        )

    def grad_reduce_seconds(self, gradient_bytes: float) -> float:
        """Seconds to reduce float32 gradients of that many bytes over the replicas.

        With the distributed optimizer, it is a reduce-scatter. Without it, it is an all-reduce, which takes
        twice as long.
        """
        collective_count = 1 if self.parallel_config.distributed_optimizer else 2
        return collective_count * self.collective_seconds(gradient_bytes, self.gradient_ranks, self.layout.tp)

    def param_gather_seconds(self, weight_bytes: float) -> float:
        """Seconds to gather updated weights of that many bytes."""
        if not self.parallel_config.distributed_optimizer:
            return 0.0
        return self.collective_seconds(weight_bytes, self.gradient_ranks, self.layout.tp)

    def optimizer_seconds(self, parameter_counts: ParameterCounts) -> float:
        """Seconds of clearing, scaling and clipping gradients and of AdamW on the GPU.

        Offloaded state is copied to the GPU and back at the same time, which takes longer than the kernel.
        The last backward pass and the next forward pass hide some of the copies.
        """
        calibration = self.calibration
        offloaded_count = parameter_counts.owned_count * offloaded_fraction(self.config)
        moments_factor = BF16_MOMENTS_FACTOR if self.config.optimizer.moments_dtype == "bfloat16" else 1.0
        device_seconds = (
            (parameter_counts.owned_count - offloaded_count) * (calibration.optimizer_ps * moments_factor)
            + parameter_counts.trained_count * calibration.gradient_ps
        ) * 1e-12

        copied_bytes = offloaded_count * optimizer_state_bytes(self.config)[1]
        hidden_bytes = min(HIDDEN_COPY_SHARE * copied_bytes, HIDDEN_COPY_BYTES)
        copy_seconds = (copied_bytes - hidden_bytes) / (calibration.host_copy_gb_s * 1e9)
        return device_seconds + copy_seconds + parameter_counts.trained_tensors * calibration.tensor_us * 1e-6


def mean_ranks_per_token(expert_count: int, top_k: int, expert_parallel_size: int) -> float:
    """Mean number of expert-parallel ranks that hold experts of a token. All experts are equally likely."""
    if expert_parallel_size == 1:
        return 1.0
    missed_probability = 1.0
    for i in range(top_k):
        missed_probability *= max(0, expert_count - expert_count // expert_parallel_size - i) / (
            expert_count - i
        )
    return expert_parallel_size * (1 - missed_probability)
