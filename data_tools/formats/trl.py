"""TRL's conversational prompt and completion: two lists of turns. Only the completion is trained on."""

from __future__ import annotations

from typing import Any

from .conversation import Message
from .record_reader import RecordFormat, RecordReader, listed_turns


def _read_messages(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    prompt, completion = (listed_turns(record, name) for name in ("prompt", "completion"))
    messages = reader.read_turns([*prompt, *completion])
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["loss_weight"] = 0.0
    return messages


FORMAT = RecordFormat(
    "trl",
    "completion",
    "prompt and completion, two lists of turns (TRL); only the completion is trained on",
    lambda record: isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list),
    _read_messages,
    read_fields=("prompt",),
)
