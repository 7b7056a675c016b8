"""The Megatron side of a conversion is what Megatron-core computes with, checked
by independent constructions.

A round trip cannot see a permutation that both directions share; these tests can.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converters import make_conversion_rules, qwen2_vl
from converters.convert import convert_weights
from converters.hf_checkpoint import short_tensor_name
from converters.rules import rules_from_entries
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import EMBEDDING_TENSOR, OUTPUT_TENSOR, tensor_table
from megatron_vl.weights.tensor_files import matrix_shape
from megatron_vl.weights.weight_reader import WeightReader

from .helpers import (
    CONFIGS,
    RELEASED,
    SIZES,
    experts_apart,
    hf_model,
    released_folder,
    released_tensors,
    small_config,
    write_hf,
)

PARAMETERS = {
    "Qwen2-VL-2B-Instruct": (729, 2_208_985_600),
    "Qwen2-VL-7B-Instruct": (730, 8_291_375_616),
    "Qwen2-VL-72B-Instruct": (1354, 73_405_560_320),
    "Qwen2.5-VL-3B-Instruct": (824, 3_754_622_976),
    "Qwen2.5-VL-7B-Instruct": (729, 8_292_166_656),
    "Qwen2.5-VL-32B-Instruct": (1161, 33_452_718_336),
    "Qwen2.5-VL-72B-Instruct": (1353, 73_410_777_344),
    "Qwen3-VL-2B-Instruct": (625, 2_127_532_032),
    "Qwen3-VL-4B-Instruct": (713, 4_437_815_808),
    "Qwen3-VL-8B-Instruct": (750, 8_767_123_696),
    "Qwen3-VL-32B-Instruct": (1058, 33_357_390_064),
    "Qwen3-VL-30B-A3B-Instruct": (882, 31_070_754_032),
    "Qwen3-VL-235B-A22B-Instruct": (1388, 235_670_022_896),
    "Qwen3.5-0.8B": (473, 852_985_920),
    "Qwen3.5-2B": (617, 2_213_241_664),
    "Qwen3.5-4B": (723, 4_539_265_536),
    "Qwen3.5-9B": (760, 9_409_813_744),
    "Qwen3.5-27B": (1184, 27_356_728_560),
    "Qwen3.6-27B": (1184, 27_356_728_560),
    "Qwen3.5-35B-A3B": (1026, 35_107_181_936),
    "Qwen3.6-35B-A3B": (1026, 35_107_181_936),
    "Qwen3.5-122B-A10B": (1164, 122_562_817_776),
    "Qwen3.5-397B-A17B": (1371, 396_802_360_816),
}
"""Numbers of tensors and parameters of the released checkpoints, without multi-token prediction."""


@pytest.mark.parametrize("size", RELEASED)
def test_rules_ask_for_the_released_tensors(size: str) -> None:
    spec = read_spec(json.loads((CONFIGS / f"{size}.json").read_text()))
    shapes = {name: shape for rule in make_conversion_rules(spec) for name, shape in rule.hf_shapes.items()}
    assert (len(shapes), sum(math.prod(shape) for shape in shapes.values())) == PARAMETERS[size]


@pytest.mark.parametrize("size", SIZES)
def test_rules_ask_for_transformers_tensors(size: str) -> None:
    """Names and shapes are those of transformers' own model."""
    shapes = {
        name: shape
        for rule in make_conversion_rules(read_spec(small_config(size)))
        for name, shape in rule.hf_shapes.items()
    }
    released = released_tensors(size).items()
    assert shapes == {name: tuple(t.shape) for name, t in released if not name.startswith("mtp.")}


@pytest.mark.parametrize("size", SIZES)
def test_rules_cover_every_element_once(size: str) -> None:
    """Blocks and padding tile each canonical tensor, and blocks alone tile each HF tensor."""
    spec = read_spec(small_config(size))
    table = tensor_table(spec)
    hf_area = dict[str, Tensor]()
    for rule in make_conversion_rules(spec):
        area = torch.zeros(matrix_shape(table[rule.name].shape), dtype=torch.int8)
        for block in rule.blocks:
            area[block.row : block.row + block.rows, block.col : block.col + block.cols] += 1
            empty = torch.zeros(matrix_shape(rule.hf_shapes[str(block.part_id)]), dtype=torch.int8)
            part = hf_area.setdefault(str(block.part_id), empty)
            there = block.inverse_block(rule.name)
            part[there.row : there.row + there.rows, there.col : there.col + there.cols] += 1
        for region in rule.padding:
            area[region.row : region.row_end, region.col : region.col_end] += 1
        assert (area == 1).all(), rule.name
    assert all((part == 1).all() for part in hf_area.values())


