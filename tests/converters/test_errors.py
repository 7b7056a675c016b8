"""Invalid input is refused by name, and nothing that looks like a checkpoint is left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.convert import convert_weights, export_weights, reshard_weights
from converters.tensor_folder import SINGLE_FILE, WEIGHT_INDEX_FILE
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.layout import make_layout
from megatron_vl.spec.tensors import LayoutError
from megatron_vl.weights.manifest import write_manifest, write_rank_file
from megatron_vl.weights.tensor_files import WeightsError
from megatron_vl.weights.weight_reader import WeightReader

from .helpers import experts_apart, read_tensors, released_tensors, small_config, write_hf

TIED, UNTIED, MOE = "Qwen2.5-VL-3B-Instruct", "Qwen2.5-VL-7B-Instruct", "Qwen3-VL-30B-A3B-Instruct"
HYBRID, HYBRID_MOE = "Qwen3.5-9B", "Qwen3.5-35B-A3B"


def hf_with(
    folder: Path, size: str = TIED, files: int = 1, config: dict | None = None, **changes: torch.Tensor | None
) -> Path:
    """A small HF folder with tensors replaced, added, or (None) removed."""
    tensors = {n: t for n, t in (released_tensors(size) | changes).items() if t is not None}
    return write_hf(folder, tensors, small_config(size) | (config or {}), files)


QUERY, UNKNOWN = "model.layers.1.self_attn.q_proj.weight", "model.layers.9.mlp.up_proj.weight"
HEAD = "lm_head.weight"
BAD_FOLDERS: list[tuple[str, dict[str, Any], str]] = [
    (TIED, {QUERY: None}, f"tensor '{QUERY}' is missing"),
    (TIED, {UNKNOWN: torch.zeros(2, 2)}, f"tensor '{UNKNOWN}' is unknown"),
    (
        TIED,
        {QUERY: torch.zeros(4, 128)},
        rf"tensor '{QUERY}' has shape \[4, 128\]; config.json says \[128, 128\]",
    ),
    (TIED, {QUERY: torch.zeros(128, 128, dtype=torch.int8)}, f"tensor '{QUERY}' has type I8"),
    (TIED, {"model.language_model.norm.weight": torch.zeros(128)}, "are the same tensor under two names"),
    (UNTIED, {HEAD: None}, f"'{HEAD}' is missing, .* tie_word_embeddings"),
    (TIED, {"config": {"model_type": "qwen3_vl_next"}}, "model_type 'qwen3_vl_next' is not supported"),
    ("Qwen3.5-0.8B", {"model.mtpx.fc.weight": torch.zeros(3)}, r"'model\.mtpx\.fc\.weight' is unknown"),
    (TIED, {"config": {"num_hidden_layers": 5}}, "tensor 'model.layers.4.* is missing"),
]


def refused(origin: Path, message: str, error: type[Exception] = WeightsError) -> None:
    out = origin.with_name("out")
    with pytest.raises(error, match=message):
        convert_weights(origin, out)
    assert not list(out.parent.glob("out*"))


@pytest.mark.parametrize(("size", "changes", "message"), BAD_FOLDERS, ids=range(len(BAD_FOLDERS)))
def test_bad_tensors_and_configs_are_named(tmp_path: Path, size: str, changes: dict, message: str) -> None:
    refused(hf_with(tmp_path / "hf", size, **changes), message, ValueError)


def test_tied_output_with_one_other_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last of many pieces."""
    monkeypatch.setattr("megatron_vl.weights.tensor_files.CHUNK_BYTES", 4096)
    output = released_tensors(TIED)["model.embed_tokens.weight"].clone()
    output[-1, -1] += 1
    message = f"tensor '{HEAD}' differs from 'model.embed_tokens.weight'"
    refused(hf_with(tmp_path / "hf", **{HEAD: output}), message)


