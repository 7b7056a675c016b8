"""The time of each piece of a step on one GPU: FLOPs and bytes divided by calibrated rates.

A piece is a decoder layer, the vision tower, the embedding, the output layer with the loss, a message between
stages, the reduction of gradients, or the update of the weights. Rows have a fixed length, so decoder layers
compute ``seq_len`` tokens, padding included; the tower computes real patches, and the output layer the tokens
with loss.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from megatron_vl.config import ModelConfig, ParallelConfig, RecomputeConfig, TrainConfig
from megatron_vl.kernels.sizes import DELTA_CHUNK
from megatron_vl.planning.calibration import Calibration
from megatron_vl.planning.memory import Parameters, offloaded, state_bytes
from megatron_vl.planning.rows import RowStatistics
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, key_value_copies

GPUS_OF_A_NODE = 8
DELTA_RATE = 0.12
"""Share of attention's rate that the delta rule's small products reach. With our kernels, 8192 tokens of 32
heads of 128 took 0.79 ms forward on an H200."""
HIDDEN_SHARE, HIDDEN_BYTES = 0.5, 5.4e9
"""Most of the copies of offloaded state that the passes before and after an update hide. On H200, they hid
half of 10 GB, and 5 to 12 GB of 20 to 41. Passes shorter than 0.1 s would hide less."""
NARROW_ELEMENT = 0.57
"""Factor of an update on the GPU with moments in bf16, for each element: on an H200, our kernel takes 4.7 ms
for 10^9 parameters, and Transformer Engine's 8.3 ms."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of a forward and a backward pass; the backward pass includes what it computes again."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: PassTime) -> PassTime:
        return PassTime(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, times: float) -> PassTime:
        return PassTime(self.forward * times, self.backward * times)

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Network:
    """How the GPUs are connected."""

    gpus_per_node: int = GPUS_OF_A_NODE

    def bandwidth(self, c: Calibration, ranks: int, stride: int) -> float:
        """Bytes that leave a GPU in a second in a collective of ``ranks`` ranks ``stride`` apart.

        Between nodes, the ranks of one node share the adapters of the GPUs that lie between them.
        """
        if ranks * stride <= self.gpus_per_node:
            return c.nvlink_gb_s * 1e9
        in_node = max(1, self.gpus_per_node // stride)
        return min(c.nvlink_gb_s, c.network_gb_s * in_node) * 1e9

    def message(self, c: Calibration, stride: int) -> float:
        """Bytes per second of a message to the rank ``stride`` further."""
        return (c.send_gb_s if 2 * stride <= self.gpus_per_node else min(c.send_gb_s, c.network_gb_s)) * 1e9


@dataclass(frozen=True)
class Costs:
    """The times of a run's pieces. ``layout`` counts with its sizes only, not with its split."""

    config: TrainConfig
    spec: ModelSpec
    layout: Layout
    dp: int
    rows: RowStatistics
    calibration: Calibration
    network: Network = Network()

    @cached_property
    def seq_len(self) -> int:
        """Tokens of a row on one rank."""
        return self.config.data.seq_len // self.layout.cp

    @cached_property
    def gradient_ranks(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.layout.cp * self.dp

    @cached_property
    def model(self) -> ModelConfig:
        return self.config.model

    @cached_property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @cached_property
    def recompute(self) -> RecomputeConfig:
        return self.config.recompute

    # --- Rates ----------------------------------------------------------------------------------------------

    def product(self, tokens: float, k: float, n: float) -> float:
        """Seconds of a matrix product [tokens, k] x [k, n]."""
        if not k * n:  # a model without dense layers
            return 0.0
        c = self.calibration
        width = math.sqrt(k * n)
        rate = c.product_tflops * 1e12 * width / (width + c.product_width)
        return 2 * tokens * k * n / rate

    def moved(self, elements: float) -> float:
        """Seconds to move that many bf16 numbers."""
        return self.element * elements / (self.calibration.memory_tb_s * 1e12)

    def collective(self, size: float, ranks: int, stride: int = 1) -> float:
        """Seconds of an all-gather or a reduce-scatter of ``size`` bytes in all."""
        if ranks == 1:
            return 0.0
        bandwidth = self.network.bandwidth(self.calibration, ranks, stride)
        return size * (ranks - 1) / ranks / bandwidth + self.calibration.collective_s

    @cached_property
    def element(self) -> int:
        return 2 if self.config.dtype == "bfloat16" else 4

    @cached_property
    def _shared(self) -> int:
        return self.layout.tp if self.parallel.sequence_parallel else 1

    # --- Language model -------------------------------------------------------------------------------------

    @cached_property
    def _layers(self) -> dict[tuple[bool, bool], PassTime]:
        """The times of a decoder layer: (with experts, with linear attention)."""
        both = (False, True)
        return {(e, linear): self._decoder_layer(e, linear) for e in both for linear in both}

    def decoder_layer(self, layer: int) -> PassTime:
        """A decoder layer on one row."""
        m = self.spec.language
        return self._layers[m.has_experts(layer), m.is_linear(layer)]

    def decoder_layers(self, layers: range) -> PassTime:
        """Consecutive decoder layers on one row."""
        time = PassTime()
        for kind, before in self._kinds_before.items():
            if count := before[layers.stop] - before[layers.start]:
                time += self._layers[kind] * count
        return time

    @cached_property
    def _kinds_before(self) -> dict[tuple[bool, bool], list[int]]:
        """How many layers of each kind are before each layer, and how many in all."""
        m = self.spec.language
        kinds = [(m.has_experts(layer), m.is_linear(layer)) for layer in range(m.num_layers)]
        return {kind: [0, *itertools.accumulate(own == kind for own in kinds)] for kind in self._layers}

    def _decoder_layer(self, experts: bool, linear: bool) -> PassTime:
        m, c, tp = self.spec.language, self.calibration, self.layout.tp
        if (experts and m.moe is None) or (linear and m.linear_attention is None):
            return PassTime()
        tokens, h = self.seq_len, m.hidden_size
        heads, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        again = self.recompute.language
        modules = set(self.recompute.language_modules) if again == "selective" else set()

        if linear:
            projections, attention = self._linear_attention()
        else:
            queries = heads * (2 if m.output_gate else 1)
            projections = self.product(tokens, h, (queries + 2 * kv) / tp)
            projections += self.product(tokens, heads / tp, h)
            attention = self._attention(heads / tp / self.layout.cp)
        rest = self.moved(c.decoder_widths * h * tokens / self._shared)
        mlp, activation = self._experts() if experts else self._mlp(tokens, m.ffn_hidden_size)
        exchange = self._tensor_collectives(tokens * h)
        if linear:
            exchange += self._state_exchange()
        else:
            exchange += self._head_exchange(heads, m.num_kv_heads, m.head_dim)

        forward = projections + attention + rest / 3 + mlp + 3 / 8 * activation + exchange
        weights = 1 + (not self.model.freeze_language)
        backward = (
            weights * (projections + mlp) + 2.5 * attention + rest * 2 / 3 + 5 / 8 * activation + exchange
        )
        if experts and m.moe is not None:
            dispatch = self._dispatch(tokens)
            forward, backward = forward + dispatch, backward + dispatch
            host = c.expert_host_s if self.layout.ep > 1 else c.expert_host_alone_s
            forward, backward = max(forward, host[0]), max(backward, host[1])
        if again == "full":
            return PassTime(forward, backward + forward)
        backward += attention * ("core_attn" in modules) + rest / 6 * ("layernorm" in modules)
        backward += (mlp + 3 / 8 * activation) * ("mlp" in modules)
        backward += 3 / 8 * activation * ("activation" in modules)
        return PassTime(forward, backward)

    def _attention(self, heads: float) -> float:
        """Forward pass of causal attention; the backward pass takes 2.5 times as long."""
        c, rows = self.calibration, self.rows
        if not rows.tokens:
            return 0.0
        length = rows.token_pairs / rows.tokens
        rate = c.attention_tflops * 1e12 * length / (length + c.attention_length)
        return 2.0 * heads * rows.token_pairs / rate

    def _linear_attention(self) -> tuple[float, float]:
        """The projections of linear attention, and the forward pass of what lies between them.

        The chunks of the delta rule compute more than the recurrence: each token multiplies with the tokens
        of its chunk. Convolution, gates and norm move their inputs and outputs.
        """
        m, c, tp = self.spec.language, self.calibration, self.layout.tp
        a = m.linear_attention
        assert a is not None
        tokens, values = self.seq_len, a.value_heads * a.value_dim
        inputs = a.conv_channels + values + 2 * a.value_heads
        projections = self.product(tokens, m.hidden_size, inputs / tp)
        projections += self.product(tokens, values / tp, m.hidden_size)

        chunk = DELTA_CHUNK * (3 * a.key_dim + 2 * a.value_dim) + 3 * a.key_dim * a.value_dim
        rule = 2.0 * tokens * a.value_heads / tp * chunk / (c.attention_tflops * 1e12 * DELTA_RATE)
        return projections, rule + self.moved((2 * a.conv_channels + 3 * values) / tp * tokens)

    def _mlp(self, tokens: float, ffn: int) -> tuple[float, float]:
        """The products of a gated MLP, and its activation in both passes."""
        h, tp = self.spec.language.hidden_size, self.layout.tp
        products = self.product(tokens, h, 2 * ffn / tp) + self.product(tokens, ffn / tp, h)
        return products, self.moved(self.calibration.activation_widths * ffn / tp * tokens)

    def _experts(self) -> tuple[float, float]:
        """The same for router and experts, evenly loaded."""
        m, c = self.spec.language, self.calibration
        moe = m.moe
        assert moe is not None
        layout = self.layout
        tokens = self.seq_len / self._shared
        # Ranks that share experts also share the rows: each expert gets those of all of them.
        rows = tokens * moe.top_k * layout.etp
        each = tokens * moe.top_k * layout.ep * layout.etp / moe.num_experts
        rate = c.expert_tflops * 1e12 * each / (each + c.expert_rows)
        products = 2 * rows * 3 * m.hidden_size * moe.ffn_hidden_size / layout.etp / rate
        products += self.product(tokens, m.hidden_size, moe.num_experts)
        if moe.shared_ffn_hidden_size:
            products += self._mlp(self.seq_len, moe.shared_ffn_hidden_size)[0]
        return products, self.moved(c.activation_widths * moe.ffn_hidden_size / layout.etp * rows)

    def _dispatch(self, seq_len: int) -> float:
        """Tokens to their experts' ranks and back, in one pass."""
        m, c = self.spec.language, self.calibration
        moe = m.moe
        assert moe is not None
        ep, etp = self.layout.ep, self.layout.etp
        tokens = seq_len / self._shared * m.hidden_size
        copies = ranks_of_a_token(moe.num_experts, moe.top_k, ep)
        seconds = self.moved(tokens * (18 + 4 * copies))
        if ep > 1:
            leaving = self.element * tokens * copies * (ep - 1) / ep
            bandwidth = self.network.bandwidth(c, ep, etp) * c.exchange_share
            seconds += 2 * (leaving / bandwidth + c.collective_s)
        return seconds + 2 * self.collective(self.element * tokens * etp, etp)

    def _tensor_collectives(self, elements: float) -> float:
        """The four all-gathers and reduce-scatters (or two all-reduces) of a layer in one pass."""
        return 4 * self.collective(self.element * elements, self.layout.tp)

    def _head_exchange(self, width: int, key_value_heads: int, head_dim: int) -> float:
        """Exchanging heads before and after attention, in one pass, under context parallelism.

        Args:
            width: elements of all query heads of a token.
        """
        tp, cp = self.layout.tp, self.layout.cp
        if cp == 1:
            return 0.0
        local = max(1, key_value_heads // tp)
        keys = local * key_value_copies(local, cp) * head_dim
        size = self.element * self.seq_len * (2 * width / tp + 2 * keys)
        bandwidth = self.network.bandwidth(self.calibration, cp, tp) * self.calibration.exchange_share
        return size * (cp - 1) / cp / bandwidth + 2 * self.calibration.collective_s

    def _state_exchange(self) -> float:
        """Two all-gathers of linear attention in one pass, under context parallelism.

        One gathers states and matrices, as if a sequence crossed a whole shard, the other the last inputs of
        the convolution.
        """
        a, tp, cp = self.spec.language.linear_attention, self.layout.tp, self.layout.cp
        assert a is not None
        states = 4 * a.state_exchange_size
        inputs = self.element * (a.conv_width - 1) * a.conv_channels
        return sum(self.collective(cp * size / tp, cp, tp) for size in (states, inputs))

    def embedding(self) -> PassTime:
        """Looking up tokens, placing features; the gradient of a table is added in float32."""
        m = self.spec.language
        tokens = self.moved(4 * m.hidden_size * self.seq_len)
        table = 0.0 if self.model.freeze_language else self._float_gradient()
        return PassTime(tokens, tokens + table)

    def _float_gradient(self) -> float:
        """Adding a gradient of the vocabulary's size in float32."""
        m = self.spec.language
        return 10.0 * m.hidden_size * m.vocab_size / self.layout.tp / (self.calibration.memory_tb_s * 1e12)

    def head(self) -> PassTime:
        """The final norm, the output layer and the loss."""
        m, c, tp = self.spec.language, self.calibration, self.layout.tp
        tokens = self.rows.head_tokens(self.seq_len)
        products = self.product(tokens, m.hidden_size, m.vocab_size / tp)
        loss = self.moved(c.logits_widths * m.vocab_size / tp * tokens)
        gather = self.collective(self.element * self.seq_len * m.hidden_size, tp)
        weights = 1 + (not self.model.freeze_language)
        gradient = 0.0 if self.model.freeze_language else self._float_gradient()
        return PassTime(products + loss / 3 + gather, weights * products + loss * 2 / 3 + gradient + gather)

    # --- Vision tower ---------------------------------------------------------------------------------------

    @cached_property
    def _tower(self) -> PassTime:
        return self.tower_alone(self.layout.tp) * (1 / self.layout.cp)

    def tower(self) -> PassTime:
        """The whole tower with its mergers on a rank's pictures of a row."""
        return self._tower

    def tower_alone(self, tp: int) -> PassTime:
        """The same on ``tp`` ranks together."""
        v, c, rows = self.spec.vision, self.calibration, self.rows
        patches, h, f = rows.patches, v.hidden_size, v.padded_ffn_hidden_size
        if not patches:
            return PassTime()

        gates = 2 if v.gated_mlp else 1
        products = self.product(patches, h, 3 * h / tp) + self.product(patches, h / tp, h)
        products += self.product(patches, h, gates * f / tp) + self.product(patches, f / tp, h)
        rest = self.moved(c.tower_widths * h * patches)
        activation = self.moved(c.activation_widths * (1 if v.gated_mlp else 0.6) * f / tp * patches)
        attention = 4.0 * h / tp * rows.frame_pairs / (c.tower_attention_tflops * 1e12)
        window = self.moved(c.window_widths * h / tp * patches)
        full = sum(v.is_full_attention(layer) for layer in range(v.num_layers))
        exchange = 4 * self.collective(self.element * patches * h, tp) / c.all_reduce_share

        linear = v.num_layers * products
        fixed = v.num_layers * rest
        active = v.num_layers * activation
        attend = full * attention
        windows = (v.num_layers - full) * window
        talk = v.num_layers * exchange
        embed = self.product(patches, v.patch_dim, h)
        width = v.merge_unit * h
        units = (1 + len(v.deepstack_layers)) * patches / v.merge_unit
        merge = self.product(units, width, width / tp) + self.product(units, width / tp, v.out_hidden_size)

        blocks = PassTime(
            linear + attend + fixed / 3 + windows / 3 + active * 3 / 8 + talk,
            2 * linear + 2 * attend + fixed * 2 / 3 + windows * 2 / 3 + active * 5 / 8 + talk,
        )
        if self.model.freeze_vision:
            back = 0.0
            merge_back = 2 * merge * (not self.model.freeze_merger)
        else:
            back = blocks.backward + embed
            back += blocks.forward * (self.recompute.vision == "full")
            back += active * 3 / 8 * (self.recompute.vision == "activation")
            merge_back = (1 + (not self.model.freeze_merger)) * merge
        return PassTime(embed + blocks.forward + merge, back + merge_back)

    # --- Between stages and at the end of a step ------------------------------------------------------------

    def message(self) -> float:
        """Seconds for a hidden state (and DeepStack's levels) to the next stage."""
        if self.layout.pp == 1:
            return 0.0
        parts = 1 + len(self.spec.vision.deepstack_layers)
        size = self.element * parts * self.seq_len * self.spec.language.hidden_size / self._shared
        stride = self.layout.tp * self.gradient_ranks
        return size / self.network.message(self.calibration, stride)

    def reduction(self, gradients: float) -> float:
        """Seconds to reduce float32 gradients of that many bytes over the replicas.

        Half of it is the distributed optimizer's: the other half of an all-reduce gathers the weights.
        """
        times = 1 if self.parallel.distributed_optimizer else 2
        return times * self.collective(gradients, self.gradient_ranks, self.layout.tp)

    def gathering(self, weights: float) -> float:
        """Seconds to gather updated weights of that many bytes."""
        if not self.parallel.distributed_optimizer:
            return 0.0
        return self.collective(weights, self.gradient_ranks, self.layout.tp)

    def update(self, parameters: Parameters) -> float:
        """Seconds of clearing, scaling and clipping gradients and of AdamW on the GPU.

        Offloaded state is copied to the GPU and back, both ways at once, which takes longer than the kernel.
        The last backward and the next forward pass hide some of them.
        """
        c = self.calibration
        away = parameters.owned * offloaded(self.config)
        element_ps = c.optimizer_ps
        if self.config.optimizer.moments_dtype == "bfloat16":
            element_ps *= NARROW_ELEMENT
        on_device = ((parameters.owned - away) * element_ps + parameters.trained * c.gradient_ps) * 1e-12

        _, state = state_bytes(self.config)
        hidden = min(HIDDEN_SHARE * away * state, HIDDEN_BYTES)
        copies = (away * state - hidden) / (c.host_copy_gb_s * 1e9)
        return on_device + copies + parameters.tensors * c.tensor_us * 1e-6


def ranks_of_a_token(experts: int, top_k: int, ep: int) -> float:
    """Mean number of expert-parallel ranks that a token's experts, chosen evenly, are on."""
    if ep == 1:
        return 1.0
    missed = 1.0
    for i in range(top_k):
        missed *= max(0, experts - experts // ep - i) / (experts - i)
    return ep * (1 - missed)
