"""Questions with answers: ``conversation`` with ``human`` and ``assistant`` (ms-swift), and
``texts`` with ``user`` and ``assistant`` (The Cauldron, FineVision)."""

from __future__ import annotations

from typing import Any

from .conversation import Message, RecordError, shorten_value
from .record_reader import RecordFormat, RecordReader, listed_turns

LISTED_TURNS = {"from": "conversations", "role": "messages"}
"""The field of turns that have this key."""


def _read_messages(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    messages: list[Message] = []
    turns_field = "texts" if _has_paired_texts(record) else "conversation"
    for i, turn_pair in enumerate(listed_turns(record, turns_field)):
        field_path = f"{turns_field}[{i}]"
        if not isinstance(turn_pair, dict):
            raise RecordError(
                "bad turn", f"an object is required, but this is {shorten_value(turn_pair)}", field_path
            )
        read_keys = []
        for role, role_keys in (("user", ("human", "user")), ("assistant", ("assistant", "gpt", "bot"))):
            text_key = next((name for name in role_keys if turn_pair.get(name) is not None), None)
            if text_key is None:
                listed_field = next((LISTED_TURNS[key] for key in LISTED_TURNS if key in turn_pair), "")
                advice = f"; did you mean the field {listed_field!r}?" if listed_field else ""
                detail = f"the {role}'s text is missing ({role_keys[0]!r}){advice}"
                raise RecordError("bad turn", detail, field_path)
            read_keys.append(text_key)
            messages.append(reader.read_content(role, turn_pair[text_key], f"{field_path}.{text_key}"))
        reader.note_ignored_keys("turns", turn_pair, *read_keys)

    return messages


def _has_paired_texts(record: dict[str, Any]) -> bool:
    texts = record.get("texts")
    return isinstance(texts, list) and bool(texts) and isinstance(texts[0], dict)


FORMAT = RecordFormat(
    "pairs",
    "conversation",
    lambda record: record.get("conversation") is not None or _has_paired_texts(record),
    _read_messages,
    read_fields=("texts",),
)
