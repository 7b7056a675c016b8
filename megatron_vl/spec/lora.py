"""LoRA adapters (arXiv 2106.09685): which matrices have one, and the shapes of their factors.

A released matrix W [out, in] gets two factors, A [rank, in] and B [out, rank], and computes
``W x + scale * B A x``. The canonical tensor of W may be fused from several released matrices (query, key and
value, for instance). Their factors are then fused in the same way, so that every layout cuts them as it cuts
W, and the conversion rules of W also convert its factors:

* ``lora_B`` has the rows of W in their canonical order: ``[rows of W, rank]``. Each row belongs to one
  released matrix. If ranks differ, the width is the largest one, and the columns after a matrix's rank are
  zero.
* ``lora_A`` has the columns of W: ``[sum of the ranks, columns of W]``, the factors of the released matrices
  one below another. A released matrix without an adapter has no rows in ``lora_A``, and its rows in
  ``lora_B`` are zero and stay zero.

For a stack of experts, both have the experts as their first dimension, and gate and up share one A, as in
PEFT's ``target_parameters``. The names of released matrices are those of the modules of ``transformers`` 5,
which PEFT's files use as well.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_vl.config import LoraConfig, ModelConfig, RunConfigError, TrainConfig
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.tensors import (
    EMBEDDING_TENSOR,
    MTP_PREFIX,
    OUTPUT_TENSOR,
    ParallelStyle,
    TensorInfo,
    model_part,
    tensor_table,
)

LANGUAGE_KINDS = ("attention", "linear_attention", "mlp", "shared_experts")
ADAPTER_KINDS = ("language", *LANGUAGE_KINDS, "experts", "vision", "merger")
"""Kinds of matrices that ``lora.targets`` may name. ``language`` stands for all of the language model but its
experts."""
_LANGUAGE_PREFIX = "model.language_model.layers."
_LANGUAGE_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "self_attention.linear_qkv": ("attention", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    "self_attention.linear_proj": ("attention", ("self_attn.o_proj",)),
    "self_attention.in_proj": (
        "linear_attention",
        (
            "linear_attn.in_proj_qkv",
            "linear_attn.in_proj_z",
            "linear_attn.in_proj_b",
            "linear_attn.in_proj_a",
        ),
    ),
    "self_attention.out_proj": ("linear_attention", ("linear_attn.out_proj",)),
    "mlp.linear_fc1": ("mlp", ("mlp.gate_proj", "mlp.up_proj")),
    "mlp.linear_fc2": ("mlp", ("mlp.down_proj",)),
    "mlp.shared_experts.linear_fc1": (
        "shared_experts",
        ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    ),
    "mlp.shared_experts.linear_fc2": ("shared_experts", ("mlp.shared_expert.down_proj",)),
    "mlp.experts.linear_fc1": ("experts", ("mlp.experts.gate_up_proj",)),
    "mlp.experts.linear_fc2": ("experts", ("mlp.experts.down_proj",)),
}
"""Canonical name within a decoder layer -> (kind, released names within the layer)."""
_VISION_NAMES: dict[str, tuple[tuple[str, ...], tuple[str, str]]] = {
    "qwen2_vl": (("mlp.fc1", "mlp.fc2"), ("mlp.0", "mlp.2")),
    "qwen2_5_vl": (("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"), ("mlp.0", "mlp.2")),
    "later": (("mlp.linear_fc1", "mlp.linear_fc2"), ("linear_fc1", "linear_fc2")),
}
"""Family -> released names of the linears of its tower's MLP, the last one last, and of a merger."""
_LAYER = r"language_model\.decoder\.layers\.(\d+)\."
_BLOCK = r"vision_model\.decoder\.layers\.(\d+)\."
_WHOLE_MODULES = (
    (r"vision_model\.merger\..*", "model.visual.merger"),
    (r"vision_model\.deepstack_mergers\.(\d+)\..*", r"model.visual.deepstack_merger_list.\1"),
    (r"vision_model\.patch_embed\..*", "model.visual.patch_embed"),
    (r"vision_model\.position_table\..*", "model.visual.pos_embed"),
    (_BLOCK + r"self_attention\.linear_qkv\.layer_norm_.*", r"model.visual.blocks.\1.norm1"),
    (_BLOCK + r"mlp\.linear_fc1\.layer_norm_.*", r"model.visual.blocks.\1.norm2"),
    (_LAYER + r"self_attention\.\w+\.layer_norm_weight", rf"{_LANGUAGE_PREFIX}\1.input_layernorm"),
    (_LAYER + r"mlp\.linear_fc1\.layer_norm_weight", rf"{_LANGUAGE_PREFIX}\1.post_attention_layernorm"),
    (_LAYER + r"pre_mlp_layernorm\.weight", rf"{_LANGUAGE_PREFIX}\1.post_attention_layernorm"),
    (_LAYER + r"self_attention\.([qk])_layernorm\.weight", rf"{_LANGUAGE_PREFIX}\1.self_attn.\2_norm"),
    (_LAYER + r"self_attention\.out_norm\.weight", rf"{_LANGUAGE_PREFIX}\1.linear_attn.norm"),
    (r"language_model\.decoder\.final_layernorm\.weight", "model.language_model.norm"),
    (re.escape(EMBEDDING_TENSOR), "model.language_model.embed_tokens"),
    (re.escape(OUTPUT_TENSOR), "lm_head"),
)
"""Canonical names of the tensors of modules that can be trained whole, and the module's released name. Each
of these tensors equals a released one."""
_REGEX_CHARACTERS = frozenset("*+?|()[]^$\\{}")
_LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True)
class MixedLora(LoraConfig):
    """Adapters that differ in rank or alpha, as PEFT's patterns give them. A run only reads them."""

    matrices: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Released matrix -> rank and alpha of its adapter."""

    __hash__ = LoraConfig.__hash__


@dataclass(frozen=True)
class AdapterPart:
    hf_name: str
    """Module name in ``transformers`` 5, without ``.weight``."""
    rank: int
    """0: this matrix has no adapter, although another one of the same canonical tensor has."""
    alpha: float
    scale: float
    """alpha / rank, or alpha / sqrt(rank) with ``lora.use_rslora``."""


@dataclass(frozen=True)
class FusedLora:
    """The adapters of the released matrices that one canonical tensor consists of."""

    base: TensorInfo
    kind: str
    parts: tuple[AdapterPart, ...]
    """One for each released matrix, in the order of the conversion rule's names."""

    @property
    def name_a(self) -> str:
        return f"{self.base.name.removesuffix('weight')}adapter.lora_A.weight"

    @property
    def name_b(self) -> str:
        return f"{self.base.name.removesuffix('weight')}adapter.lora_B.weight"

    @property
    def ranks(self) -> list[int]:
        return [part.rank for part in self.parts]

    def tensor_infos(self) -> tuple[TensorInfo, TensorInfo]:
        """The factors A and B as canonical tensors. Of a row-parallel matrix A is cut, otherwise B."""
        *expert_shape, rows, columns = self.base.shape
        cuts_columns = self.base.parallel_style == "row"
        style_a: ParallelStyle = "row" if cuts_columns else "replicated"
        style_b: ParallelStyle = "replicated" if cuts_columns else self.base.parallel_style
        shape_a = (*expert_shape, sum(self.ranks), columns)
        shape_b = (*expert_shape, rows, max(self.ranks))
        return (
            replace(self.base, name=self.name_a, shape=shape_a, parallel_style=style_a, section_rows=()),
            replace(self.base, name=self.name_b, shape=shape_b, parallel_style=style_b),
        )


