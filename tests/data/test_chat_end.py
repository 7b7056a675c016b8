"""A start notes where generation does not stop at the token that ends an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.stop_tokens import serving_notes
from megatron_vl.spec.families import read_spec
from tests.security.payload import edit
from tests.tiny import tiny_checkpoint

END_OF_TEXT, END_OF_TURN = 400, 402


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    shutil.copytree(tiny_checkpoint("qwen2_5_vl"), tmp_path / "hf")
    return tmp_path / "hf"


def notes(hf: Path) -> list[str]:
    return serving_notes(ChatEncoder(hf, read_spec(hf)))


def without_generation_config(hf: Path, eos: object, tokenizer_eos: str) -> None:
    (hf / "generation_config.json").unlink()
    edit(hf / "config.json", eos_token_id=eos)
    edit(hf / "tokenizer_config.json", eos_token=tokenizer_eos)


@pytest.mark.parametrize("eos", [END_OF_TEXT, [END_OF_TEXT], [END_OF_TEXT, 401]])
def test_note_names_missing_stop_token(hf: Path, eos: object) -> None:
    edit(hf / "generation_config.json", eos_token_id=eos)
    [note] = notes(hf)
    assert f"answers end with '<|im_end|>' (id {END_OF_TURN})" in note and "'<|endoftext|>'" in note
    assert f"add {END_OF_TURN} to eos_token_id in generation_config.json" in note


def test_note_without_generation_config_follows_the_tokenizer(hf: Path) -> None:
    without_generation_config(hf, END_OF_TEXT, "<|endoftext|>")
    assert "generation stops only at '<|endoftext|>'" in notes(hf)[0]


def test_note_names_another_end_of_the_template(hf: Path) -> None:
    template = json.loads((hf / "chat_template.json").read_text())["chat_template"]
    for name in ("chat_template.json", "tokenizer_config.json"):
        edit(hf / name, chat_template=template.replace("<|im_end|>", "<|object_ref_end|>"))
    assert "answers end with '<|object_ref_end|>'" in notes(hf)[0]


@pytest.mark.parametrize("eos", [END_OF_TURN, [END_OF_TURN], [END_OF_TURN, END_OF_TEXT]])
def test_note_is_absent_for_usual_folders(hf: Path, eos: object) -> None:
    edit(hf / "generation_config.json", eos_token_id=eos)
    assert notes(hf) == []


def test_note_is_absent_for_small_released_qwen3_5(hf: Path) -> None:
    """Without a generation_config.json, and with the other token in the config."""
    without_generation_config(hf, END_OF_TEXT, "<|im_end|>")
    assert notes(hf) == []


def test_note_names_another_template_of_the_tokenizer(hf: Path) -> None:
    edit(hf / "tokenizer_config.json", chat_template="{{ tools }}")
    [note] = notes(hf)
    assert "chat_template.json and tokenizer_config.json differ; the first is used" in note
