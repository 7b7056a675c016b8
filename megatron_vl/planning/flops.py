"""FLOPs of a packed row: those of the model, for MFU, and those of recomputation, which HFU adds.

The count includes every matrix product of both towers (fused QKV, projections, MLPs, patch embedding, merger)
over real tokens and patches; the output layer over the loss tokens, which is all that training needs; and
attention over true document, frame and window lengths, with only the causal half where the mask is causal. It
does not include embedding look-ups, norms, RoPE, softmax, activations, padding (tails of rows, padded FFN
columns, the tokens that fill up the output layer's) or what attention kernels recompute internally.

The backward pass of a matrix product costs one forward for the gradient of its weight, if the weight is
trained, and one for the gradient of its input, if something before it is trained. The backward pass of
attention, which has no weights, costs two. So does that of the delta rule of linear attention; its
convolution is not counted.

With LoRA, the model's own weights are frozen. Their products have a gradient of the input only where an
adapter lies before them, in the order of the forward pass. Adapters are counted like other products.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatron_vl.config import LoraConfig, ModelConfig, RecomputeConfig
from megatron_vl.planning.calibration import DATA_SHEETS
from megatron_vl.planning.layer_kinds import MatrixAdapter, block_adapters, layer_kinds, merger_adapters
from megatron_vl.spec.adapters import saved_modules, trained_parts, trains_own_matrices
from megatron_vl.spec.families import LanguageSpec, ModelSpec, VisionSpec
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, OUTPUT_TENSOR, tensor_table


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of the two halves of the model."""

    language: float
    vision: float

    def __add__(self, other: ModelFlops) -> ModelFlops:
        return ModelFlops(self.language + other.language, self.vision + other.vision)

    @property
    def total(self) -> float:
        return self.language + self.vision


@dataclass(frozen=True)
class LanguageForwardFlops:
    """Forward FLOPs of the language model by part, all layers together."""

    projections: float
    """Queries, keys, values and the output of attention."""
    attention: float
    """QK^T and PV, the causal half of each."""
    mlp: float
    """In layers with experts: the router, and the experts that a token goes to."""
    output_layer: float
    """The output layer over the vocabulary."""
    delta_rule: float = 0.0
    """The delta rule of linear attention, token by token: a head reads the value of its key, writes the
    correction, and reads the value of its query. The chunks of kernels compute more."""

    @property
    def decoder_layers(self) -> float:
        return self.projections + self.attention + self.delta_rule + self.mlp

    @property
    def total(self) -> float:
        return self.decoder_layers + self.output_layer


@dataclass(frozen=True)
class VisionForwardFlops:
    """Forward FLOPs of the vision tower by part, all layers together."""

    patch_embed: float
    block_linears: float
    """QKV, projection and MLP of the blocks."""
    attention: float
    mergers: float
    """The merger and the mergers of DeepStack."""

    @property
    def vision_blocks(self) -> float:
        return self.block_linears + self.attention

    @property
    def total(self) -> float:
        return self.patch_embed + self.vision_blocks + self.mergers


def language_forward_flops(
    language_spec: LanguageSpec, document_lengths: list[int], head_tokens: int
) -> LanguageForwardFlops:
    """Forward FLOPs of documents of these lengths in tokens. ``head_tokens`` of the tokens get logits."""
    token_count, query_width = sum(document_lengths), language_spec.num_heads * language_spec.head_dim
    linear_attention = language_spec.linear_attention
    linear_layers = len(linear_attention.linear_layers) if linear_attention is not None else 0
    full_layers = language_spec.num_layers - linear_layers
    delta_rule_products = 0
    if linear_attention is not None:
        value_width = linear_attention.value_heads * linear_attention.value_dim
        delta_rule_products = 3 * value_width * linear_attention.key_dim

    projection_weights, mlp_weights = _projection_and_mlp_weights(language_spec)
    return LanguageForwardFlops(
        projections=2.0 * projection_weights * token_count,
        attention=2.0 * full_layers * query_width * sum(length * length for length in document_lengths),
        delta_rule=2.0 * linear_layers * delta_rule_products * token_count,
        mlp=2.0 * mlp_weights * token_count,
        output_layer=2.0 * language_spec.hidden_size * language_spec.vocab_size * head_tokens,
    )


