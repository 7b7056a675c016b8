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
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_vl.config import ModelConfig, RecomputeConfig
from megatron_vl.spec.families import LanguageSpec, ModelSpec, VisionSpec


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
    query_gate_width = query_width * (2 if language_spec.output_gate else 1)
    full_projection_weights = (
        language_spec.hidden_size
        * (query_gate_width + 2 * language_spec.num_kv_heads * language_spec.head_dim)
        + query_width * language_spec.hidden_size
    )
    linear_attention = language_spec.linear_attention
    linear_layers = (
        0
        if linear_attention is None
        else sum(language_spec.has_linear_attention(layer) for layer in range(language_spec.num_layers))
    )
    full_layers = language_spec.num_layers - linear_layers
    linear_projection_weights = delta_rule_products = 0
    if linear_attention is not None:
        value_width = linear_attention.value_heads * linear_attention.value_dim
        linear_projection_weights = language_spec.hidden_size * (
            linear_attention.conv_channels + 2 * value_width + 2 * linear_attention.value_heads
        )
        delta_rule_products = 3 * value_width * linear_attention.key_dim

    return LanguageForwardFlops(
        projections=2.0
        * (full_layers * full_projection_weights + linear_layers * linear_projection_weights)
        * token_count,
        attention=2.0 * full_layers * query_width * sum(length * length for length in document_lengths),
        delta_rule=2.0 * linear_layers * delta_rule_products * token_count,
        mlp=2.0
        * sum(_mlp_weights(language_spec, layer) for layer in range(language_spec.num_layers))
        * token_count,
        output_layer=2.0 * language_spec.hidden_size * language_spec.vocab_size * head_tokens,
    )


def _mlp_weights(language_spec: LanguageSpec, layer_index: int) -> int:
    """Weights of a layer's MLP that multiply one token."""
    if language_spec.moe is None or not language_spec.has_experts(layer_index):
        return 3 * language_spec.hidden_size * language_spec.ffn_hidden_size
    shared_ffn_size = language_spec.moe.shared_ffn_hidden_size
    gate_weights = 1 if shared_ffn_size else 0
    width = language_spec.moe.top_k * language_spec.moe.ffn_hidden_size + shared_ffn_size
    return (
        language_spec.hidden_size * (language_spec.moe.num_experts + gate_weights)
        + 3 * language_spec.hidden_size * width
    )


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
) -> ModelFlops:
    """FLOPs of the forward and backward pass of one row.

    Args:
        document_lengths: real document lengths in tokens (without the padded tail).
        frame_lengths, window_lengths: lengths in patches; empty for a text-only row.
        head_tokens: tokens for which the output layer is computed. Model FLOPs count the loss tokens only;
            many programs compute and count all tokens.
    """
    language_forward = language_forward_flops(spec.language, document_lengths, head_tokens)
    vision_forward = vision_forward_flops(spec.vision, frame_lengths, window_lengths)
    trains_tower = not model_config.freeze_vision
    trains_merger = not model_config.freeze_merger
    trains_decoder = not model_config.freeze_language
    return ModelFlops(
        # Embeddings are part of the language model, so something before its layers is always trained.
        language=(2.0 + trains_decoder)
        * (language_forward.total - language_forward.attention - language_forward.delta_rule)
        + 3.0 * (language_forward.attention + language_forward.delta_rule),
        # Pixels take no gradient.
        vision=(1.0 + trains_tower) * vision_forward.patch_embed
        + (3.0 if trains_tower else 1.0) * vision_forward.vision_blocks
        # A merger begins with a norm, whose weight needs the gradient of its output even if the tower is
        # frozen.
        + (1.0 + trains_merger + (trains_merger or trains_tower)) * vision_forward.mergers,
    )


def recompute_flops(
    spec: ModelSpec,
    model_config: ModelConfig,
    recompute_config: RecomputeConfig,
    document_lengths: list[int],
    frame_lengths: list[int],
    window_lengths: list[int],
    is_decoupled: bool = False,
) -> ModelFlops:
    """FLOPs that recomputation adds to :func:`row_flops`.

    They are those of the layers whose forward pass runs again during backward; the output layer's never does.

    Args:
        is_decoupled: whether the tower first ran without keeping activations (``vision.placement:
            decoupled``, ``vision.keep_patches: 0``).
    """
    language_forward = language_forward_flops(spec.language, document_lengths, head_tokens=0)
    vision_forward = vision_forward_flops(spec.vision, frame_lengths, window_lengths)

    language_recompute = 0.0
    if recompute_config.language == "full":
        language_recompute = language_forward.decoder_layers
    elif recompute_config.language == "selective":
        language_recompute = (language_forward.attention + language_forward.delta_rule) * (
            "core_attn" in recompute_config.language_modules
        )
        language_recompute += language_forward.mlp * ("mlp" in recompute_config.language_modules)
    vision_recompute = (
        vision_forward.vision_blocks
        if recompute_config.vision == "full" and not model_config.freeze_vision
        else 0.0
    )
    if is_decoupled and not model_config.freeze_vision:
        vision_recompute += vision_forward.total
    return ModelFlops(language_recompute, vision_recompute)


PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
"""Dense bf16 peak of one accelerator in TFLOP/s, by a part of its name (vendor data sheets)."""


def peak_tflops(device_name: str, stated_tflops: float = 0.0) -> float:
    """Peak for MFU: ``stated_tflops`` if given, else by device name, else 0 (MFU is then not shown)."""
    if stated_tflops:
        return stated_tflops
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), 0.0)
