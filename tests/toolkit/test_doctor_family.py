"""What doctor says about a model with linear attention: kernels, layouts, rounded decays, thinking."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_vl.config import DataConfig, ModelConfig, TrainConfig
from megatron_vl.kernels.gated_delta_rule_triton import is_supported
from megatron_vl.models.attention import choose_backend
from megatron_vl.spec.families import ModelSpec, read_spec
from tests.tiny import tiny_checkpoint
from toolkit.doctor import Finding
from toolkit.doctor.family_checks import DELTA_RULE_WIDTHS, check_family

ROOT = Path(__file__).resolve().parents[1]


def spec_of(size: str) -> ModelSpec:
    """The spec of a released Qwen3.5."""
    return read_spec(json.loads((ROOT / "hf_configs" / f"Qwen3.5-{size}.json").read_text()))


def found(
    hf: Path, spec: ModelSpec | None = None, on_gpus: bool = False, **fields: object
) -> dict[str, Finding]:
    config = TrainConfig(model=ModelConfig(hf=str(hf)), **fields)  # type: ignore[arg-type]
    return {one.name: one for one in check_family(config, spec or read_spec(hf), on_gpus)}


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a tiny Qwen3.5, with the released chat template of 9B."""
    shutil.copytree(tiny_checkpoint("qwen3_5", dtype=torch.bfloat16), tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.json").unlink()
    shutil.copy(
        ROOT / "hf_configs" / "Qwen3.5-9B.chat_template.jinja", tmp_path / "hf" / "chat_template.jinja"
    )
    return tmp_path / "hf"


def test_other_families_have_no_such_findings():
    assert found(tiny_checkpoint("qwen3_vl")) == {}


def test_the_kernels_of_this_machine_are_named(folder, monkeypatch):
    spec = spec_of("9B")
    on_cpu = found(folder, spec)
    assert {one.state for one in on_cpu.values()} == {"ok"}
    assert on_cpu["linear attention"].found.startswith("24 of 32 decoder layers; without a GPU")
    assert "sdpa" not in on_cpu["attention"].found

    monkeypatch.setattr("toolkit.doctor.family_checks.installed_version", {"triton": "3.6.0"}.get)
    on_gpus = found(folder, spec, on_gpus=True, dtype="bfloat16")
    assert on_gpus["linear attention"].found == "24 of 32 decoder layers, with our kernels on Triton 3.6.0"
    assert "heads of 256 take FlashAttention-2" in on_gpus["attention"].found
    assert choose_backend("auto", platform="cuda", head_dim=256, causal=True) == "torch_varlen"

    slow = found(folder, spec, on_gpus=True, dtype="float32")["linear attention"]
    assert slow.state == "note" and "in torch, which is slow, because dtype is float32" in slow.found
    linear = dataclasses.replace(spec.language.linear_attention, key_dim=96)
    wide = dataclasses.replace(spec, language=dataclasses.replace(spec.language, linear_attention=linear))
    odd = found(folder, wide, on_gpus=True, dtype="bfloat16")["linear attention"]
    assert odd.state == "note" and "its kernels have no heads of 96" in odd.found
    monkeypatch.setattr("toolkit.doctor.family_checks.installed_version", lambda name: None)
    assert "Triton is not installed" in found(folder, spec, on_gpus=True)["linear attention"].found


def test_the_kernels_have_the_heads_that_doctor_believes():
    heads = {n: torch.zeros(1, 1, n) for n in (8, *DELTA_RULE_WIDTHS, 48, 96, 256)}
    assert [n for n, x in heads.items() if is_supported(x, x, x)] == list(DELTA_RULE_WIDTHS)


@pytest.mark.parametrize(
    ("size", "valid"), [("0.8B", "1, 2, 4"), ("27B", "1, 2, 4, 8"), ("9B", "1, 2, 4, 8, 16")]
)
def test_tensor_parallel_sizes_divide_the_key_heads(folder, size, valid):
    said = found(folder, spec_of(size))["tensor parallel"].found
    assert said == f"parallel.tp may be {valid} (16 key heads of linear attention)"


def test_rounded_decays_are_recognised(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]["bos_token_id"]  # released Qwen3.5 has none, 3.6 does
    (folder / "config.json").write_text(json.dumps(config))
    assert found(folder)["float32 tensors"].state == "ok"
    for file in folder.glob("*.safetensors"):
        tensors = {
            name: tensor.bfloat16() if name.endswith("A_log") else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    rounded = found(folder)["float32 tensors"]
    assert rounded.state == "note" and "A_log are stored as bfloat16" in rounded.found and rounded.advice

    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert "float32 tensors" not in found(folder)  # a run needs the config only


def test_a_template_without_thinking_is_named(folder):
    said = found(folder, data=DataConfig(earlier_answers="masked"))["thinking"]
    assert said.state == "ok" and "a request may switch it" in said.found
    assert "empty blocks are masked, earlier answers masked" in said.found
    (folder / "chat_template.jinja").unlink()  # the tiny checkpoint's tokenizer has Qwen2-VL's
    said = found(folder)["thinking"]
    assert said.state == "note" and "writes no <think>" in said.found
