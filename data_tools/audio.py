"""Finds audio in records, because no Qwen-VL model can hear it.

A record with audio is useless without it: the model would learn to guess the answer, and a placeholder would
be trained on as text. Sounds are listed beside the conversation or a turn (``audios`` of LLaMA-Factory and
ms-swift, ``audio`` of OpenAI's answers and of Hugging Face's data sets), are content parts (``input_audio``
of OpenAI, ``audio`` of transformers' processors, ``audio_url`` of vLLM), or have a placeholder in the text.

``<audio>`` is also HTML. If no sound is listed, it counts as a placeholder only where placeholders stand, at
the beginning or the end of a line. It is text within a sentence ("How do I use the <audio> tag?"), where no
format of training data has one without a list of sounds; as code (in backticks); as an element with
``</audio>``; and beside other elements of HTML (``<source>``, ``<div>``). If images or videos are listed,
whose markers may stand anywhere, it counts as a placeholder anywhere except in code and HTML. ``<sound>`` and
``<speech>`` are read like it. Answers may be HTML and are never searched for it.
"""

from __future__ import annotations

import re
from typing import Any

AUDIO_KEYS = ("audios", "audio", "audio_url", "input_audio", "audio_path", "audio_paths", "audio_file")
"""Fields of records, turns and content parts that hold sounds."""
AMBIGUOUS_AUDIO_KEYS = ("sound", "sounds", "speech", "speeches")
"""Fields that hold sounds where their value is one; it may be a word or a speech in writing."""
CONTENT_KEYS = ("bytes", "path", "url", "array", "data", "id")
"""Fields of a structure that hold a sound. Other fields, such as a rate or a format, do not show that there
is one."""
AUDIO_PART_TYPES = ("audio", "audio_url", "input_audio")
"""Types of content parts that are sounds."""
AUDIO_TOKEN = re.compile(r"<\|audio(?:_pad|_\d{1,4})?\|>", re.IGNORECASE)
"""Placeholder for a sound or its features in Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni and Phi-4."""
AUDIO_PLACEHOLDER = re.compile("<(?:audio|sound|speech)>", re.IGNORECASE)
NUMBERED_PLACEHOLDER = re.compile(r"<audio_?\d{1,4}>", re.IGNORECASE)
"""This is not HTML: it is a placeholder anywhere except in code."""
INLINE_REFERENCE = re.compile(
    r"<audio>data:audio/|<(audio|sound|speech)>([^<>\n]{1,4096}+)</(?:audio|sound|speech)>", re.IGNORECASE
)
AUDIO_SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".amr", ".wma")
"""A sound's placeholder in the text, as in Qwen-Audio and early ms-swift; in HTML it is an attribute."""
CODE_SPAN = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`"
    r"|<(?:audio|sound|speech)>(?:(?!<(?:audio|sound|speech)>).)*?</(?:audio|sound|speech)>",
    re.DOTALL | re.IGNORECASE,
)
"""This looks at each character only a few times, however long the text is and whatever it contains."""
PAGE_ELEMENT = re.compile(
    r"</?(?:source|track|html|head|body|main|header|footer|nav|section|article|div|figure|figcaption|table|tr"
    r"|td|ul|ol|li|form|button|script|style)\b[^<>]{0,500}>|<!(?:doctype|--)[^<>]{0,500}>",
    re.IGNORECASE,
)
"""Elements of pages. Those that also format plain text (``<br>``, ``<p>``, ``<b>``) prove nothing."""
OTHER_MARKERS = re.compile("<(?:image|video)>")


def find_audio_field(json_object: dict[str, Any]) -> str | None:
    """The first field of a record, turn or content part that holds a sound."""
    for key in AUDIO_KEYS:
        value = json_object.get(key)
        # Some tables count sounds: 0 is none. In a list, it is silence.
        if not _is_empty_value(value) and value != 0:
            return key
    return next((key for key in AMBIGUOUS_AUDIO_KEYS if _holds_audio(json_object.get(key))), None)


def _is_empty_value(field_value: Any) -> bool:
    """Exported tables fill columns and structures with empty values; a flag is not a sound."""
    if isinstance(field_value, dict):
        content_values = [field_value[key] for key in CONTENT_KEYS if key in field_value]
        return all(map(_is_empty_value, content_values or field_value.values()))
    if isinstance(field_value, list):
        return all(map(_is_empty_value, field_value))
    return field_value is None or field_value == "" or isinstance(field_value, bool)


def _holds_audio(field_value: Any) -> bool:
    """Whether a value is a sound's file, address or content, and not a word."""
    if isinstance(field_value, dict):
        return any(key in field_value for key in CONTENT_KEYS) and not _is_empty_value(field_value)
    if isinstance(field_value, list):
        return any(map(_holds_audio, field_value))
    return isinstance(field_value, str) and _is_audio_reference(field_value)


def _is_audio_reference(reference_text: str) -> bool:
    if reference_text[:11].lower() == "data:audio/":
        return True
    return reference_text.partition("?")[0].strip().lower().endswith(AUDIO_SUFFIXES)


def find_audio_placeholder(text: str, match_anywhere: bool) -> str | None:
    """Finds the placeholder of a sound in a user's text or a system prompt.

    Args:
        match_anywhere: treat ``<audio>`` within a sentence as a placeholder too.
    """
    if not AUDIO_PLACEHOLDER.search(text) and not NUMBERED_PLACEHOLDER.search(text):
        return None
    for placeholder_match in INLINE_REFERENCE.finditer(text):
        if placeholder_match[2] is None or _is_audio_reference(placeholder_match[2]):
            return placeholder_match[0]

    # Code is replaced by a word, so that the text around it still counts as one sentence.
    prose = CODE_SPAN.sub("code", text)
    if PAGE_ELEMENT.search(prose):
        prose = AUDIO_PLACEHOLDER.sub("code", prose)
    unambiguous_match = NUMBERED_PLACEHOLDER.search(prose) or (
        AUDIO_PLACEHOLDER.search(prose) if match_anywhere else None
    )
    if unambiguous_match is not None:
        return unambiguous_match[0]

    for line in prose.splitlines():
        stripped_line = OTHER_MARKERS.sub("", line).strip()
        for placeholder_match in AUDIO_PLACEHOLDER.finditer(stripped_line):
            if placeholder_match.start() == 0 or placeholder_match.end() == len(stripped_line):
                return placeholder_match[0]
    return None
