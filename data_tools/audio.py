"""Finds audio in records, because no Qwen-VL model can hear it.

A record with audio is useless without it: the model would learn to guess the answer, and a placeholder would
be learnt as text. Sounds are listed beside the conversation or a turn (``audios`` of LLaMA-Factory and
ms-swift, ``audio`` of OpenAI's answers and of Hugging Face's data sets), are content parts (``input_audio``
of OpenAI, ``audio`` of transformers' processors, ``audio_url`` of vLLM), or have a placeholder in the text.

``<audio>`` is also HTML. If no sound is listed, it counts as a placeholder only where placeholders stand, at
the beginning or the end of a line. It is text within a sentence ("How do I use the <audio> tag?"), where no
format of training data has one without a list of sounds; as code (in backticks); as an element with
``</audio>``; and next to other elements of HTML (``<source>``, ``<div>``). If images or videos are listed,
whose markers may stand anywhere, it counts as a placeholder anywhere except in code. ``<sound>`` and
``<speech>`` are read like it. Answers may be HTML and are never searched for it.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

KEYS = ("audios", "audio", "audio_url", "input_audio", "audio_path", "audio_paths", "audio_file")
"""Fields of records, turns and content parts that hold sounds."""
WORDS = ("sound", "sounds", "speech", "speeches")
"""Fields that hold sounds where their value is one; it may be a word or a speech in writing."""
HOLDING = ("bytes", "path", "url", "array", "data", "id")
"""Fields of a structure that hold a sound; beside them, a rate and a format say nothing of one."""
PARTS = ("audio", "audio_url", "input_audio")
"""Types of content parts that are sounds."""
TOKEN = re.compile(r"<\|audio(?:_pad|_\d{1,4})?\|>", re.IGNORECASE)
"""Placeholder for a sound or its features in Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni and Phi-4."""
PLACEHOLDER = re.compile("<(?:audio|sound|speech)>", re.IGNORECASE)
NUMBERED = re.compile(r"<audio_?\d{1,4}>", re.IGNORECASE)
"""This is not HTML: it is a placeholder anywhere except in code."""
REFERENCE = re.compile(
    r"<audio>data:audio/|<(audio|sound|speech)>([^<>\n]{1,4096}+)</(?:audio|sound|speech)>", re.IGNORECASE
)
SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".amr", ".wma")
"""A sound's placeholder in the text, as in Qwen-Audio and early ms-swift; in HTML it is an attribute."""
CODE = re.compile(
    r"```.*?(?:```|\Z)|`[^`\n]*`"
    r"|<(?:audio|sound|speech)>(?:(?!<(?:audio|sound|speech)>).)*?</(?:audio|sound|speech)>",
    re.DOTALL | re.IGNORECASE,
)
"""This looks at each character only a few times, however long the text is and whatever it contains."""
TAG = re.compile(
    r"</?(?:source|track|html|head|body|main|header|footer|nav|section|article|div|figure|figcaption|table|tr"
    r"|td|ul|ol|li|form|button|script|style)\b[^<>]{0,500}>|<!(?:doctype|--)[^<>]{0,500}>",
    re.IGNORECASE,
)
"""Elements of pages. Those that also format plain text (``<br>``, ``<p>``, ``<b>``) prove nothing."""
OTHER_MARKERS = re.compile("<(?:image|video)>")


def listed_in(item: dict[str, Any]) -> str | None:
    """The first field of a record, turn or content part that holds a sound."""
    for key in KEYS:
        value = item.get(key)
        # Some tables count sounds: 0 is none. In a list, it is silence.
        if not _is_empty(value) and value != 0:
            return key
    return next((key for key in WORDS if _is_sound(item.get(key))), None)


def _is_empty(value: Any) -> bool:
    """Exported tables fill columns and structures with empty values; a flag is not a sound."""
    if isinstance(value, dict):
        held = [value[key] for key in HOLDING if key in value]
        return all(map(_is_empty, held or value.values()))
    if isinstance(value, list):
        return all(map(_is_empty, value))
    return value is None or value == "" or isinstance(value, bool)


def _is_sound(value: Any) -> bool:
    """Whether a value is a sound's file, address or content, and not a word."""
    if isinstance(value, dict):
        return any(key in value for key in HOLDING) and not _is_empty(value)
    if isinstance(value, list):
        return any(map(_is_sound, value))
    return isinstance(value, str) and _names_a_sound(value)


def _names_a_sound(text: str) -> bool:
    if text[:11].lower() == "data:audio/":
        return True
    return text.partition("?")[0].strip().lower().endswith(SUFFIXES)


def placeholder_in(text: str, anywhere: bool) -> str | None:
    """Finds the placeholder of a sound in a user's text or a system prompt.

    Args:
        anywhere: treat ``<audio>`` within a sentence as a placeholder too.
    """
    if not PLACEHOLDER.search(text) and not NUMBERED.search(text):
        return None
    for found in REFERENCE.finditer(text):
        if found[2] is None or _names_a_sound(found[2]):
            return found[0]

    # Code is replaced by a word, so that the text around it still counts as one sentence.
    prose = _without_html(CODE.sub("code", text))
    named = NUMBERED.search(prose) or (PLACEHOLDER.search(prose) if anywhere else None)
    if named is not None:
        return named[0]

    for line in prose.splitlines():
        bare = OTHER_MARKERS.sub("", line).strip()
        for found in PLACEHOLDER.finditer(bare):
            if found.start() == 0 or found.end() == len(bare):
                return found[0]
    return None


def _without_html(text: str) -> str:
    """Placeholders with nothing but white space between them and an element of a page become words."""
    found = sorted([*TAG.finditer(text), *PLACEHOLDER.finditer(text)], key=lambda piece: piece.start())
    is_tag = [TAG.fullmatch(piece[0]) is not None for piece in found]

    html = set()
    for i, (one, other) in enumerate(itertools.pairwise(found)):
        touching = not text[one.end() : other.start()].strip()
        if touching and is_tag[i] != is_tag[i + 1]:
            html.add(other.start() if is_tag[i] else one.start())

    return PLACEHOLDER.sub(lambda piece: "code" if piece.start() in html else piece[0], text)
