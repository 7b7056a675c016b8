"""The rules ask for every released tensor, and tile each element once."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from converters import make_conversion_rules
from converters.convert import convert_weights
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import tensor_table
from megatron_vl.weights.tensor_files import matrix_shape
from megatron_vl.weights.weight_reader import WeightReader

from .helpers import (
    CONFIGS,
    RELEASED,
    SIZES,
    experts_apart,
    hf_model,
    released_tensors,
    small_config,
    write_hf,
)

PUBLISHED: dict[str, tuple[int, ...]] = {
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
    "Qwen3.5-0.8B": (473, 852_985_920, 1_746_882_752, 20_452_864),
    "Qwen3.5-2B": (617, 2_213_241_664, 4_548_144_832, 60_828_160),
    "Qwen3.5-4B": (723, 4_539_265_536, 9_319_737_856, 120_599_552),
    "Qwen3.5-9B": (760, 9_409_813_744, 19_306_216_416, 243_290_624),
    "Qwen3.5-27B": (1184, 27_356_728_560, 55_562_872_800, 424_699_392),
    "Qwen3.6-27B": (1184, 27_356_728_560, 55_562_855_904, 424_699_392),
    "Qwen3.5-35B-A3B": (1026, 35_107_181_936, 71_903_655_008, 844_640_768),
    "Qwen3.6-35B-A3B": (1026, 35_107_181_936, 71_903_645_408, 844_640_768),
    "Qwen3.5-122B-A10B": (1164, 122_562_817_776, 250_173_007_840, 2_523_679_232),
    "Qwen3.5-397B-A17B": (1371, 396_802_360_816, 806_795_875_168, 6_595_568_128),
}
"""Numbers of tensors and parameters of the released checkpoints, without multi-token prediction; from Qwen3.5
on also ``total_size`` of the weight index in bytes, and the parameters of multi-token prediction."""


@pytest.mark.parametrize("size", RELEASED)
def test_rules_ask_for_the_released_tensors(size: str) -> None:
    spec = read_spec(json.loads((CONFIGS / f"{size}.json").read_text()))
    shapes = {name: shape for rule in make_conversion_rules(spec) for name, shape in rule.hf_shapes.items()}
    assert (len(shapes), sum(math.prod(shape) for shape in shapes.values())) == PUBLISHED[size][:2]


@pytest.mark.parametrize("size", [size for size, numbers in PUBLISHED.items() if len(numbers) > 2])
def test_bytes_are_those_of_the_released_index(size: str) -> None:
    """All is bfloat16, except that Qwen3.5 has decays and norms of linear attention in float32."""
    total, mtp = PUBLISHED[size][2:]
    spec = read_spec(CONFIGS / f"{size}.json")
    table, v = tensor_table(spec), spec.vision
    # The tower's FFN is padded here: rows and bias of fc1, columns of fc2.
    padding = v.num_layers * (v.padded_ffn_hidden_size - v.ffn_hidden_size) * (2 * v.hidden_size + 1)
    parameters = sum(math.prod(info.shape) for info in table.values()) - padding
    wide = sum(
        math.prod(info.shape) for name, info in table.items() if name.endswith(("A_log", "out_norm.weight"))
    )
    assert total == 2 * (parameters + mtp) + (2 * wide if size.startswith("Qwen3.5") else 0)


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


def test_fewer_layers_keep_their_kind() -> None:
    spec = read_spec(CONFIGS / "Qwen3.5-9B.json").replace_layers(num_language_layers=5)
    assert [spec.language.has_linear_attention(i) for i in range(5)] == [True, True, True, False, True]
    assert spec.language.linear_attention.linear_layers == (0, 1, 2, 4)
