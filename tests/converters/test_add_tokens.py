"""Rows for more tokens: what transformers loads, what stays, and what trains."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from converters.add_tokens import add_tokens
from converters.hf_checkpoint import HfCheckpoint
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.conversation_checks import ChatError
from megatron_vl.data.sample.tokenizer import load_tokenizer
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import LayoutError, check_tensor_parallel
from megatron_vl.system.json_files import manifest_digest
from megatron_vl.weights.trained_media import exported_facts
from tests.converters.fp8_folders import fp8_folder
from tests.converters.helpers import read_tensors
from tests.security.payload import edit
from tests.tiny import tiny_checkpoint
from toolkit.cli import main
from toolkit.common.hf_loading import load_hf_model

TOKENS = ["<loc_1>", "<loc_2>", "new word", "Ωμέγα"]


def token_file(folder: Path, tokens: list[str]) -> Path:
    path = folder / "tokens.txt"
    path.write_text("\n".join(tokens) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(("family", "tied"), [("qwen2_5_vl", False), ("qwen3_5", True)])
def test_added_tokens_have_the_mean_of_their_pieces(tmp_path: Path, family: str, tied: bool) -> None:
    hf = tiny_checkpoint(family, tied=tied)
    old_tokenizer, _ = load_tokenizer(hf)
    main(f"convert --hf {hf} --add-tokens {token_file(tmp_path, TOKENS)} --out {tmp_path / 'out'}".split())
    tokenizer, note = load_tokenizer(tmp_path / "out")
    old_rows = read_spec(hf).language.vocab_size
    assert note.replace(str(tmp_path / "out"), str(hf)) == load_tokenizer(hf)[1]
    assert read_spec(tmp_path / "out").language.vocab_size == old_rows
    assert len(tokenizer) == len(old_tokenizer) + len(TOKENS)
    first_id = len(old_tokenizer)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for i, text in enumerate(TOKENS):
        for loaded in (tokenizer, theirs):
            assert loaded(f"a{text}b", add_special_tokens=False)["input_ids"][1:-1] == [first_id + i]
            assert loaded.decode([first_id + i], skip_special_tokens=True) == text

    before, after = (load_hf_model(path, torch.float32) for path in (hf, tmp_path / "out"))
    for matrix in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(model, matrix)().weight.detach() for model in (before, after))
        assert torch.equal(old[:first_id], new[:first_id]) and len(new) == len(old)
        for i, text in enumerate(TOKENS):
            pieces = old_tokenizer(text, add_special_tokens=False)["input_ids"]
            assert len(pieces) > 1
            assert torch.equal(new[first_id + i], old[pieces].mean(0).bfloat16().float())
    ids = torch.tensor([old_tokenizer("A cat sat.", add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        logits = [model(input_ids=ids).logits[..., :first_id] for model in (before, after)]
    assert torch.equal(*logits)


def test_rows_grow_and_can_be_cut(tmp_path: Path) -> None:
    """FP8 weights stay as they are; a second conversion has nothing to do."""
    hf = fp8_folder(tmp_path / "hf", "qwen3_vl")
    tokenizer = AutoTokenizer.from_pretrained(hf)
    tokens = [f"<loc_{i}>" for i in range(300)]
    report = add_tokens(hf, token_file(tmp_path, tokens), tmp_path / "out")
    old_rows, rows = (read_spec(path).language.vocab_size for path in (hf, tmp_path / "out"))
    assert old_rows < len(tokenizer) + 300 <= rows and rows % 128 == 0 and rows - 128 < len(tokenizer) + 300
    assert f"{rows} rows (before: {old_rows}), 300 of them the mean of their pieces" in report.notes
    assert f"new tokens have the ids {len(tokenizer)} to {len(tokenizer) + 299}" in report.notes
    old, new = read_tensors(hf), read_tensors(tmp_path / "out")
    assert old.keys() == new.keys()
    for name, tensor in old.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            mean = tensor[: len(tokenizer)].double().mean(0).bfloat16()
            assert torch.equal(
                new[name][len(tokenizer) + 300 :], mean.expand(rows - len(tokenizer) - 300, -1)
            )
            tensor, new[name] = tensor[: len(tokenizer)], new[name][: len(tokenizer)]
        assert torch.equal(tensor.view(torch.uint8), new[name].view(torch.uint8))
    HfCheckpoint(tmp_path / "out")

    again = add_tokens(tmp_path / "out", token_file(tmp_path, tokens[:2]), tmp_path / "again")
    assert "2 tokens were in the tokenizer already, and those with a row keep it" in again.notes
    first, second = (read_tensors(tmp_path / name) for name in ("out", "again"))
    for name, tensor in first.items():
        assert torch.equal(second[name].view(torch.uint8), tensor.view(torch.uint8))


def resized(hf: Path, rows: int) -> None:
    """As ``resize_token_embeddings`` does, with any number of rows."""
    from safetensors.torch import load_file, save_file

    for path in hf.glob("*.safetensors"):
        tensors = load_file(path)
        for name in tensors:
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                tensors[name] = tensors[name][:rows].contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    text_config = json.loads((hf / "config.json").read_text())["text_config"]
    edit(hf / "config.json", text_config=text_config | {"vocab_size": rows})


def test_odd_numbers_of_rows_have_a_way_out(tmp_path: Path) -> None:
    hf = shutil.copytree(tiny_checkpoint("qwen3_vl"), tmp_path / "hf")
    resized(hf, 415)
    with pytest.raises(LayoutError, match="vocabulary of 415 tokens.*convert --add-tokens` with an empty"):
        check_tensor_parallel(read_spec(hf), 2)
    facts = {"media": {"max_pixels": 4096}}  # of an exported folder
    (hf / "megatron_vl.json").write_text(json.dumps(facts | {"digest": manifest_digest(facts)}))
    add_tokens(hf, token_file(tmp_path, []), tmp_path / "out")
    assert exported_facts(tmp_path / "out") == facts
    spec = read_spec(tmp_path / "out")
    assert spec.language.vocab_size == 512
    check_tensor_parallel(spec, 4)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()


def test_tokens_without_a_row_get_one(tmp_path: Path) -> None:
    """A start is refused with the command that helps; an empty file gives their rows to all tokens."""
    hf = shutil.copytree(tiny_checkpoint("qwen3_vl"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(hf)
    pieces = tokenizer("<loc_299>", add_special_tokens=False)["input_ids"]
    tokenizer.add_tokens([f"<loc_{i}>" for i in range(300)])
    tokenizer.save_pretrained(hf)
    remedy = rf"`megatron-vl convert --hf {hf} --add-tokens FILE --out NEW_FOLDER` \(FILE may be empty\)"
    with pytest.raises(ChatError, match=remedy):
        ChatEncoder(hf, read_spec(hf))  # with which every start and data command begins
    add_tokens(hf, token_file(tmp_path, []), tmp_path / "out")
    name = "model.language_model.embed_tokens.weight"
    old, new = read_tensors(hf)[name], read_tensors(tmp_path / "out")[name]
    assert torch.equal(new[: len(old)], old)
    ChatEncoder(tmp_path / "out", read_spec(tmp_path / "out"))
    expected = old[pieces].float().mean(0).bfloat16()
    assert torch.equal(new[tokenizer.convert_tokens_to_ids("<loc_299>")], expected)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (["x"], "--parallel.tp 2", "--add-tokens writes a Hugging Face folder; leave out the layout"),
        (["x<|im_end|>y"], "", "'x<|im_end|>y' cannot become a token with the id 414; leave it out"),
        (["é"], "", "'é' cannot become a token"),  # the vocabulary's name of a byte
    ],
)
def test_tokens_that_cannot_be_added(tmp_path, tokens: list[str], options: str, message: str, capsys) -> None:
    command = f"convert --hf {tiny_checkpoint('qwen3_vl')} --add-tokens {token_file(tmp_path, tokens)}"
    status = main(f"{command} --out {tmp_path / 'out'} {options}".split())
    assert status != 0 and message in capsys.readouterr().err and not (tmp_path / "out").exists()