@pytest.fixture(
    scope="module",
    params=[
        *("Qwen2-VL-2B-Instruct", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-2B-Instruct", "Qwen3-VL-32B-Instruct"),
        *("Qwen3-VL-30B-A3B-Instruct", "Qwen3.6-27B", "Qwen3.5-35B-A3B"),
    ],
)
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(size, reader of unsplit weights, HF tensors under names that all families share)."""
    size = request.param
    root = tmp_path_factory.mktemp("canonical")
    convert_weights(released_folder(root / "hf", size), root / "full")
    return (
        size,
        WeightReader(root / "full"),
        {short_tensor_name(name): tensor for name, tensor in released_tensors(size).items()},
    )


def test_language_qkv_splits_as_core_does(converted) -> None:
    """Projecting with the fused matrix and splitting like Megatron-core gives HF's queries, keys, values."""
    size, reader, hf = converted
    m = read_spec(small_config(size)).language
    groups = m.num_kv_heads
    dim = m.head_dim
    per_group = m.num_heads // m.num_kv_heads
    for layer in (i for i in range(m.num_layers) if not (m.output_gate or m.has_linear_attention(i))):
        for kind in ("weight", "bias") if m.qkv_bias else ("weight",):
            fused = reader.read_shard(
                f"language_model.decoder.layers.{layer}.self_attention.linear_qkv.{kind}"
            )
            heads = fused.view(groups, per_group + 2, dim, -1)
            parts = {"q": heads[:, :per_group], "k": heads[:, per_group], "v": heads[:, per_group + 1]}
            for which, part in parts.items():
                ours = part.reshape(-1, fused.shape[1]) if kind == "weight" else part.reshape(-1)
                assert torch.equal(ours, hf[f"model.layers.{layer}.self_attn.{which}_proj.{kind}"])


def test_vision_qkv_splits_as_core_does(converted) -> None:
    """HF reshapes the projection to [3, heads, dim], Megatron-core to [heads, 3 * dim]."""
    size, reader, hf = converted
    v = read_spec(small_config(size)).vision
    for layer in range(v.num_layers):
        for kind in ("weight", "bias"):
            theirs = hf[f"visual.blocks.{layer}.attn.qkv.{kind}"].view(3, v.num_heads, v.head_dim, -1)
            ours = reader.read_shard(f"vision_model.decoder.layers.{layer}.self_attention.linear_qkv.{kind}")
            for head in range(v.num_heads):
                mine = ours.view(v.num_heads, 3 * v.head_dim, -1)[head].chunk(3)
                assert all(torch.equal(mine[i], theirs[i, head]) for i in range(3))


@pytest.mark.parametrize("size", [size for size in SIZES if "-A" in size])
def test_experts_of_every_style_become_the_same_weights(tmp_path: Path, size: str) -> None:
    """Those that the parity table compares with transformers have the released style."""
    released, config = released_tensors(size), small_config(size)
    styles = {
        "released": released,
        "apart": experts_apart(released, input_first="VL" in size),
        "in memory": {name: hf_model(size).state_dict().get(name, t) for name, t in released.items()},
    }
    digests = set()
    for style, tensors in styles.items():
        convert_weights(write_hf(tmp_path / style, tensors, config), tmp_path / f"{style} out")
        reader = WeightReader(tmp_path / f"{style} out")
        names = [name for name in reader.tensor_names() if ".experts." in name]
        digests.add(b"".join(reader.read_shard(n).view(torch.uint8).numpy().tobytes() for n in names))
    assert len(digests) == 1


def test_padding_is_zero(converted) -> None:
    size, reader, _ = converted
    v = read_spec(small_config(size)).vision
    width, padded = v.ffn_hidden_size, v.padded_ffn_hidden_size
    assert (padded > width) == (small_config(size)["vision_config"].get("intermediate_size") != 256)
    fc1 = reader.read_shard("vision_model.decoder.layers.1.mlp.linear_fc1.weight")
    fc2 = reader.read_shard("vision_model.decoder.layers.1.mlp.linear_fc2.weight")
    for half in fc1.chunk(2 if v.gated_mlp else 1):
        assert half.shape[0] == padded and not half[width:].any() and half[:width].any(dim=1).all()
    assert fc2.shape[1] == padded and not fc2[:, width:].any()


def test_patch_embedding_is_a_matrix(converted) -> None:
    """Conv3d with kernel = stride on one patch equals the matrix on (channel, time, row, column)."""
    _, reader, hf = converted
    kernel = hf["visual.patch_embed.proj.weight"].double()
    patch = torch.randn(5, *kernel.shape[1:], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    conv = torch.nn.functional.conv3d(patch, kernel).flatten(1)
    matrix = reader.read_shard("vision_model.patch_embed.proj.weight").double()
    torch.testing.assert_close(patch.flatten(1) @ matrix.T, conv)


def test_tied_output_is_not_stored(converted) -> None:
    size, reader, hf = converted
    assert (
        (OUTPUT_TENSOR in reader.tensor_names())
        == ("lm_head.weight" in hf)
        == (not small_config(size)["tie_word_embeddings"])
    )
    assert torch.equal(reader.read_shard(EMBEDDING_TENSOR), hf["model.embed_tokens.weight"])


def test_tensors_without_an_entry_are_named() -> None:
    spec = read_spec(small_config("Qwen2-VL-2B-Instruct"))
    entries = [*qwen2_vl.TOWER, *qwen2_vl.TOWER_MLP]
    with pytest.raises(ValueError, match=r"qwen2_vl: no rule for tensor 'language_model\.embedding"):
        rules_from_entries(spec, entries)
    with pytest.raises(ValueError, match="two entries for one name"):
        rules_from_entries(spec, [*entries, entries[0]])
