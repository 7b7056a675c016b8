"""What only Qwen3.5 has: linear attention, output gates, float32 tensors and multi-token prediction."""

import math
from pathlib import Path

import pytest
import torch

from converters.convert import convert_weights, export_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import tensor_table

from .helpers import CONFIGS, assert_same_folder, experts_apart, released_tensors, run, small_config, write_hf

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


@pytest.mark.parametrize("place", ["", "model.", "language_model.", "model.language_model."])
def test_prediction_is_left_where_it_is(tmp_path: Path, place: str, capsys) -> None:
    """As released, and in the places of other tools, where transformers ignores it too."""
    from transformers import AutoModelForImageTextToText

    tensors = {place * name.startswith("mtp.") + name: t for name, t in released_tensors(DENSE_3_5).items()}
    origin, full, back = tmp_path / "hf", tmp_path / "full", tmp_path / "back"
    write_hf(origin, tensors, small_config(DENSE_3_5))
    assert run("convert", "--hf", origin, "--out", full, "--parallel.tp", 2) == 0
    note = "note: 3 tensors of multi-token prediction (mtp.*) were not converted"
    assert note in capsys.readouterr().out
    assert run("export", "--checkpoint", full, "--hf", origin, "--out", back) == 0
    note = "(mtp.*) were copied from the original folder as they are: they were not"
    assert note in capsys.readouterr().out
    assert_same_folder(origin, back)
    theirs = AutoModelForImageTextToText.from_pretrained(origin, output_loading_info=True)[1]
    assert not theirs["missing_keys"] and all("mtp." in name for name in theirs["unexpected_keys"])


def test_fewer_layers_keep_their_kind() -> None:
    spec = read_spec(CONFIGS / "Qwen3.5-9B.json").replace_layers(num_language_layers=5)
    assert [spec.language.has_linear_attention(i) for i in range(5)] == [True, True, True, False, True]
    assert spec.language.linear_attention.linear_layers == (0, 1, 2, 4)
