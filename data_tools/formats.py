"""ShareGPT and OpenAI conversations -> one form: HF messages and the media that they refer to, in the order of the text.

* ShareGPT: ``conversations`` with ``from`` (human/user, gpt/assistant, system) and ``value``; ``<image>`` and ``<video>`` in
  the text stand for the entries of ``image(s)`` and ``video(s)``, each a string or a list.
* OpenAI: ``messages`` with ``role`` and ``content``, a string or parts of type text, image, image_url, video, video_url.
  Text with ``<image>`` markers and ``image(s)`` next to ``messages`` is read as in ShareGPT.

Text stays as it is, white space too. Nothing is guessed: markers and media that do not agree refuse the record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MARKER = re.compile("(<image>|<video>)")
PLACEHOLDER = re.compile(r"<\|(?:image|video)_pad\|>")
KINDS = ("image", "video")


class RecordError(ValueError):
    """A record that cannot be used: ``reason`` is what it is counted under, the message says more."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason


@dataclass
class Conversation:
    """Messages with typed content; part ``{"type": "image"}`` number i belongs to ``media[i]``, videos too."""

    messages: list[dict[str, Any]]
    media: list[tuple[str, str]] = field(default_factory=list)
    """(kind, reference as written) in the order of the text."""


def read_conversation(record: Any) -> Conversation:
    """One record of either format. Raises :class:`RecordError`."""
    if not isinstance(record, dict):
        raise RecordError("not an object", f"the record is a {type(record).__name__}, not an object")
    turns, name = (
        (record["messages"], "messages") if record.get("messages") is not None else (record.get("conversations"), "conversations")
    )
    if turns is None:
        raise RecordError("no conversation", "neither 'messages' nor 'conversations' is there")
    if not isinstance(turns, list) or not turns:
        raise RecordError("no conversation", f"'{name}' is not a list with at least one turn")
    reader = _Reader(record, always_markers=name == "conversations")
    messages = [reader.message(turn, i) for i, turn in enumerate(turns, 1)]
    reader.finish()
    system = record.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(system, "'system'")})
    if not any(message["role"] == "assistant" for message in messages):
        raise RecordError("no assistant turn", "there is nothing to learn without an assistant turn")
    return Conversation(messages, reader.media)


class _Reader:
    """Reads turns and hands out the media listed beside them, in order, to markers and empty parts."""

    def __init__(self, record: dict[str, Any], always_markers: bool) -> None:
        self.waiting = {kind: [*_references(record, kind), *_references(record, kind + "s")] for kind in KINDS}
        self.listed = {kind: len(refs) for kind, refs in self.waiting.items()}
        self.markers = always_markers or any(self.listed.values())
        self.asked = dict.fromkeys(KINDS, 0)
        self.media: list[tuple[str, str]] = []

    def message(self, turn: Any, number: int) -> dict[str, Any]:
        if not isinstance(turn, dict):
            raise RecordError("bad turn", f"turn {number} is not an object")
        written = turn.get("role", turn.get("from"))
        role = ROLES.get(written) if isinstance(written, str) else None
        if role is None:
            raise RecordError("unknown role", f"turn {number} has the role {written!r}; valid: {', '.join(ROLES)}")
        content = turn.get("content", turn.get("value"))
        if isinstance(content, list):
            parts = [part for item in content for part in self.part(item, number)]
            return {"role": role, "content": parts}
        parts = self.text(_text(content, f"the content of turn {number}"))
        if all(part["type"] == "text" for part in parts):
            return {"role": role, "content": "".join(part["text"] for part in parts)}
        return {"role": role, "content": parts}

    def text(self, text: str) -> list[dict[str, Any]]:
        if not self.markers:
            return [{"type": "text", "text": text}]
        parts = (piece for piece in MARKER.split(text) if piece)
        return [self.next(piece[1:-1]) if MARKER.fullmatch(piece) else {"type": "text", "text": piece} for piece in parts]

    def part(self, item: Any, number: int) -> list[dict[str, Any]]:
        """A typed part: the reference is in the field of its type (``image``, ``image_url``, ...) or listed beside."""
        if isinstance(item, str):
            return self.text(_text(item, f"a part of turn {number}"))
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "text":
            return self.text(_text(item.get("text"), f"a text part of turn {number}"))
        if kind not in ("image", "image_url", "video", "video_url"):
            raise RecordError("unknown content part", f"turn {number} has a content part of type {kind!r}")
        name = kind.removesuffix("_url")
        value = next((item[key] for key in (kind, f"{name}_url", name, "url", "path") if item.get(key) is not None), None)
        if isinstance(value, dict):
            value = value.get("url")
        if value is None and self.listed[name]:
            return [self.next(name)]
        self.media.append((name, _reference(value, f"turn {number}")))
        return [{"type": name}]

    def next(self, kind: str) -> dict[str, Any]:
        """The next listed medium of a kind. One too many is noticed in :meth:`finish`, with both counts."""
        self.asked[kind] += 1
        if self.waiting[kind]:
            self.media.append((kind, self.waiting[kind].pop(0)))
        return {"type": kind}

    def finish(self) -> None:
        for kind in KINDS:
            if self.asked[kind] != self.listed[kind]:
                detail = f"{self.asked[kind]} <{kind}> in the text, but {self.listed[kind]} listed under '{kind}' / '{kind}s'"
                raise RecordError("markers and media differ", detail)


def _references(record: dict[str, Any], field_name: str) -> list[str]:
    value = record.get(field_name)
    if value is None or value == "":
        return []
    return [_reference(item, f"'{field_name}'") for item in (value if isinstance(value, list) else [value])]


def _reference(value: Any, where: str) -> str:
    if isinstance(value, dict):
        value = value.get("path", value.get("url"))
    if not isinstance(value, str) or not value:
        raise RecordError(
            "bad media reference", f"{where} refers to a medium by {type(value).__name__}; a path or data: URI is needed"
        )
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RecordError("bad text", f"{where} is a {type(value).__name__}, not a string")
    if PLACEHOLDER.search(value):
        raise RecordError("placeholder token in text", f"{where} holds a token that stands for image or video features")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError("bad text", f"{where} is no valid Unicode: {error.reason}") from error
    return value
