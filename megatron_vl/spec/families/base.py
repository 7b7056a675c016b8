"""The description of a model, which its family reads from the model's config.

A family turns a Hugging Face ``config.json`` into a :class:`ModelSpec`, which holds plain numbers and flags
and needs no torch. Everything else (model building, the tensor table, conversion, FLOP counts)
is derived from the spec.

A missing size is refused by name. Other missing fields get the defaults of the family's config classes in
transformers (5.17 to 5.23), so that the same folder means the same model to both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_vl.errors import UserError


class ConfigError(UserError, ValueError):
    """A Hugging Face config cannot be used. The message names the field and what would be valid."""


@dataclass(frozen=True)
class VisionSpec:
    """The vision tower. Lengths are in elements, ``window_size`` in pixels."""

    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_hidden_size: int
    """FFN width as in the HF checkpoint."""
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    out_hidden_size: int
    """Width of the merged features, equal to the language model's hidden size."""
    norm: str
    """``RMSNorm`` or ``LayerNorm`` (with bias)."""
    norm_eps: float
    activation: str
    """``silu``, ``quick_gelu`` or ``gelu_tanh``."""
    gated_mlp: bool
    """True for SwiGLU (gate and up projections), False for a plain two-layer MLP."""
    window_size: int = 0
    """Side of an attention window in pixels; 0 means full attention in all layers."""
    full_attention_layers: tuple[int, ...] = ()
    """Zero-based layers with full attention; the others attend within windows.
    Ignored if ``window_size`` is 0."""
    tokens_per_second: float = 0.0
    """Temporal M-RoPE positions per second of video (Qwen2.5-VL); 0 means one position per frame group."""
    patch_bias: bool = False
    """Whether the patch embedding has a bias."""
    position_table_side: int = 0
    """Number of rows (and columns) of the square table of learned position embeddings; 0 means no table. The
    table is interpolated to each grid of patches and added to their embeddings."""
    deepstack_layers: tuple[int, ...] = ()
    """Zero-based layers for DeepStack. The output of each goes through its own merger and is added to the
    language model's hidden states at the medium's tokens: for the first layer after decoder layer 0, for the
    second after decoder layer 1, and so on."""
    video_timestamps: bool = False
    """Whether each frame group of a video is a separate run of placeholders after its time as text."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def padded_ffn_hidden_size(self) -> int:
        """FFN width in Megatron checkpoints and on the device:
        ``ffn_hidden_size`` rounded up to a multiple of 128.

        The added rows and columns are zero, do not change results, and stay zero in training because their
        gradients are zero. An aligned width is 2.9x faster on H100/H200 (3420 -> 3456), and every
        power-of-two TP up to 8 divides it.
        """
        return -(-self.ffn_hidden_size // 128) * 128

    @property
    def patch_dim(self) -> int:
        """Number of elements in one flattened patch, ordered (channel, time, row, column) as in HF."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merge_unit(self) -> int:
        """Number of patches merged into one language-model token."""
        return self.spatial_merge_size**2

    def is_full_attention(self, layer: int) -> bool:
        """Whether the zero-based ``layer`` attends over whole frames instead of windows."""
        return self.window_size == 0 or layer in self.full_attention_layers


@dataclass(frozen=True)
class MoeSpec:
    """The mixture of experts that replaces a decoder layer's MLP."""

    num_experts: int
    top_k: int
    """Number of experts that a token goes to."""
    ffn_hidden_size: int
    """FFN width of one expert. :attr:`LanguageSpec.ffn_hidden_size` is that of the dense layers."""
    norm_topk_prob: bool
    """Whether the weights of a token's experts are divided by their sum."""
    aux_loss_coef: float = dataclasses.field(compare=False)
    """Coefficient of the load-balancing loss if it is added.
    It affects training but does not identify the model."""
    dense_layers: tuple[int, ...]
    """Zero-based decoder layers that keep a dense MLP."""
    output_router_logits: bool = dataclasses.field(default=False, compare=False)
    """Whether the load-balancing loss is added."""
    shared_ffn_hidden_size: int = 0
    """FFN width of the shared expert that every token goes to, with a gate of its own; 0: there is none."""


@dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated DeltaNet (arXiv 2412.06464), the linear attention that replaces softmax attention in some layers.

    Each key head serves ``value_heads / key_heads`` value heads, one after another.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    conv_width: int
    """Number of tokens that the causal convolution before the delta rule reaches, with the present one."""
    layers: tuple[int, ...]
    """Zero-based decoder layers with linear attention; the others have softmax attention."""

    @property
    def conv_channels(self) -> int:
        """Number of channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclass(frozen=True)
class LanguageSpec:
    """The language model."""

    hidden_size: int
    num_layers: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    """Numbers of rotary frequencies for time, height and width. They add up to ``rotary_dim / 2``."""
    tied_embeddings: bool
    qkv_bias: bool = True
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised per head."""
    mrope_interleaved: bool = False
    """Whether time, height and width alternate along the frequencies instead
    of having a contiguous section each."""
    moe: MoeSpec | None = None
    """The experts of the layers that have experts; None for a dense model."""
    rotary_fraction: float = 1.0
    """Fraction of a head's elements, from the first on, that RoPE rotates."""
    output_gate: bool = False
    """Whether softmax attention's output is multiplied by the sigmoid of a gate, which the query projection
    gives beside each head's query."""
    zero_centered_norms: bool = False
    """Whether the RMS norms multiply by ``1 + weight``. The norm within linear attention never does."""
    linear_attention: LinearAttentionSpec | None = None
    """The layers with linear attention; None: all layers have softmax attention."""

    @property
    def moe_ffn_hidden_size(self) -> int:
        """FFN width of one expert; 0 without experts."""
        return self.moe.ffn_hidden_size if self.moe else 0

    @property
    def rotary_dim(self) -> int:
        """Number of a head's elements that RoPE rotates."""
        return int(self.head_dim * self.rotary_fraction)

    def is_linear(self, layer: int) -> bool:
        """Whether the zero-based decoder ``layer`` has linear attention."""
        return self.linear_attention is not None and layer in self.linear_attention.layers

    def has_experts(self, layer: int) -> bool:
        """Whether the zero-based decoder ``layer`` has experts instead of a dense MLP."""
        return self.moe is not None and layer not in self.moe.dense_layers


@dataclass(frozen=True)
class ModelSpec:
    """One model: its family, its two halves, its special tokens, and the HF config that it was read from."""

    family: str
    vision: VisionSpec
    language: LanguageSpec
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    initializer_range: float = 0.02
    hf_config: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def differences(self, other: ModelSpec) -> list[tuple[str, Any, Any]]:
        """(field, ours, the other's) of what makes two specs different models; empty for the same model.

        Weights of one can be used as the other's when there is no difference. Special tokens and the
        spread of random weights are no part of that, and neither is the coefficient of the balancing loss.
        """
        if self.family != other.family:
            return [("family", self.family, other.family)]
        found = []
        for half in ("vision", "language"):
            mine, others = getattr(self, half), getattr(other, half)
            for f in dataclasses.fields(mine):
                pair = getattr(mine, f.name), getattr(others, f.name)
                if f.compare and pair[0] != pair[1]:
                    found.append((f"{half} {f.name}", *pair))
        return found

    def replace_layers(self, *, vision: int | None = None, language: int | None = None) -> ModelSpec:
        """A copy with other layer counts, for benchmarks and tests.

        DeepStack keeps the levels that still have a layer on both sides.
        """
        spec = self
        if vision is not None:
            spec = dataclasses.replace(spec, vision=dataclasses.replace(spec.vision, num_layers=vision))
        if language is not None:
            moe = spec.language.moe
            if moe:
                dense = tuple(i for i in moe.dense_layers if i < language)
                moe = dataclasses.replace(moe, dense_layers=dense)
            linear = spec.language.linear_attention
            if linear:
                kept_layers = tuple(i for i in linear.layers if i < language)
                linear = dataclasses.replace(linear, layers=kept_layers)
            smaller = dataclasses.replace(
                spec.language, num_layers=language, moe=moe, linear_attention=linear
            )
            spec = dataclasses.replace(spec, language=smaller)

        kept = tuple(i for i in spec.vision.deepstack_layers if i < spec.vision.num_layers)
        kept = kept[: spec.language.num_layers]
        return dataclasses.replace(spec, vision=dataclasses.replace(spec.vision, deepstack_layers=kept))


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The text fields of an HF config, wherever they are.

    Released Qwen2-VL and Qwen2.5-VL checkpoints have them at the top level; transformers 5.x nests them.
    """
    return config["text_config"] if isinstance(config.get("text_config"), dict) else config


TEXT = "the text fields (text_config, or the top of the file)"
"""The location of the language model's fields, for messages."""


def require(config: dict[str, Any], name: str, where: str) -> Any:
    """``config[name]``, or a :class:`ConfigError` that says which field is missing where."""
    if config.get(name) is None:
        raise ConfigError(f"config.json: field {name!r} is missing in {where}")
    return config[name]


