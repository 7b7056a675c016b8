"""Finds audio in records, because no Qwen-VL model can hear it.

A record with audio is useless without it: the model would learn to guess the answer, and a placeholder would
be learnt as text. Sounds are listed beside the conversation or a turn (``audios`` of LLaMA-Factory and
ms-swift, ``audio`` of OpenAI's answers and of Hugging Face's data sets), are content parts (``input_audio``
of OpenAI, ``audio`` of transformers' processors, ``audio_url`` of vLLM), or have a placeholder in the text.

``<audio>`` is also HTML. If no sound is listed, it counts as a placeholder only where placeholders stand, at
the beginning or the end of a line. Within a sentence ("How do I use the <audio> tag?"), as code (in
backticks) or as an element with ``</audio>``, it is text. If images or videos are listed, whose markers may
stand anywhere, it counts as a placeholder anywhere except in code. Answers may be HTML and are never
searched for it.
"""

from __future__ import annotations

import re
from typing import Any

KEYS = ("audios", "audio", "audio_url", "input_audio")
"""Fields of records, turns and content parts that hold sounds."""
PARTS = ("audio", "audio_url", "input_audio")
"""Types of content parts that are sounds."""
PLACEHOLDER = "<audio>"
TOKEN = re.compile(r"<\|(?:AUDIO|audio_pad)\|>")
"""Placeholder for the features of a sound in Qwen2-Audio, Qwen2.5-Omni and Qwen3-Omni."""
REFERENCE = re.compile(r"<audio>data:audio/|<audio>([^<>\n]{1,4096}+)</audio>")
SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".amr", ".wma")
"""A sound's placeholder in the text, as in Qwen-Audio and early ms-swift; in HTML it is an attribute."""
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|<audio>(?:(?!<audio>).)*?</audio>", re.DOTALL)
"""This looks at each character only a few times, however long the text is and whatever it contains."""
OTHER_MARKERS = re.compile("<(?:image|video)>")


def listed_in(item: dict[str, Any]) -> str | None:
    """The first field of a record, turn or content part that holds a sound."""
    return next((key for key in KEYS if not _is_empty(item.get(key))), None)


def _is_empty(value: Any) -> bool:
    """Exported tables fill columns and structures with empty values; a flag is not a sound."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return value is None or value == "" or isinstance(value, bool)


def placeholder_in(text: str, anywhere: bool) -> str | None:
    """Finds the placeholder of a sound in a user's text or a system prompt.

    Args:
        anywhere: treat ``<audio>`` within a sentence as a placeholder too.
    """
    if PLACEHOLDER not in text:
        return None
    for found in REFERENCE.finditer(text):
        if found[1] is None or found[1].strip().lower().endswith(SUFFIXES):
            return found[0]

    # Code is replaced by a word, so that the text around it still counts as one sentence.
    prose = CODE.sub("code", text)
    if anywhere and PLACEHOLDER in prose:
        return PLACEHOLDER

    for line in prose.splitlines():
        bare = OTHER_MARKERS.sub("", line).strip()
        if bare.startswith(PLACEHOLDER) or bare.endswith(PLACEHOLDER):
            return PLACEHOLDER
    return None
