"""FP8 weights are read as transformers reads them, and written as serving engines read them."""

import filecmp
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.compare import compare_weights
from converters.convert import _write_weights, convert_weights, export_weights
from converters.fp8 import BlockGrid, Fp8Folder, Fp8Output, open_tensor_folder
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.spec.families import ConfigError
from megatron_vl.weights.tensor_files import MatrixRegion, WeightsError, row_regions
from tests.converters.fp8_folders import SIZES, dequantise, fp8_folder, quantise
from tests.converters.helpers import read_tensors, stack_mtp_experts
from tests.security.payload import edit
from tests.tiny import tiny_checkpoint
from toolkit.common.hf_loading import load_hf_model

WHOLE_BLOCKS: dict[str, Any] = {
    **{"hidden_size": 384, "heads": 4, "kv_heads": 2, "head_dim": 64, "interleaved_section": (16, 8, 8)},
    **{"ffn_hidden_size": 256, "experts": 4, "expert_ffn_hidden_size": 128, "shared_ffn_hidden_size": 128},
    **{"hybrid_head_dim": 64, "hybrid_section": (4, 2, 2), "linear_key_dim": 32, "linear_value_dim": 16},
}
"""Sizes that blocks of 128 x 128 divide."""
LAYER = "model.language_model.layers.0"


