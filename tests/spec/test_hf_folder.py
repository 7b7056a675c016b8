"""Hugging Face folders that contradict themselves, or were not downloaded, are refused by every reader."""

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from converters.convert import convert_weights
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.spec.families import ConfigError, read_spec
from megatron_vl.spec.families.hf_folder import chat_template_note, read_chat_template
from tests.security.payload import edit
from tests.tiny import tiny_checkpoint
from toolkit.cli import main
from toolkit.common.hf_loading import check_hf_folder

POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:5f9e4d4901a92b997e463c1f46055088b6cca5ca61a6522d1b9f64c4bb81cb42\nsize 12807982\n"
)
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "activation_scheme": "dynamic"}
TEMPLATES = [
    {"name": "default", "template": "{{ messages }}"},
    {"name": "tool_use", "template": "{{ tools }}"},
]


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen3_vl"), tmp_path / "hf")


def quantised(section: str, value: Any) -> Callable[[Path], None]:
    """With that ``quantization_config`` in a section of the config, or at its top."""

    def change(hf: Path) -> None:
        config = json.loads((hf / "config.json").read_text())
        (config[section] if section else config)["quantization_config"] = value
        (hf / "config.json").write_text(json.dumps(config))

    return change


def file(name: str, text: str) -> Callable[[Path], object]:
    def write(hf: Path) -> None:
        (hf / name).parent.mkdir(exist_ok=True)
        (hf / name).write_text(text)

    return write


def fields(name: str, **values: Any) -> Callable[[Path], object]:
    return lambda hf: edit(hf / name, **values)


def tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    """Adds a tensor to the first file, or replaces it there, and names it in the index."""

    def change(hf: Path) -> None:
        path = min(hf.glob("*.safetensors"))
        save_file(load_file(path) | {name: value}, path, metadata={"format": "pt"})
        weight_map = json.loads((hf / "model.safetensors.index.json").read_text())["weight_map"]
        edit(hf / "model.safetensors.index.json", weight_map=weight_map | {name: path.name})

    return change


