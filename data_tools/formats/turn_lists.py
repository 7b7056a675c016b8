"""Formats whose record is a list of turns, each with a role and its content."""

from __future__ import annotations

from typing import Any

from .conversation import Message
from .record_reader import RecordFormat, RecordReader, listed_turns


def _read_trl(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    prompt, completion = (listed_turns(record, name) for name in ("prompt", "completion"))
    messages = reader.read_turns([*prompt, *completion])
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["loss_weight"] = 0.0
    return messages


OPENAI = RecordFormat(
    "openai",
    "messages",
    lambda record: record.get("messages") is not None,
    read_fields=("parallel_tool_calls", "extra_info", "_dataset_name"),
)
"""TRL and ms-swift have it too. ``<image>`` in a text stands for an entry of ``image(s)``,
as in ShareGPT; where media are content parts, it is text."""
QWEN = RecordFormat(
    "qwen",
    "conversations",
    lambda record: record.get("conversations") is not None and isinstance(record.get("data_path"), str),
    read_fields=("data_path",),
    strip_user_text=True,
    media_folder_field="data_path",
)
"""Qwen's fine-tuning JSON. Only ``data_path`` tells it from ShareGPT, so a file without it is read by this
rule if ``--format qwen`` says so."""
SHAREGPT = RecordFormat("sharegpt", "conversations", lambda record: record.get("conversations") is not None)
"""LLaVA's own code moves an image to the beginning of its turn; here it stays where the text has it."""
TRL = RecordFormat(
    "trl",
    "completion",
    lambda record: isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list),
    _read_trl,
    read_fields=("prompt",),
)
