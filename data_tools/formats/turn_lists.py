"""Formats whose record is a list of turns, each with a role and its content."""

from __future__ import annotations

from typing import Any

from .conversation import Message
from .record_reader import RecordFormat, RecordReader, listed_turns


def _has_typed_values(record: dict[str, Any]) -> bool:
    """Whether the content of the first turn is parts of ``type`` and ``value``."""
    turns = record.get("messages")
    content = (
        turns[0].get("content") if isinstance(turns, list) and turns and isinstance(turns[0], dict) else ()
    )
    return isinstance(content, list) and any(isinstance(part, dict) and "value" in part for part in content)


def _read_trl(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    prompt, completion = (listed_turns(record, name) for name in ("prompt", "completion"))
    messages = reader.read_turns([*prompt, *completion])
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["loss_weight"] = 0.0
    return messages


LLAMAFACTORY_V1 = RecordFormat(
    "llamafactory-v1",
    "messages",
    "messages whose content is parts of type and value (text, image_url, reasoning, tool_call), loss_weight",
    _has_typed_values,
    read_fields=("extra_info", "_dataset_name"),
)
OPENAI = RecordFormat(
    "openai",
    "messages",
    "messages with role and content (text, or parts of type text, image_url, ...), tool_calls",
    lambda record: record.get("messages") is not None,
    read_fields=("parallel_tool_calls",),
)
"""TRL and ms-swift have it too. ``<image>`` in the text stands for an entry of ``image(s)``, as in ShareGPT;
where media are content parts, it is text."""
QWEN = RecordFormat(
    "qwen",
    "conversations",
    "conversations with image(s) below data_path; the user's texts are stripped",
    lambda record: record.get("conversations") is not None and isinstance(record.get("data_path"), str),
    read_fields=("data_path",),
    strip_user_text=True,
    media_folder_field="data_path",
)
"""Qwen's fine-tuning JSON. Only ``data_path`` tells it from ShareGPT, so a file without it is read by this
rule if ``--format qwen`` says so."""
SHAREGPT = RecordFormat(
    "sharegpt",
    "conversations",
    "conversations with from and value, <image> in the text for entries of image(s) (LLaVA, LLaMA-Factory)",
    lambda record: record.get("conversations") is not None,
)
"""LLaVA's own code moves an image to the beginning of its turn; here it stays where the text has it."""
TRL = RecordFormat(
    "trl",
    "completion",
    "prompt and completion, two lists of turns (TRL); only the completion is trained on",
    lambda record: isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list),
    _read_trl,
    read_fields=("prompt",),
)
