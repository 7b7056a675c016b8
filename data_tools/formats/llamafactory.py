"""LLaMA-Factory v1: ``messages`` with ``loss_weight``, whose content is parts ``{"type", "value"}``.

Types are text, image_url, video_url, reasoning and tool_call. (Its older files are ShareGPT and Alpaca.)
"""

from __future__ import annotations

from typing import Any

from .record_reader import RecordFormat


def _matches_record(record: dict[str, Any]) -> bool:
    turns = record.get("messages")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], dict):
        return False
    first_content = turns[0].get("content")
    return isinstance(first_content, list) and any(
        isinstance(part, dict) and "value" in part for part in first_content
    )


FORMAT = RecordFormat(
    "llamafactory-v1",
    "messages",
    "messages whose content is parts of type and value (text, image_url, reasoning, tool_call), loss_weight",
    _matches_record,
    read_fields=("extra_info", "_dataset_name"),
)
