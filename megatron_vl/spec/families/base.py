"""Model descriptions, which each family reads from a model's config.

A family turns a Hugging Face ``config.json`` into a :class:`ModelSpec`, which holds plain numbers and flags
and needs no torch. Everything else (model building, the tensor table, conversion, FLOP counts) is derived
from the spec.

If a size is missing, an error names it. Other missing fields get the defaults of the family's config classes
in transformers (5.17 to 5.24), so that a folder describes the same model there and here.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

from megatron_vl.spec.families.rope import (
    ConfigError,
    YarnSpec,
    check_rope_places,
    read_rope_fields,
    read_yarn,
    text_config,
)


@dataclasses.dataclass(frozen=True)
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
    """Zero-based layers with full attention. The other layers attend within windows. Ignored if
    ``window_size`` is 0."""
    tokens_per_second: float = 0.0
    """Temporal M-RoPE positions per second of video (Qwen2.5-VL); 0 means one position per frame group."""
    patch_bias: bool = False
    position_table_side: int = 0
    """Number of rows (and columns) of the square table of learned position embeddings; 0 means no table. The
    table is interpolated to each grid of patches and added to their embeddings."""
    deepstack_layers: tuple[int, ...] = ()
    """Zero-based tower layers for DeepStack. Each layer's output goes through its own merger and is added to
    the language model's hidden states at the medium's tokens. The first layer's features are added after
    decoder layer 0, the second's after decoder layer 1, and so on."""
    video_timestamps: bool = False
    """Whether a video's placeholders are one run per frame group, each preceded by its time as text."""
    box_frame: str = "thousandths"
    """What coordinates of boxes count: ``thousandths`` of the image's sides, or pixels of the ``resized``
    image."""
    box_tokens: bool = False
    """Whether boxes and the names of objects stand between tokens of their own, and not in JSON."""

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def padded_ffn_hidden_size(self) -> int:
        """FFN width in checkpoints and on the device: ``ffn_hidden_size``, rounded up to a multiple of 128.

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

    def is_full_attention(self, layer_index: int) -> bool:
        """Whether the layer ``layer_index`` (from 0) attends over whole frames instead of windows."""
        return self.window_size == 0 or layer_index in self.full_attention_layers


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """The mixture of experts that replaces a decoder layer's MLP."""

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """FFN width of one expert. :attr:`LanguageSpec.ffn_hidden_size` is that of the dense layers."""
    aux_loss_coef: float = dataclasses.field(compare=False)
    """Coefficient of the load-balancing loss, if that loss is added. It affects training but is not part of
    the model's identity."""
    dense_layers: tuple[int, ...]
    """Zero-based decoder layers that keep a dense MLP."""
    output_router_logits: bool = dataclasses.field(default=False, compare=False)
    shared_ffn_hidden_size: int = 0
    """FFN width of the shared expert, which has its own gate and processes every token; 0: there is none."""


@dataclasses.dataclass(frozen=True)
class LinearAttentionSpec:
    """Gated DeltaNet (arXiv 2412.06464), the linear attention that replaces softmax attention in some layers.

    Each key head serves ``value_heads / key_heads`` consecutive value heads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    conv_width: int
    """Width in tokens of the causal convolution before the delta rule, including the current token."""
    linear_layers: tuple[int, ...]
    """Zero-based decoder layers with linear attention; the others have softmax attention."""

    @property
    def conv_channels(self) -> int:
        """Number of channels of the convolution: all queries, all keys, all values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_exchange_size(self) -> int:
        """Number of float32 elements that a context-parallel rank sends.

        They are, for each value head, a state [K, V] and the matrix [K, K] that the rank's shard applies to
        the state of a sequence which crosses the shard.
        """
        return self.value_heads * self.key_dim * (self.key_dim + self.value_dim)