def is_lora_tensor(tensor_name: str) -> bool:
    return tensor_name.endswith((".adapter.lora_A.weight", ".adapter.lora_B.weight"))


@functools.cache
def fused_lora(spec: ModelSpec, lora: LoraConfig) -> dict[str, FusedLora]:
    """The adapters of a run by the canonical name of their base tensor, in model order. Empty without LoRA.

    Raises:
        RunConfigError: an entry of ``lora.targets`` matches no matrix.
    """
    if not lora.rank:
        return {}

    if isinstance(lora, MixedLora):
        matrices = lora.matrices
    else:
        released = [_released_modules(spec, base) for base in tensor_table(spec).values()]
        named = [(kind, hf_name) for kind, hf_names in released for hf_name in hf_names]
        targeted_names = _matching_names("lora.targets", lora.targets, named)
        matrices = dict.fromkeys(targeted_names, (lora.rank, lora.alpha))
    adapters: dict[str, FusedLora] = {}
    for base in tensor_table(spec).values():
        kind, hf_names = _released_modules(spec, base)
        if matrices.keys().isdisjoint(hf_names):
            continue
        parts = []
        for hf_name in hf_names:
            rank, alpha = matrices.get(hf_name, (0, 0.0))
            divisor = math.sqrt(rank) if lora.use_rslora else rank
            parts.append(AdapterPart(hf_name, rank, alpha, alpha / divisor if rank else 0.0))
        adapters[base.name] = FusedLora(base, kind, tuple(parts))
    return adapters


def stored_lora(settings: Mapping[str, Any]) -> LoraConfig:
    """The adapters that a manifest records; without any settings, those of rank 0."""
    settings = dict(settings)
    matrices = settings.pop("matrices", {})
    if not matrices:
        return LoraConfig(**settings)
    return MixedLora(**settings, matrices={name: (rank, alpha) for name, (rank, alpha) in matrices.items()})


