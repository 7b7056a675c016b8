"""The tokens at which generation stops, and whether an answer that was trained on ends with one of them."""

import json
from pathlib import Path
from typing import Any

from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.spec.families.hf_folder import chat_template_note


def read_stop_tokens(hf_dir: str | Path, tokenizer: Any) -> list[int]:
    """The tokens that end a turn.

    They are the ``eos_token_id`` of ``generation_config.json``, as in HF's generate. Without that file, they
    are those of ``config.json`` and of the tokenizer, as in serving engines. Qwen3.5 up to 9B comes without
    the file, and its config names only ``<|endoftext|>``, which does not end a turn.

    Raises:
        ChatError: none of them has an end token.
    """
    if tokens := _read_eos_tokens(Path(hf_dir) / "generation_config.json"):
        return tokens
    tokens = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    tokens += _read_eos_tokens(Path(hf_dir) / "config.json")
    if not tokens:
        raise ChatError(
            f"{hf_dir}: neither generation_config.json, config.json nor the tokenizer has an eos_token_id"
        )
    return list(dict.fromkeys(tokens))


def _read_eos_tokens(config_path: Path) -> list[int]:
    """``eos_token_id`` of a JSON file or of its ``text_config``; empty if it has none."""
    config = json.loads(config_path.read_text()) if config_path.is_file() else {}
    tokens = config.get("eos_token_id", (config.get("text_config") or {}).get("eos_token_id"))
    if tokens is None:
        return []
    return [int(token) for token in (tokens if isinstance(tokens, list) else [tokens])]


def serving_notes(chat_encoder: ChatEncoder) -> list[str]:
    """Notes on what a server of the encoder's folder would do otherwise than training."""
    hf_dir = chat_encoder.hf_dir
    # An export replaces all templates of the folder by the one that the run was given.
    notes = [] if chat_encoder.given_template else list(filter(None, [chat_template_note(hf_dir)]))
    try:
        token_ids, loss_mask = chat_encoder.encode(
            [{"role": "user", "content": "?"}, {"role": "assistant", "content": "."}], []
        )
        end_token = int(token_ids[loss_mask.nonzero()[-1]])
        stop_tokens = read_stop_tokens(hf_dir, chat_encoder.tokenizer)
    except (ChatError, IndexError):
        return notes  # the template refuses this conversation, or its answer is not trained on
    if end_token not in stop_tokens:
        name, *stops = chat_encoder.tokenizer.convert_ids_to_tokens([end_token, *stop_tokens])
        notes.append(
            f"{hf_dir}: answers end with {name!r} (id {end_token}), but generation stops only at"
            f" {', '.join(map(repr, stops))}, so it continues after an answer; add {end_token} to"
            " eos_token_id in generation_config.json"
        )
    return notes