SMALL_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
IMPOSSIBLE: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (TIED, {}, {"ep": 0}, "ep=0 must be at least 1"),
    (TIED, {}, {"tp": 3}, "tp=3 does not divide 16 attention heads"),
    (TIED, {}, {"pp": 2, "layers": [1, 1]}, "add up to 2; the model has 4"),
    (TIED, {}, {"pp": 2, "layers": [1, 1, 2]}, "has 3 entries"),
    (TIED, {}, {"vpp": 2}, "vpp=2 needs pp"),
    (TIED, {}, {"pp": 8}, "8 chunks for 4 decoder layers"),
    (TIED, {}, {"ep": 2}, "ep=2 is for models with experts; qwen2_5_vl is dense: leave ep at 1"),
    (TIED, {}, {"etp": 2}, "etp=2 is for models with experts"),
    (MOE, {"num_experts_per_tok": 9}, {}, "num_experts_per_tok 9 must be between 1 and num_experts 8"),
    (MOE, {"norm_topk_prob": False}, {}, "norm_topk_prob=false is not supported"),
    (MOE, {"decoder_sparse_step": 0}, {}, "decoder_sparse_step 0 must be at least 1"),
    (HYBRID, SMALL_HEADS, {"tp": 4}, "tp=4 does not divide 2 key heads"),
    (HYBRID, {"num_attention_heads": 24, "num_key_value_heads": 6}, {"tp": 4}, "divide 6 key/value heads"),
    (HYBRID, {"linear_num_value_heads": 33}, {}, "linear_num_value_heads 33 must be a multiple"),
    (HYBRID, {"attn_output_gate": False}, {}, "attn_output_gate=false is not supported; set it to true"),
    (HYBRID, {"num_hidden_layers": 31}, {}, "layer_types must name"),
    (HYBRID_MOE, {"shared_expert_intermediate_size": 516}, {"tp": 8}, "shared expert's FFN width 516"),
    (HYBRID_MOE, {"mlp_only_layers": [1]}, {}, r"dense layers \[1\]"),
]


@pytest.mark.parametrize(("size", "text", "layout", "message"), IMPOSSIBLE)
def test_impossible_configs_and_layouts_are_refused(size, text, layout, message: str) -> None:
    config = small_config(size)
    config.get("text_config", config).update(text)
    with pytest.raises((ConfigError, LayoutError), match=message):
        make_layout(read_spec(config), **layout)


def test_square_experts_are_refused(tmp_path: Path) -> None:
    """Both orientations fit one of the two stacks; the other does not decide (``detect_expert_style``)."""
    config, tensors = small_config(MOE), released_tensors(MOE)
    config["text_config"]["moe_intermediate_size"] = 192
    for name, tensor in tensors.items():
        if ".mlp.experts." in name:
            shape = (8, 192, 384) if name.endswith("gate_up_proj") else (8, 192, 192)
            tensors[name] = torch.zeros(shape, dtype=tensor.dtype)
    message = "'.*mlp.experts.down_proj' holds square matrices, 192 by 192"
    refused(write_hf(tmp_path / "hf", tensors, config), message)
    # What the message says to do.
    convert_weights(write_hf(tmp_path / "apart", experts_apart(tensors), config), tmp_path / "out")


def test_experts_of_two_styles_are_refused(tmp_path: Path) -> None:
    tensors, layer = released_tensors(MOE), "model.language_model.layers.2.mlp.experts"
    stack = tensors[f"{layer}.down_proj"]
    for changes, message in (
        (
            {f"{layer}.down_proj": stack.transpose(1, 2)},
            r"shape \[8, 40, 192\]; config.json says \[8, 192, 40\]",
        ),
        (experts_apart({f"{layer}.down_proj": stack}), f"'{layer}.0.down_proj.weight' is unknown"),
    ):
        refused(write_hf(tmp_path / str(len(changes)), tensors | changes, small_config(MOE)), message)


def test_missing_and_truncated_files_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere does not exist", ConfigError)
    origin = hf_with(tmp_path / "hf", files=2)
    last = origin / "model-00002-of-00002.safetensors"
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    refused(origin, "model-00002-of-00002.safetensors is not a whole safetensors file")
    last.unlink()
    refused(origin, "model-00002-of-00002.safetensors is missing")
    (origin / WEIGHT_INDEX_FILE).unlink()
    refused(origin, f"neither {SINGLE_FILE} nor {WEIGHT_INDEX_FILE}", FileNotFoundError)


