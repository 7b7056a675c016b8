"""What one Megatron tensor is made of in a Hugging Face checkpoint, written once and read in both directions.

A :class:`Rule` lists the rectangles (:class:`~megatron_vl.weights.blocks.Block`) that a canonical tensor and
its HF tensors have in common. Conversion reads the list forwards, export backwards, so that each is the
other's inverse; what no rectangle covers is padding and zero. The functions below write the lists for the
structures that occur.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_vl.spec.families import LanguageSpec, ModelSpec, VisionSpec
from megatron_vl.spec.tensors import EMBEDDING, OUTPUT, TensorInfo, tensor_table
from megatron_vl.weights.blocks import Block
from megatron_vl.weights.tensor_files import Window, matrix_shape

HF_OUTPUT = "lm_head.weight"

ExpertStyle = Literal["input_first", "output_first", "apart"]
"""How a folder stores a layer's experts:

* ``input_first``: stacks whose matrices are transposed, ``gate_up_proj [E, h, 2 * f]`` and
  ``down_proj [E, f, h]``. The released checkpoints, and what transformers 4.57 saves.
* ``output_first``: stacks as Megatron's and as in transformers 5's memory, ``[E, 2 * f, h]`` and
  ``[E, h, f]``; what it saves.
* ``apart``: three matrices for each expert, ``experts.N.gate_proj.weight`` and so on, as in the text models
  (Qwen3-MoE).
"""
RELEASED: ExpertStyle = "input_first"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
"""HF's names of the stacks, within a layer."""


@dataclass(frozen=True)
class Rule:
    """One canonical tensor and its HF tensors, under their released names."""

    name: str
    hf: dict[str, tuple[int, ...]]
    """HF name -> shape."""
    blocks: tuple[Block, ...]
    padding: tuple[Window, ...] = ()
    """Windows of the canonical tensor that HF does not have; zero."""


def same(info: TensorInfo, hf: str, shape: tuple[int, ...] | None = None) -> Rule:
    """The tensor as it is; ``shape`` where HF gives it more dimensions (the Conv3d of the patch
    embedding)."""
    return Rule(info.name, {hf: shape or info.shape}, (Block(hf, *matrix_shape(info.shape)),))


def split_qkv(info: TensorInfo, hf: tuple[str, str, str], heads: int, groups: int, dim: int) -> Rule:
    """HF query, key and value; canonical holds, for each key/value head, its query heads, its key and its
    value head."""
    per_group, cols = heads // groups, matrix_shape(info.shape)[1]
    sizes = dict(zip(hf, (per_group * dim, dim, dim), strict=True))
    return _runs(
        info, {name: groups * rows for name, rows in sizes.items()}, _interleaved(sizes, groups, cols)
    )


def fused_qkv(info: TensorInfo, hf: str, heads: int, dim: int) -> Rule:
    """One HF tensor with all queries, then all keys, then all values; canonical has q, k, v of each head
    together."""
    cols = matrix_shape(info.shape)[1]
    blocks = [
        Block(hf, dim, cols, row=(3 * head + which) * dim, part_row=(which * heads + head) * dim)
        for head in range(heads)
        for which in range(3)
    ]
    return _runs(info, {hf: 3 * heads * dim}, blocks)


def gated(info: TensorInfo, gate: str, up: str, width: int) -> Rule:
    """Gate, then up, each padded with zero rows from ``width`` to half of the canonical rows."""
    rows, cols = matrix_shape(info.shape)
    half = rows // 2
    blocks = [Block(hf, width, cols, row=i * half) for i, hf in enumerate((gate, up))]
    padding = [Window(i * half + width, (i + 1) * half, 0, cols) for i in (0, 1) if half > width]
    return _runs(info, {gate: width, up: width}, blocks, padding)


def padded_rows(info: TensorInfo, hf: str, width: int) -> Rule:
    """Zero rows added from ``width`` on."""
    rows, cols = matrix_shape(info.shape)
    padding = [Window(width, rows, 0, cols)] if rows > width else []
    return _runs(info, {hf: width}, [Block(hf, width, cols)], padding)


def padded_columns(info: TensorInfo, hf: str, width: int) -> Rule:
    """Zero columns added from ``width`` on."""
    rows, cols = matrix_shape(info.shape)
    padding = (Window(0, rows, width, cols),) if cols > width else ()
    return Rule(info.name, {hf: (rows, width)}, (Block(hf, rows, width),), padding)


