"""OpenAI: ``messages`` with ``role`` and ``content``, a string or parts. TRL and ms-swift have them too.

Text with ``<image>`` markers and ``image(s)`` next to ``messages`` is read as in ShareGPT. In a record whose
media are content parts, ``<image>`` in the text is text.
"""

from __future__ import annotations

from .record_reader import RecordFormat

FORMAT = RecordFormat(
    "openai",
    "messages",
    "messages with role and content (text, or parts of type text, image_url, ...), tool_calls",
    lambda record: record.get("messages") is not None,
    read_fields=("parallel_tool_calls",),
)