QUERY = "model.language_model.layers.0.self_attn.q_proj.weight"
SCALE = torch.ones(1)
TURNS = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hello to you."}]
SECOND_FILE = "model-00002-of-00002.safetensors"
REFUSED = {
    # Peers write these names; the tensors beside them are plain here.
    **{
        method: (quantised("", {"quant_method": method}), rf"quantised \({method}\)")
        for method in ("gptq", "awq", "bitsandbytes", "mxfp4")
    },
    "a named pipe": (lambda hf: os.mkfifo(hf / "processor_config.json"), "json is a named pipe"),
    "fp8 at the top": (quantised("", FP8), r"field 'quantization_config'"),
    "fp8 in the tower": (quantised("vision_config", FP8), r"field 'vision_config.quantization_config'"),
    "awq in the text": (quantised("text_config", {"quant_method": "awq"}), r"quantised \(awq\)"),
    "MLX": (fields("config.json", quantization={"bits": 4}), r"field 'quantization'"),
    "ModelOpt": (file("hf_quant_config.json", "{}"), "hf_quant_config.json says that the weights are quant"),
    "scales of fp8 blocks": (tensor(f"{QUERY}_scale_inv", SCALE), "tensor '.*q_proj.weight_scale_inv'"),
    "fp8 without scales": (
        tensor(QUERY, torch.zeros(64, 64).to(torch.float8_e4m3fn)),
        "tensor '.*q_proj.weight' has type F8_E4M3",
    ),
    "a file beside an index": (
        lambda hf: shutil.copy(min(hf.glob("*.safetensors")), hf / "model.safetensors"),
        "both model.safetensors and model.safetensors.index.json",
    ),
    "an adapter": (file("adapter_config.json", "{}"), "adapter_config.json"),
    "two templates": (
        file("chat_template.jinja", "{{ messages }}"),
        "chat_template.jinja and chat_template.json",
    ),
    "a template of the processor": (
        file("processor_config.json", json.dumps({"chat_template": "{{ messages }}"})),
        "chat_template.json and processor_config.json differ",
    ),
    "a list of templates": (fields("chat_template.json", chat_template=TEMPLATES), "several named chat"),
    "a template for tools": (
        file("additional_chat_templates/tool_use.jinja", "{{ tools }}"),
        "tool_use.jinja holds several",
    ),
    **{
        f"pointer as {name}": (file(name, POINTER), f"{name} is a Git LFS pointer.*git lfs pull")
        for name in ("config.json", "tokenizer.json", SECOND_FILE)
    },
    "a config that is cut": (file("config.json", '{"model_type": '), "config.json is not JSON"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(hf: Path, kind: str) -> None:
    change, message = REFUSED[kind]
    change(hf)
    for reader in (read_spec, HfCheckpoint, check_hf_folder):
        with pytest.raises(ConfigError, match=message) as caught:
            reader(hf)
        assert str(hf) in str(caught.value)


def test_read_spec_opens_one_file_of_weights(hf: Path) -> None:
    """And judges the tensors of the others by their names in the index."""
    last = max(hf.glob("*.safetensors"))
    last.write_bytes(b"not weights, and longer than a pointer" * 100)
    read_spec(hf)
    index = hf / "model.safetensors.index.json"
    edit(index, weight_map=json.loads(index.read_text())["weight_map"] | {f"{QUERY}_scale_inv": last.name})
    with pytest.raises(ConfigError, match=f"{last.name}: tensor '{QUERY}_scale_inv' is quantised"):
        read_spec(hf)


def one_file(hf: Path, has_index: bool = False) -> None:
    tensors = {k: v for path in hf.glob("*.safetensors") for k, v in load_file(path).items()}
    for path in [*hf.glob("*.safetensors"), hf / "model.safetensors.index.json"]:
        path.unlink()
    save_file(tensors, hf / "model.safetensors")
    if has_index:
        weight_map = dict.fromkeys(tensors, "model.safetensors")
        (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


ACCEPTED: dict[str, Callable[[Path], object]] = {
    "as written": lambda hf: None,
    "no quantisation": quantised("", None),
    "one file": one_file,
    "one file with an index": partial(one_file, has_index=True),
    "weights that are not read": lambda hf: save_file(
        {"x.weight_scale": SCALE.to(torch.float8_e4m3fn)}, hf / "consolidated.safetensors"
    ),
    "one template twice": lambda hf: (hf / "chat_template.jinja").write_text(read_chat_template(hf) + "\n"),
    # As in the released Qwen2.5-VL, whose tokenizer_config.json has a template for tools.
    "another template of the tokenizer": fields("tokenizer_config.json", chat_template="{{ tools }}"),
    "images that are pointers": file("figure.png", POINTER),
    "other templates": file("additional_chat_templates/rag.jinja", "{{ messages }}"),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_accepted(hf: Path, kind: str) -> None:
    ACCEPTED[kind](hf)
    HfCheckpoint(hf)
    check_hf_folder(hf)


def test_template_of_the_tokenizer_is_noted(hf: Path) -> None:
    assert chat_template_note(hf) == ""
    edit(hf / "tokenizer_config.json", chat_template="{{ tools }}")
    assert "chat_template.json and tokenizer_config.json differ" in chat_template_note(hf)
    (hf / "chat_template.json").unlink()
    assert chat_template_note(hf) == "" and read_chat_template(hf) == "{{ tools }}"


COMMANDS = {
    "convert": ["convert", "--hf", "HF", "--out", "OUT"],
    "train": ["train", "--model.hf", "HF", "--data.path", "synthetic:images", "--steps", "1", "--dry-run"],
    "train from records": ["train", "--model.hf", "HF", "--data.path", "RECORDS", "--checkpoint.dir", "OUT"],
    "verify": ["verify", "HF", "HF"],
    "plan": ["plan", "--hf", "HF", "--gpu", "H100", "--gpus", "1"],
    "parity": ["parity", "--hf", "HF", "--layouts", "1"],
    "export": ["export", "--checkpoint", "WEIGHTS", "--hf", "HF", "--out", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_it(hf: Path, tmp_path: Path, capsys, command: str) -> None:
    if command == "export":
        convert_weights(hf, tmp_path / "weights")
    change, message = REFUSED["fp8 without scales"]
    change(hf)
    (records := tmp_path / "records.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    paths = {"HF": hf, "OUT": tmp_path / "out", "WEIGHTS": tmp_path / "weights", "RECORDS": records}
    assert main([str(paths.get(word, word)) for word in COMMANDS[command]]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"megatron-vl {COMMANDS[command][0]}: {hf}") and re.search(message, said)
    assert not paths["OUT"].exists()