@functools.cache
def _projection_and_mlp_weights(language_spec: LanguageSpec) -> tuple[int, int]:
    """Weights that multiply one token in all layers: (those of attention, those of MLPs)."""
    projection_weights = mlp_weights = 0
    for layer_index in range(language_spec.num_layers):
        for matrix_name, weight_count in _layer_weights(language_spec, layer_index).items():
            if matrix_name.startswith("mlp."):
                mlp_weights += weight_count
            else:
                projection_weights += weight_count
    return projection_weights, mlp_weights


def _layer_weights(language_spec: LanguageSpec, layer_index: int) -> dict[str, int]:
    """Weights of a decoder layer that multiply one token, by matrix in the order of the forward pass."""
    hidden_size, moe_spec = language_spec.hidden_size, language_spec.moe
    linear_attention = language_spec.linear_attention
    if linear_attention is not None and language_spec.has_linear_attention(layer_index):
        value_width = linear_attention.value_heads * linear_attention.value_dim
        input_width = linear_attention.conv_channels + value_width + 2 * linear_attention.value_heads
        weights = {
            "self_attention.in_proj": hidden_size * input_width,
            "self_attention.out_proj": hidden_size * value_width,
        }
    else:
        query_width = language_spec.num_heads * language_spec.head_dim
        query_gate_width = query_width * (2 if language_spec.output_gate else 1)
        key_value_width = 2 * language_spec.num_kv_heads * language_spec.head_dim
        weights = {
            "self_attention.linear_qkv": hidden_size * (query_gate_width + key_value_width),
            "self_attention.linear_proj": hidden_size * query_width,
        }

    if moe_spec is None or not language_spec.has_experts(layer_index):
        ffn_weights = hidden_size * language_spec.ffn_hidden_size
        return weights | {"mlp.linear_fc1": 2 * ffn_weights, "mlp.linear_fc2": ffn_weights}
    expert_weights = hidden_size * moe_spec.top_k * moe_spec.ffn_hidden_size
    shared_weights = hidden_size * moe_spec.shared_ffn_hidden_size
    return weights | {
        "mlp.router": hidden_size * (moe_spec.num_experts + (shared_weights > 0)),
        "mlp.experts.linear_fc1": 2 * expert_weights,
        "mlp.shared_experts.linear_fc1": 2 * shared_weights,
        "mlp.experts.linear_fc2": expert_weights,
        "mlp.shared_experts.linear_fc2": shared_weights,
    }