def adapter_table(spec: ModelSpec, lora: LoraConfig) -> dict[str, TensorInfo]:
    """All factors of a run's adapters by canonical name, in model order."""
    return {info.name: info for adapter in fused_lora(spec, lora).values() for info in adapter.tensor_infos()}


@functools.cache
def saved_modules(spec: ModelSpec, lora: LoraConfig) -> dict[str, str]:
    """The tensors of ``lora.modules_to_save``: canonical name -> released name of the module, in model order.

    Raises:
        RunConfigError: an entry matches no module that can be trained whole, or one that has adapters too, or
            the embedding, which is tied to the output layer.
    """
    modules = {name: whole_module(name) for name in (tensor_table(spec) if lora.rank else ())}
    module_by_tensor = {name: module for name, module in modules.items() if module}
    named_modules = [
        ("merger" if model_part(name) == "merger" else "module", module)
        for name, module in module_by_tensor.items()
    ]
    if spec.language.tied_embeddings:
        named_modules.append(("module", "lm_head"))
    chosen_names = _matching_names("lora.modules_to_save", lora.modules_to_save, named_modules)
    if spec.language.tied_embeddings and chosen_names & {"lm_head", "model.language_model.embed_tokens"}:
        raise RunConfigError(
            "lora.modules_to_save: the embedding and lm_head of this model are tied, and PEFT would store two"
            " copies that differ; leave them out"
        )
    saved = {name: module for name, module in module_by_tensor.items() if module in chosen_names}
    for tensor_name in saved.keys() & fused_lora(spec, lora).keys():
        raise RunConfigError(f"lora.modules_to_save: {saved[tensor_name]} has adapters too; exclude them")
    return saved


def whole_module(tensor_name: str) -> str:
    """The released module that a canonical tensor belongs to; empty if it cannot be trained whole."""
    for pattern, module_name in _WHOLE_MODULES:
        if name_match := re.fullmatch(pattern, tensor_name):
            return name_match.expand(module_name)
    return ""


def trained_table(spec: ModelSpec, lora: LoraConfig) -> dict[str, TensorInfo]:
    """The tensors that a run's checkpoints hold: what it trains with LoRA, otherwise all of the model's."""
    if not lora.rank:
        return tensor_table(spec)
    saved = saved_modules(spec, lora)
    return adapter_table(spec, lora) | {
        name: info
        for name, info in tensor_table(spec).items()
        if name in saved or name.startswith(MTP_PREFIX)
    }


@functools.cache
def trained_tensors(spec: ModelSpec, lora: LoraConfig, model_config: ModelConfig) -> frozenset[str]:
    """The canonical names of what a run trains: with LoRA, of adapters and modules that are trained whole."""
    return frozenset(
        tensor_name
        for tensor_name in trained_table(spec, lora)
        if lora.rank
        or tensor_name.startswith(MTP_PREFIX)
        or not getattr(model_config, f"freeze_{model_part(tensor_name)}")
    )


def trains_own_matrices(model_config: ModelConfig, lora: LoraConfig, part_name: str) -> bool:
    """Whether a part's own matrices are trained, and not adapters of them.

    With LoRA, modules that are trained whole (:func:`saved_modules`) come on top.

    Args:
        part_name: ``language``, ``vision`` or ``merger``.
    """
    return not (lora.rank or getattr(model_config, f"freeze_{part_name}"))


@functools.cache
def trained_parts(spec: ModelSpec, lora: LoraConfig, model_config: ModelConfig) -> frozenset[str]:
    """The parts of the model (``vision``, ``merger``, ``language``) in which something is trained.

    Multi-token prediction belongs to none of them.
    """
    trained_names = trained_tensors(spec, lora, model_config)
    return frozenset(model_part(name) for name in trained_names if not name.startswith(MTP_PREFIX))


def freeze_parts_without_lora(config: TrainConfig, spec: ModelSpec) -> TrainConfig:
    """The config of a run with LoRA, with ``model.freeze_*`` set for the parts that have no adapter.

    So all that asks which parts are trained finds the right answer. A config without LoRA stays as it is.

    Raises:
        RunConfigError: a part is frozen and has adapters.
    """
    if not config.lora.rank:
        return config
    adapted_parts = trained_parts(spec, config.lora, config.model)
    for part in sorted(adapted_parts):
        if getattr(config.model, f"freeze_{part}"):
            raise RunConfigError(
                f"model.freeze_{part} is set, but lora.targets names matrices of this part, or"
                " lora.modules_to_save a module; leave out one of the two"
            )

    model_config = replace(
        config.model,
        freeze_vision="vision" not in adapted_parts,
        freeze_merger="merger" not in adapted_parts,
        freeze_language="language" not in adapted_parts,
    )
    return replace(config, model=model_config)


