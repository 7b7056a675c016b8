"""The ids of training are those of the folder's tokenizer.json, whatever class transformers takes for it."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from megatron_vl.config import parse_config
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.spec.families import read_spec
from megatron_vl.training.resolve import resolve_run
from tests.data.helpers import assistant, user
from toolkit.cli import main
from toolkit.common.hf_loading import load_hf_processor
from toolkit.common.tiny_checkpoint import write_tiny_checkpoint

TEXTS = [
    *("abc 123456 x", "ABC", "x\u0323\u0302 e\u0301", "don't\n\n x", "\ufb01 Å \u212b ２０２６"),
    *("हिन्दी में", "กำลัง"),
    "עִבְרִית, العَرَبِيَّة",
    "日本語 ２３ 👩‍👩‍👧",
]
MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

MARKS_ARE_LETTERS = Version(transformers.__version__) >= Version("5.24")
"""Whether the class that transformers takes for a folder of Qwen3.5 joins marks and letters."""


def steps(rules: dict) -> list[dict]:
    """Of the pre-tokenizer: the first splits by a pattern, the second makes bytes."""
    return rules["pre_tokenizer"]["pretokenizers"]


DIGIT, DIGITS = r"\p{N}|", r"\p{N}{1,3}|"
CHANGES = {
    "as written": lambda rules: None,
    "marks with letters": lambda rules: steps(rules)[0]["pattern"].update(Regex=MARKS),
    "digits by three": lambda rules: steps(rules)[0].update(
        pattern={"Regex": steps(rules)[0]["pattern"]["Regex"].replace(DIGIT, DIGITS, 1)}
    ),
    "no normaliser": lambda rules: rules.update(normalizer=None),
    "lower case": lambda rules: rules.update(normalizer={"type": "Lowercase"}),
    "NFKC": lambda rules: rules.update(normalizer={"type": "NFKC"}),
    "white space alone": lambda rules: steps(rules).insert(0, {"type": "WhitespaceSplit"}),
    "a space in front": lambda rules: steps(rules)[1].update(add_prefix_space=True),
}
REPLACED = {"no normaliser": "normaliser", "lower case": "normaliser", "NFKC": "normaliser"}


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def folder(request, tmp_path_factory) -> Path:
    path = write_tiny_checkpoint(tmp_path_factory.mktemp(request.param) / "hf", request.param)
    shutil.copytree(path, path.with_name("kept"))
    return path


def write_rules(folder: Path, change, tokenizer_class: str | None) -> Tokenizer:
    kept = folder.with_name("kept")
    change(rules := json.loads((kept / "tokenizer.json").read_text()))
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    config = json.loads((kept / "tokenizer_config.json").read_text()) | {"tokenizer_class": tokenizer_class}
    named = {name: value for name, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


OTHER_CLASSES = [("digits by three", name) for name in ("PreTrainedTokenizerFast", "Qwen3_5Tokenizer", None)]


@pytest.mark.parametrize(
    ("name", "tokenizer_class"), [*((name, "Qwen2Tokenizer") for name in CHANGES), *OTHER_CLASSES]
)
def test_token_ids_are_those_of_the_file(folder, name, tokenizer_class):
    file = write_rules(folder, CHANGES[name], tokenizer_class)
    encoder = ChatEncoder(folder, read_spec(folder))
    assert ChatEncoder(folder, read_spec(folder)).tokenizer is encoder.tokenizer  # loaded once
    for text in TEXTS:
        assert encoder._fast_tokenizer.encode(text).ids == file.encode(text).ids, text
        assert encoder.tokenizer(text)["input_ids"] == file.encode(text).ids, text
        messages = [user(text), assistant(text)]
        ids, _ = encoder.encode(messages, [])
        assert ids.tolist() == file.encode(encoder.render_conversation(messages)).ids, text

    alone = AutoTokenizer.from_pretrained(folder).backend_tokenizer
    is_other = any(alone.encode(text).ids != file.encode(text).ids for text in TEXTS)
    assert bool(encoder.serving_note) or not is_other
    if encoder.serving_note:
        assert REPLACED.get(name, "split pattern") in encoder.serving_note
        assert type(encoder.tokenizer).__name__ in encoder.serving_note


def test_ids_of_hindi_worked_out_by_hand(tmp_path):
    """The bytes of "हिन्दी में" have the ids of GPT-2's order: E0 156, A4 97, A5 98, and a space 220. Merges
    make 396 of E0 A4, 397 of ह, 398 of its mark ि, and 399 of both: one piece only if marks are letters."""
    write_tiny_checkpoint(tmp_path / "hf", "qwen3_5")
    rules = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    vocabulary = [token for token, token_id in rules["model"]["vocab"].items() if token_id < 396]
    vocabulary += ["à¤", "à¤¹", "à¤¿", "à¤¹à¤¿"]
    rules["model"]["vocab"] = {token: number for number, token in enumerate(vocabulary)}
    rules["model"]["merges"] = [["à", "¤"], ["à¤", "¹"], ["à¤", "¿"], ["à¤¹", "à¤¿"]]
    CHANGES["marks with letters"](rules)
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(rules))

    # न 396 and A8, ् E0 A5 8D, द 396 and A6, ी E0 A5 80, a space, म 396 and AE, े E0 A5 87, ं 396 and 82
    rest = [396, 101, 156, 98, 235, 396, 99, 156, 98, 222, 220, 396, 106, 156, 98, 229, 396, 224]
    encoder = ChatEncoder(tmp_path / "hf", read_spec(tmp_path / "hf"))
    assert encoder.tokenizer("हिन्दी में")["input_ids"] == [399, *rest]
    alone = AutoTokenizer.from_pretrained(tmp_path / "hf")("हिन्दी में")["input_ids"]
    if MARKS_ARE_LETTERS:
        assert alone == [399, *rest] and not encoder.serving_note
    else:  # Qwen2's class, for which a mark ends a word
        assert alone == [397, 398, *rest] and "split pattern" in encoder.serving_note


def test_reference_processor_gives_the_ids_of_the_file(folder):
    file = write_rules(folder, CHANGES["digits by three"], "Qwen2Tokenizer")
    tokenizer = load_hf_processor(folder).tokenizer
    assert tokenizer("abc 123456 x")["input_ids"] == file.encode("abc 123456 x").ids


def test_added_tokens_keep_their_lstrip_and_rstrip(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "hf", "qwen3_vl")
    rules = json.loads((folder / "tokenizer.json").read_text())
    for token in rules["added_tokens"]:
        token["rstrip"] |= token["content"] == "<|im_end|>"
        token["lstrip"] |= token["content"] == "<|box_start|>"
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    encoder = ChatEncoder(folder, read_spec(folder))
    assert "added tokens" in encoder.serving_note

    ids, mask = encoder.encode([user("Hi"), assistant("a  <|box_start|>b")], [])
    trained = [encoder._fast_tokenizer.id_to_token(int(i)) for i in ids[mask]]
    assert trained == ["a", "<|box_start|>", "b", "<|im_end|>"]  # both tokens have taken white space


def run_fields(folder: Path, tmp_path: Path) -> list[str]:
    """Those of a run on a data set of one shard, which is not there."""
    meta = tmp_path / "data" / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    (meta / "split.yaml").write_text("split_parts: {train: [train-0.tar]}\nexclude: []\n")
    (meta / ".info.json").write_text('{"shard_counts": {"train-0.tar": 1}}')
    (meta / "dataset.yaml").write_text("{__module__: megatron.energon, __class__: CrudeWebdataset}\n")
    fields = ["--model.hf", str(folder), "--data.path", str(tmp_path / "data"), "--platform", "cpu"]
    return [*fields, "--data.seq_len", "512"]


def start(folder: Path, tmp_path: Path, tp: int = 1):
    return resolve_run(parse_config([*run_fields(folder, tmp_path), "--parallel.tp", str(tp)]), tp)


def test_start_names_the_class_that_replaces_rules(folder, tmp_path):
    write_rules(folder, CHANGES["as written"], "PreTrainedTokenizerFast")
    notes = [note for note in start(folder, tmp_path).run_notes if "tokenizer.json" in note]
    # transformers 5.24 takes the family's class whatever is written, and this file has the pattern of Qwen2.
    takes_own_class = MARKS_ARE_LETTERS and read_spec(folder).family.startswith("qwen3_5")
    assert ["NOTE: Qwen3_5Tokenizer of" in note for note in notes] == [True] * takes_own_class
    write_rules(folder, CHANGES["digits by three"], "Qwen2Tokenizer")
    [note] = [note for note in start(folder, tmp_path).run_notes if "tokenizer.json" in note]
    name = "Qwen3_5Tokenizer" if takes_own_class else "Qwen2Tokenizer"
    replaced = f"{name} of transformers {transformers.__version__} replaces the split pattern of "
    assert note == (
        f"NOTE: {replaced}{folder / 'tokenizer.json'}: training uses the file, and serving with this"
        " transformers gives some texts other tokens than they were trained with"
    )


def test_token_without_a_row_in_the_embedding_is_refused(tmp_path, capsys):
    folder = write_tiny_checkpoint(tmp_path / "hf", "qwen3_vl")
    spec = read_spec(folder)
    rows = spec.language.vocab_size
    tokenizer = Tokenizer.from_file(file := str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<loc_{i}>" for i in range(rows - tokenizer.get_vocab_size())])
    tokenizer.save(file)
    ChatEncoder(folder, spec)  # the last token has the last row
    tokenizer.add_tokens(["<one more>"])
    tokenizer.save(file)
    starts = [partial(start, folder, tmp_path, tp) for tp in (1, 2)]
    for refuse in (partial(ChatEncoder, folder, spec), *starts):
        with pytest.raises(ChatError, match=rf"token ids up to {rows} .*embedding has {rows} rows"):
            refuse()
    assert main(["train", *run_fields(folder, tmp_path), "--dry-run"]) == 1
    assert f"train: {folder}: the tokenizer has token ids up to {rows} (" in capsys.readouterr().err
