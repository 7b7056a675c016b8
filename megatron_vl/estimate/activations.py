"""Estimates the activations of one micro-batch on one GPU: what modules keep for their backward pass.

For a token (or patch) of a layer of width ``h`` and FFN width ``f``, they are the inputs and outputs of both
norms (4 h), attention (its input after RoPE, and its output), and linear and activation of the MLP (3 f with
a gate, 2 f without one; ``top_k`` times that for experts).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from megatron_vl.config import CALLS_WITHOUT_ACTIVATIONS, FEATURE_ROWS_ON_DEVICE, TrainConfig
from megatron_vl.estimate.parameters import (
    BlockKind,
    LayerKind,
    MatrixAdapter,
    block_kinds,
    bytes_per_element,
    layer_kinds,
    mean_ranks_per_token,
    merger_adapters,
)
from megatron_vl.kernels.sizes import DELTA_CHUNK, LOSS_CHUNK_TOKENS, TOWER_HEAD_DIMS
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.layout import Layout, key_value_copies
from megatron_vl.spec.lora import saved_modules, trains_own_matrices


@dataclass(frozen=True)
class ActivationBytes:
    kept_bytes: float = 0.0
    """Bytes that are kept until the backward pass of the micro-batch."""
    transient_bytes: float = 0.0
    """Bytes that are needed while a layer is recomputed, or while a delta rule runs backward."""
    host_bytes: float = 0.0
    """Bytes in host memory until the backward pass of the micro-batch."""


@dataclass(frozen=True)
class ActivationEstimator:
    config: TrainConfig
    """In a run with LoRA, the parts without adapters are frozen."""
    spec: ModelSpec
    layout: Layout
    patch_count: int
    loss_tokens: int = 0
    micro_batches: int = 1

    @functools.cached_property
    def seq_len(self) -> int:
        """Tokens of a row on one rank."""
        return self.config.data.seq_len // self.layout.cp

    @functools.cached_property
    def bytes_per_element(self) -> int:
        return bytes_per_element(self.config)

    @functools.cached_property
    def replicated_tower(self) -> ActivationEstimator:
        """The estimator of a tower on every rank, which encodes an even share of the images of a step."""
        patches_per_rank = -(-self.micro_batches * self.patch_count // self.layout.replica_ranks)
        layout = dataclasses.replace(self.layout, tp=1)
        return dataclasses.replace(self, layout=layout, patch_count=patches_per_rank)

    def logits_bytes(self, pipeline_stage: int) -> float:
        """Bytes of the logits that a stage computes at once, held twice; only the last stage has any."""
        if pipeline_stage < self.layout.pp - 1:
            return 0.0
        tokens = min(-(-self.loss_tokens // self.layout.cp), LOSS_CHUNK_TOKENS)
        # Those of multi-token prediction come on top, unless they are computed in chunks.
        copies = 4.0 if self.spec.language.has_mtp and tokens < LOSS_CHUNK_TOKENS else 2.0
        return copies * self.bytes_per_element * tokens * self.spec.language.vocab_size / self.layout.tp

    @property
    def _sequence_parallel_size(self) -> int:
        """Number of ranks that share the tokens between the linears of a decoder layer."""
        return self.layout.tp if self.config.parallel.sequence_parallel else 1

    def chunk_bytes(self, pipeline_stage: int, chunk_index: int) -> ActivationBytes:
        layout, language_spec = self.layout, self.spec.language
        is_first_chunk = pipeline_stage + chunk_index == 0
        is_last_chunk = pipeline_stage == layout.pp - 1 and chunk_index == layout.vpp - 1
        bytes_per_feature = self.bytes_per_element * self.seq_len
        hidden_bytes = bytes_per_feature * language_spec.hidden_size / self._sequence_parallel_size
        chunk_layers = layout.chunk_layers(pipeline_stage, chunk_index)
        kinds_of_layers = self._kinds[chunk_layers.start : chunk_layers.stop]

        # The input: the stage's input with room for levels of DeepStack, or the embedding and its copy
        # with features.
        deepstack_levels = len(self.spec.vision.deepstack_layers)
        boundary_bytes = (
            hidden_bytes * (1 + deepstack_levels)
            + (hidden_bytes * self._sequence_parallel_size if is_first_chunk else 0.0)
            + (2 * hidden_bytes if is_last_chunk else 0.0)
        )
        if language_spec.has_mtp:
            boundary_bytes += hidden_bytes  # the embeddings that messages carry
        if language_spec.has_mtp and is_last_chunk:
            boundary_bytes += 6 * hidden_bytes  # both norms and what they normalise, side by side
            mtp_kind = LayerKind(language_spec.moe is not None, False)
            mtp_bytes = [bytes_per_feature * self._decoder_layer_elements(mtp_kind)]
        else:
            mtp_bytes = []
        has_linear_attention = any(kind.has_linear_attention for kind in kinds_of_layers)
        delta_rule_bytes = self._delta_rule_bytes() if has_linear_attention else 0.0

        layer_bytes = [bytes_per_feature * self._elements_by_layer_kind[kind] for kind in kinds_of_layers]
        if self.config.recompute.language != "full":
            return ActivationBytes(sum(layer_bytes + mtp_bytes) + boundary_bytes, delta_rule_bytes)

        # The backward pass of the MLP frees its activations before that of the delta rule begins.
        for layer_index, kind in enumerate(kinds_of_layers):
            if kind.has_linear_attention:
                bytes_of_mlp = bytes_per_feature * self._mlp_elements(kind)
                layer_bytes[layer_index] += max(0.0, delta_rule_bytes - bytes_of_mlp)
        levels_in = max(0, deepstack_levels - chunk_layers.start)
        if self.config.recompute.offload_inputs and levels_in:
            # The levels are in the first layer's input and output, and in their gradients. Where inputs stay
            # on the device, most are free by then. Measured with the 8B at 1,048,576 tokens, cp 8: 114.0 GiB;
            # 107.5 with the levels counted once, 114.5 so.
            boundary_bytes += hidden_bytes * (2 * (levels_in + levels_in - 1) - deepstack_levels)
        kept_bytes = sum(bytes_per_feature * self._kept_elements(kind) for kind in kinds_of_layers)
        return self._recomputed_layers(layer_bytes + mtp_bytes, hidden_bytes, boundary_bytes + kept_bytes)

    def _kept_elements(self, kind: LayerKind) -> float:
        """Elements of one token that ``recompute.keep`` adds to the input of a layer."""
        language_spec, kept = self.spec.language, self.config.recompute.keep
        elements = 0.0
        if "attention" in kept and not kind.has_linear_attention:
            output_and_log_sum_exp = language_spec.head_dim + 4 / self.bytes_per_element
            elements += language_spec.num_heads * output_and_log_sum_exp / self.layout.tp
        if "experts" in kept and kind.has_experts and self._experts_gather:
            assert language_spec.moe is not None
            elements += (
                2 * language_spec.moe.top_k * language_spec.moe.ffn_hidden_size / self._sequence_parallel_size
            )
        return elements

    @property
    def _experts_gather(self) -> bool:
        """Whether experts keep tokens and no copies of them (:mod:`megatron_vl.models.moe.experts`)."""
        return self.layout.etp == 1

    def _recomputed_layers(
        self, layer_bytes: list[float], input_bytes: float, other_bytes: float
    ) -> ActivationBytes:
        """Layers that keep their inputs, and need ``layer_bytes`` while one is recomputed.

        If inputs are in host memory, those of the recomputed layer and of the next one are on the device.
        """
        all_inputs, largest = len(layer_bytes) * input_bytes, max(layer_bytes, default=0.0)
        if not self.config.recompute.offload_inputs:
            return ActivationBytes(all_inputs + other_bytes, largest)
        return ActivationBytes(other_bytes, largest + min(2, len(layer_bytes)) * input_bytes, all_inputs)

    @functools.cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return layer_kinds(self.spec, self.config.lora)

    @functools.cached_property
    def _elements_by_layer_kind(self) -> dict[LayerKind, float]:
        return {kind: self._decoder_layer_elements(kind) for kind in set(self._kinds)}

    def _decoder_layer_elements(self, kind: LayerKind) -> float:
        """Elements of one token; log-sum-exp and router values are converted to the elements' size."""
        recomputed_modules = self.config.recompute.selected_modules
        attention_elements = (
            self._linear_attention_elements(kind)
            if kind.has_linear_attention
            else self._attention_elements(kind)
        )
        attention_elements += self._adapter_elements(kind.adapters, "self_attention.")
        norm_tensors = 2 if "layernorm" in recomputed_modules else 4
        norm_elements = norm_tensors * self.spec.language.hidden_size / self._sequence_parallel_size
        if "mlp" in recomputed_modules:
            return norm_elements + attention_elements

        mlp_elements = self._mlp_elements(kind) + self._adapter_elements(kind.adapters, "mlp.")
        return norm_elements + attention_elements + mlp_elements

    def _mlp_elements(self, kind: LayerKind) -> float:
        if kind.has_experts:
            return self._expert_elements(kind)
        kept_widths = 2 + self._keeps_activation(kind.adapters, "mlp.linear_fc2")
        return kept_widths * self.spec.language.ffn_hidden_size / self.layout.tp

    def _trains(self, part: str) -> bool:
        return trains_own_matrices(self.config.model, self.config.lora, part)

    def _keeps_input(self, adapters: tuple[MatrixAdapter, ...], matrix_name: str, is_trained: bool) -> bool:
        """Whether autograd keeps the input of a matrix, for the gradient of the matrix or of its adapter.

        With dropout, the adapter keeps a copy instead (:meth:`_adapter_elements`).
        """
        return is_trained or (
            not self.config.lora.dropout and any(adapter.matrix_name == matrix_name for adapter in adapters)
        )

    def _keeps_activation(self, adapters: tuple[MatrixAdapter, ...], matrix_name: str) -> bool:
        """Whether a decoder layer keeps the output of an MLP's activation, the input of ``matrix_name``."""
        keeps_input = self._keeps_input(adapters, matrix_name, self._trains("language"))
        return keeps_input and "activation" not in self.config.recompute.selected_modules

    def _adapter_elements(
        self, adapters: tuple[MatrixAdapter, ...], prefix: str = "", *, is_language: bool = True
    ) -> float:
        """Elements of one token that the adapters of matrices with this prefix keep.

        They are the input of B, and what dropout leaves and its mask. Ranks that cut a matrix by rows have
        the input of B for all tokens of the row.
        """
        sequence_ranks = self._sequence_parallel_size if is_language else 1
        dropout_widths = (1 + 1 / self.bytes_per_element) * bool(self.config.lora.dropout)
        elements = 0.0
        for adapter in [each for each in adapters if each.matrix_name.startswith(prefix)]:
            if adapter.is_expert and (moe_spec := self.spec.language.moe) is not None:
                elements += moe_spec.top_k * self.layout.etp * adapter.rank_sum / sequence_ranks
            else:
                input_ranks = self.layout.tp if adapter.is_row_parallel else sequence_ranks
                elements += adapter.rank_sum / (sequence_ranks if adapter.is_row_parallel else 1)
                elements += dropout_widths * adapter.columns / input_ranks
        return elements

    def _attention_elements(self, kind: LayerKind) -> float:
        language_spec, tensor_parallel_size = self.spec.language, self.layout.tp
        # A rank holds whole key/value heads; with more ranks than heads, the heads are copied.
        query_width = language_spec.num_heads * language_spec.head_dim / tensor_parallel_size
        key_value_width = max(language_spec.num_kv_heads / tensor_parallel_size, 1.0) * language_spec.head_dim
        exchanged = gate_elements = 0.0
        # The norms of queries and keys keep the fused output.
        norm_inputs = (query_width + 2 * key_value_width) * language_spec.qk_norm
        if self.layout.cp > 1:
            key_value_heads = max(1, language_spec.num_kv_heads // tensor_parallel_size)
            key_value_width *= key_value_copies(key_value_heads, self.layout.head_ranks)
            key_value_width *= self.layout.key_ranks
            exchanged = query_width  # the output of attention is kept before and after the exchange
        if language_spec.output_gate:
            is_trained = self._trains("language")
            keeps_output = self._keeps_input(kind.adapters, "self_attention.linear_proj", is_trained)
            gate_elements = query_width * (1 + keeps_output + 4 / self.bytes_per_element)
        log_sum_exp = language_spec.num_heads * 4 / self.bytes_per_element / tensor_parallel_size
        return 2 * query_width + 2 * key_value_width + norm_inputs + exchanged + log_sum_exp + gate_elements

    def _linear_attention_elements(self, kind: LayerKind) -> float:
        if (linear_attention := self.spec.language.linear_attention) is None:
            return 0.0
        values = linear_attention.value_heads * linear_attention.value_dim
        projected_elements = linear_attention.conv_channels + values + 2 * linear_attention.value_heads
        core_elements = (
            linear_attention.conv_channels
            + values
            + linear_attention.value_heads * (1 + 4 / self.bytes_per_element + DELTA_CHUNK)
            + linear_attention.key_heads * 8 / self.bytes_per_element
        )
        if self.layout.cp > 1:  # a state and a matrix of each value head
            state_bytes = 4 * linear_attention.state_exchange_size
            core_elements += state_bytes / (self.bytes_per_element * self.seq_len)
        keeps_output = self._keeps_input(kind.adapters, "self_attention.out_proj", self._trains("language"))
        return (
            projected_elements
            + values * keeps_output
            + core_elements * ("core_attn" not in self.config.recompute.selected_modules)
        ) / self.layout.tp

    def _delta_rule_bytes(self) -> float:
        """Bytes that exist only during the backward pass of a delta rule.

        They are the states of all chunks in both directions, products that are computed again, and the states
        and matrices that a rank receives from all ranks that share its rows.
        """
        linear_attention = self.spec.language.linear_attention
        assert linear_attention is not None
        chunk_state_elements = 2 * linear_attention.key_dim * linear_attention.value_dim / DELTA_CHUNK
        token_elements = linear_attention.value_heads * (
            chunk_state_elements + 2 * linear_attention.key_dim + 4 * linear_attention.value_dim
        )
        rank_count = self.layout.cp if self.layout.cp > 1 else 0
        received_bytes = 4 * rank_count * linear_attention.state_exchange_size
        return (self.bytes_per_element * self.seq_len * token_elements + received_bytes) / self.layout.tp

    def _expert_elements(self, kind: LayerKind) -> float:
        """Elements of one token in a layer of experts.

        They are the router's logits, probabilities and map in float32, and the inputs of the experts and of
        their activation. A token becomes ``top_k`` rows. With an even load, a rank's experts process the rows
        of its own tokens, times the number of ranks that share the experts' matrices. Experts that gather
        keep what came from other ranks once a rank, without other ranks nothing but the norm's output.
        """
        hidden_size, moe_spec = self.spec.language.hidden_size, self.spec.language.moe
        assert moe_spec is not None
        keeps_input = self._keeps_input(kind.adapters, "mlp.experts.linear_fc1", self._trains("language"))
        input_rows = float(moe_spec.top_k * self.layout.etp)
        keeps_activation = self._keeps_activation(kind.adapters, "mlp.experts.linear_fc2")
        if self._experts_gather:
            ranks = self.layout.ep
            input_rows = mean_ranks_per_token(moe_spec.num_experts, moe_spec.top_k, ranks) * (ranks > 1)
            keeps_activation = keeps_activation and bool(kind.adapters)
        activation_elements = moe_spec.top_k * (2 + keeps_activation) * moe_spec.ffn_hidden_size
        expert_elements = keeps_input * input_rows * hidden_size + activation_elements
        shared_expert_elements = 0.0
        if moe_spec.shared_ffn_hidden_size:
            kept_widths = 2 + self._keeps_activation(kind.adapters, "mlp.shared_experts.linear_fc2")
            shared_expert_elements = kept_widths * moe_spec.shared_ffn_hidden_size + hidden_size
        return (
            expert_elements + shared_expert_elements + 3 * moe_spec.num_experts * 4 / self.bytes_per_element
        ) / self._sequence_parallel_size

    def vision_tower_bytes(self) -> ActivationBytes:
        """The activations of the tower for one row's patches. The tower has no sequence parallelism."""
        vision_spec, model_config = self.spec.vision, self.config.model
        bytes_per_feature = self.bytes_per_element * self.patch_count
        kinds = block_kinds(self.spec, self.config.lora)
        bytes_by_kind = {kind: bytes_per_feature * self._vision_layer_elements(kind) for kind in set(kinds)}
        layer_bytes = [bytes_by_kind[kind] for kind in kinds]

        # Pixels are kept as float32 and twice as patches, for the gradient of the patch embedding.
        pixel_bytes = self.patch_count * vision_spec.patch_dim * (2 + 2 * self.bytes_per_element)
        merger_bytes = bytes_per_feature * self._merger_elements()
        if model_config.freeze_vision:
            return ActivationBytes(
                0.0 if model_config.freeze_merger else merger_bytes, max(layer_bytes) + pixel_bytes
            )
        trains_patch_embed = self._trains("vision") or "model.visual.patch_embed" in self._whole_modules
        kept_bytes = merger_bytes + pixel_bytes * trains_patch_embed
        if self.config.recompute.vision == "full":
            return self._recomputed_layers(
                layer_bytes, bytes_per_feature * vision_spec.hidden_size, kept_bytes
            )
        return ActivationBytes(sum(layer_bytes) + kept_bytes)

    @property
    def _whole_modules(self) -> set[str]:
        """The released names of the modules that are trained whole beside adapters."""
        return set(saved_modules(self.spec, self.config.lora).values())

    def _merger_elements(self) -> float:
        vision_spec = self.spec.vision
        trains_merger = not self.config.lora.rank or "model.visual.merger" in self._whole_modules
        keeps_norm_input = trains_merger or not self.config.model.freeze_vision
        elements = 0.0
        for adapters in merger_adapters(self.spec, self.config.lora):
            keeps_activation = self._keeps_input(adapters, "linear_fc2", trains_merger)
            widths = 1 + keeps_norm_input + (1 + keeps_activation) / self.layout.tp
            elements += vision_spec.hidden_size * widths
            adapter_elements = self._adapter_elements(adapters, is_language=False)
            elements += (vision_spec.out_hidden_size + adapter_elements) / vision_spec.merge_unit
        return elements

    def decoupled_tower_bytes(
        self, pipeline_bytes: float, placed_rows: int, row_patches: int
    ) -> tuple[float, float]:
        """Bytes of a tower that every rank holds, for the rank's own share of a step's patches.

        The tower runs while the activations of the pipeline do not exist, and may use their memory.

        Args:
            pipeline_bytes: bytes of the pipeline's activations.
            placed_rows: number of rows of ``row_patches`` patches each whose features and gradients this
                stage holds.

        Returns:
            (bytes on the GPU, bytes in host memory).
        """
        kept_bytes, encode_bytes, backward_bytes = self._decoupled_parts
        vision_spec, model_config = self.spec.vision, self.config.model
        is_frozen = model_config.freeze_vision and model_config.freeze_merger
        levels = 1 + len(vision_spec.deepstack_layers)
        patch_bytes = self.bytes_per_element * levels * vision_spec.out_hidden_size / vision_spec.merge_unit
        local_feature_bytes, row_feature_bytes = patch_bytes * self.patch_count, patch_bytes * row_patches
        host_rows = max(0, placed_rows - FEATURE_ROWS_ON_DEVICE)
        # Of the rows in host memory, one is in use and the next one is being fetched.
        rows_on_device = min(placed_rows, FEATURE_ROWS_ON_DEVICE) + min(2, host_rows)
        placed_bytes = row_feature_bytes * rows_on_device * (1 if is_frozen else 2)
        # Kept activations exist during the pipeline's passes and the first pass of other images. Their own
        # backward pass comes first and frees them. All rows' features are on the device when ranks exchange
        # them.
        return max(
            placed_bytes + kept_bytes,
            placed_bytes + local_feature_bytes + backward_bytes - pipeline_bytes,
            placed_bytes + kept_bytes + local_feature_bytes + encode_bytes - pipeline_bytes,
            row_feature_bytes * placed_rows + kept_bytes + local_feature_bytes - pipeline_bytes,
        ), row_feature_bytes * host_rows

    @functools.cached_property
    def _decoupled_parts(self) -> tuple[float, float, float]:
        """Bytes of a decoupled tower that are kept, and at the peaks of its first and its second passes."""
        model_config, patches_a_call = self.config.model, self.config.vision.patches_a_call
        frozen_model = dataclasses.replace(model_config, freeze_vision=True, freeze_merger=True)
        frozen_config = dataclasses.replace(self.config, model=frozen_model)

        def peak(patch_count: int, config: TrainConfig) -> float:
            patch_count = min(self.patch_count, patch_count)
            tower = dataclasses.replace(self, config=config, patch_count=patch_count).vision_tower_bytes()
            return tower.kept_bytes + tower.transient_bytes

        encode_bytes = peak(CALLS_WITHOUT_ACTIVATIONS * patches_a_call, frozen_config)
        if model_config.freeze_vision and model_config.freeze_merger:
            return 0.0, encode_bytes, 0.0
        # Mergers above frozen blocks keep the activations of all patches.
        kept_patches = self.patch_count if model_config.freeze_vision else 0
        kept_bytes = dataclasses.replace(self, patch_count=kept_patches).vision_tower_bytes().kept_bytes
        return kept_bytes, encode_bytes, peak(patches_a_call, self.config)

    def _vision_layer_elements(self, kind: BlockKind) -> float:
        vision_spec = self.spec.vision
        # As megatron_vl.models.attention.choose_backend says for GPUs. That module takes seconds to import.
        is_auto = self.config.model.attention == "auto"
        takes_kernels = is_auto and self.bytes_per_element == 2 and vision_spec.head_dim in TOWER_HEAD_DIMS
        if is_auto and not kind.has_full_attention:
            # One kernel from the fused QKV output to the attention's output.
            attention_elements = 4.0 * vision_spec.hidden_size
        else:
            # Our kernels keep rotated copies and the output. Others keep v, or all of the fused output, too.
            kept_widths = 4.0 if takes_kernels else 6.0
            log_sum_exp = vision_spec.num_heads * 4 / self.bytes_per_element
            attention_elements = kept_widths * vision_spec.hidden_size + log_sum_exp
        keeps_activation = self.config.recompute.vision != "activation" and self._keeps_input(
            kind.adapters, "mlp.linear_fc2", self._trains("vision")
        )
        mlp_matrices = (2 if vision_spec.gated_mlp else 1) + keeps_activation
        return (
            4 * vision_spec.hidden_size
            + (attention_elements + mlp_matrices * vision_spec.padded_ffn_hidden_size) / self.layout.tp
            + self._adapter_elements(kind.adapters, is_language=False)
        )

    def row_bytes(self, includes_pixels: bool) -> float:
        """Bytes of one row on the device.

        A token takes 24 bytes in int32 buffers of the whole row, and 44 in int64 copies of this rank's
        tokens. Each patch has uint8 planes.
        """
        patch_bytes = self.spec.vision.patch_dim / self.spec.vision.temporal_patch_size + 32
        token_bytes = (24.0 * self.layout.cp + 44.0) * self.seq_len
        return token_bytes + self.patch_count * patch_bytes * includes_pixels
