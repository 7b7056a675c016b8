"""Finds audio in records, because no Qwen-VL model can hear it.

A record with audio is useless without it: the model would learn to guess the answer, and a placeholder would
be trained on as text. Sounds are listed beside the conversation or a turn (``audios`` of LLaMA-Factory and
ms-swift, ``audio`` of OpenAI's answers and of Hugging Face's data sets), are content parts (``input_audio``
of OpenAI, ``audio`` of transformers' processors, ``audio_url`` of vLLM), or have a placeholder in the text.

``<audio>`` is also HTML. It counts as a placeholder where placeholders stand, at the beginning or the end of
a line, and is text within a sentence and as code (in backticks). Answers are never searched.
"""

from __future__ import annotations

import re
from typing import Any

AUDIO_KEYS = ("audios", "audio", "audio_url", "input_audio", "audio_path", "audio_paths", "audio_file")
"""Fields of records, turns and content parts that hold sounds."""
CONTENT_KEYS = ("bytes", "path", "url", "array", "data", "id")
"""Fields of a structure that hold a sound. Other fields, such as a rate or a format, do not show that there
is one."""
AUDIO_PART_TYPES = ("audio", "audio_url", "input_audio")
"""Types of content parts that are sounds."""
AUDIO_TOKEN = re.compile(r"<\|audio(?:_pad|_\d{1,4})?\|>", re.IGNORECASE)
"""Placeholder for a sound or its features in Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni and Phi-4."""
AUDIO_PLACEHOLDER = re.compile(
    r"^[ \t]*<audio>|</?audio>[ \t]*$|<audio_?\d{1,4}>", re.IGNORECASE | re.MULTILINE
)
CODE_SPAN = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def find_audio_field(json_object: dict[str, Any]) -> str | None:
    """The first field of a record, turn or content part that holds a sound."""
    # Some tables count sounds: 0 is none. In a list, it is silence.
    values = ((key, json_object.get(key)) for key in AUDIO_KEYS)
    return next((key for key, value in values if not _is_empty_value(value) and value != 0), None)


def _is_empty_value(field_value: Any) -> bool:
    """Exported tables fill columns and structures with empty values; a flag is not a sound."""
    if isinstance(field_value, dict):
        content_values = [field_value[key] for key in CONTENT_KEYS if key in field_value]
        return all(map(_is_empty_value, content_values or field_value.values()))
    if isinstance(field_value, list):
        return all(map(_is_empty_value, field_value))
    return field_value is None or field_value == "" or isinstance(field_value, bool)


def find_audio_placeholder(text: str) -> str | None:
    """Finds the placeholder of a sound in a user's text or a system prompt."""
    # Code is replaced by a word, so that the text around it still counts as one sentence.
    match = AUDIO_PLACEHOLDER.search(CODE_SPAN.sub("code", text)) if "audio" in text.lower() else None
    return match[0].strip() if match else None