def vision_forward_flops(
    vision_spec: VisionSpec, frame_lengths: list[int], window_lengths: list[int]
) -> VisionForwardFlops:
    """Forward FLOPs of segments of these lengths in patches; both lists are empty for a text-only row."""
    patch_count = sum(frame_lengths)
    block_weights = (
        4 * vision_spec.hidden_size**2
        + (3 if vision_spec.gated_mlp else 2) * vision_spec.hidden_size * vision_spec.ffn_hidden_size
    )

    full_pairs = sum(length * length for length in frame_lengths)
    window_pairs = sum(length * length for length in window_lengths)
    attention_pairs = sum(
        full_pairs if vision_spec.is_full_attention(layer) else window_pairs
        for layer in range(vision_spec.num_layers)
    )

    merger_width = vision_spec.merge_unit * vision_spec.hidden_size
    merged_units = (1 + len(vision_spec.deepstack_layers)) * (patch_count // vision_spec.merge_unit)
    return VisionForwardFlops(
        patch_embed=2.0 * vision_spec.patch_dim * vision_spec.hidden_size * patch_count,
        block_linears=2.0 * vision_spec.num_layers * block_weights * patch_count,
        attention=4.0 * vision_spec.hidden_size * attention_pairs,
        mergers=2.0
        * merged_units
        * (merger_width * merger_width + merger_width * vision_spec.out_hidden_size),
    )


def row_flops(
    spec: ModelSpec,
    model_config: ModelConfig,
    document_lengths: list[int],
    frame_lengths: list[int],
    window_lengths: list[int],
    head_tokens: int,
    lora: LoraConfig | None = None,
) -> ModelFlops:
    """FLOPs of the forward and backward pass of one row.

    Args:
        document_lengths: real document lengths in tokens (without the padded tail).
        frame_lengths, window_lengths: lengths in patches; empty for a text-only row.
        head_tokens: tokens for which the output layer is computed. Model FLOPs count the loss tokens only;
            many programs compute and count all tokens.
        lora: the run's adapters, if it has any. ``model_config`` does not matter then.
    """
    lora = lora or LoraConfig()
    weights, patch_count = _counted_weights(spec, model_config, lora), sum(frame_lengths)
    language = language_forward_flops(spec.language, document_lengths, head_tokens)
    trains_output = OUTPUT_TENSOR in saved_modules(spec, lora)
    trains_output |= trains_own_matrices(model_config, lora, "language")
    attention_pairs = weights.full_layers * sum(length * length for length in frame_lengths)
    attention_pairs += weights.window_layers * sum(length * length for length in window_lengths)
    return ModelFlops(
        language=2.0 * weights.per_token * sum(document_lengths)
        + weights.attention_share * language.attention
        + weights.delta_rule_share * language.delta_rule
        + (2.0 + trains_output) * language.output_layer,
        vision=2.0 * weights.per_patch * patch_count
        + 4.0 * spec.vision.hidden_size * attention_pairs
        + 2.0 * weights.per_merged_unit * (patch_count // spec.vision.merge_unit),
    )


@dataclass(frozen=True)
class _CountedWeights:
    """What multiplies the lengths of a row, forward and backward pass together.

    A product that is computed three times counts three times.
    """

    per_token: float
    attention_share: float
    """How often attention is computed: 3 if all layers have a backward pass."""
    delta_rule_share: float
    per_patch: float
    full_layers: int
    """Layers of the tower with attention over frames, times 3 with a backward pass."""
    window_layers: int
    per_merged_unit: float


@functools.cache
def _counted_weights(spec: ModelSpec, model_config: ModelConfig, lora: LoraConfig) -> _CountedWeights:
    per_patch, layers_by_attention, reached_blocks = _tower_products(spec, model_config, lora)
    per_unit, is_reached = _merger_products(spec, model_config, lora, reached_blocks)
    # Embeddings are part of the language model, so without LoRA something before its layers is trained.
    is_reached = is_reached or not lora.rank or EMBEDDING_TENSOR in saved_modules(spec, lora)
    is_trained = trains_own_matrices(model_config, lora, "language")

    per_token = 0.0
    decoder_layers: dict[bool, list[int]] = {True: [], False: []}
    top_k = spec.language.moe.top_k if spec.language.moe is not None else 1
    for layer_index, kind in enumerate(layer_kinds(spec, lora)):
        weights = _layer_weights(spec.language, layer_index)
        prefix = f"language_model.decoder.layers.{layer_index}."
        trained = _trained_before(spec, lora, prefix, weights)
        count, reaches_output, is_reached = _count_products(
            weights, kind.adapters, is_reached, is_trained, trained, top_k
        )
        per_token += count
        decoder_layers[kind.has_linear_attention].append(1 + 2 * reaches_output)

    rule_share, attention_share = (
        sum(counts) / len(counts) if counts else 0.0 for counts in decoder_layers.values()
    )
    full_layers, window_layers = layers_by_attention[True], layers_by_attention[False]
    return _CountedWeights(
        per_token, attention_share, rule_share, per_patch, full_layers, window_layers, per_unit
    )


def _tower_products(
    spec: ModelSpec, model_config: ModelConfig, lora: LoraConfig
) -> tuple[float, dict[bool, int], list[bool]]:
    """:func:`_count_products` for the tower.

    Returns:
        The sum; the attention of its layers in products of the forward pass, by whether it is full attention;
        and whether an adapter lies before the end of each layer.
    """
    vision_spec = spec.vision
    saved = saved_modules(spec, lora)
    is_trained = trains_own_matrices(model_config, lora, "vision")
    trains_patch_embed = is_trained or "vision_model.patch_embed.proj.weight" in saved
    product_count = float(vision_spec.patch_dim * vision_spec.hidden_size)
    product_count *= 1 + trains_patch_embed
    is_reached = trains_patch_embed or "vision_model.position_table.weight" in saved
    layers_by_attention = {True: 0, False: 0}
    reached_blocks = []
    for layer_index in range(vision_spec.num_layers):
        adapters = block_adapters(spec, lora, layer_index)
        weights = _block_weights(vision_spec)
        prefix = f"vision_model.decoder.layers.{layer_index}."
        trained = _trained_before(spec, lora, prefix, weights)
        count, reaches_output, is_reached = _count_products(
            weights, adapters, is_reached, is_trained, trained
        )
        product_count += count
        layers_by_attention[vision_spec.is_full_attention(layer_index)] += 1 + 2 * reaches_output
        reached_blocks.append(is_reached)
    return product_count, layers_by_attention, reached_blocks


def _merger_products(
    spec: ModelSpec, model_config: ModelConfig, lora: LoraConfig, reached_blocks: list[bool]
) -> tuple[float, bool]:
    """:func:`_count_products` for all mergers: the sum, and whether an adapter lies before the end of any."""
    vision_spec = spec.vision
    merger_width = vision_spec.merge_unit * vision_spec.hidden_size
    weights = {
        "linear_fc1": merger_width * merger_width,
        "linear_fc2": merger_width * vision_spec.out_hidden_size,
    }
    source_blocks = [vision_spec.num_layers - 1, *vision_spec.deepstack_layers]
    product_count = 0.0
    is_any_reached = False
    for number, adapters in enumerate(merger_adapters(spec, lora)):
        prefix = f"vision_model.deepstack_mergers.{number - 1}." if number else "vision_model.merger."
        trained = _trained_before(spec, lora, prefix, weights)
        trains_all = trains_own_matrices(model_config, lora, "merger")
        is_reached = trains_all or reached_blocks[source_blocks[number]]
        # If something before a matrix is trained whole, so is all of the merger.
        is_trained = trains_all or bool(trained)
        count, _, is_reached = _count_products(weights, adapters, is_reached, is_trained, trained)
        product_count += count
        is_any_reached = is_any_reached or is_reached
    return product_count, is_any_reached


def _block_weights(vision_spec: VisionSpec) -> dict[str, int]:
    """Weights of a layer of the tower, by matrix in the order of the forward pass."""
    hidden_size, ffn_width = vision_spec.hidden_size, vision_spec.ffn_hidden_size
    return {
        "self_attention.linear_qkv": 3 * hidden_size**2,
        "self_attention.linear_proj": hidden_size**2,
        "mlp.linear_fc1": (2 if vision_spec.gated_mlp else 1) * hidden_size * ffn_width,
        "mlp.linear_fc2": hidden_size * ffn_width,
    }


def _count_products(
    weights: dict[str, int],
    adapters: tuple[MatrixAdapter, ...],
    is_reached: bool,
    is_trained: bool,
    trained_before: set[str],
    top_k: int = 1,
) -> tuple[float, bool, bool]:
    """Weights of matrices and their adapters, times the products that each of them is in.

    Args:
        weights: those of each matrix, in the order of the forward pass.
        is_reached: whether something that is trained lies before these matrices and their norms.
        is_trained: whether the matrices themselves are trained.
        trained_before: result of :func:`_trained_before`.
        top_k: number of experts of a token.

    Returns:
        The sum, whether an adapter lies before the second matrix (and so before the attention in front of
        it), and whether one lies before the end.
    """
    product_count, is_second_reached = 0.0, is_reached
    adapter_by_matrix = {adapter.matrix_name: adapter for adapter in adapters}
    for number, (matrix_name, weight_count) in enumerate(weights.items()):
        is_reached = is_reached or matrix_name in trained_before
        if number == 1:
            is_second_reached = is_reached
        product_count += weight_count * (1 + is_trained + is_reached)
        if (adapter := adapter_by_matrix.get(matrix_name)) is not None:
            elements_a, elements_b = adapter.factor_elements
            product_count += (elements_a * (2 + is_reached) + 3 * elements_b) * (
                top_k if adapter.is_expert else 1
            )
            is_reached = True
    return product_count, is_second_reached, is_reached


def _trained_before(spec: ModelSpec, lora: LoraConfig, prefix: str, weights: dict[str, int]) -> set[str]:
    """The matrices of a layer or merger that have before them, within it, a tensor that is trained whole.

    Args:
        prefix: the beginning of the canonical names of the layer's tensors.
        weights: by matrix.
    """
    trained_before: set[str] = set()
    saved = saved_modules(spec, lora)
    is_reached = False
    for tensor_name in tensor_table(spec) if saved else ():
        if not tensor_name.startswith(prefix):
            continue
        is_reached = is_reached or tensor_name in saved
        matrix_name = tensor_name.removeprefix(prefix)
        matrix_name = matrix_name.removesuffix(".weight")
        if is_reached and matrix_name in weights:
            trained_before.add(matrix_name)
    return trained_before


def _adapter_weights(spec: ModelSpec, lora: LoraConfig, prefix: str) -> int:
    """Elements of the decoder layers' adapters that multiply a token, of matrices whose names begin so."""
    top_k = spec.language.moe.top_k if spec.language.moe is not None else 1
    return sum(
        sum(adapter.factor_elements) * (top_k if adapter.is_expert else 1)
        for kind in layer_kinds(spec, lora)
        for adapter in kind.adapters
        if adapter.matrix_name.startswith(prefix)
    )


def recompute_flops(
    spec: ModelSpec,
    model_config: ModelConfig,
    recompute_config: RecomputeConfig,
    document_lengths: list[int],
    frame_lengths: list[int],
    window_lengths: list[int],
    is_decoupled: bool = False,
    lora: LoraConfig | None = None,
) -> ModelFlops:
    """FLOPs that recomputation adds to :func:`row_flops`.

    They are those of the layers whose forward pass runs again during backward. The output layer, which runs
    again for long rows of answers, is not counted.

    Args:
        is_decoupled: whether the tower first ran without keeping activations (``vision.placement:
            decoupled``).
        lora: the run's adapters, if it has any.
    """
    lora = lora or LoraConfig()
    trains_tower = "vision" in trained_parts(spec, lora, model_config)
    language_forward = language_forward_flops(spec.language, document_lengths, head_tokens=0)
    vision_forward = vision_forward_flops(spec.vision, frame_lengths, window_lengths)

    language_recompute = 0.0
    if recompute_config.language == "full":
        language_recompute = language_forward.decoder_layers
        language_recompute += 2.0 * sum(document_lengths) * _adapter_weights(spec, lora, "")
    if "core_attn" in recompute_config.selected_modules:
        language_recompute = language_forward.attention + language_forward.delta_rule
    if "mlp" in recompute_config.selected_modules:
        language_recompute += language_forward.mlp
        language_recompute += 2.0 * sum(document_lengths) * _adapter_weights(spec, lora, "mlp.")

    vision_recompute = (
        vision_forward.vision_blocks if recompute_config.vision == "full" and trains_tower else 0.0
    )
    if is_decoupled and trains_tower:
        vision_recompute += vision_forward.total
    return ModelFlops(language_recompute, vision_recompute)


EXPORT_VERSIONS = {"H800": "H100", "A800": "A100"}
"""GPUs that differ from others in their links alone."""


def peak_tflops(device_name: str, stated_tflops: float = 0.0) -> float:
    """Peak for MFU: ``stated_tflops`` if given, else by device name, else 0 (MFU is then not shown)."""
    if stated_tflops:
        return stated_tflops
    for kind in (*DATA_SHEETS, *EXPORT_VERSIONS):
        if kind in device_name:
            return DATA_SHEETS[EXPORT_VERSIONS.get(kind, kind)].peak_tflops
    return 0.0