def read_language(
    config: dict[str, Any],
    *,
    norm_eps: float,
    rope_theta: float,
    head_dim: int | None = None,
    tied: bool | None = None,
    rotary_fraction: float = 1.0,
    dense: bool = True,
) -> LanguageSpec:
    """Reads the language model's fields, which may be flat or nested and have old or new rope names.

    Args:
        norm_eps, rope_theta: defaults of the family's config class, for a file without them.
        head_dim: the same; None: the width divided by the number of heads.
        tied: whether the output layer is the embedding; None: as the file says at either level.
        rotary_fraction: fraction of a head that RoPE rotates.
        dense: whether the family has dense layers at all; if not, their FFN width is 0.

    Reference: ``Qwen2VLTextConfig`` / ``Qwen2_5_VLTextConfig`` / ``Qwen3VLTextConfig`` of transformers.
    """
    text = text_config(config)
    # If a file has both names, transformers uses the older one.
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("mrope", "default"):
        raise ConfigError(f"config.json: rope type {kind!r} is not supported; valid: 'mrope', 'default'")
    if text.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported; set it to false")
    if text.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act {text['hidden_act']!r} is not supported; valid: 'silu'")
    if "mrope_section" not in rope:
        raise ConfigError("config.json: mrope_section is missing in rope_scaling / rope_parameters")

    hidden, heads = require(text, "hidden_size", TEXT), require(text, "num_attention_heads", TEXT)
    if "num_key_value_heads" not in text:  # a null means as many as heads
        require(text, "num_key_value_heads", TEXT)
    head_dim = text.get("head_dim", head_dim) or hidden // heads
    section = tuple(int(n) for n in rope["mrope_section"])
    rotary_dim = int(head_dim * rotary_fraction)
    if len(section) != 3 or sum(section) != rotary_dim // 2:
        fraction = f" x partial_rotary_factor {rotary_fraction}" if rotary_fraction != 1.0 else ""
        raise ConfigError(
            f"config.json: mrope_section {section} must be three numbers that add up to"
            f" head_dim{fraction}/2 = {rotary_dim // 2}"
        )
    if tied is None:
        tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))

    return LanguageSpec(
        hidden_size=hidden,
        num_layers=require(text, "num_hidden_layers", TEXT),
        ffn_hidden_size=require(text, "intermediate_size", TEXT) if dense else 0,
        num_heads=heads,
        num_kv_heads=text["num_key_value_heads"] or heads,
        head_dim=head_dim,
        vocab_size=require(text, "vocab_size", TEXT),
        norm_eps=text.get("rms_norm_eps", norm_eps),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", rope_theta))),
        mrope_section=section,
        tied_embeddings=tied,
        mrope_interleaved=bool(rope.get("mrope_interleaved", False)),
        rotary_fraction=rotary_fraction,
    )


QWEN2_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
"""Special tokens of a file that does not name them, up to Qwen3-VL."""


def assemble(
    family: str,
    config: dict[str, Any],
    vision: VisionSpec,
    language: LanguageSpec,
    tokens: dict[str, int] = QWEN2_TOKENS,
) -> ModelSpec:
    """Joins the two halves and the special tokens, and checks that the features fit the language model."""
    if vision.out_hidden_size != language.hidden_size:
        raise ConfigError(
            f"config.json: the vision tower gives features of width {vision.out_hidden_size}, "
            f"but the language model needs {language.hidden_size}"
        )
    if vision.hidden_size % vision.num_heads:
        raise ConfigError(
            f"config.json: vision width {vision.hidden_size} does not divide by {vision.num_heads} heads"
        )
    if vision.head_dim % 4:
        raise ConfigError(
            f"config.json: vision head dimension {vision.head_dim} must divide by 4 for 2D RoPE"
        )

    deep = vision.deepstack_layers
    if list(deep) != sorted(set(deep)) or any(not 0 <= layer < vision.num_layers for layer in deep):
        raise ConfigError(
            f"config.json: DeepStack layers {list(deep)} (deepstack_visual_indexes; 8, 16, 24 without it) "
            f"must ascend within the {vision.num_layers} vision layers"
        )
    if len(deep) > language.num_layers:
        raise ConfigError(
            f"config.json: {len(deep)} DeepStack layers need as many decoder layers; there are"
            f" {language.num_layers}"
        )

    return ModelSpec(
        family=family,
        vision=vision,
        language=language,
        **{name: config.get(name, token) for name, token in tokens.items()},
        initializer_range=text_config(config).get("initializer_range", 0.02),
        hf_config=config,
    )
