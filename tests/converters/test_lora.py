"""Adapters in PEFT's files: in and out in all layouts, and merged, compared with what peft does."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.convert import convert_adapter, export_adapter, export_weights, reshard_weights
from converters.hf_checkpoint import long_tensor_name
from converters.peft_folder import ADAPTER_CONFIG_FILE, ADAPTER_FILE, PeftFolder
from megatron_vl.config import LoraConfig
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import read_chat_template
from megatron_vl.spec.lora import fused_lora
from megatron_vl.weights.tensor_files import WeightsError
from tests.support.run_json import write_run_json
from tests.tiny import tiny_checkpoint

from .helpers import read_tensors, run
from .peft_models import (
    FAMILIES,
    MOE_FAMILIES,
    SAVED,
    all_targets,
    load_peft,
    logits,
    merged_by_peft,
    peft_folder,
    peft_model,
)


def patterns(family: str) -> dict[str, Any]:
    """Ranks and scales that differ within fused matrices."""
    mlp = {"gate_up_proj": 3} if family in MOE_FAMILIES else {"language_model.layers.1.mlp.gate_proj": 2}
    return {"rank_pattern": {"k_proj": 6, **mlp}, "alpha_pattern": {"v_proj": 5, "attn.qkv": 3.5}}


def float_checkpoint(family: str) -> Path:
    return tiny_checkpoint(family, dtype=torch.float32)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory):
    """Maps each family to an adapter of all its matrices, written by peft once."""
    root = tmp_path_factory.mktemp("adapters")

    @cache
    def adapter(family: str) -> Path:
        hf = float_checkpoint(family)
        return peft_folder(root / family, hf, **all_targets(hf), **patterns(family))

    return adapter


def released(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Stored tensors under transformers' names, and experts in its orientation."""
    turned = family == "qwen3_vl_moe"
    return {
        long_tensor_name(name): tensor.transpose(1, 2) if turned and ".mlp.experts." in name else tensor
        for name, tensor in tensors.items()
        if not name.startswith("mtp.")
    }


LAYOUTS: list[dict[str, Any]] = [{"tp": 4}, {"pp": 2}, {"tp": 2, "pp": 2, "vpp": 2}]
MOE_LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "ep": 2}, {"pp": 2, "ep": 4, "etp": 2}]


@pytest.mark.parametrize(
    ("family", "trains_whole"),
    [
        # In `make test`, each family once: its modules are those of another one too.
        pytest.param(family, trains_whole, marks=[] if in_make_test else pytest.mark.full)
        for family in FAMILIES
        for trains_whole in (False, True)
        for in_make_test in [trains_whole == (family in ("qwen2_vl", "qwen3_vl", "qwen3_5"))]
    ],
)
def test_adapters_keep_their_bits_through_all_layouts(tmp_path, adapters, family, trains_whole) -> None:
    """PEFT -> unsplit -> TP4 -> PP2 -> ... -> PEFT; computes and merges as peft, the rest stays as it is."""
    hf, adapter, out = float_checkpoint(family), adapters(family), tmp_path / "out"
    if trains_whole:
        adapter = tmp_path / "peft"
        model = peft_model(hf, **SAVED)
        for name, parameter in model.named_parameters():
            parameter.data *= 1.25 if ".modules_to_save." in name else 1
        model.save_pretrained(adapter)
    convert_adapter(adapter, hf, tmp_path / "0")
    layouts = LAYOUTS + (MOE_LAYOUTS if family in MOE_FAMILIES and not trains_whole else [])
    for number, layout in enumerate(layouts):
        reshard_weights(tmp_path / str(number), tmp_path / str(number + 1), layout)
    export_adapter(tmp_path / str(len(layouts)), hf, out)

    written, back = (load_file(folder / ADAPTER_FILE) for folder in (adapter, out))
    assert written.keys() == back.keys() and any("lora" not in key for key in back) == trains_whole
    assert all(torch.equal(tensor, back[key]) for key, tensor in written.items())
    assert torch.equal(logits(load_peft(hf, out)), logits(load_peft(hf, adapter)))

    export_weights(out, hf, tmp_path / "merged", merges_adapter=True)
    merged, base = (released(read_tensors(folder), family) for folder in (tmp_path / "merged", hf))
    expected = merged_by_peft(hf, adapter)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-6, msg=name)
    changed = {n.removesuffix(".weight") for n in base if not torch.equal(base[n], merged[n])}
    assert trains_whole or changed == PeftFolder(adapter, read_spec(hf)).factors.keys()


