"""OpenAI: ``messages`` with ``role`` and ``content``, a string or parts. TRL and ms-swift have them too.

Text with ``<image>`` markers and ``image(s)`` next to ``messages`` is read as in ShareGPT. In a record whose
media are content parts, ``<image>`` in the text is text.
"""

from __future__ import annotations

from typing import Any

from .canonical import Message
from .content import Reader
from .kind import Format, listed_turns


def _read(record: dict[str, Any], reader: Reader) -> list[Message]:
    return reader.turns(listed_turns(record, "messages"))


FORMAT = Format(
    "openai",
    "messages",
    "messages with role and content (text, or parts of type text, image_url, ...), tool_calls",
    lambda record: record.get("messages") is not None,
    _read,
    fields=("parallel_tool_calls",),
)