@pytest.mark.parametrize("rows", [512, 600])
def test_fp8_values_are_read_once_for_values_and_scales(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """A stack of three matrices in pieces; matrices whose last blocks are smaller share a piece's blocks."""
    monkeypatch.setattr("megatron_vl.weights.tensor_files.CHUNK_BYTES", 2 * 4 * 128 * 200)
    values = torch.randn(3, rows, 200, generator=torch.Generator().manual_seed(1))
    values[1, :128, 128:] = 0.0
    regions: list[MatrixRegion] = []

    def read_values(region: MatrixRegion) -> Tensor:
        regions.append(region)
        return values.flatten(0, 1)[region.row : region.row_end]

    output = Fp8Output(BlockGrid((3, rows, 200), (128, 128)), read_values)
    pieces = list(map(output.read_weight, row_regions(values.shape, 4, rows_multiple=128)))
    assert rows == 600 or sum(region.row_end - region.row for region in regions) == 3 * rows
    assert len(pieces) > 5 and max(region.row_end - region.row for region in regions) <= 384
    blocks = -(-rows // 128)
    written = torch.cat(pieces).view(3, rows, 200)
    scales = output.read_scales(MatrixRegion(0, 3 * blocks, 0, 2)).view(3, blocks, 2)
    weight, expected = quantise(values, (128, 128), torch.float32)
    weight.view(torch.uint8)[1, :128, 128:], expected[1, 0, 1] = 0, 1.0  # a block of zeros
    torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
    assert (written.float() - weight.float()).abs().max() <= 32  # a value between two may round either way
    assert (written.view(torch.uint8) == weight.view(torch.uint8)).float().mean() > 0.999
    assert not output._scale_rows


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
def test_fp8_weights_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForImageTextToText, FineGrainedFP8Config

    hf = fp8_folder(tmp_path / "hf", family, experts_apart=True)
    options = {"dtype": torch.bfloat16, "quantization_config": FineGrainedFP8Config(dequantize=True)}
    theirs = AutoModelForImageTextToText.from_pretrained(hf, **options).state_dict()
    source = HfCheckpoint(hf)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(source.spec.hf_config))
    save_file(theirs, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    reference = HfCheckpoint(tmp_path / "theirs")
    assert len(open_tensor_folder(hf).grid_by_tensor) > 20
    for name in source.tensor_infos:
        assert torch.equal(source.read_shard(name).bfloat16(), reference.read_shard(name)), name
    loaded = load_hf_model(hf, torch.float32).state_dict()
    assert all(torch.equal(loaded[name].bfloat16(), theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("family", "apart", "block_size"),
    [
        ("qwen3_vl", False, (40, 48)),
        ("qwen3_5_moe", True, (16, 32)),
        ("qwen3_5_moe", False, (40, 48)),
        ("qwen3_vl_moe", False, (40, 48)),
    ],
)
def test_fp8_round_trip_gives_the_same_files(tmp_path, family, apart, block_size) -> None:
    """Also where blocks end within a shard, and where the last ones are smaller."""
    hf = fp8_folder(tmp_path / "hf", family, block_size, experts_apart=apart)
    report = convert_weights(hf, tmp_path / "megatron", {"tp": 2, "pp": 2})
    assert "in float32 and rounded once to bfloat16" in report.notes[0]
    export_weights(tmp_path / "megatron", hf, tmp_path / "out", as_fp8=True)
    names = sorted(path.name for path in hf.iterdir())
    assert filecmp.cmpfiles(hf, tmp_path / "out", names, shallow=False)[0] == names

    export_weights(tmp_path / "megatron", hf, tmp_path / "plain")
    assert not compare_weights(hf, tmp_path / "plain").differences
    assert not compare_weights(hf, tmp_path / "megatron").differences
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    stored, plain = read_tensors(hf), read_tensors(tmp_path / "plain")
    assert plain.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name, values in plain.items():
        if scaled := f"{name}_scale_inv" in stored:
            expected = dequantise(stored[name], stored[f"{name}_scale_inv"], block_size).bfloat16()
        assert torch.equal(values, expected if scaled else stored[name]), name


def test_fp8_blocks_that_were_trained_change_alone(tmp_path: Path) -> None:
    """The block's largest value becomes 448; the others are within half a step of E4M3."""
    hf = fp8_folder(tmp_path / "hf", "qwen3_vl")
    name, folder = f"{LAYER}.self_attn.o_proj.weight", cast("Fp8Folder", open_tensor_folder(hf))
    grid = folder.grid_by_tensor[name]
    whole = MatrixRegion(0, grid.shape[0], 0, grid.shape[1])
    trained = folder.read_region(name, whole).clone()
    trained[20, 40] = 3.0  # the second block of 16 rows, and of 32 columns

    def read_values(region: MatrixRegion) -> Tensor:
        return trained[region.row : region.row_end].float()

    output = Fp8Output(grid, read_values, (folder, name))
    weight = output.read_weight(whole)
    scales = output.read_scales(MatrixRegion(0, grid.scale_shape[0], 0, grid.scale_shape[1]))
    stored = read_tensors(hf)
    is_changed = scales != stored[f"{name}_scale_inv"]
    assert is_changed.nonzero().tolist() == [[1, 1]]
    assert scales.dtype == torch.bfloat16 and weight[20, 40].float() == 448
    differs = weight.view(torch.uint8) != stored[name].view(torch.uint8)
    assert not differs[:16].any() and not differs[32:].any() and not differs[:, :32].any()
    errors = (dequantise(weight, scales, (16, 32)) - trained.float()).abs()
    assert errors[16:32, 32:64].max() <= 3.0 / 448 * 16 * 1.01


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_vl_moe"])
def test_export_in_fp8_equals_the_quantiser_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    hf = tiny_checkpoint(family, **WHOLE_BLOCKS)
    convert_weights(hf, tmp_path / "megatron", {"tp": 2})
    export_weights(tmp_path / "megatron", hf, tmp_path / "fp8", as_fp8=True)
    stored, plain = read_tensors(tmp_path / "fp8"), load_hf_model(hf, torch.float32).state_dict()
    settings = SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float")
    quantiser = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    scaled = [name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")]
    assert len(scaled) == len([t for t in stored.values() if t.dtype == torch.float8_e4m3fn]) > 20
    for name in scaled:
        if ".experts." not in name:
            theirs = quantiser.convert({name: plain[name]})
            for key, tensor in theirs.items():
                assert torch.equal(stored[key].view(torch.uint8), tensor.view(torch.uint8)), key

    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    index = json.loads((tmp_path / "fp8" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == stored.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    assert not {name.removesuffix(".weight") for name in scaled} & set(config["modules_to_not_convert"])
    loaded = load_hf_model(tmp_path / "fp8", torch.float32).state_dict()
    for name, values in plain.items():
        error = (loaded[name] - values).abs().max() / values.abs().max()
        assert error <= 0.04, name  # half the largest step of E4M3 is 16 of 448; then bfloat16 rounds
        if name not in scaled and ".experts." not in name:
            assert error == 0, name


def test_export_in_fp8_leaves_what_the_released_folders_leave(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen3_5_moe", **WHOLE_BLOCKS)
    convert_weights(hf, tmp_path / "megatron")
    report = export_weights(tmp_path / "megatron", hf, tmp_path / "fp8", as_fp8=True)
    assert "matrices are in FP8 (E4M3), with a scale for each block" in report.notes[0]
    names = read_tensors(tmp_path / "fp8").keys()
    in_layer = {i: {n.split(f".layers.{i}.")[1] for n in names if f"_model.layers.{i}." in n} for i in (0, 3)}
    experts = {n for n in in_layer[0] if ".experts." in n}
    assert (
        experts
        == {n for n in in_layer[3] if ".experts." in n}
        == {
            f"mlp.experts.{expert}.{matrix}_proj.weight{scale}"
            for expert in range(4)
            for matrix in ("gate", "up", "down")
            for scale in ("", "_scale_inv")
        }
    )
    assert {n.removesuffix("_scale_inv") for n in in_layer[3] - experts if n.endswith("_scale_inv")} == {
        *(f"self_attn.{matrix}_proj.weight" for matrix in "qkvo"),
        *(f"mlp.shared_expert.{matrix}_proj.weight" for matrix in ("gate", "up", "down")),
    }
    own = [len(layer - experts) for layer in in_layer.values()]
    assert own == [22, 20]
    assert 30 * own[0] + 10 * own[1] + 40 * 256 * len(experts) // 4 + 3 + 333 + 1560 == 64_196
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())
    form = config["quantization_config"]
    assert (form["quant_method"], form["activation_scheme"]) == ("fp8", "dynamic")
    modules = form["modules_to_not_convert"]
    assert {name.removeprefix(f"{LAYER}.") for name in modules if name.startswith(f"{LAYER}.")} == {
        *("input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.shared_expert_gate"),
        *(f"linear_attn.{n}" for n in ("A_log", "conv1d", "dt_bias", "norm")),
        *(f"linear_attn.in_proj_{n}" for n in ("a", "b", "ba")),
    }
    assert {"lm_head", "model.language_model.embed_tokens", "mtp.fc", "mtp.norm"} <= set(modules)
    assert {f"{n}visual.blocks.0.attn.qkv" for n in ("", "model.")} <= set(modules)
    assert "visual.blocks.0.attn.qkv_proj" in modules


@pytest.mark.parametrize("style", ["apart", "stacked"])
def test_trained_mtp_is_written_in_fp8_as_in_the_released_folders(tmp_path: Path, style: str) -> None:
    """Of Qwen3.6-35B-A3B-FP8, 1,560 tensors: 24, and six of each of 256 experts, also from stacks."""
    hf = shutil.copytree(tiny_checkpoint("qwen3_5_moe", **WHOLE_BLOCKS), tmp_path / "hf")
    if style == "stacked":
        stack_mtp_experts(hf)
    source = HfCheckpoint(hf, has_mtp=True)
    _write_weights(source, [hf], tmp_path / "megatron", None, "convert", 0, False, {})
    export_weights(tmp_path / "megatron", hf, tmp_path / "fp8", as_fp8=True)
    names = [name for name in read_tensors(tmp_path / "fp8") if name.startswith("mtp.")]
    assert len(names) == 24 + 6 * 4 and 24 + 6 * 256 == 1560
    back = HfCheckpoint(tmp_path / "fp8", has_mtp=True)
    for name in (name for name in back.tensor_infos if name.startswith("mtp.")):
        torch.testing.assert_close(back.read_shard(name), source.read_shard(name), rtol=0.07, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "apart"), [("qwen3_vl_moe", False), ("qwen3_vl_moe", True), ("qwen3_5_moe", False)]
)
def test_experts_that_transformers_misreads_are_filled_in(tmp_path: Path, family: str, apart: bool) -> None:
    hf = fp8_folder(tmp_path / "hf", family, experts_apart=apart)
    source = HfCheckpoint(hf)
    model = load_hf_model(hf, torch.float32)
    experts = model.model.language_model.layers[1].mlp.experts
    for name, parameter in (("linear_fc1", experts.gate_up_proj), ("linear_fc2", experts.down_proj)):
        ours = source.read_shard(f"language_model.decoder.layers.1.mlp.experts.{name}.weight")
        assert torch.equal(parameter, ours.float())
    plain = load_hf_model(tiny_checkpoint(family, **SIZES), torch.float32)
    assert (plain.model.language_model.layers[1].mlp.experts.down_proj - experts.down_proj).abs().max() < 0.1


def test_mtp_in_fp8_in_a_place_of_other_tools(tmp_path: Path) -> None:
    hf = fp8_folder(tmp_path / "hf", "qwen3_5_moe", experts_apart=True, mtp_prefix="mtp.")
    peers = fp8_folder(
        tmp_path / "peers", "qwen3_5_moe", experts_apart=True, mtp_prefix="model.language_model.mtp."
    )
    convert_weights(peers, tmp_path / "megatron")
    export_weights(tmp_path / "megatron", peers, tmp_path / "out", as_fp8=True)
    names = sorted(path.name for path in peers.iterdir())
    assert filecmp.cmpfiles(peers, tmp_path / "out", names, shallow=False)[0] == names

    released, source = HfCheckpoint(hf, has_mtp=True), HfCheckpoint(peers, has_mtp=True)
    fp8_names = source.tensor_folder.grid_by_tensor
    assert "model.language_model.mtp.layers.0.self_attn.q_proj.weight" in fp8_names
    for name in released.tensor_infos:
        assert torch.equal(source.read_shard(name), released.read_shard(name)), name


def test_fp8_folder_with_yarn_where_transformers_reads_none(tmp_path: Path) -> None:
    """It has YaRN in transformers, and the same weights: not the FP8 values without their scales."""
    hf = fp8_folder(tmp_path / "hf", "qwen3_vl")
    weights = load_hf_model(hf, torch.float32).state_dict()
    text = json.loads((hf / "config.json").read_text())["text_config"]
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    first = text.pop("rope_scaling", None) or text["rope_parameters"]
    edit(hf / "config.json", text_config=text | {"rope_scaling": first, "rope_parameters": yarn})
    model = load_hf_model(hf, torch.float32)
    assert model.model.language_model.rotary_emb.rope_type == "yarn"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


NOT_READ = r"quantised \(fp8\); of quantised weights, only FP8 in blocks"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({}, r"says that the weights are quantised \(fp8\), but no tensor has scales"),
    "another block": (
        {"weight_block_size": [128, 128]},
        "has shape .*; weight_block_size in config.json says",
    ),
    "no blocks": ({"weight_block_size": None}, NOT_READ),
    "static": ({"activation_scheme": "static"}, NOT_READ),
    "another format": ({"fmt": "e5m2"}, NOT_READ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_quantised_weights_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    changes, message = REFUSED[kind]
    hf = fp8_folder(tmp_path / "hf", "qwen3_vl")
    form = json.loads((hf / "config.json").read_text())["quantization_config"]
    edit(hf / "config.json", quantization_config=form | changes)
    if kind == "no scales":
        for path in hf.glob("*.safetensors"):
            kept = {k: t.bfloat16() for k, t in load_file(path).items() if "_scale_inv" not in k}
            save_file(kept, path, metadata={"format": "pt"})
        index = json.loads((hf / "model.safetensors.index.json").read_text())["weight_map"]
        weight_map = {k: file for k, file in index.items() if "_scale_inv" not in k}
        edit(hf / "model.safetensors.index.json", weight_map=weight_map)
    with pytest.raises((ConfigError, WeightsError), match=message):
        HfCheckpoint(hf)


def test_fp8_is_refused_where_blocks_would_not_be_whole(tmp_path: Path) -> None:
    hf = tiny_checkpoint("qwen3_vl")
    convert_weights(hf, tmp_path / "megatron")
    with pytest.raises(WeightsError, match="cannot be written in FP8: .* whole blocks of 128 x 128"):
        export_weights(tmp_path / "megatron", hf, tmp_path / "out", as_fp8=True)
    assert not (tmp_path / "out").exists()