def rewritten(source: Path, target: Path, tensors: dict[str, Tensor], **settings: Any) -> Path:
    target.mkdir()
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, target / ADAPTER_FILE)
    config = json.loads((source / ADAPTER_CONFIG_FILE).read_text()) | settings
    (target / ADAPTER_CONFIG_FILE).write_text(json.dumps(config))
    return target


def swapped_sides(tensors: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """The factors of experts as peft 0.18 wrote them: A has the outputs, B the inputs."""
    swapped = dict(tensors)
    for key in tensors:
        if ".mlp.experts." in key and ".lora_A." in key:
            key_b = key.replace("lora_A", "lora_B")
            factor_a, factor_b = tensors[key], tensors[key_b]
            rank = factor_a.shape[0] // experts
            a = factor_a.view(experts, rank, -1)
            b = factor_b.view(-1, rank, experts)
            swapped[key] = b.permute(2, 1, 0).reshape(experts * rank, -1)
            swapped[key_b] = a.permute(2, 1, 0).reshape(-1, rank * experts)
    return swapped


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_swapped_sides_of_older_peft_are_read(tmp_path: Path, adapters, family: str) -> None:
    hf, adapter = float_checkpoint(family), adapters(family)
    tensors = swapped_sides(load_file(adapter / ADAPTER_FILE), 8)
    older = rewritten(adapter, tmp_path / "older", tensors, peft_version="0.18.1")
    ours, theirs = (PeftFolder(folder, read_spec(hf)) for folder in (adapter, older))
    assert ours.lora == theirs.lora and ours.factors.keys() == theirs.factors.keys()
    for name, factors in ours.factors.items():
        assert torch.equal(factors.factor_a, theirs.factors[name].factor_a), name
        assert torch.equal(factors.factor_b, theirs.factors[name].factor_b), name


def test_names_of_older_transformers_are_read(tmp_path: Path, adapters) -> None:
    """Before transformers 4.52, Qwen2-VL's modules were model.layers.* and visual.*."""
    hf, adapter = float_checkpoint("qwen2_vl"), adapters("qwen2_vl")
    tensors = {
        key.replace("model.language_model.", "model.").replace("model.model.visual.", "model.visual."): tensor
        for key, tensor in load_file(adapter / ADAPTER_FILE).items()
    }
    spec, layer = read_spec(hf), "layers.1.mlp.gate_proj"
    expected = PeftFolder(adapter, spec).factors
    for number, name in enumerate((f"model.{layer}", f"model.language_model.{layer}", layer)):
        settings = {
            "rank_pattern": {"k_proj": 6, name: 2},
            "alpha_pattern": {"v_proj": 5, "visual.blocks.0.attn.qkv": 60, name: 60},
        }
        factors = PeftFolder(rewritten(adapter, tmp_path / str(number), tensors, **settings), spec).factors
        assert factors.keys() == expected.keys()
        wide = {name for name, matrix in factors.items() if matrix.alpha == 60}
        assert wide == {f"model.language_model.{layer}", "model.visual.blocks.0.attn.qkv"}

    # PEFT would ignore the old name of a module whose tensors have the new one.
    settings = {"alpha_pattern": {f"model.{layer}": 60}}
    newer = rewritten(adapter, tmp_path / "newer", load_file(adapter / ADAPTER_FILE), **settings)
    with pytest.raises(WeightsError, match=f"alpha_pattern 'model.{layer}' matches no matrix"):
        PeftFolder(newer, spec)


def test_contradicting_patterns_are_refused(tmp_path: Path, adapters) -> None:
    """PEFT takes the first one at training, but sorts them when it saves. An export has disjoint ones."""
    hf, adapter = float_checkpoint("qwen3_vl"), adapters("qwen3_vl")
    spec, tensors = read_spec(hf), load_file(adapter / ADAPTER_FILE)
    last = "language_model.layers.1.self_attn.v_proj"
    for setting, value, other in (("alpha_pattern", 16, 1), ("rank_pattern", 4, 2)):
        entries = {"v_proj": value, last: other} | patterns("qwen3_vl")[setting] | {"v_proj": value}
        folder = rewritten(adapter, tmp_path / setting, tensors, **{setting: entries})
        with pytest.raises(WeightsError, match=f"{setting} has 2 values for 'model.{last}'.*'v_proj', '"):
            PeftFolder(folder, spec)
    same = rewritten(adapter, tmp_path / "same", tensors, alpha_pattern={"v_proj": 16, last: 16})
    assert PeftFolder(same, spec).factors[f"model.{last}"].alpha == 16

    convert_adapter(adapter, hf, tmp_path / "weights")
    export_adapter(tmp_path / "weights", hf, tmp_path / "out")
    config = json.loads((tmp_path / "out" / ADAPTER_CONFIG_FILE).read_text())
    for setting in ("rank_pattern", "alpha_pattern"):
        matches = {
            name: [entry for entry in config[setting] if re.fullmatch(rf"(.*\.)?({entry})", name)]
            for name in PeftFolder(adapter, spec).factors
        }
        assert any(matches.values()) and max(map(len, matches.values())) == 1


@pytest.mark.parametrize("layers", [0, [0], [0, 2]])
def test_layers_to_transform_must_hold_every_factor(tmp_path: Path, adapters, layers: Any) -> None:
    hf, adapter = float_checkpoint("qwen3_vl"), adapters("qwen3_vl")
    settings = {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": layers}
    tensors = {
        key: tensor
        for key, tensor in load_file(adapter / ADAPTER_FILE).items()
        if any(f".{name}." in key for name in settings["target_modules"])
    }
    kept = {key: tensor for key, tensor in tensors.items() if ".layers.0." in key}
    no_patterns = {"rank_pattern": {}, "alpha_pattern": {}}
    folder = rewritten(adapter, tmp_path / "all", tensors, **settings, **no_patterns)
    with pytest.raises(WeightsError, match=r"layers\.1\..* has an adapter, but layers_to_transform"):
        PeftFolder(folder, read_spec(hf))
    folder = rewritten(adapter, tmp_path / "kept", kept, **settings, **no_patterns)
    assert len(PeftFolder(folder, read_spec(hf)).factors) == 2


def factors_of(module: str) -> dict[str, Tensor]:
    return {f"base_model.model.{module}.lora_{letter}.weight": torch.ones(4, 4) for letter in "AB"}


REFUSED: list[tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = [
    ("use_dora", {"use_dora": True}, dict),
    ("bias is 'all'", {"bias": "all"}, dict),
    ("init_lora_weights is 'pissa_niter_4'", {"init_lora_weights": "pissa_niter_4"}, dict),
    ("peft_type", {"peft_type": "LOHA"}, dict),
    (r"require \[8, ", {"r": 8}, dict),
    ("lm_head", {}, lambda tensors: tensors | factors_of("lm_head")),
    ("has only one of lora_A, lora_B", {}, lambda tensors: dict(list(tensors.items())[1:])),
    ("is not a factor", {}, lambda tensors: tensors | {"base_model.model.x.lora_magnitude": torch.ones(3)}),
    (
        r"experts\.5\.gate_proj' has an adapter, but qwen3_5_moe has no such matrix",
        {},
        lambda tensors: tensors | factors_of("model.layers.1.mlp.experts.5.gate_proj"),
    ),
]


@pytest.mark.parametrize(("message", "settings", "change"), REFUSED, ids=[each[0] for each in REFUSED])
def test_unsupported_settings_and_tensors_are_refused(tmp_path, adapters, message, settings, change) -> None:
    hf, adapter = float_checkpoint("qwen3_5_moe"), adapters("qwen3_5_moe")
    tensors = change(load_file(adapter / ADAPTER_FILE))
    with pytest.raises(WeightsError, match=message):
        PeftFolder(rewritten(adapter, tmp_path / "adapter", tensors, **settings), read_spec(hf))


def test_pickles_are_refused(tmp_path, adapters) -> None:
    folder = rewritten(adapters("qwen3_vl"), tmp_path / "adapter", {"x": torch.ones(1)})
    (folder / ADAPTER_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(WeightsError, match="is a pickle.*save_pretrained"):
        PeftFolder(folder, read_spec(float_checkpoint("qwen3_vl")))


def test_square_experts_need_a_known_version(tmp_path) -> None:
    hf = tiny_checkpoint("qwen3_5_moe", dtype=torch.float32, expert_ffn_hidden_size=64)
    settings = {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    adapter = peft_folder(tmp_path / "adapter", hf, **settings)
    assert len(PeftFolder(adapter, read_spec(hf)).factors) == 4
    older = rewritten(adapter, tmp_path / "older", load_file(adapter / ADAPTER_FILE), peft_version="0.18.0")
    with pytest.raises(WeightsError, match="square matrices"):
        PeftFolder(older, read_spec(hf))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_linear_targets_are_those_of_peft(family: str) -> None:
    """But for the gate of shared experts, which can have no adapter here."""
    hf = float_checkpoint(family)
    model = peft_model(hf, target_modules="all-linear").base_model.model
    names = {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")}
    adapters = fused_lora(read_spec(hf), LoraConfig(rank=1, targets="all-linear")).values()
    ours = {part.hf_name for adapter in adapters for part in adapter.parts}
    assert ours == {name for name in names if not name.endswith(".shared_expert_gate")}


def test_command_exports_adapters(tmp_path, adapters, capsys) -> None:
    hf, adapter = float_checkpoint("qwen3_vl"), adapters("qwen3_vl")
    weights = ("--checkpoint", tmp_path / "weights", "--hf", hf)
    convert_adapter(adapter, hf, tmp_path / "weights", {"tp": 2})
    assert run("export", *weights, "--adapter", "--out", tmp_path / "peft") == 0
    assert load_file(tmp_path / "peft" / ADAPTER_FILE).keys() == load_file(adapter / ADAPTER_FILE).keys()
    assert run("export", *weights, "--adapter", "--out", tmp_path / "peft") == 1
    assert run("export", *weights, "--adapter", "--out", tmp_path / "peft", "--force") == 0
    assert run("export", *weights, "--merge", "--out", tmp_path / "merged") == 0
    words = ("export", "--checkpoint", adapter, "--hf", hf, "--merge", "--out", tmp_path / "merged again")
    assert run(*words) == 0
    assert run("verify", tmp_path / "merged", tmp_path / "merged again") == 0

    capsys.readouterr()
    assert run("export", *weights, "--out", tmp_path / "whole") == 1
    assert re.findall(r"\((--\w+)\)", capsys.readouterr().err) == ["--adapter", "--merge"]
    assert run("export", *weights, "--merge", "--adapter", "--out", tmp_path / "both") == 2


def test_adapters_keep_the_chat_template_that_they_were_trained_with(tmp_path: Path, adapters) -> None:
    hf, step = float_checkpoint("qwen2_vl"), tmp_path / "step_00000001"
    convert_adapter(adapters("qwen2_vl"), hf, step / "weights")
    write_run_json(step, {"fields": {"data.max_pixels": 1, "data.chat_template": "{{ messages }}"}})
    export_adapter(step, hf, tmp_path / "peft")
    export_weights(tmp_path / "peft", hf, tmp_path / "merged", merges_adapter=True)
    convert_adapter(tmp_path / "peft", hf, tmp_path / "weights")
    export_weights(tmp_path / "weights", hf, tmp_path / "again", merges_adapter=True)
    assert (tmp_path / "peft" / "chat_template.jinja").read_text() == "{{ messages }}"
    for folder in ("merged", "again"):
        assert read_chat_template(tmp_path / folder) == "{{ messages }}" != read_chat_template(hf)


def test_adapters_of_another_model_are_refused(tmp_path: Path, adapters) -> None:
    hf, adapter = float_checkpoint("qwen3_vl"), adapters("qwen3_vl")
    convert_adapter(adapter, hf, tmp_path / "weights")
    other = tiny_checkpoint("qwen3_vl", layers=3)
    for convert in (export_adapter, export_weights):
        arguments = {"merges_adapter": True} if convert is export_weights else {}
        with pytest.raises(WeightsError, match="different models"):
            convert(tmp_path / "weights", other, tmp_path / "out", **arguments)
    with pytest.raises(WeightsError, match="layers.3"):
        PeftFolder(adapter, read_spec(other))
