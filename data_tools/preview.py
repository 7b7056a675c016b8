"""Says what a conversion would understand of the first records of each file, without writing anything."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .convert import ConversionOptions, check_inputs, inspect_all
from .formats import Conversation, RecordError, read_conversation
from .formats.canonical import text_of
from .inputs import Source
from .media import MediaInfo
from .records import BadLine, read_records
from .resume import names

RECORDS = 200
"""Records of each file that are looked at."""
PATCH = 28
"""Side in pixels of what becomes one token in Qwen2-VL and Qwen2.5-VL (32 in later families)."""
MOST_TOKENS_A_MEDIUM = 16384
EXAMPLES = 3


@dataclass
class Preview:
    """What was understood of a file's first records."""

    file: str
    records: int = 0
    samples: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)
    media: Counter[str] = field(default_factory=Counter)
    features: Counter[str] = field(default_factory=Counter)
    """Samples with tools, calls, reasoning, loss weights."""
    tokens: int = 0
    """Estimate: a token for four characters of ASCII or one of other scripts, and for each 28 x 28 pixels."""
    ignored: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    """Record, field, reason and detail of the first records of each reason that cannot be used."""
    first: list[str] = field(default_factory=list)
    """The turns of the first sample, shortened."""
    notes: list[str] = field(default_factory=list)
    """What is probably wrong with the arguments."""

    def as_json(self) -> dict[str, Any]:
        return dict(self.__dict__)


def preview(inputs: list[Any], options: ConversionOptions) -> list[Preview]:
    """Looks at the first records of each file. Media are decoded as in a conversion.

    Raises:
        ConvertError, ReadError: an argument or a file cannot be used.
    """
    sources = check_inputs(inputs, options)
    shown = names([source.path for source in sources])
    return [_look(name, source, options) for name, source in zip(shown, sources, strict=True)]


def _look(name: str, source: Source, options: ConversionOptions) -> Preview:
    found = Preview(name)
    root = options.root
    seen: Counter[str] = Counter()

    for number, record in itertools.islice(read_records(source.path), RECORDS):
        found.records += 1
        if isinstance(record, dict):
            seen.update(map(str, record))

        try:
            if isinstance(record, BadLine):
                raise RecordError(record.reason, str(record))
            conversation = read_conversation(source.renamed(record), options.format or source.format)
            infos = inspect_all(conversation.media, conversation.fields, root, options.max_pixels)
        except RecordError as error:
            found.refused[error.reason] += 1
            if found.refused[error.reason] <= EXAMPLES:
                place = f", field {error.field}" if error.field else ""
                found.examples.append(f"record {number}{place}: {error.reason}: {error}")
        else:
            _count(found, conversation, infos)

    found.notes = _notes(found, source, seen, root)
    return found


def _notes(found: Preview, source: Source, seen: Counter[str], root: Path | None) -> list[str]:
    """What is probably wrong with the arguments.

    Args:
        seen: the fields of the records.
    """
    notes = []
    absent = [name for name in source.columns if found.records and not seen[name]]
    if absent:
        have = ", ".join(sorted(seen)) or "no fields"
        notes.append(f"columns of the index name {', '.join(absent)}, which no record has; they have {have}")
    if found.refused["medium missing"]:
        notes.append(f"media were looked for in {root} (--media-root)")
    return notes


def _count(found: Preview, conversation: Conversation, infos: list[MediaInfo]) -> None:
    found.samples += 1
    found.formats[conversation.format] += 1
    found.media.update(info.kind for info in infos)
    found.ignored.update(f"{key} ({where})" for where, key in conversation.ignored)
    found.tokens += sum(map(_media_tokens, infos))
    has = {
        "tools": bool(conversation.tools),
        "tool calls": any(m.get("tool_calls") for m in conversation.messages),
        "reasoning": any(
            m.get("reasoning_content") or "<think>" in text_of(m) for m in conversation.messages
        ),
        "loss weights": conversation.weighted,
    }
    found.features.update(name for name, there in has.items() if there)

    for message in conversation.messages:
        found.roles[message["role"]] += 1
        text = text_of(message)
        plain = sum(character.isascii() for character in text)
        found.tokens += plain // 4 + len(text) - plain + 5

    if found.samples == 1:
        found.first = [_shown(message) for message in conversation.messages]


def _media_tokens(info: MediaInfo) -> int:
    tokens = max(1, info.height * info.width // PATCH**2)
    if info.kind == "video":
        tokens *= max(1, round(info.frames / max(info.fps, 1e-6)))  # two frames a second, two in a token
    return min(tokens, MOST_TOKENS_A_MEDIUM)


def _shown(message: dict[str, Any]) -> str:
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "".join(part.get("text", f"<{part['type']}>") for part in parts)
    text = " ".join(text.split())
    notes = [f"weight {message['loss_weight']:g}"] if "loss_weight" in message else []
    notes += [f"calls {call['function']['name']}" for call in message.get("tool_calls", [])]
    notes += ["with reasoning"] if message.get("reasoning_content") else []
    role = f"{message['role']} ({', '.join(notes)})" if notes else message["role"]
    return f"{role}: {text if len(text) <= 90 else text[:87] + '...'}"
