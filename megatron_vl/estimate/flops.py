"""FLOPs of a packed row: those of the model, for MFU, and those of recomputation, which HFU adds.

The count includes every matrix product of both towers over real tokens and patches; the output layer over the
loss tokens, which is all that training needs; and attention over true document, frame and window lengths,
with only the causal half where the mask is causal. It does not include embedding look-ups, norms, RoPE,
softmax, activations, convolutions, padding or what attention kernels recompute internally.

The backward pass of a matrix product costs one forward for the gradient of its weight, if the weight is
trained, and one for the gradient of its input, if something before it is trained. With LoRA, that is an
adapter. The backward pass of attention, which has no weights, costs two, and so does that of the delta rule.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from megatron_vl.config import LoraConfig, ModelConfig, RecomputeConfig, TrainConfig
from megatron_vl.estimate.parameters import (
    LayerKind,
    MatrixAdapter,
    block_kinds,
    layer_kinds,
    merger_adapters,
)
from megatron_vl.spec.families import LanguageSpec, ModelSpec, VisionSpec
from megatron_vl.spec.lora import saved_modules, trained_parts, trains_own_matrices
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, OUTPUT_TENSOR, tensor_table

EXPERTS = "mlp.experts."
"""How the names of the matrices of routed experts begin, within a layer."""


class RowSizes(NamedTuple):
    """What decides the FLOPs of a row. For the mean of several rows, each number is a mean."""

    tokens: float
    token_pairs: float
    """Sum of the documents' squared lengths."""
    loss_tokens: float
    """Tokens for which the output layer is computed."""
    patches: float = 0.0
    frame_pairs: float = 0.0
    """Sum of the squared numbers of patches of images and frames of videos."""
    window_pairs: float = 0.0


def row_sizes(
    document_lengths: list[int], frame_lengths: list[int], window_lengths: list[int], loss_tokens: int
) -> RowSizes:
    """The sizes of a row with documents of these lengths in tokens, and frames and windows in patches.

    Args:
        document_lengths: without the padded tail.
        frame_lengths, window_lengths: empty for a row of text.
        loss_tokens: tokens for which the output layer is computed; many programs count all tokens.
    """
    pairs = [sum(n * n for n in lengths) for lengths in (document_lengths, frame_lengths, window_lengths)]
    return RowSizes(sum(document_lengths), pairs[0], loss_tokens, sum(frame_lengths), *pairs[1:])


class LayerFlops(NamedTuple):
    """FLOPs of a decoder layer on a row: of the delta rule, of routed experts, and of all else."""

    dense: float
    delta_rule: float
    experts: float


@dataclass(frozen=True)
class RowFlops:
    """FLOPs of a row by parts that reach different shares of a GPU's peak; the mergers' are the tower's."""

    layers: tuple[LayerFlops, ...]
    output: float
    tower: float

    def __add__(self, other: RowFlops) -> RowFlops:
        pairs = zip(self.layers, other.layers, strict=True)
        layers = tuple(LayerFlops(*map(sum, zip(*pair, strict=True))) for pair in pairs)
        return RowFlops(layers, self.output + other.output, self.tower + other.tower)

    @functools.cached_property
    def layer_totals(self) -> tuple[float, ...]:
        return tuple(map(sum, self.layers))

    @property
    def language(self) -> float:
        return sum(self.layer_totals) + self.output

    @property
    def total(self) -> float:
        return self.language + self.tower


# --- Both passes --------------------------------------------------------------------------------------------


def needed_flops(spec: ModelSpec, config: TrainConfig, sizes: RowSizes) -> RowFlops:
    """FLOPs that rows of ``sizes`` need, forward and backward, without recomputation."""
    counts = _counted_products(spec, config.model, config.lora)
    by_kind = {kind: _layer_flops(spec.language, kind, sizes) for kind in set(counts.layers)}
    trains_output = OUTPUT_TENSOR in saved_modules(spec, config.lora)
    trains_output |= trains_own_matrices(config.model, config.lora, "language")
    output_weights = spec.language.hidden_size * spec.language.vocab_size
    attention_pairs = counts.full_layers * sizes.frame_pairs + counts.window_layers * sizes.window_pairs
    return RowFlops(
        layers=tuple(by_kind[kind] for kind in counts.layers),
        output=2.0 * (2 + trains_output) * output_weights * sizes.loss_tokens
        + _mtp_flops(spec.language, sizes, trains_output=trains_output and config.mtp.trains == "all"),
        tower=2.0 * counts.per_patch * sizes.patches
        + 4.0 * spec.vision.hidden_size * attention_pairs
        + 2.0 * counts.per_merged_unit * (sizes.patches / spec.vision.merge_unit),
    )


