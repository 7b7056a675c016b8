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

from megatron_vl.config import ModelConfig, TrainConfig
from megatron_vl.kernels.sizes import (
    DELTA_CHUNK,
    LOSS_CHUNK_TOKENS,
    MAX_STATE_CHUNKS_ON_GPU,
    STATE_CHUNK_BYTES,
)
from megatron_vl.planning.calibration import Calibration, find_calibration
from megatron_vl.planning.layer_kinds import (
    LayerKind,
    MatrixAdapter,
    block_adapters,
    layer_kinds,
    merger_adapters,
)
from megatron_vl.planning.memory import (
    ParameterCounts,
    bytes_per_element,
    offloaded_fraction,
    optimizer_state_bytes,
)
from megatron_vl.planning.row_statistics import RowStatistics, make_assumed_rows
from megatron_vl.spec.adapters import freeze_unadapted_parts, trains_own_matrices
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, key_value_copies

GPUS_PER_NODE = 8
DELTA_RULE_RATE_SHARE = 0.12
"""Share of attention's rate that the delta rule's small products reach. With our kernels, 8192 tokens of 32
heads of 128 took 0.79 ms forward on an H200."""
EXPERT_GRADIENT_SHARE = 0.75
"""Adding to the gradients of experts takes this share of the time of its memory traffic; products hide the
rest. An H100 had 0.68 to 0.83, with 128 and 256 experts (docs/log/speed.md)."""
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

    def at_least(self, forward: float, backward: float) -> PassTime:
        """Passes that end no earlier than something that takes so many seconds beside each of them."""
        return PassTime(max(self.forward, forward), max(self.backward, backward))

    @property
    def total_seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class _LayerParts:
    """Seconds of the parts of a decoder layer: forward passes, where nothing else is said."""

    projections: float
    """The linears around attention."""
    attention: float
    """Attention or the delta rule. A backward pass takes 2.5 times as long."""
    elementwise: float
    """Norms, RoPE and sums, in both passes."""
    mlp: float
    """The products of the MLP or of router and experts."""
    activation: float
    """The activation of the MLP or the experts, in both passes."""
    collectives: float
    """Collectives of tensor and context parallelism, which are the same in each pass."""
    adapters: PassTime

    def pass_time(self, trains_weights: bool) -> PassTime:
        """The passes of the layer without recomputation."""
        # The forward pass has a third of the elementwise work, and 3 of 8 parts of an activation's traffic.
        forward_seconds = (
            self.projections
            + self.attention
            + self.elementwise / 3
            + self.mlp
            + 3 / 8 * self.activation
            + self.collectives
            + self.adapters.forward
        )
        # Each product has two gradients, of its input and of its weight. Frozen weights need only the first.
        backward_seconds = (
            (1 + trains_weights) * (self.projections + self.mlp)
            + 2.5 * self.attention
            + self.elementwise * 2 / 3
            + 5 / 8 * self.activation
            + self.collectives
            + self.adapters.backward
        )
        return PassTime(forward_seconds, backward_seconds)

    def with_selective_recompute(self, layer_time: PassTime, modules: set[str]) -> PassTime:
        """The passes of a layer whose backward pass repeats the forward passes of some modules."""
        backward_seconds = layer_time.backward
        backward_seconds += self.attention * ("core_attn" in modules) + self.elementwise / 6 * (
            "layernorm" in modules
        )
        backward_seconds += (self.mlp + 3 / 8 * self.activation) * ("mlp" in modules)
        backward_seconds += 3 / 8 * self.activation * ("activation" in modules)
        return PassTime(layer_time.forward, backward_seconds)


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
        return (
            calibration.send_gb_s
            if 2 * rank_stride <= self.gpus_per_node
            else min(calibration.send_gb_s, calibration.network_gb_s)
        ) * 1e9


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
    def micro_batches(self) -> int:
        """Rows of a replica in a step."""
        return self.config.global_batch_size // self.data_parallel_size

    @cached_property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.layout.cp * self.data_parallel_size

    @cached_property
    def model_config(self) -> ModelConfig:
        """The model, whose parts without adapters are frozen in a run with LoRA."""
        return freeze_unadapted_parts(self.config, self.spec).model

    @cached_property
    def _trains_language(self) -> bool:
        """Whether the language model's own matrices are trained, and not adapters of them."""
        return trains_own_matrices(self.model_config, self.config.lora, "language")

    # --- Rates ----------------------------------------------------------------------------------------------

    def matmul_seconds(self, token_count: float, k: float, n: float) -> float:
        """Seconds of a matrix product [tokens, k] x [k, n]."""
        if not k * n:  # a model without dense layers
            return 0.0
        calibration = self.calibration
        width = math.sqrt(k * n)
        flops_per_second = calibration.product_tflops * 1e12 * width / (width + calibration.product_width)
        return 2 * token_count * k * n / flops_per_second

    def _matmul_pair_seconds(
        self, token_count: float, hidden_size: int, widened: float, narrowed: float
    ) -> float:
        """Seconds of a product from ``hidden_size`` to another width, and of one from a width back to it."""
        return self.matmul_seconds(token_count, hidden_size, widened) + self.matmul_seconds(
            token_count, narrowed, hidden_size
        )

    def elementwise_seconds(self, element_count: float) -> float:
        """Seconds to move ``element_count`` elements of the model's dtype through the GPU's memory."""
        return self.bytes_per_element * element_count / (self.calibration.memory_tb_s * 1e12)

    def _input_copy_seconds(self, element_count: float) -> float:
        """Seconds to copy the input of a recomputed layer to host memory, or back; 0 if it stays on the GPU.

        The passes of a layer hide them, if they take as long.
        """
        if not self.config.recompute.offload_inputs:
            return 0.0
        return self.bytes_per_element * element_count / (self.calibration.host_copy_gb_s * 1e9)

    def collective_seconds(self, total_bytes: float, rank_count: int, rank_stride: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``total_bytes`` bytes in all."""
        if rank_count == 1:
            return 0.0
        bytes_per_second = self.network.collective_bandwidth(self.calibration, rank_count, rank_stride)
        return total_bytes * (rank_count - 1) / rank_count / bytes_per_second + self.calibration.collective_s

    @cached_property
    def bytes_per_element(self) -> int:
        return bytes_per_element(self.config)

    @cached_property
    def _sequence_parallel_size(self) -> int:
        return self.layout.tp if self.config.parallel.sequence_parallel else 1

    # --- Language model -------------------------------------------------------------------------------------

    @cached_property
    def _times_by_layer_kind(self) -> dict[LayerKind, PassTime]:
        """The times of a decoder layer of each kind that the model has."""
        kinds = layer_kinds(self.spec, self.config.lora)
        return {kind: self._compute_layer_time(kind) for kind in dict.fromkeys(kinds)}

    def decoder_layers_time(self, layer_range: range) -> PassTime:
        """Consecutive decoder layers on one row."""
        total_time = PassTime()
        for kind, cumulative_counts in self._layer_kind_counts.items():
            if count := cumulative_counts[layer_range.stop] - cumulative_counts[layer_range.start]:
                total_time += self._times_by_layer_kind[kind] * count
        return total_time

    @cached_property
    def _layer_kind_counts(self) -> dict[LayerKind, list[int]]:
        """For each kind, the number of its layers before each layer, and as the last entry before the end."""
        kinds = layer_kinds(self.spec, self.config.lora)
        return {
            kind: [0, *itertools.accumulate(layer_kind == kind for layer_kind in kinds)]
            for kind in self._times_by_layer_kind
        }

    def _compute_layer_time(self, kind: LayerKind) -> PassTime:
        """The time of a decoder layer of one kind on one row."""
        parts = self._layer_parts(kind)
        layer_time = parts.pass_time(trains_weights=self._trains_language)
        if kind.has_experts:
            dispatch_seconds = self._dispatch_seconds()
            layer_time += PassTime(dispatch_seconds, dispatch_seconds + self._expert_gradient_seconds())
            # A layer with experts takes at least the host's time to launch its many kernels.
            host_launch_seconds = (
                self.calibration.expert_host_s if self.layout.ep > 1 else self.calibration.expert_host_alone_s
            )
            layer_time = layer_time.at_least(*host_launch_seconds)

        if self.config.recompute.language != "full":
            recomputed_modules = self.config.recompute.selected_modules
            return parts.with_selective_recompute(layer_time, recomputed_modules)

        input_elements = self.seq_len * self.spec.language.hidden_size / self._sequence_parallel_size
        copy_seconds = self._input_copy_seconds(input_elements)
        layer_time += PassTime(0.0, layer_time.forward)
        return layer_time.at_least(copy_seconds, copy_seconds)

    def _layer_parts(self, kind: LayerKind) -> _LayerParts:
        """The times of the parts of a decoder layer, without the dispatch of tokens to experts."""
        language_spec = self.spec.language
        token_count, hidden_size = self.seq_len, language_spec.hidden_size
        if kind.has_linear_attention:
            projection_seconds, attention_seconds = self._linear_attention_seconds()
            exchange_seconds = self._state_exchange()
        else:
            projection_seconds, attention_seconds = self._self_attention_seconds()
            exchange_seconds = self._head_exchange()
        mlp_seconds, activation_seconds = (
            self._expert_seconds()
            if kind.has_experts
            else self._mlp_seconds(token_count, language_spec.ffn_hidden_size)
        )

        # A layer has four all-gathers and reduce-scatters, or two all-reduces, in one pass.
        message_bytes = self.bytes_per_element * (token_count * hidden_size)
        collective_seconds = 4 * self.collective_seconds(message_bytes, self.layout.tp)
        return _LayerParts(
            projection_seconds,
            attention_seconds,
            self.elementwise_seconds(
                self.calibration.decoder_widths * hidden_size * token_count / self._sequence_parallel_size
            ),
            mlp_seconds,
            activation_seconds,
            collective_seconds + exchange_seconds,
            self._adapters_time(kind.adapters, token_count, self.layout.tp),
        )

    def _self_attention_seconds(self) -> tuple[float, float]:
        """Seconds of the forward pass of self-attention: (its projections, attention itself)."""
        language_spec, tensor_parallel_size = self.spec.language, self.layout.tp
        query_width = language_spec.num_heads * language_spec.head_dim
        query_gate_width = query_width * (2 if language_spec.output_gate else 1)
        fused_width = query_gate_width + 2 * language_spec.num_kv_heads * language_spec.head_dim
        projection_seconds = self._matmul_pair_seconds(
            self.seq_len,
            language_spec.hidden_size,
            fused_width / tensor_parallel_size,
            query_width / tensor_parallel_size,
        )
        head_width = query_width / tensor_parallel_size / self.layout.cp
        return projection_seconds, self._attention_seconds(head_width)

    def _adapters_time(
        self, adapters: tuple[MatrixAdapter, ...], token_count: float, tensor_parallel_size: int
    ) -> PassTime:
        """The time of the adapters of a layer: two narrow products each, and a sum with the matrix's output.

        The backward pass has twice the products, and a sum with the gradient of the matrix's input. What
        ranks exchange is as narrow as the factors and is not counted.
        """
        total_time = PassTime()
        for adapter in adapters:
            row_count, ways = token_count, tensor_parallel_size
            if adapter.is_expert:
                assert self.spec.language.moe is not None
                row_count *= self.spec.language.moe.top_k * self.layout.etp / self._sequence_parallel_size
                ways = self.layout.etp
            rows = adapter.rows / (1 if adapter.is_row_parallel else ways)
            columns = adapter.columns / (ways if adapter.is_row_parallel else 1)
            product_seconds = self.matmul_seconds(row_count, columns, adapter.rank_sum)
            product_seconds += self.matmul_seconds(row_count, adapter.rank_sum, rows)
            total_time += PassTime(
                product_seconds + self.elementwise_seconds(3 * rows * row_count),
                2 * product_seconds + self.elementwise_seconds(3 * columns * row_count),
            )
        return total_time

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
        # Among ranks that gather keys, the one with a document's end has the most pairs of tokens: of a
        # document over n of them, 2 - 1 / n times the mean. The others wait for it.
        part_length = self.config.data.seq_len / self.layout.key_ranks
        largest_share = 2.0 - min(1.0, part_length / length)
        return 2.0 * head_width * rows.mean_token_pairs * largest_share / flops_per_second

    def _linear_attention_seconds(self) -> tuple[float, float]:
        """Seconds of the forward pass of linear attention: (its projections, all that lies between them).

        The chunks of the delta rule compute more than the recurrence, because each token is multiplied with
        the other tokens of its chunk. Convolution, gates and norm are limited by memory.
        """
        language_spec, calibration = self.spec.language, self.calibration
        tensor_parallel_size = self.layout.tp
        linear_attention = language_spec.linear_attention
        assert linear_attention is not None
        token_count, value_width = self.seq_len, linear_attention.value_heads * linear_attention.value_dim
        input_width = linear_attention.conv_channels + value_width + 2 * linear_attention.value_heads
        projection_seconds = self._matmul_pair_seconds(
            token_count,
            language_spec.hidden_size,
            input_width / tensor_parallel_size,
            value_width / tensor_parallel_size,
        )

        chunk_flops_per_head = (
            DELTA_CHUNK * (3 * linear_attention.key_dim + 2 * linear_attention.value_dim)
            + 3 * linear_attention.key_dim * linear_attention.value_dim
        )
        delta_rule_seconds = (
            2.0
            * token_count
            * linear_attention.value_heads
            / tensor_parallel_size
            * chunk_flops_per_head
            / (calibration.attention_tflops * 1e12 * DELTA_RULE_RATE_SHARE)
        )
        return projection_seconds, delta_rule_seconds + self.elementwise_seconds(
            (2 * linear_attention.conv_channels + 3 * value_width) / tensor_parallel_size * token_count
        )

    def _mlp_seconds(self, token_count: float, ffn_width: int) -> tuple[float, float]:
        """Seconds of a gated MLP: (its products in the forward pass, its activation in both passes)."""
        hidden_size, tensor_parallel_size = self.spec.language.hidden_size, self.layout.tp
        matmul_seconds = self._matmul_pair_seconds(
            token_count, hidden_size, 2 * ffn_width / tensor_parallel_size, ffn_width / tensor_parallel_size
        )
        return matmul_seconds, self.elementwise_seconds(
            self.calibration.activation_widths * ffn_width / tensor_parallel_size * token_count
        )

    def _expert_seconds(self) -> tuple[float, float]:
        """:meth:`_mlp_seconds` of router and experts, evenly loaded."""
        language_spec, calibration = self.spec.language, self.calibration
        moe_spec = language_spec.moe
        assert moe_spec is not None
        layout = self.layout
        tokens_per_rank = self.seq_len / self._sequence_parallel_size
        # Ranks that share experts also share the rows: each expert gets those of all of them.
        expert_rows = tokens_per_rank * moe_spec.top_k * layout.etp
        rows_per_expert = tokens_per_rank * moe_spec.top_k * layout.ep * layout.etp / moe_spec.num_experts
        flops_per_second = (
            calibration.expert_tflops * 1e12 * rows_per_expert / (rows_per_expert + calibration.expert_rows)
        )
        matmul_seconds = (
            2
            * expert_rows
            * 3
            * language_spec.hidden_size
            * moe_spec.ffn_hidden_size
            / layout.etp
            / flops_per_second
        )
        matmul_seconds += self.matmul_seconds(
            tokens_per_rank, language_spec.hidden_size, moe_spec.num_experts
        )
        if moe_spec.shared_ffn_hidden_size:
            matmul_seconds += self._mlp_seconds(self.seq_len, moe_spec.shared_ffn_hidden_size)[0]
        return matmul_seconds, self.elementwise_seconds(
            calibration.activation_widths * moe_spec.ffn_hidden_size / layout.etp * expert_rows
        )

    def _expert_gradient_seconds(self) -> float:
        """Seconds to add a row's gradients to those of all experts of this rank, in fp32.

        The rate of products does not contain it: an expert's gradient is as large for few tokens as for many.
        """
        language_spec, layout = self.spec.language, self.layout
        assert language_spec.moe is not None
        if not self._trains_language:
            return 0.0

        local_experts = language_spec.moe.num_experts / (layout.ep * layout.etp)
        weight_elements = 3 * language_spec.hidden_size * language_spec.moe.ffn_hidden_size * local_experts
        read_and_written_bytes = 2 * 4 * weight_elements
        return EXPERT_GRADIENT_SHARE * read_and_written_bytes / (self.calibration.memory_tb_s * 1e12)

    def _dispatch_seconds(self) -> float:
        """Seconds to send tokens to the ranks of their experts and back, in one pass."""
        language_spec, calibration = self.spec.language, self.calibration
        moe_spec = language_spec.moe
        assert moe_spec is not None
        expert_parallel_size, expert_tensor_size = self.layout.ep, self.layout.etp
        hidden_elements = self.seq_len / self._sequence_parallel_size * language_spec.hidden_size
        copies_per_token = mean_ranks_per_token(moe_spec.num_experts, moe_spec.top_k, expert_parallel_size)
        dispatch_seconds = self.elementwise_seconds(hidden_elements * (18 + 4 * copies_per_token))
        if expert_parallel_size > 1:
            bytes_sent = (
                self.bytes_per_element
                * hidden_elements
                * copies_per_token
                * (expert_parallel_size - 1)
                / expert_parallel_size
            )
            bytes_per_second = (
                self.network.collective_bandwidth(calibration, expert_parallel_size, expert_tensor_size)
                * calibration.exchange_share
            )
            dispatch_seconds += 2 * (bytes_sent / bytes_per_second + calibration.collective_s)
        return dispatch_seconds + 2 * self.collective_seconds(
            self.bytes_per_element * hidden_elements * expert_tensor_size, expert_tensor_size
        )

    def _head_exchange(self) -> float:
        """Seconds to exchange heads around attention and to gather keys and values, in one pass."""
        language_spec = self.spec.language
        tp, head_ranks, key_ranks = self.layout.tp, self.layout.head_ranks, self.layout.key_ranks
        if self.layout.cp == 1:
            return 0.0
        local_heads = max(1, language_spec.num_kv_heads // tp)
        key_width = local_heads * key_value_copies(local_heads, head_ranks) * language_spec.head_dim
        token_bytes = self.bytes_per_element * self.seq_len
        gather_seconds = 2 * self.collective_seconds(
            key_ranks * token_bytes * key_width, key_ranks, tp * head_ranks
        )
        if head_ranks == 1:
            return gather_seconds

        bandwidth = self.network.collective_bandwidth(self.calibration, head_ranks, tp)
        query_width = language_spec.num_heads * language_spec.head_dim
        exchanged_bytes = token_bytes * (2 * query_width / tp + 2 * key_width) * (head_ranks - 1) / head_ranks
        exchange_seconds = exchanged_bytes / (bandwidth * self.calibration.exchange_share)
        return exchange_seconds + 2 * self.calibration.collective_s + gather_seconds

    def _state_exchange(self) -> float:
        """Seconds of two all-gathers of linear attention in one pass, under context parallelism.

        One gathers states and matrices, under the assumption that a sequence crosses a whole shard. The other
        one gathers the last inputs of the convolution.
        """
        a, tp, cp = self.spec.language.linear_attention, self.layout.tp, self.layout.cp
        assert a is not None
        states = 4 * a.state_exchange_size
        inputs = self.bytes_per_element * (a.conv_width - 1) * a.conv_channels
        return sum(self.collective_seconds(cp * size / tp, cp, tp) for size in (states, inputs))

    def embedding_time(self) -> PassTime:
        """Looking up tokens and placing features."""
        tokens = self.elementwise_seconds(4 * self.spec.language.hidden_size * self.seq_len)
        return PassTime(tokens, tokens)

    def output_layer_time(self) -> PassTime:
        """The final norm, the output layer and the loss on one row."""
        language_spec, calibration = self.spec.language, self.calibration
        tensor_parallel_size = self.layout.tp
        tokens = self.row_statistics.head_tokens(self.config.data.seq_len, self.layout.cp)
        matmul_seconds = self.matmul_seconds(
            tokens, language_spec.hidden_size, language_spec.vocab_size / tensor_parallel_size
        )
        loss = self.elementwise_seconds(
            calibration.logits_widths * language_spec.vocab_size / tensor_parallel_size * tokens
        )
        gather_seconds = self.collective_seconds(
            self.bytes_per_element * self.seq_len * language_spec.hidden_size, tensor_parallel_size
        )
        forward_seconds = matmul_seconds + loss / 3
        # More tokens are computed in chunks, each again in the backward pass.
        repeated_seconds = forward_seconds if tokens > LOSS_CHUNK_TOKENS else 0.0
        return PassTime(
            forward_seconds + gather_seconds,
            repeated_seconds + (1 + self._trains_language) * matmul_seconds + loss * 2 / 3 + gather_seconds,
        )

    # --- Vision tower ---------------------------------------------------------------------------------------

    @cached_property
    def vision_tower_time(self) -> PassTime:
        """The whole tower with its mergers on a rank's pictures of a row."""
        row_time = self.tower_time_at(self.layout.tp)
        return row_time * (1 / self.layout.cp)

    def tower_time_at(self, tensor_parallel_size: int) -> PassTime:
        """The tower with its mergers on a row's pictures, on ``tensor_parallel_size`` ranks together."""
        vision_spec = self.spec.vision
        patch_count = self.row_statistics.mean_patches
        if not patch_count:
            return PassTime()

        has_lora = self.config.lora.rank > 0
        patch_embed_seconds = self.matmul_seconds(patch_count, vision_spec.patch_dim, vision_spec.hidden_size)
        activation_seconds = self._tower_activation_seconds(tensor_parallel_size)
        blocks_time = self._tower_blocks_time(tensor_parallel_size, activation_seconds)
        merger_seconds = self._merger_seconds(tensor_parallel_size)

        # A frozen tower has no backward pass, because nothing before it is trained.
        if self.model_config.freeze_vision:
            tower_backward_seconds = 0.0
            merger_backward_seconds = (2 - has_lora) * merger_seconds * (not self.model_config.freeze_merger)
        else:
            if self.config.recompute.vision == "full":
                input_elements = vision_spec.num_layers * patch_count * vision_spec.hidden_size
                copy_seconds = self._input_copy_seconds(input_elements)
                blocks_time = blocks_time.at_least(copy_seconds, copy_seconds)
            tower_backward_seconds = (
                blocks_time.backward
                + patch_embed_seconds * (not has_lora)
                + blocks_time.forward * (self.config.recompute.vision == "full")
                + activation_seconds * 3 / 8 * (self.config.recompute.vision == "activation")
            )
            trains_merger = not (has_lora or self.model_config.freeze_merger)
            merger_backward_seconds = (1 + trains_merger) * merger_seconds
        tower_time = PassTime(
            patch_embed_seconds + blocks_time.forward + merger_seconds,
            tower_backward_seconds + merger_backward_seconds,
        )
        units = patch_count / vision_spec.merge_unit
        for adapters in merger_adapters(self.spec, self.config.lora):
            tower_time += self._adapters_time(adapters, units, tensor_parallel_size)
        return tower_time

    def _tower_blocks_time(self, tensor_parallel_size: int, activation_seconds: float) -> PassTime:
        """All layers of the tower, without recomputation."""
        vision_spec, calibration = self.spec.vision, self.calibration
        patch_count, num_layers = self.row_statistics.mean_patches, vision_spec.num_layers
        matmul_seconds = num_layers * self._tower_matmul_seconds(tensor_parallel_size)
        attention_seconds, window_seconds = self._tower_attention_seconds(tensor_parallel_size)
        elementwise_seconds = num_layers * self.elementwise_seconds(
            calibration.tower_widths * vision_spec.hidden_size * patch_count
        )
        message_bytes = self.bytes_per_element * patch_count * vision_spec.hidden_size
        collective_seconds = num_layers * (
            4 * self.collective_seconds(message_bytes, tensor_parallel_size) / calibration.all_reduce_share
        )

        blocks_time = PassTime(
            matmul_seconds
            + attention_seconds
            + elementwise_seconds / 3
            + window_seconds / 3
            + activation_seconds * 3 / 8
            + collective_seconds,
            (2 - (self.config.lora.rank > 0)) * matmul_seconds
            + 2 * attention_seconds
            + elementwise_seconds * 2 / 3
            + window_seconds * 2 / 3
            + activation_seconds * 5 / 8
            + collective_seconds,
        )
        for layer in range(num_layers):
            adapters = block_adapters(self.spec, self.config.lora, layer)
            blocks_time += self._adapters_time(adapters, patch_count, tensor_parallel_size)
        return blocks_time

    def _tower_matmul_seconds(self, tensor_parallel_size: int) -> float:
        """Seconds of the matrix products of one layer of the tower."""
        vision_spec, patch_count = self.spec.vision, self.row_statistics.mean_patches
        hidden_size, ffn_width = vision_spec.hidden_size, vision_spec.padded_ffn_hidden_size
        gate_factor = 2 if vision_spec.gated_mlp else 1
        attention_widths = 3 * hidden_size / tensor_parallel_size, hidden_size / tensor_parallel_size
        mlp_widths = gate_factor * ffn_width / tensor_parallel_size, ffn_width / tensor_parallel_size
        attention_seconds = self._matmul_pair_seconds(patch_count, hidden_size, *attention_widths)
        return attention_seconds + self._matmul_pair_seconds(patch_count, hidden_size, *mlp_widths)

    def _tower_activation_seconds(self, tensor_parallel_size: int) -> float:
        """Seconds of the activation functions of all layers of the tower."""
        vision_spec = self.spec.vision
        return vision_spec.num_layers * self.elementwise_seconds(
            self.calibration.activation_widths
            * (1 if vision_spec.gated_mlp else 0.6)
            * vision_spec.padded_ffn_hidden_size
            / tensor_parallel_size
            * self.row_statistics.mean_patches
        )

    def _tower_attention_seconds(self, tensor_parallel_size: int) -> tuple[float, float]:
        """Seconds of the layers with full attention, and of those with attention within windows."""
        vision_spec, calibration = self.spec.vision, self.calibration
        full_seconds = (
            4.0
            * vision_spec.hidden_size
            / tensor_parallel_size
            * self.row_statistics.mean_frame_pairs
            / (calibration.tower_attention_tflops * 1e12)
        )
        window_seconds = self.elementwise_seconds(
            calibration.window_widths
            * vision_spec.hidden_size
            / tensor_parallel_size
            * self.row_statistics.mean_patches
        )
        full_layers = sum(vision_spec.is_full_attention(layer) for layer in range(vision_spec.num_layers))
        return full_layers * full_seconds, (vision_spec.num_layers - full_layers) * window_seconds

    def _merger_seconds(self, tensor_parallel_size: int) -> float:
        """Seconds of the forward pass of the merger and of DeepStack's mergers."""
        vision_spec = self.spec.vision
        merger_width = vision_spec.merge_unit * vision_spec.hidden_size
        merger_count = 1 + len(vision_spec.deepstack_layers)
        merged_units = merger_count * self.row_statistics.mean_patches / vision_spec.merge_unit
        return self.matmul_seconds(
            merged_units, merger_width, merger_width / tensor_parallel_size
        ) + self.matmul_seconds(
            merged_units, merger_width / tensor_parallel_size, vision_spec.out_hidden_size
        )

    # --- Between stages and at the end of a step ------------------------------------------------------------

    def stage_message_seconds(self) -> float:
        """Seconds for a hidden state (and DeepStack's levels) to the next stage."""
        if self.layout.pp == 1:
            return 0.0
        hidden_state_count = 1 + len(self.spec.vision.deepstack_layers)
        size = (
            self.bytes_per_element
            * hidden_state_count
            * self.seq_len
            * self.spec.language.hidden_size
            / self._sequence_parallel_size
        )
        rank_stride = self.layout.tp * self.gradient_ranks
        return size / self.network.message_bandwidth(self.calibration, rank_stride)

    def grad_reduce_seconds(self, gradient_bytes: float) -> float:
        """Seconds to reduce float32 gradients of that many bytes over the replicas.

        With the distributed optimizer, it is a reduce-scatter. Without it, it is an all-reduce, which takes
        twice as long.
        """
        collective_count = 1 if self.config.parallel.distributed_optimizer else 2
        return collective_count * self.collective_seconds(gradient_bytes, self.gradient_ranks, self.layout.tp)

    def param_gather_seconds(self, weight_bytes: float) -> float:
        """Seconds to gather updated weights of that many bytes."""
        if not self.config.parallel.distributed_optimizer:
            return 0.0
        return self.collective_seconds(weight_bytes, self.gradient_ranks, self.layout.tp)

    def optimizer_seconds(self, parameter_counts: ParameterCounts, passes: PassTime) -> float:
        """Seconds of clearing and scaling gradients and of AdamW on the GPU.

        Offloaded state is copied to the GPU and back at the same time; the longer one of copies and kernel
        counts. Copies back begin when the gradient norm is known. As many chunks as there are slots may still
        be on their way in the next forward pass, which hides their copies. Copies of as many to the GPU are
        hidden by the last backward pass, which is longer.

        Args:
            passes: time of this GPU's layers for one micro-batch.
        """
        calibration = self.calibration
        offloaded_count = parameter_counts.owned_count * offloaded_fraction(self.config)
        picoseconds_per_parameter = calibration.optimizer_ps
        gradient_picoseconds = calibration.gradient_ps
        if self.config.optimizer.moments_dtype == "bfloat16":
            picoseconds_per_parameter *= BF16_MOMENTS_FACTOR
            # Our kernel scales gradients as it reads them. Clearing is 4 of the 12 bytes of both.
            gradient_picoseconds /= 3
        device_seconds = (
            (parameter_counts.owned_count - offloaded_count) * picoseconds_per_parameter
            + parameter_counts.trained_count * gradient_picoseconds
        ) * 1e-12

        _, host_state_bytes = optimizer_state_bytes(self.config)
        copied_bytes = offloaded_count * host_state_bytes
        bytes_per_second = calibration.host_copy_gb_s * 1e9
        # A tower on every rank runs in the memory in which copies would wait.
        hidden_seconds = (
            0.0
            if self.layout.decoupled
            else min(MAX_STATE_CHUNKS_ON_GPU * STATE_CHUNK_BYTES / bytes_per_second, passes.forward)
        )
        kernel_seconds = offloaded_count * picoseconds_per_parameter * 1e-12
        copy_seconds = max(copied_bytes / bytes_per_second - hidden_seconds, kernel_seconds)
        return device_seconds + copy_seconds + parameter_counts.trained_tensors * calibration.tensor_us * 1e-6


def run_costs(
    config: TrainConfig,
    spec: ModelSpec,
    layout: Layout,
    data_parallel_size: int,
    row_statistics: RowStatistics | None,
    calibration: Calibration | None,
    network: Network | None,
) -> StepCosts:
    """The costs of a run's step, with assumed rows and the rates of an H200 where none are given."""
    row_statistics = row_statistics or make_assumed_rows(spec, config.data.seq_len, config.data.max_patches)
    calibration = calibration or find_calibration()
    return StepCosts(
        config, spec, layout, data_parallel_size, row_statistics, calibration, network or Network()
    )


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
