"""A start notes where generation does not stop at the token that ends an answer."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.data.sample.stop_tokens import read_stop_tokens, serving_notes
from megatron_vl.spec.families import read_spec
from tests.security.payload import edit
from tests.tiny import tiny_checkpoint

END_OF_TEXT, END_OF_TURN = 400, 402


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return shutil.copytree(tiny_checkpoint("qwen2_5_vl"), tmp_path / "hf")


def notes(hf: Path) -> list[str]:
    return serving_notes(ChatEncoder(hf, read_spec(hf)))


@pytest.mark.parametrize(
    ("eos", "has_note"),
    [(END_OF_TEXT, True), ([END_OF_TEXT], True), ([END_OF_TEXT, 401], True), (END_OF_TURN, False)]
    + [([END_OF_TURN], False), ([END_OF_TURN, END_OF_TEXT], False)],
)
def test_note_names_missing_stop_token(hf: Path, eos: object, has_note: bool) -> None:
    edit(hf / "generation_config.json", eos_token_id=eos)
    told = notes(hf)
    assert len(told) == has_note
    for note in told:
        assert f"answers end with '<|im_end|>' (id {END_OF_TURN})" in note and "'<|endoftext|>'" in note
        assert f"add {END_OF_TURN} to eos_token_id in generation_config.json" in note


def test_note_without_generation_config_follows_the_tokenizer(hf: Path) -> None:
    """The small Qwen3.5 are released without that file, and with the other token in the config."""
    (hf / "generation_config.json").unlink()
    edit(hf / "config.json", eos_token_id=END_OF_TEXT)
    for token, has_note in (("<|endoftext|>", True), ("<|im_end|>", False)):
        edit(hf / "tokenizer_config.json", eos_token=token)
        assert any("generation stops only at '<|endoftext|>'" in note for note in notes(hf)) == has_note


def test_note_names_what_templates_say_otherwise(hf: Path) -> None:
    template = json.loads((hf / "chat_template.json").read_text())["chat_template"]
    edit(hf / "tokenizer_config.json", chat_template="{{ tools }}")
    assert "chat_template.json and tokenizer_config.json differ; the first is used" in notes(hf)[0]
    for name in ("chat_template.json", "tokenizer_config.json"):
        edit(hf / name, chat_template=template.replace("<|im_end|>", "<|object_ref_end|>"))
    assert "answers end with '<|object_ref_end|>'" in notes(hf)[0]


@pytest.mark.parametrize(
    ("generation", "config", "of_tokenizer", "stop"),
    [
        # Qwen3.5-27B: generation_config.json is all that counts.
        ({"eos_token_id": [248046, 248044]}, {"eos_token_id": 248044}, 248046, [248046, 248044]),
        # Up to 9B there is no such file, and config.json names <|endoftext|> alone.
        (None, {"text_config": {"eos_token_id": 248044}}, 248046, [248046, 248044]),
        (None, {"eos_token_id": 5}, None, [5]),
        ({"top_k": 1}, {}, 5, [5]),
        ({"eos_token_id": 0}, {}, 5, [0]),
    ],
)
def test_stop_tokens_end_a_turn(generation, config, of_tokenizer, stop, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_stop_tokens(tmp_path, SimpleNamespace(eos_token_id=of_tokenizer)) == stop


def test_stop_tokens_are_required(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ChatError, match="eos_token_id"):
        read_stop_tokens(tmp_path, SimpleNamespace(eos_token_id=None))
