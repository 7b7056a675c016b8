"""Qwen's fine-tuning JSON: ShareGPT with the folder of a record's media in ``data_path``.

As in Qwen's code, white space around the user's texts, also between media, is removed. Only ``data_path``
tells the format from ShareGPT, so a file without it is read by this rule if ``--format qwen`` says so.
"""

from __future__ import annotations

from typing import Any

from .canonical import Message
from .content import Reader
from .kind import Format, listed_turns


def _read(record: dict[str, Any], reader: Reader) -> list[Message]:
    return reader.turns(listed_turns(record, "conversations"))


FORMAT = Format(
    "qwen",
    "conversations",
    "conversations with image(s) below data_path; the user's texts are stripped",
    lambda record: record.get("conversations") is not None and isinstance(record.get("data_path"), str),
    _read,
    fields=("data_path",),
    strip=True,
    base="data_path",
)