def _mtp_flops(language_spec: LanguageSpec, sizes: RowSizes, *, trains_output: bool) -> float:
    """Multi-token prediction, if the model has it: its layer, and the output layer once more.

    All of the layer is trained, also the norms in front of its first matrix. Its loss trains the output layer
    with ``mtp.trains: all``, if that is trained at all.
    """
    if not language_spec.has_mtp:
        return 0.0
    hidden_size = language_spec.hidden_size
    weights = sum(layer_weights(language_spec, _mtp_kind(language_spec)).values()) + 2 * hidden_size**2
    layer = _layer_flops(language_spec, _LayerProducts(3.0 * weights, 0.0, 3, is_linear=False), sizes)
    output_weights = hidden_size * language_spec.vocab_size
    return layer.dense + 2.0 * (2 + trains_output) * output_weights * sizes.loss_tokens


def _mtp_kind(language_spec: LanguageSpec) -> LayerKind:
    return LayerKind(language_spec.moe is not None, False)


def _layer_flops(language_spec: LanguageSpec, products: _LayerProducts, sizes: RowSizes) -> LayerFlops:
    attention = delta_rule = 0.0
    if products.is_linear:
        # A head reads the value of its key, writes the correction, and reads the value of its query.
        linear = language_spec.linear_attention
        assert linear is not None
        delta_rule = 6.0 * linear.value_heads * linear.value_dim * linear.key_dim * sizes.tokens
    else:
        # QK^T and PV, the causal half of each.
        attention = 2.0 * language_spec.num_heads * language_spec.head_dim * sizes.token_pairs
    return LayerFlops(
        2.0 * products.dense * sizes.tokens + products.attention_count * attention,
        products.attention_count * delta_rule,
        2.0 * products.experts * sizes.tokens,
    )


class _LayerProducts(NamedTuple):
    """What multiplies the sizes of a row in a decoder layer."""

    dense: float
    """Weights that multiply a token, times the products that they are in."""
    experts: float
    attention_count: int
    """How often attention or the delta rule is computed; its backward pass counts twice."""
    is_linear: bool


class _CountedProducts(NamedTuple):
    """What multiplies the sizes of a row. Products of both passes are counted."""

    layers: tuple[_LayerProducts, ...]
    per_patch: float
    full_layers: int  # of the tower, with attention over frames; times 3 with a backward pass
    window_layers: int
    per_merged_unit: float


