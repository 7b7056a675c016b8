"""What only Qwen3.5 has: linear attention, output gates, float32 tensors and multi-token prediction."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.convert import convert_weights, export_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.tensors import LayoutError, check_tensor_parallel, tensor_table
from toolkit.cli import main

from .helpers import (
    CONFIGS,
    assert_same_folder,
    experts_apart,
    released_folder,
    released_tensors,
    small_config,
    write_hf,
)

DENSE, MOE = "Qwen3.6-27B", "Qwen3.5-35B-A3B"
DENSE_3_5 = "Qwen3.5-0.8B"

PUBLISHED = {
    "Qwen3.5-0.8B": (1_746_882_752, 20_452_864),
    "Qwen3.5-2B": (4_548_144_832, 60_828_160),
    "Qwen3.5-4B": (9_319_737_856, 120_599_552),
    "Qwen3.5-9B": (19_306_216_416, 243_290_624),
    "Qwen3.5-27B": (55_562_872_800, 424_699_392),
    "Qwen3.6-27B": (55_562_855_904, 424_699_392),
    "Qwen3.5-35B-A3B": (71_903_655_008, 844_640_768),
    "Qwen3.6-35B-A3B": (71_903_645_408, 844_640_768),
    "Qwen3.5-122B-A10B": (250_173_007_840, 2_523_679_232),
    "Qwen3.5-397B-A17B": (806_795_875_168, 6_595_568_128),
}
"""``total_size`` of each released weight index in bytes, and the parameters of multi-token prediction."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_bytes_are_those_of_the_released_index(size: str) -> None:
    """All is bfloat16, except that Qwen3.5 has decays and norms of linear attention in float32."""
    total, mtp = PUBLISHED[size]
    table = tensor_table(read_spec(CONFIGS / f"{size}.json"))
    v = read_spec(CONFIGS / f"{size}.json").vision
    # The tower's FFN is padded here: rows and bias of fc1, columns of fc2.
    padding = v.num_layers * (v.padded_ffn_hidden_size - v.ffn_hidden_size) * (2 * v.hidden_size + 1)
    parameters = sum(math.prod(info.shape) for info in table.values()) - padding
    wide = sum(
        math.prod(info.shape) for name, info in table.items() if name.endswith(("A_log", "out_norm.weight"))
    )
    assert total == 2 * (parameters + mtp) + (2 * wide if size.startswith("Qwen3.5") else 0)


@pytest.mark.parametrize(("experts", "mtp"), [("stacked", "stacked"), ("apart", "apart"), ("apart", "none")])
def test_experts_and_prediction_in_every_style(tmp_path: Path, experts: str, mtp: str) -> None:
    """Qwen3.5 stores MTP's experts apart beside stacked ones of the model, Qwen3.6 both stacked;
    ``transformers`` writes the model's apart and loses MTP."""
    tensors = {name: t for name, t in released_tensors(MOE).items() if not name.startswith("mtp.")}
    if experts == "apart":
        tensors = experts_apart(tensors, input_first=False)
    other = {"apart": MOE, "stacked": "Qwen3.6-35B-A3B", "none": DENSE}[mtp]
    beside = {name: t for name, t in released_tensors(other).items() if name.startswith("mtp.")}
    beside = {} if mtp == "none" else beside
    origin = write_hf(tmp_path / "hf", tensors | beside, small_config(MOE), files=3)

    report = convert_weights(origin, tmp_path / "shards", {"tp": 2, "pp": 2, "ep": 4, "etp": 2})
    assert report.carried == len(beside) and (mtp == "none" or len(beside) > 4)
    report = export_weights(tmp_path / "shards", origin, tmp_path / "back")
    assert report.carried == len(beside) and report.tensors == len(tensors) + len(beside)
    assert_same_folder(origin, tmp_path / "back")


def test_unknown_tensors_beside_the_model_are_refused(tmp_path: Path) -> None:
    tensors = released_tensors(DENSE_3_5) | {"model.mtpx.fc.weight": torch.zeros(3)}
    origin = write_hf(tmp_path / "hf", tensors, small_config(DENSE_3_5))
    with pytest.raises(ValueError, match=r"'model\.mtpx\.fc\.weight' is unknown"):
        HfCheckpoint(origin)


@pytest.mark.parametrize("place", ["model.", "language_model.", "model.language_model."])
def test_prediction_in_the_places_of_other_tools(tmp_path: Path, place: str) -> None:
    """transformers ignores it there too; an export leaves it where it was."""
    from transformers import AutoModelForImageTextToText

    tensors = {place * name.startswith("mtp.") + name: t for name, t in released_tensors(DENSE_3_5).items()}
    origin = write_hf(tmp_path / "hf", tensors, small_config(DENSE_3_5))
    assert convert_weights(origin, tmp_path / "full").carried == 3
    export_weights(tmp_path / "full", origin, tmp_path / "back")
    assert_same_folder(origin, tmp_path / "back")
    theirs = AutoModelForImageTextToText.from_pretrained(origin, output_loading_info=True)[1]
    assert not theirs["missing_keys"] and all("mtp." in name for name in theirs["unexpected_keys"])


def test_convert_says_what_it_leaves_out(tmp_path: Path, capsys) -> None:
    """And every byte comes back, with tied embeddings too."""
    origin, full, back = (str(tmp_path / name) for name in ("hf", "full", "back"))
    released_folder(Path(origin), DENSE_3_5)
    assert main(["convert", "--hf", origin, "--out", full, "--parallel.tp", "2"]) == 0
    said = capsys.readouterr().out
    assert "note: 3 tensors of multi-token prediction (mtp.*) were not converted" in said
    assert main(["export", "--checkpoint", full, "--hf", origin, "--out", back]) == 0
    said = capsys.readouterr().out
    assert "(mtp.*) were copied from the original folder as they are: they were not" in said
    assert_same_folder(Path(origin), Path(back))


def config_of(size: str, **text: Any) -> dict[str, Any]:
    config = json.loads((CONFIGS / f"{size}.json").read_text())
    config["text_config"] |= text
    return config


@pytest.mark.parametrize(
    ("size", "text", "tp", "message"),
    [
        (
            "9B",
            {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            4,
            "tp=4 does not divide 2 key heads",
        ),
        ("9B", {"num_attention_heads": 24, "num_key_value_heads": 6}, 4, "does not divide 6 key/value heads"),
        ("35B-A3B", {"shared_expert_intermediate_size": 516}, 8, "the shared expert's FFN width 516"),
        ("9B", {"linear_num_value_heads": 33}, 1, "linear_num_value_heads 33 must be a multiple"),
        ("9B", {"attn_output_gate": False}, 1, "attn_output_gate=false is not supported; set it to true"),
        ("9B", {"num_hidden_layers": 31}, 1, "layer_types must name"),
        ("35B-A3B", {"mlp_only_layers": [1]}, 1, r"dense layers \[1\]"),
    ],
)
def test_impossible_configs_are_refused(size: str, text: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises((ConfigError, LayoutError), match=message):
        check_tensor_parallel(read_spec(config_of(f"Qwen3.5-{size}", **text)), tp)


def test_fewer_layers_keep_their_kind() -> None:
    spec = read_spec(CONFIGS / "Qwen3.5-9B.json").replace_layers(num_language_layers=5)
    assert [spec.language.has_linear_attention(i) for i in range(5)] == [True, True, True, False, True]
    assert spec.language.linear_attention.linear_layers == (0, 1, 2, 4)