def test_index_must_agree_with_its_files(tmp_path: Path) -> None:
    origin = hf_with(tmp_path / "hf", files=2)
    good = json.loads((origin / WEIGHT_INDEX_FILE).read_text())["weight_map"]
    name = next(iter(good))
    without = {key: file for key, file in good.items() if key != name}
    moved = good | {name: "model-00002-of-00002.safetensors"}
    for weight_map, message in (
        (without, f"tensor '{name}' is in no file, but it is in model-00001"),
        (moved, f"tensor '{name}' is in model-00002.*, but it is in model-00001"),
        (good | {"ghost": good[name]}, "tensor 'ghost' is in model-00001.*, but it is in no file"),
    ):
        (origin / WEIGHT_INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        refused(origin, message)
    last = origin / "model-00002-of-00002.safetensors"
    save_file(load_file(last) | {name: torch.zeros(1)}, last)
    (origin / WEIGHT_INDEX_FILE).write_text(json.dumps({"weight_map": good}))
    refused(origin, f"tensor '{name}' is in both")


def test_export_needs_the_same_model(tmp_path: Path) -> None:
    convert_weights(hf_with(tmp_path / "hf"), tmp_path / "full")
    other = hf_with(tmp_path / "other", config={"rope_theta": 5000.0})
    with pytest.raises(WeightsError, match="language rope_theta is 1000000.0 .* but 5000.0"):
        export_weights(tmp_path / "full", other, tmp_path / "out")
    family = hf_with(tmp_path / "family", "Qwen2-VL-2B-Instruct")
    with pytest.raises(WeightsError, match="holds a qwen2_5_vl model, .* holds a qwen2_vl model"):
        export_weights(tmp_path / "full", family, tmp_path / "out")


def trained(folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """Weights that were converted from ``hf`` beside ``folder``, and changed."""
    reader = WeightReader(folder.with_name("full"))
    tensors = {name: change(name, reader.read_shard(name)) for name in reader.tensor_names()}
    write_manifest(folder, reader.spec, None, [write_rank_file(folder, tensors, tp=0, pp=0)])
    return folder


def test_padding_with_values_is_refused(tmp_path: Path) -> None:
    convert_weights(hf_with(tmp_path / "hf"), tmp_path / "full")
    padded = "vision_model.decoder.layers.1.mlp.linear_fc2.weight"

    def change(name: str, tensor: Tensor) -> Tensor:
        if name == padded:
            tensor[3, -1] = 1e-3
        return tensor

    with pytest.raises(WeightsError, match=f"padding of tensor '{padded}'"):
        export_weights(trained(tmp_path / "trained", change), tmp_path / "hf", tmp_path / "out")


def test_trained_float32_is_rounded_to_the_origins_type(tmp_path: Path) -> None:
    origin = hf_with(tmp_path / "hf")
    convert_weights(origin, tmp_path / "full")
    weights = trained(tmp_path / "trained", lambda _, tensor: tensor.float() * 1.001)
    report = export_weights(weights, origin, tmp_path / "out")
    assert report.cast == {("float32", "bfloat16"): report.tensors}
    before, after = read_tensors(origin), read_tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], (tensor.float() * 1.001).bfloat16()), name


def test_force_touches_nothing_else(tmp_path: Path) -> None:
    origin = hf_with(tmp_path / "hf")
    convert_weights(origin, tmp_path / "full")
    other = shutil.copytree(origin, tmp_path / "another_hf")
    full = tmp_path / "full"
    for work, message in (
        (lambda: convert_weights(origin, full), "--force"),
        (lambda: convert_weights(origin, other, force=True), "nothing in it is replaced"),
        (lambda: export_weights(full, origin, full / "..", force=True), "nothing in it is replaced"),
        (lambda: convert_weights(origin, origin, force=True), "is the input folder"),
        (lambda: reshard_weights(full, full, force=True), "is the input folder"),
    ):
        with pytest.raises((FileExistsError, ValueError), match=message):
            work()
    assert sorted(p.name for p in other.iterdir()) == sorted(p.name for p in origin.iterdir())


def test_full_disk_is_reported_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(hf_with(tmp_path / "hf"), "0.0 GB free")
