"""LLaMA-Factory v1: ``messages`` with ``loss_weight``, whose content is parts ``{"type", "value"}``.

Types are text, image_url, video_url, reasoning and tool_call. (Its older files are ShareGPT and Alpaca.)
"""

from __future__ import annotations

from typing import Any

from .canonical import Message
from .content import Reader
from .kind import Format, listed_turns


def _matches(record: dict[str, Any]) -> bool:
    turns = record.get("messages")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return False
    content = turns[0].get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and "value" in part for part in content)


def _read(record: dict[str, Any], reader: Reader) -> list[Message]:
    return reader.turns(listed_turns(record, "messages"))


FORMAT = Format(
    "llamafactory-v1",
    "messages",
    "messages whose content is parts of type and value (text, image_url, reasoning, tool_call), loss_weight",
    _matches,
    _read,
    fields=("extra_info", "_dataset_name"),
)