def row_runs(spec: ModelSpec, base: TensorInfo) -> list[tuple[int, int]]:
    """The released matrix of each row of a canonical tensor, as runs of (number of the matrix, rows).

    For a stack of experts, the rows are those of one expert.
    """
    rows = base.shape[1] if base.num_experts else base.shape[0]
    if base.num_experts or len(_released_modules(spec, base)[1]) == 1:
        return [(0, rows)]
    if base.parallel_style == "gated":
        return [(0, rows // 2), (1, rows // 2)]
    if base.parallel_style == "sections":
        # Queries, keys and values of linear attention are one released matrix.
        return [(0, sum(base.section_rows[:3])), *enumerate(base.section_rows[3:], start=1)]

    # For each key/value head: its queries (and their gates), the key and the value.
    language = spec.language
    queries_per_group = language.num_heads // language.num_kv_heads
    if language.output_gate:
        queries_per_group *= 2
    head_dim = language.head_dim
    return [(0, queries_per_group * head_dim), (1, head_dim), (2, head_dim)] * language.num_kv_heads


def initial_bound(spec: ModelSpec, base: TensorInfo) -> tuple[float, int]:
    """How A is drawn: (bound of the uniform distribution, columns that are drawn; the others are zero).

    The bound is that of PEFT, which draws A as ``torch.nn.Linear`` draws its weight.
    """
    columns = base.shape[-1]
    vision = spec.vision
    is_padded = base.name.startswith("vision_model.decoder.") and columns == vision.padded_ffn_hidden_size
    if is_padded and base.name.endswith("mlp.linear_fc2.weight"):
        columns = vision.ffn_hidden_size
    return 1 / math.sqrt(columns), columns


def _released_modules(spec: ModelSpec, base: TensorInfo) -> tuple[str, tuple[str, ...]]:
    """(kind, released module names) of a canonical tensor; no names if it can have no adapter."""
    name = base.name.removesuffix(".weight")
    layer_match = _LAYER_NUMBER.search(name)
    if name == base.name:
        return "", ()
    if name.startswith("language_model.decoder.layers.") and layer_match:
        kind, suffixes = _LANGUAGE_MODULES.get(name[layer_match.end() :], ("", ()))
        return kind, tuple(f"{_LANGUAGE_PREFIX}{layer_match[1]}.{suffix}" for suffix in suffixes)
    if not name.startswith("vision_model."):
        return "", ()

    mlp_names, merger_names = _VISION_NAMES.get(spec.family, _VISION_NAMES["later"])
    if layer_match:
        suffixes = {
            "self_attention.linear_qkv": ("attn.qkv",),
            "self_attention.linear_proj": ("attn.proj",),
            "mlp.linear_fc1": mlp_names[:-1],
            "mlp.linear_fc2": mlp_names[-1:],
        }.get(name[layer_match.end() :], ())
        return "vision", tuple(f"model.visual.blocks.{layer_match[1]}.{suffix}" for suffix in suffixes)

    merger, _, linear = name.removeprefix("vision_model.").rpartition(".")
    if linear not in ("linear_fc1", "linear_fc2"):
        return "", ()
    merger = merger.replace("deepstack_mergers", "deepstack_merger_list")
    return "merger", (f"model.visual.{merger}.{merger_names[linear == 'linear_fc2']}",)


def _matching_names(
    field_name: str, targets: Sequence[str], named_modules: Sequence[tuple[str, str]]
) -> set[str]:
    """Resolves LoRA targets to released matrices, which are given with their kinds."""
    matching_names: set[str] = set()
    for target in targets:
        target_names = {hf_name for kind, hf_name in named_modules if _is_match(target, kind, hf_name)}
        if not target_names:
            valid_kinds = [
                kind for kind in ADAPTER_KINDS if any(_is_match(kind, *named) for named in named_modules)
            ]
            names_text = ", ".join(sorted({hf_name.rpartition(".")[2] for _, hf_name in named_modules}))
            raise RunConfigError(
                f"{field_name}: {target!r} matches no matrix of this model. Names: {names_text}; or give a"
                f" regular expression for the whole name, such as {named_modules[0][1]!r}. Kinds:"
                f" {', '.join(valid_kinds)}"
            )
        matching_names |= target_names
    return matching_names


def _is_match(target: str, kind: str, hf_name: str) -> bool:
    """Whether a target means a matrix: by its kind, by the end of its name, or as a regular expression."""
    if target == "language":
        return kind in LANGUAGE_KINDS
    if target in ADAPTER_KINDS:
        return kind == target
    if _REGEX_CHARACTERS & set(target):
        return re.fullmatch(target, hf_name) is not None
    return hf_name == target or hf_name.endswith(f".{target}")