@dataclasses.dataclass(frozen=True)
class LanguageSpec:
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
    """Whether time, height and width alternate along the rotary frequencies. Otherwise, each has one
    contiguous section."""
    moe: MoeSpec | None = None
    """The experts of the layers that have experts; None for a dense model."""
    rotary_fraction: float = 1.0
    """Fraction of a head's elements that RoPE rotates, starting with the first element."""
    yarn: YarnSpec | None = None
    """YaRN; None for the frequencies of the pretraining."""
    output_gate: bool = False
    """Whether softmax attention's output is multiplied by the sigmoid of a gate. The query projection outputs
    this gate next to each head's query."""
    zero_centered_norms: bool = False
    """Whether the RMS norms multiply by ``1 + weight``. The norm within linear attention never does."""
    linear_attention: LinearAttentionSpec | None = None
    """Gated DeltaNet and the layers that use it; None: all layers have softmax attention."""
    has_mtp: bool = False
    """Whether the layer of multi-token prediction is part of the model. A run that trains it sets this
    (:meth:`ModelSpec.with_mtp`); no config does."""

    @property
    def needs_whole_rows(self) -> bool:
        """Whether ranks that share a row need labels beyond their own part, for the tokens two ahead."""
        return self.has_mtp

    @property
    def moe_ffn_hidden_size(self) -> int:
        """FFN width of one expert; 0 without experts."""
        return self.moe.ffn_hidden_size if self.moe else 0

    @property
    def rotary_dim(self) -> int:
        """Number of a head's elements that RoPE rotates."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def query_scale(self) -> tuple[int, float] | None:
        """YaRN's attention factor of query and key: (elements of a query's head, their factor); None: 1."""
        if self.yarn is None or self.yarn.attention_factor == 1.0:
            return None
        return self.rotary_dim, self.yarn.attention_factor**2

    @property
    def rope_fields(self) -> dict[str, Any]:
        """The rotary positions, with the names of ``config.json``."""
        fields: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        fields["mrope_section"] = list(self.mrope_section)
        if self.mrope_interleaved:
            fields["mrope_interleaved"] = True
        if self.rotary_fraction != 1.0:
            fields["partial_rotary_factor"] = self.rotary_fraction
        return fields | (self.yarn.as_fields() if self.yarn else {})

    def has_linear_attention(self, layer_index: int) -> bool:
        return self.linear_attention is not None and layer_index in self.linear_attention.linear_layers

    def has_experts(self, layer_index: int) -> bool:
        """Whether the decoder layer ``layer_index`` (from 0) has experts instead of a dense MLP."""
        return self.moe is not None and layer_index not in self.moe.dense_layers


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """One model: its family, its two halves, its special tokens, and the HF config that describes it."""

    family: str
    vision: VisionSpec
    language: LanguageSpec
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    initializer_range: float = 0.02
    hf_config: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    def __hash__(self) -> int:
        # The estimate looks up what it has cached thousands of times; these fields tell most models apart.
        return hash((self.family, self.language.num_layers, self.language.hidden_size))

    def different_fields(self, other: ModelSpec) -> list[tuple[str, Any, Any]]:
        """Lists (field, own value, other's value) for the fields that make two specs different models.

        If the list is empty, both specs can use the same weights. Special tokens, the range of random initial
        weights, the coefficient of the load-balancing loss, YaRN, and whether multi-token prediction is part
        of the model are not compared.
        """
        if self.family != other.family:
            return [("family", self.family, other.family)]
        halves: dict[str, tuple[Any, Any]] = {
            "vision": (self.vision, other.vision),
            "language": (self.language, other.language),
        }
        compared = {
            f"{half} {each.name}": (getattr(own, each.name), getattr(others, each.name))
            for half, (own, others) in halves.items()
            for each in dataclasses.fields(own)
            if each.compare and each.name not in ("yarn", "has_mtp")
        }
        return [(name, value, others) for name, (value, others) in compared.items() if value != others]

    def with_mtp(self, has_mtp: bool = True) -> ModelSpec:
        """A copy with or without the layer of multi-token prediction.

        Raises:
            ConfigError: the model has no such layer, or not one that shares the model's embedding.
        """
        fields = text_config(self.hf_config) if has_mtp else {}
        if has_mtp and not self.family.startswith("qwen3_5"):
            raise ConfigError(f"{self.family} has no layer of multi-token prediction: set mtp.loss to 0")
        if fields.get("mtp_num_hidden_layers", 1) != 1 or fields.get("mtp_use_dedicated_embeddings"):
            raise ConfigError(
                "config.json: only one layer of multi-token prediction that shares the model's embedding is"
                " supported (mtp_num_hidden_layers 1, mtp_use_dedicated_embeddings false): set mtp.loss to 0"
            )
        return dataclasses.replace(self, language=dataclasses.replace(self.language, has_mtp=has_mtp))

    def replace_layers(
        self, *, num_vision_layers: int | None = None, num_language_layers: int | None = None
    ) -> ModelSpec:
        """A copy with other layer counts and the HF config that describes it, for benchmarks and tests.

        DeepStack keeps the levels that still have a layer on both sides.
        """
        vision, language = self.vision, self.language
        if num_language_layers is not None:

            def kept(layer_numbers: tuple[int, ...]) -> tuple[int, ...]:
                return tuple(layer for layer in layer_numbers if layer < num_language_layers)

            moe, linear = language.moe, language.linear_attention
            moe = moe and dataclasses.replace(moe, dense_layers=kept(moe.dense_layers))
            linear = linear and dataclasses.replace(linear, linear_layers=kept(linear.linear_layers))
            language = dataclasses.replace(
                language, num_layers=num_language_layers, moe=moe, linear_attention=linear
            )

        num_layers = vision.num_layers if num_vision_layers is None else num_vision_layers
        deepstack_layers = tuple(layer for layer in vision.deepstack_layers if layer < num_layers)
        vision = dataclasses.replace(
            vision, num_layers=num_layers, deepstack_layers=deepstack_layers[: language.num_layers]
        )
        hf_config = _config_with_layers(self.hf_config, vision, language)
        return dataclasses.replace(self, vision=vision, language=language, hf_config=hf_config)


def _config_with_layers(
    config: dict[str, Any], vision_spec: VisionSpec, language_spec: LanguageSpec
) -> dict[str, Any]:
    """A copy of an HF config with the layers of the specs; empty if ``config`` is."""
    if not config:
        return {}
    config = copy.deepcopy(config)
    text_fields = text_config(config)
    text_fields["num_hidden_layers"] = language_spec.num_layers
    if text_fields.get("layer_types"):
        text_fields["layer_types"] = text_fields["layer_types"][: language_spec.num_layers]

    config["vision_config"]["depth"] = vision_spec.num_layers
    if vision_spec.position_table_side:
        # From Qwen3-VL on, a missing field means layers 8, 16 and 24, which the tower may not have.
        config["vision_config"]["deepstack_visual_indexes"] = list(vision_spec.deepstack_layers)
    return config


TEXT_FIELDS_PLACE = "the text fields (text_config, or the top of the file)"
"""Where the language model's fields are, for error messages."""


def require_field(config: dict[str, Any], field_name: str, section_name: str) -> Any:
    """Returns ``config[field_name]``.

    Raises:
        ConfigError: the field is missing or null. The message names the field and ``section_name``.
    """
    if config.get(field_name) is None:
        raise ConfigError(f"config.json: field {field_name!r} is missing in {section_name}")
    return config[field_name]


def read_language_spec(
    config: dict[str, Any],
    *,
    norm_eps: float,
    rope_theta: float,
    head_dim: int | None = None,
    tied_embeddings: bool | None = None,
    rotary_fraction: float = 1.0,
    has_dense_layers: bool = True,
) -> LanguageSpec:
    """Reads the language model's fields. They may be flat or nested, with old or new rope names.

    Args:
        norm_eps, rope_theta, head_dim: the family's defaults. ``head_dim`` None: ``hidden_size`` divided by
            the number of heads.
        tied_embeddings: whether the output layer shares the embedding's weight; None: read it from either
            level.
        has_dense_layers: whether the family has dense layers. If not, their FFN width is 0.

    Raises:
        ConfigError: a field is missing, or its value is not supported.

    Reference: ``Qwen2VLTextConfig`` / ``Qwen2_5_VLTextConfig`` / ``Qwen3VLTextConfig`` of transformers.
    """
    text_fields, rope_fields = text_config(config), read_rope_fields(config)
    check_rope_places(config)
    _check_text_fields(text_fields, rope_fields)
    required_field = partial(require_field, text_fields, section_name=TEXT_FIELDS_PLACE)

    num_heads = required_field("num_attention_heads")
    if "num_key_value_heads" not in text_fields:  # null means one for each attention head
        required_field("num_key_value_heads")
    head_dim = text_fields.get("head_dim", head_dim) or required_field("hidden_size") // num_heads
    if tied_embeddings is None:
        tied_embeddings = bool(config.get("tie_word_embeddings") or text_fields.get("tie_word_embeddings"))

    return LanguageSpec(
        hidden_size=required_field("hidden_size"),
        num_layers=required_field("num_hidden_layers"),
        ffn_hidden_size=required_field("intermediate_size") if has_dense_layers else 0,
        num_heads=num_heads,
        num_kv_heads=text_fields["num_key_value_heads"] or num_heads,
        head_dim=head_dim,
        vocab_size=required_field("vocab_size"),
        norm_eps=text_fields.get("rms_norm_eps", norm_eps),
        rope_theta=float(rope_fields.get("rope_theta", text_fields.get("rope_theta", rope_theta))),
        mrope_section=_read_mrope_section(rope_fields, head_dim, rotary_fraction),
        tied_embeddings=tied_embeddings,
        mrope_interleaved=bool(rope_fields.get("mrope_interleaved", False)),
        rotary_fraction=rotary_fraction,
        yarn=read_yarn(config),
    )


def _check_text_fields(text_fields: dict[str, Any], rope_fields: dict[str, Any]) -> None:
    """Raises ConfigError for settings of the language model that no family supports."""
    if text_fields.get("use_sliding_window"):
        raise ConfigError("config.json: use_sliding_window=true is not supported; set it to false")
    if text_fields.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"config.json: hidden_act {text_fields['hidden_act']!r} is not supported; valid: 'silu'"
        )
    if "mrope_section" not in rope_fields:
        raise ConfigError("config.json: mrope_section is missing in rope_scaling / rope_parameters")