def stacked(info: TensorInfo, hf: str, style: ExpertStyle) -> Rule:
    """One HF stack of all experts' matrices, each one transposed where the style has the input first."""
    if style == "output_first":
        return same(info, hf)
    count, rows, cols = info.shape
    blocks = (Block(hf, rows, cols, row=i * rows, part_row=i * cols, transposed=True) for i in range(count))
    return Rule(info.name, {hf: (count, cols, rows)}, tuple(blocks))


def expert_by_expert(info: TensorInfo, hf: str, names: Sequence[str]) -> Rule:
    """HF matrices of their own for each expert, one below the other in ours; ``hf`` holds ``{}`` for the
    expert's number."""
    count, rows, cols = info.shape
    height = rows // len(names)
    tensors = [f"{hf.format(expert)}{name}" for expert in range(count) for name in names]
    blocks = tuple(Block(name, height, cols, row=i * height) for i, name in enumerate(tensors))
    return Rule(info.name, dict.fromkeys(tensors, (height, cols)), blocks)


def _interleaved(sizes: dict[str, int], groups: int, cols: int) -> list[Block]:
    blocks, row = [], 0
    for group in range(groups):
        for hf, rows in sizes.items():
            blocks.append(Block(hf, rows, cols, row=row, part_row=group * rows))
            row += rows
    return blocks


def _runs(
    info: TensorInfo, rows: dict[str, int], blocks: Sequence[Block], padding: Sequence[Window] = ()
) -> Rule:
    """A rule whose HF tensors have the canonical tensor's columns."""
    return Rule(
        info.name, {hf: (n, *info.shape[1:]) for hf, n in rows.items()}, tuple(blocks), tuple(padding)
    )


# --- Parts that families share ------------------------------------------------------------------------------


def language_rules(
    spec: ModelSpec, table: dict[str, TensorInfo], prefix: str = "model.", experts: ExpertStyle = RELEASED
) -> list[Rule]:
    """The language model, its HF names beginning with ``prefix`` as in the released checkpoints."""
    m = spec.language
    rules = [same(table[EMBEDDING], f"{prefix}embed_tokens.weight")]
    for i in range(m.num_layers):
        ours, hf = f"language_model.decoder.layers.{i}.", f"{prefix}layers.{i}."
        rules += _attention(m, table, ours, hf)
        rules += _experts(table, ours, hf, experts) if m.has_experts(i) else _mlp(m, table, ours, hf)
    rules.append(same(table["language_model.decoder.final_layernorm.weight"], f"{prefix}norm.weight"))
    if not m.tied_embeddings:
        rules.append(same(table[OUTPUT], HF_OUTPUT))
    return rules


def _attention(m: LanguageSpec, table: dict[str, TensorInfo], ours: str, hf: str) -> list[Rule]:
    attention = hf + "self_attn."

    def qkv(kind: str) -> Rule:
        names = (f"{attention}q_proj.{kind}", f"{attention}k_proj.{kind}", f"{attention}v_proj.{kind}")
        return split_qkv(
            table[f"{ours}self_attention.linear_qkv.{kind}"], names, m.num_heads, m.num_kv_heads, m.head_dim
        )

    return [
        same(table[ours + "self_attention.linear_qkv.layer_norm_weight"], hf + "input_layernorm.weight"),
        *(qkv(kind) for kind in (("weight", "bias") if m.qkv_bias else ("weight",))),
        *(
            same(table[f"{ours}self_attention.{n}_layernorm.weight"], f"{attention}{n}_norm.weight")
            for n in "qk"
            if m.qk_norm
        ),
        same(table[ours + "self_attention.linear_proj.weight"], attention + "o_proj.weight"),
    ]


def _mlp(m: LanguageSpec, table: dict[str, TensorInfo], ours: str, hf: str) -> list[Rule]:
    mlp = hf + "mlp."
    return [
        same(table[ours + "mlp.linear_fc1.layer_norm_weight"], hf + "post_attention_layernorm.weight"),
        gated(
            table[ours + "mlp.linear_fc1.weight"],
            mlp + "gate_proj.weight",
            mlp + "up_proj.weight",
            m.ffn_hidden_size,
        ),
        same(table[ours + "mlp.linear_fc2.weight"], mlp + "down_proj.weight"),
    ]


