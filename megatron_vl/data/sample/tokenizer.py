"""Loads the tokenizer of a Hugging Face folder, with the rules of its ``tokenizer.json``.

The classes of transformers rebuild some tokenizers: ``Qwen2Tokenizer`` keeps vocabulary and merges of the
file and replaces its normaliser and split pattern. The released Qwen3.5 folders name that class, although
their pattern joins combining marks to letters, so that it gives other ids than the file (transformers issue
44297).
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_vl.data.sample.conversation_checks import ChatError


def load_tokenizer(hf_dir: str | Path) -> tuple[Any, str]:
    """Loads transformers' tokenizer of a folder, and lets it encode and decode as ``tokenizer.json`` says.

    A folder without that file keeps the rules of the class.

    Returns:
        The tokenizer, and a note if transformers alone would give other ids; otherwise an empty text.

    Raises:
        FileNotFoundError: the folder has no tokenizer.
        ChatError: the tokenizer gives no character offsets.
    """
    from transformers import AutoTokenizer

    hf_path = Path(hf_dir)
    if not any((hf_path / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise FileNotFoundError(f"{hf_path} has no tokenizer (tokenizer.json, or vocab.json and merges.txt)")
    tokenizer = AutoTokenizer.from_pretrained(
        hf_path, trust_remote_code=False, local_files_only=True, use_fast=True
    )
    if not tokenizer.is_fast:
        raise ChatError(f"{hf_path}: the tokenizer gives no character offsets; a tokenizer.json is needed")

    serving_note = ""
    if (hf_path / "tokenizer.json").is_file():
        file_tokenizer = Tokenizer.from_file(str(hf_path / "tokenizer.json"))
        serving_note = _serving_note(tokenizer, file_tokenizer, hf_path)
        tokenizer._tokenizer = file_tokenizer  # what backend_tokenizer returns; there is no public setter
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer, serving_note


def shared_tokenizer(hf_dir: str | Path) -> tuple[Any, str]:
    """:func:`load_tokenizer`, once a process while the folder's files stay the same; nobody may change it."""
    files = [file for file in sorted(Path(hf_dir).glob("*")) if file.is_file()]
    return _load_once(Path(hf_dir), tuple((file.name, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=4)
def _load_once(hf_path: Path, _: tuple[tuple[str, int], ...]) -> tuple[Any, str]:
    return load_tokenizer(hf_path)


def _serving_note(tokenizer: Any, file_tokenizer: Tokenizer, hf_path: Path) -> str:
    """Says what transformers' class replaces of the file's rules; empty if it keeps all of them."""
    class_rules, file_rules = map(_encoding_rules, (tokenizer.backend_tokenizer, file_tokenizer))
    if not (replaced_rules := [name for name, rule in file_rules.items() if class_rules[name] != rule]):
        return ""
    import transformers

    return (
        f"{type(tokenizer).__name__} of transformers {transformers.__version__} replaces the"
        f" {' and the '.join(replaced_rules)} of {hf_path / 'tokenizer.json'}: training uses the file, and"
        " serving with this transformers gives some texts other tokens than they were trained with"
    )


def _encoding_rules(tokenizer: Tokenizer) -> dict[str, Any]:
    """What decides the ids of a text, beside vocabulary and merges, which all classes keep."""
    return {
        "normaliser": tokenizer.normalizer and tokenizer.normalizer.__getstate__(),
        "split pattern": tokenizer.pre_tokenizer and tokenizer.pre_tokenizer.__getstate__(),
        "added tokens": {i: repr(token) for i, token in tokenizer.get_added_tokens_decoder().items()},
        "merge rule": [getattr(tokenizer.model, name, None) for name in ("ignore_merges", "byte_fallback")],
    }


def check_embedding_rows(tokenizer: Tokenizer, embedding_rows: int, hf_dir: str | Path) -> None:
    """Raises ChatError if a token has an id without a row: TP 1 would fail there, and TP 2 train on."""
    last_token, last_id = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if last_id >= embedding_rows:
        raise ChatError(
            f"{hf_dir}: the tokenizer has token ids up to {last_id} ({last_token!r}), but the embedding has"
            f" {embedding_rows} rows (vocab_size in config.json): write a folder with enough"
            f" rows with `megatron-vl convert --hf {hf_dir} --add-tokens FILE --out NEW_FOLDER` (FILE may be"
            " empty), or remove the added tokens"
        )