def _read_mrope_section(
    rope_fields: dict[str, Any], head_dim: int, rotary_fraction: float
) -> tuple[int, int, int]:
    """:attr:`LanguageSpec.mrope_section`, after checking its sum."""
    mrope_section = tuple(int(frequency_count) for frequency_count in rope_fields["mrope_section"])
    rotary_dim = int(head_dim * rotary_fraction)
    if len(mrope_section) != 3 or sum(mrope_section) != rotary_dim // 2:
        fraction_text = f" x partial_rotary_factor {rotary_fraction}" if rotary_fraction != 1.0 else ""
        raise ConfigError(
            f"config.json: mrope_section {mrope_section} must be three numbers that add up to"
            f" head_dim{fraction_text}/2 = {rotary_dim // 2}"
        )
    return mrope_section


QWEN2_SPECIAL_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
"""Defaults for configs that do not name their special tokens, for the families up to Qwen3-VL."""


def assemble_model_spec(
    family: str,
    config: dict[str, Any],
    vision_spec: VisionSpec,
    language_spec: LanguageSpec,
    default_tokens: dict[str, int] = QWEN2_SPECIAL_TOKENS,
) -> ModelSpec:
    """Joins the two halves and the special tokens, and checks that they fit each other.

    Args:
        default_tokens: the family's default for each special token.

    Raises:
        ConfigError: the halves do not fit, or the vision fields contradict each other.
    """
    if vision_spec.out_hidden_size != language_spec.hidden_size:
        raise ConfigError(
            f"config.json: the vision tower's features have width {vision_spec.out_hidden_size}, "
            f"but the language model needs {language_spec.hidden_size}"
        )
    _check_vision_spec(vision_spec)
    if len(vision_spec.deepstack_layers) > language_spec.num_layers:
        raise ConfigError(
            f"config.json: {len(vision_spec.deepstack_layers)} DeepStack layers need as many decoder layers;"
            f" there are {language_spec.num_layers}"
        )
    return ModelSpec(
        family=family,
        vision=vision_spec,
        language=language_spec,
        **{name: config.get(name, token) for name, token in default_tokens.items()},
        initializer_range=text_config(config).get("initializer_range", 0.02),
        hf_config=config,
    )


def _check_vision_spec(vision_spec: VisionSpec) -> None:
    if vision_spec.hidden_size % vision_spec.num_heads:
        raise ConfigError(
            f"config.json: vision width {vision_spec.hidden_size} is not divisible by {vision_spec.num_heads}"
            " heads"
        )
    if vision_spec.head_dim % 4:
        raise ConfigError(
            f"config.json: vision head dimension {vision_spec.head_dim} must be a multiple of 4 for 2D RoPE"
        )
    deepstack_layers = list(vision_spec.deepstack_layers)
    if deepstack_layers != sorted({*range(vision_spec.num_layers)}.intersection(deepstack_layers)):
        raise ConfigError(
            f"config.json: DeepStack layers {deepstack_layers} (deepstack_visual_indexes; default 8,"
            f" 16, 24) must ascend and be below {vision_spec.num_layers}, the number of vision layers"
        )