def _experts(table: dict[str, TensorInfo], ours: str, hf: str, style: ExpertStyle) -> list[Rule]:
    fc1, fc2 = (table[f"{ours}mlp.experts.linear_{which}.weight"] for which in ("fc1", "fc2"))
    if style == "apart":
        each = hf + "mlp.experts.{}."
        matrices = [
            expert_by_expert(fc1, each, ("gate_proj.weight", "up_proj.weight")),
            expert_by_expert(fc2, each, ("down_proj.weight",)),
        ]
    else:
        matrices = [stacked(fc1, hf + GATE_UP, style), stacked(fc2, hf + DOWN, style)]
    return [
        same(table[ours + "pre_mlp_layernorm.weight"], hf + "post_attention_layernorm.weight"),
        same(table[ours + "mlp.router.weight"], hf + "mlp.gate.weight"),
        *matrices,
    ]


QWEN2_MERGER = ("ln_q", "mlp.0", "mlp.2")
"""HF's names within the merger of Qwen2-VL and Qwen2.5-VL: norm, first and second linear layer."""


def vision_rules(
    spec: ModelSpec,
    table: dict[str, TensorInfo],
    mlp: Callable[[VisionSpec, str, str], list[Rule]],
    *,
    prefix: str = "visual.",
    merger: tuple[str, str, str] = QWEN2_MERGER,
) -> list[Rule]:
    """The vision tower.

    Args:
        mlp: the rules of a layer's MLP, which differ: called with the tower, the layer's canonical and HF
            prefixes.
        prefix: what HF's names begin with.
        merger: HF's names of a merger's norm and two linear layers.
    """
    v = spec.vision
    kinds = ("weight", "bias") if v.norm == "LayerNorm" else ("weight",)
    conv = (v.hidden_size, v.in_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    rules = [same(table["vision_model.patch_embed.proj.weight"], f"{prefix}patch_embed.proj.weight", conv)]
    if v.patch_bias:
        rules.append(same(table["vision_model.patch_embed.proj.bias"], f"{prefix}patch_embed.proj.bias"))
    if v.position_table_side:
        rules.append(same(table["vision_model.position_table.weight"], f"{prefix}pos_embed.weight"))
    for i in range(v.num_layers):
        ours, hf = f"vision_model.decoder.layers.{i}.", f"{prefix}blocks.{i}."
        qkv, proj = ours + "self_attention.linear_qkv.", ours + "self_attention.linear_proj."
        rules += [same(table[f"{qkv}layer_norm_{kind}"], f"{hf}norm1.{kind}") for kind in kinds]
        rules += [
            fused_qkv(table[qkv + kind], f"{hf}attn.qkv.{kind}", v.num_heads, v.head_dim)
            for kind in ("weight", "bias")
        ]
        rules += [same(table[proj + kind], f"{hf}attn.proj.{kind}") for kind in ("weight", "bias")]
        rules += [
            same(table[f"{ours}mlp.linear_fc1.layer_norm_{kind}"], f"{hf}norm2.{kind}") for kind in kinds
        ]
        rules += mlp(v, ours + "mlp.", hf + "mlp.")
    deepstack = range(len(v.deepstack_layers))
    for ours, hf in [
        ("merger", "merger"),
        *((f"deepstack_mergers.{i}", f"deepstack_merger_list.{i}") for i in deepstack),
    ]:
        for part, hf_part in zip(("norm", "linear_fc1", "linear_fc2"), merger, strict=True):
            for kind in kinds if part == "norm" else ("weight", "bias"):
                rules.append(
                    same(table[f"vision_model.{ours}.{part}.{kind}"], f"{prefix}{hf}.{hf_part}.{kind}")
                )
    return rules


def check_cover(spec: ModelSpec, rules: Sequence[Rule]) -> None:
    """Raises :class:`ValueError` unless there is exactly one rule for every tensor of the model."""
    table, names = tensor_table(spec), [rule.name for rule in rules]
    wrong = sorted(set(table) ^ set(names)) or sorted(name for name in set(names) if names.count(name) > 1)
    if wrong:
        raise ValueError(f"{spec.family}: no rule, or more than one, for tensor {wrong[0]!r}")
