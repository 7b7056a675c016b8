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
class Flops:
    """FLOPs of the two halves of the model."""

    language: float
    vision: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.language + other.language, self.vision + other.vision)

    @property
    def total(self) -> float:
        return self.language + self.vision


@dataclass(frozen=True)
class LanguageForward:
    """Forward FLOPs of the language model by part, all layers together."""

    projections: float
    """Queries, keys, values and the output of attention."""
    attention: float
    """QK^T and PV, the causal half of each."""
    mlp: float
    """In layers with experts: the router, and the experts that a token goes to."""
    head: float
    """The output layer over the vocabulary."""
    rule: float = 0.0
    """The delta rule of linear attention, token by token: a head reads the value of its key, writes the
    correction, and reads the value of its query. The chunks of kernels compute more."""

    @property
    def layers(self) -> float:
        return self.projections + self.attention + self.rule + self.mlp

    @property
    def total(self) -> float:
        return self.layers + self.head


@dataclass(frozen=True)
class VisionForward:
    """Forward FLOPs of the vision tower by part, all layers together."""

    patch_embed: float
    linear: float
    """QKV, projection and MLP of the blocks."""
    attention: float
    mergers: float
    """The merger and the mergers of DeepStack."""

    @property
    def blocks(self) -> float:
        return self.linear + self.attention

    @property
    def total(self) -> float:
        return self.patch_embed + self.blocks + self.mergers


def language_parts(m: LanguageSpec, lengths: list[int], head_tokens: int) -> LanguageForward:
    """Forward FLOPs of documents of these lengths in tokens. ``head_tokens`` of the tokens get logits."""
    tokens, heads = sum(lengths), m.num_heads * m.head_dim
    queries = heads * (2 if m.output_gate else 1)
    projections = m.hidden_size * (queries + 2 * m.num_kv_heads * m.head_dim) + heads * m.hidden_size
    a = m.linear_attention
    linear = 0 if a is None else sum(m.is_linear(layer) for layer in range(m.num_layers))
    full = m.num_layers - linear
    mixing = rule = 0
    if a is not None:
        values = a.value_heads * a.value_dim
        mixing = m.hidden_size * (a.conv_channels + 2 * values + 2 * a.value_heads)
        rule = 3 * values * a.key_dim

    return LanguageForward(
        projections=2.0 * (full * projections + linear * mixing) * tokens,
        attention=2.0 * full * heads * sum(n * n for n in lengths),
        rule=2.0 * linear * rule * tokens,
        mlp=2.0 * sum(_mlp_weights(m, layer) for layer in range(m.num_layers)) * tokens,
        head=2.0 * m.hidden_size * m.vocab_size * head_tokens,
    )


def _mlp_weights(m: LanguageSpec, layer: int) -> int:
    """Weights of a layer's MLP that multiply one token."""
    if m.moe is None or not m.has_experts(layer):
        return 3 * m.hidden_size * m.ffn_hidden_size
    shared = m.moe.shared_ffn_hidden_size
    gate = 1 if shared else 0
    width = m.moe.top_k * m.moe.ffn_hidden_size + shared
    return m.hidden_size * (m.moe.num_experts + gate) + 3 * m.hidden_size * width


def vision_parts(v: VisionSpec, full: list[int], window: list[int]) -> VisionForward:
    """Forward FLOPs of segments of these lengths in patches; both lists are empty for a text-only row."""
    patches = sum(full)
    weights = 4 * v.hidden_size**2 + (3 if v.gated_mlp else 2) * v.hidden_size * v.ffn_hidden_size

    full_pairs = sum(n * n for n in full)
    window_pairs = sum(n * n for n in window)
    pairs = sum(full_pairs if v.is_full_attention(layer) else window_pairs for layer in range(v.num_layers))

    width = v.merge_unit * v.hidden_size
    units = (1 + len(v.deepstack_layers)) * (patches // v.merge_unit)
    return VisionForward(
        patch_embed=2.0 * v.patch_dim * v.hidden_size * patches,
        linear=2.0 * v.num_layers * weights * patches,
        attention=4.0 * v.hidden_size * pairs,
        mergers=2.0 * units * (width * width + width * v.out_hidden_size),
    )


def row_flops(
    spec: ModelSpec,
    model: ModelConfig,
    lengths: list[int],
    full: list[int],
    window: list[int],
    head_tokens: int,
) -> Flops:
    """FLOPs of the forward and backward pass of one row.

    Args:
        lengths: real document lengths in tokens (without the padded tail).
        full, window: frame and window lengths in patches; empty for a text-only row.
        head_tokens: tokens for which the output layer is computed. Model FLOPs count the loss tokens only;
            many programs compute and count all tokens.
    """
    language = language_parts(spec.language, lengths, head_tokens)
    vision = vision_parts(spec.vision, full, window)
    tower, merger, decoder = not model.freeze_vision, not model.freeze_merger, not model.freeze_language
    return Flops(
        # Embeddings are part of the language model, so something before its layers is always trained.
        language=(2.0 + decoder) * (language.total - language.attention - language.rule)
        + 3.0 * (language.attention + language.rule),
        # Pixels take no gradient.
        vision=(1.0 + tower) * vision.patch_embed
        + (3.0 if tower else 1.0) * vision.blocks
        # A merger begins with a norm, whose weight needs the gradient
        # of what follows even where the tower is frozen.
        + (1.0 + merger + (merger or tower)) * vision.mergers,
    )


def recompute_flops(
    spec: ModelSpec,
    model: ModelConfig,
    recompute: RecomputeConfig,
    lengths: list[int],
    full: list[int],
    window: list[int],
    decoupled: bool = False,
) -> Flops:
    """FLOPs that recomputation adds to :func:`row_flops`.

    They are those of the layers whose forward pass runs again during backward; the output layer's never does.

    Args:
        decoupled: whether the tower first ran without keeping activations (``vision.placement: decoupled``,
            ``vision.keep_patches: 0``).
    """
    language = language_parts(spec.language, lengths, head_tokens=0)
    vision = vision_parts(spec.vision, full, window)

    again = 0.0
    if recompute.language == "full":
        again = language.layers
    elif recompute.language == "selective":
        again = (language.attention + language.rule) * ("core_attn" in recompute.language_modules)
        again += language.mlp * ("mlp" in recompute.language_modules)
    tower = vision.blocks if recompute.vision == "full" and not model.freeze_vision else 0.0
    if decoupled and not model.freeze_vision:
        tower += vision.total
    return Flops(again, tower)


PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0, "A800": 312.0, "B200": 2250.0}
"""Dense bf16 peak of one accelerator in TFLOP/s, by a part of its name (vendor data sheets)."""


def peak_tflops(device_name: str, stated: float = 0.0) -> float:
    """Peak for MFU: ``stated`` if given, else by device name, else 0 (MFU is then not shown)."""
    if stated:
        return stated
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), 0.0)
