"""What only Qwen3.5 has: linear attention, output gates, float32 tensors and multi-token prediction."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.convert import convert_weights, export_weights, reshard_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.tensors import LayoutError, Sharding, check_tensor_parallel, tensor_table
from megatron_vl.weights.weight_reader import WeightReader
from toolkit.cli import main

from .helpers import (
    CONFIGS,
    assert_same_folder,
    experts_apart,
    hf_model,
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


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[WeightReader, dict[str, Tensor]]:
    root = tmp_path_factory.mktemp("qwen3_5")
    convert_weights(released_folder(root / "hf", DENSE), root / "shards", {"tp": 4, "pp": 2})
    return WeightReader(root / "shards"), released_tensors(DENSE)


def test_gated_attention_as_core_splits_it(converted) -> None:
    """Each group's rows are its queries, its gates, key, value; HF has query and gate of a head together."""
    reader, hf = converted
    m = reader.spec.language
    (layer,) = [i for i in range(m.num_layers) if not m.has_linear_attention(i)]
    fused = reader.read_shard(f"language_model.decoder.layers.{layer}.self_attention.linear_qkv.weight")
    per_group, dim = m.num_heads // m.num_kv_heads, m.head_dim
    groups = fused.view(m.num_kv_heads, 2 * per_group + 2, dim, -1)

    prefix = f"model.language_model.layers.{layer}.self_attn."
    theirs = hf[f"{prefix}q_proj.weight"].view(m.num_heads, 2, dim, -1)  # view(..., heads, 2 * dim).chunk(2)
    assert torch.equal(groups[:, :per_group].reshape(m.num_heads, dim, -1), theirs[:, 0])
    assert torch.equal(groups[:, per_group:-2].reshape(m.num_heads, dim, -1), theirs[:, 1])
    for which, name in ((-2, "k_proj"), (-1, "v_proj")):
        assert torch.equal(groups[:, which].flatten(0, 1), hf[f"{prefix}{name}.weight"])


def test_linear_attention_of_a_tensor_rank(converted) -> None:
    """Rank 2 of 4 holds its quarter of the heads of each section, so that key heads stay with the value
    heads that they serve."""
    reader, hf = converted
    a = reader.spec.language.linear_attention
    ours = "language_model.decoder.layers.1.self_attention."
    theirs = {
        name.split(".linear_attn.")[1]: tensor
        for name, tensor in hf.items()
        if name.startswith("model.language_model.layers.1.linear_attn.")
    }
    keys, values = a.key_heads * a.key_dim, a.value_heads * a.value_dim

    def quarter(tensor: Tensor) -> Tensor:
        return tensor.chunk(4)[2]

    q, k, v = (quarter(t) for t in theirs["in_proj_qkv.weight"].split((keys, keys, values)))
    z, b, a_ = (quarter(theirs[f"in_proj_{name}.weight"]) for name in "zba")
    rank = {
        name.removeprefix(ours): reader.read_shard(name, 2, Sharding(4))
        for name in reader.tensor_infos
        if name.startswith(ours)
    }
    assert torch.equal(rank["in_proj.weight"], torch.cat((q, k, v, z, b, a_)))
    channels = theirs["conv1d.weight"].split((keys, keys, values))
    assert torch.equal(rank["conv1d.weight"], torch.cat([quarter(part) for part in channels]))
    assert torch.equal(rank["A_log"], quarter(theirs["A_log"]))
    assert torch.equal(rank["dt_bias"], quarter(theirs["dt_bias"]))
    assert torch.equal(rank["out_norm.weight"], theirs["norm.weight"])
    assert torch.equal(rank["out_proj.weight"], theirs["out_proj.weight"].chunk(4, dim=1)[2])


@pytest.mark.parametrize("size", [DENSE_3_5, MOE])
def test_float32_stays_float32(tmp_path: Path, size: str) -> None:
    origin = released_folder(tmp_path / "hf", size)
    convert_weights(origin, tmp_path / "shards", {"tp": 2})
    reshard_weights(tmp_path / "shards", tmp_path / "other", {"pp": 2})
    reader, hf = WeightReader(tmp_path / "other"), released_tensors(size)
    wide = {name for name in reader.tensor_names() if reader.dtype(name) == torch.float32}
    assert wide == {name for name in reader.tensor_infos if name.endswith((".A_log", ".out_norm.weight"))}
    assert torch.equal(
        reader.read_shard("language_model.decoder.layers.0.self_attention.A_log"),
        hf["model.language_model.layers.0.linear_attn.A_log"],
    )


@pytest.mark.parametrize("experts", ["stacked", "apart"])
@pytest.mark.parametrize("mtp", ["stacked", "apart", "none"])
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


def loaded_and_saved(folder: Path, out: Path, dtype: torch.dtype) -> Path:
    """What ``transformers`` makes of a folder."""
    hf_model(DENSE_3_5).from_pretrained(folder, dtype=dtype).save_pretrained(out)
    return out


def config_of(size: str, **text: Any) -> dict[str, Any]:
    config = json.loads((CONFIGS / f"{size}.json").read_text())
    config["text_config"] |= text
    return config


def test_impossible_qwen3_5_configs_are_refused() -> None:
    few = read_spec(config_of("Qwen3.5-9B", linear_num_key_heads=2, linear_num_value_heads=4))
    with pytest.raises(LayoutError, match=r"tp=4 does not divide 2 key heads .* allow tp in \[1, 2\]"):
        check_tensor_parallel(few, 4)
    six = read_spec(config_of("Qwen3.5-9B", num_attention_heads=24, num_key_value_heads=6))
    with pytest.raises(LayoutError, match="tp=4 does not divide 6 key/value heads"):
        check_tensor_parallel(six, 4)
    odd = read_spec(config_of("Qwen3.5-35B-A3B", shared_expert_intermediate_size=516))
    with pytest.raises(LayoutError, match="tp=8 does not divide the shared expert's FFN width 516"):
        check_tensor_parallel(odd, 8)
    with pytest.raises(ConfigError, match="linear_num_value_heads 33 must be a multiple"):
        read_spec(config_of("Qwen3.5-9B", linear_num_value_heads=33))
    with pytest.raises(ConfigError, match="attn_output_gate=false is not supported; set it to true"):
        read_spec(config_of("Qwen3.5-9B", attn_output_gate=False))
    with pytest.raises(ConfigError, match="layer_types must name"):
        read_spec(config_of("Qwen3.5-9B", num_hidden_layers=31))
    with pytest.raises(ConfigError, match=r"dense layers \[1\]"):
        read_spec(config_of("Qwen3.5-35B-A3B", mlp_only_layers=[1]))
    with pytest.raises(ConfigError, match=r"head_dim x partial_rotary_factor 0\.25/2 = 32"):
        rope = {"mrope_section": [24, 20, 20], "rope_theta": 1e7, "partial_rotary_factor": 0.25}
        read_spec(config_of("Qwen3.5-9B", rope_parameters=rope))


def test_fewer_layers_keep_their_kind() -> None:
    spec = read_spec(CONFIGS / "Qwen3.5-9B.json").replace_layers(num_language_layers=5)
    assert [spec.language.has_linear_attention(i) for i in range(5)] == [True, True, True, False, True]
    assert spec.language.linear_attention.linear_layers == (0, 1, 2, 4)
