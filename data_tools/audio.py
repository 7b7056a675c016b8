"""Where a record has audio, which no Qwen-VL model can hear.

A record with audio is of no use without it: the answer would be learnt as a guess, and a placeholder as text.
Sounds are listed beside the conversation or a turn (``audios`` of LLaMA-Factory and ms-swift, ``audio`` of
OpenAI's answers and of Hugging Face's data sets), are content parts (``input_audio`` of OpenAI, ``audio`` of
transformers' processors, ``audio_url`` of vLLM), or have a placeholder in the text.

``<audio>`` is also HTML. Where nothing is listed, it is taken for a placeholder where placeholders stand, at
the beginning or the end of a line; within a sentence ("How do I use the <audio> tag?"), as code (in
backticks) or as an element with ``</audio>``, it is text. Beside listed images or videos, whose markers may
stand anywhere, it is a placeholder anywhere but in code. Answers may be HTML and are never searched for it.
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
"""Stands for the features of a sound in Qwen2-Audio, Qwen2.5-Omni and Qwen3-Omni."""
REFERENCE = re.compile(r"<audio>data:audio/|<audio>([^<>\n]{1,4096}+)</audio>")
SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".amr", ".wma")
"""A sound's place in the text, as Qwen-Audio and early ms-swift have it; in HTML it is an attribute."""
CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|<audio>(?:(?!<audio>).)*?</audio>", re.DOTALL)
"""Each character is looked at a few times at most, however long the text and whatever is in it."""
OTHER_MARKERS = re.compile("<(?:image|video)>")


def listed_in(item: dict[str, Any]) -> str | None:
    """The first field of a record, turn or content part that holds a sound."""
    return next((key for key in KEYS if not _is_empty(item.get(key))), None)


def _is_empty(value: Any) -> bool:
    """Exported tables fill columns and structures with empty values; a flag is no sound."""
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return value is None or value == "" or isinstance(value, bool)


def placeholder_in(text: str, anywhere: bool) -> str | None:
    """What stands for a sound in a user's text or a system prompt.

    Args:
        anywhere: ``<audio>`` within a sentence stands for a sound too.
    """
    if PLACEHOLDER not in text:
        return None
    for found in REFERENCE.finditer(text):
        if found[1] is None or found[1].strip().lower().endswith(SUFFIXES):
            return found[0]

    # Code becomes a word, so that what stands before or after it is still within a sentence.
    prose = CODE.sub("code", text)
    if anywhere and PLACEHOLDER in prose:
        return PLACEHOLDER

    for line in prose.splitlines():
        bare = OTHER_MARKERS.sub("", line).strip()
        if bare.startswith(PLACEHOLDER) or bare.endswith(PLACEHOLDER):
            return PLACEHOLDER
    return None