@functools.cache
def _counted_products(spec: ModelSpec, model_config: ModelConfig, lora: LoraConfig) -> _CountedProducts:
    per_patch, layers_by_attention, reached_blocks = _tower_products(spec, model_config, lora)
    per_unit, is_reached = _merger_products(spec, model_config, lora, reached_blocks)
    # Embeddings are part of the language model, so without LoRA something before its layers is trained.
    is_reached = is_reached or not lora.rank or EMBEDDING_TENSOR in saved_modules(spec, lora)
    is_trained = trains_own_matrices(model_config, lora, "language")

    layers = []
    for layer_index, kind in enumerate(layer_kinds(spec, lora)):
        weights = layer_weights(spec.language, kind)
        trained = _trained_before(spec, lora, f"language_model.decoder.layers.{layer_index}.", weights)
        counts, reaches_output, is_reached = _count_products(
            weights, kind.adapters, is_reached, is_trained, trained
        )
        experts = sum(count for name, count in counts.items() if name.startswith(EXPERTS))
        dense = sum(counts.values()) - experts
        layers.append(_LayerProducts(dense, experts, 1 + 2 * reaches_output, kind.has_linear_attention))
    return _CountedProducts(
        tuple(layers), per_patch, layers_by_attention[True], layers_by_attention[False], per_unit
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
    product_count = float(vision_spec.patch_dim * vision_spec.hidden_size) * (1 + trains_patch_embed)
    is_reached = trains_patch_embed or "vision_model.position_table.weight" in saved
    layers_by_attention = {True: 0, False: 0}
    reached_blocks = []
    weights = block_weights(vision_spec)
    for layer_index, kind in enumerate(block_kinds(spec, lora)):
        trained = _trained_before(spec, lora, f"vision_model.decoder.layers.{layer_index}.", weights)
        counts, reaches_output, is_reached = _count_products(
            weights, kind.adapters, is_reached, is_trained, trained
        )
        product_count += sum(counts.values())
        layers_by_attention[kind.has_full_attention] += 1 + 2 * reaches_output
        reached_blocks.append(is_reached)
    return product_count, layers_by_attention, reached_blocks


def _merger_products(
    spec: ModelSpec, model_config: ModelConfig, lora: LoraConfig, reached_blocks: list[bool]
) -> tuple[float, bool]:
    """:func:`_count_products` for all mergers: the sum, and whether an adapter lies before the end of any."""
    vision_spec = spec.vision
    weights = merger_weights(vision_spec)
    trains_all = trains_own_matrices(model_config, lora, "merger")
    source_blocks = [vision_spec.num_layers - 1, *vision_spec.deepstack_layers]
    product_count, is_any_reached = 0.0, False
    for number, adapters in enumerate(merger_adapters(spec, lora)):
        name = f"deepstack_mergers.{number - 1}" if number else "merger"
        trained = _trained_before(spec, lora, f"vision_model.{name}.", weights)
        # If something before a matrix is trained whole, so is all of the merger.
        counts, _, is_reached = _count_products(
            weights,
            adapters,
            is_reached=trains_all or reached_blocks[source_blocks[number]],
            is_trained=trains_all or bool(trained),
            trained_before=trained,
        )
        product_count += sum(counts.values())
        is_any_reached = is_any_reached or is_reached
    return product_count, is_any_reached


def _count_products(
    weights: dict[str, int],
    adapters: tuple[MatrixAdapter, ...],
    is_reached: bool,
    is_trained: bool,
    trained_before: set[str],
) -> tuple[dict[str, float], bool, bool]:
    """Weights of matrices, in the order of the forward pass, and their adapters, times their products.

    Args:
        is_reached: whether something that is trained lies before these matrices and their norms.
        is_trained: whether the matrices themselves are trained.
        trained_before: result of :func:`_trained_before`.

    Returns:
        The count of each matrix, whether an adapter lies before the second matrix (and so before the
        attention in front of it), and whether one lies before the end.
    """
    counts, is_second_reached = {}, is_reached
    adapter_by_matrix = {adapter.matrix_name: adapter for adapter in adapters}
    for number, (matrix_name, weight_count) in enumerate(weights.items()):
        is_reached = is_reached or matrix_name in trained_before
        if number == 1:
            is_second_reached = is_reached
        counts[matrix_name] = float(weight_count * (1 + is_trained + is_reached))
        if (adapter := adapter_by_matrix.get(matrix_name)) is not None:
            elements_a, elements_b = adapter.factor_elements
            counts[matrix_name] += elements_a * (2 + is_reached) + 3 * elements_b
            is_reached = True
    return counts, is_second_reached, is_reached


def _trained_before(spec: ModelSpec, lora: LoraConfig, prefix: str, weights: dict[str, int]) -> set[str]:
    """The matrices of a layer or merger that have before them, within it, a tensor that is trained whole."""
    trained_before, is_reached = set[str](), False
    saved = saved_modules(spec, lora)
    for tensor_name in tensor_table(spec) if saved else ():
        if tensor_name.startswith(prefix):
            is_reached = is_reached or tensor_name in saved
            matrix_name = tensor_name.removeprefix(prefix).removesuffix(".weight")
            if is_reached and matrix_name in weights:
                trained_before.add(matrix_name)
    return trained_before


# --- Forward passes -----------------------------------------------------------------------------------------


def repeated_flops(
    spec: ModelSpec,
    model_config: ModelConfig,
    lora: LoraConfig,
    recompute_config: RecomputeConfig,
    sizes: RowSizes,
    is_decoupled: bool = False,
) -> RowFlops:
    """FLOPs of the forward passes that run again in the backward pass of a row, by part.

    The output layer, which runs again for long rows of answers, is not counted.

    Args:
        is_decoupled: whether the tower first ran without keeping activations (``vision.placement:
            decoupled``).
    """
    modules = {"all"} if recompute_config.language == "full" else recompute_config.selected_modules
    kinds = layer_kinds(spec, lora)
    kept: set[str] = set(recompute_config.keep)
    by_kind = {kind: _repeated_layer(spec.language, kind, modules, kept, sizes) for kind in set(kinds)}
    tower = 0.0
    if "vision" in trained_parts(spec, lora, model_config):
        blocks, rest = tower_forward_flops(spec.vision, sizes)
        tower = blocks * (recompute_config.vision == "full") + (blocks + rest) * is_decoupled
    language, has_mtp = spec.language, spec.language.has_mtp
    mtp = sum(_repeated_layer(language, _mtp_kind(language), modules, set(), sizes)) if has_mtp else 0.0
    return RowFlops(tuple(by_kind[kind] for kind in kinds), mtp, tower)


def _repeated_layer(
    language_spec: LanguageSpec, kind: LayerKind, modules: set[str], kept: set[str], sizes: RowSizes
) -> LayerFlops:
    repeated = {"dense": 0.0, "experts": 0.0}
    adapter_weights = {adapter.matrix_name: sum(adapter.factor_elements) for adapter in kind.adapters}
    known = {EXPERTS + "linear_fc1"} if "experts" in kept else set()
    if EXPERTS + "linear_fc2" not in adapter_weights:
        known.add(EXPERTS + "linear_fc2")  # nothing reads its second result
    for name, weight_count in layer_weights(language_spec, kind).items():
        if "all" in modules or ("mlp" in modules and name.startswith("mlp.")):
            part = "experts" if name.startswith(EXPERTS) else "dense"
            repeated[part] += weight_count * (name not in known) + adapter_weights.get(name, 0)
    knows_attention = "attention" in kept and not kind.has_linear_attention
    attention_count = int(bool(modules & {"all", "core_attn"}) and not knows_attention)
    products = _LayerProducts(
        **repeated, attention_count=attention_count, is_linear=kind.has_linear_attention
    )
    return _layer_flops(language_spec, products, sizes)


def tower_forward_flops(vision_spec: VisionSpec, sizes: RowSizes) -> tuple[float, float]:
    """Forward FLOPs of the vision tower on a row: (its layers, patch embedding and mergers)."""
    full_layers = sum(vision_spec.is_full_attention(layer) for layer in range(vision_spec.num_layers))
    window_layers = vision_spec.num_layers - full_layers
    attention_pairs = full_layers * sizes.frame_pairs + window_layers * sizes.window_pairs
    linear_weights = vision_spec.num_layers * sum(block_weights(vision_spec).values())
    merged_units = (1 + len(vision_spec.deepstack_layers)) * sizes.patches / vision_spec.merge_unit
    return (
        2.0 * linear_weights * sizes.patches + 4.0 * vision_spec.hidden_size * attention_pairs,
        2.0 * vision_spec.patch_dim * vision_spec.hidden_size * sizes.patches
        + 2.0 * merged_units * sum(merger_weights(vision_spec).values()),
    )


def layer_weights(language_spec: LanguageSpec, kind: LayerKind) -> dict[str, int]:
    """Weights of a decoder layer that multiply one token, by matrix in the order of the forward pass."""
    hidden_size, moe_spec = language_spec.hidden_size, language_spec.moe
    if (linear_attention := language_spec.linear_attention) is not None and kind.has_linear_attention:
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

    if moe_spec is None or not kind.has_experts:
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


def block_weights(vision_spec: VisionSpec) -> dict[str, int]:
    hidden_size, ffn_width = vision_spec.hidden_size, vision_spec.ffn_hidden_size
    return {
        "self_attention.linear_qkv": 3 * hidden_size**2,
        "self_attention.linear_proj": hidden_size**2,
        "mlp.linear_fc1": (2 if vision_spec.gated_mlp else 1) * hidden_size * ffn_width,
        "mlp.linear_fc2": hidden_size * ffn_width,
    }


def merger_weights(vision_spec: VisionSpec) -> dict[str, int]:
    """Weights of a merger that multiply a merged unit of patches, by matrix."""
    merger_width = vision_spec.merge_unit * vision_spec.hidden_size
    return {"linear_fc1": merger_width**2, "linear_fc2": merger_width * vision_spec.out_hidden_size}
