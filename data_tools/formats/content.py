"""Reads turns and content, and assigns the media listed beside them, in order, to markers and empty parts."""

from __future__ import annotations

import re
from typing import Any

from .. import audio
from . import tools
from .canonical import (
    Message,
    RecordError,
    audio_error,
    joined,
    refuse_audio_in,
    refuse_listed_audio,
    shown,
    text,
)
from .frames import Frames, may_be_folder, read_rate
from .weights import TURN_KEYS, turn_weight

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function": "tool",
    "function_call": "call",
    "tool_call": "call",
}
"""What each spelling of a role stands for; ``call`` is an assistant's turn whose text is a call."""
MARKER = re.compile("(<image>|<video>)")
KINDS = ("image", "video")
PARTS = ("text", "image", "image_url", "video", "video_url", "reasoning", "thinking", "tool_call")
REASONING = ("reasoning_content", "reasoning", "thinking")
STRUCTURE = {
    "assistant": ("tool_calls", "function_call", "tool_call_id", "name", *REASONING, *TURN_KEYS),
    "call": ("tool_call_id", "name", *REASONING, *TURN_KEYS),
    "tool": ("tool_call_id", "name", *TURN_KEYS),
}
"""Keys of a turn, by its role, that are read, or only connect turns with each other."""
EMPTY: tuple[Any, ...] = (None, "", [], {})
LONGEST_KEY = 60
"""Characters of an ignored key that are shown; keys come from untrusted input."""


class Reader:
    """Reads the turns of one record.

    Args:
        record: the record. place: the field that holds the turns. read: fields of the record that have an
            effect. strip: remove white space around the user's texts, as Qwen's fine-tuning code does.
        base: folder of the record's media.
    """

    def __init__(
        self,
        record: dict[str, Any],
        place: str,
        read: tuple[str, ...],
        *,
        strip: bool = False,
        base: str = "",
    ) -> None:
        self.place = place
        self.strip = strip
        self.base = base
        self.ignored: list[tuple[str, str]] = []
        self.rates: set[str] = set()
        """Keys of the record that say how many pictures of a video there are a second."""
        self.waiting = {
            kind: [*self.references(record, kind), *self.references(record, kind + "s")] for kind in KINDS
        }
        of_media = self.ignored
        self.ignored = []
        self.ignore("records", record, *read, *self.rates)
        self.ignored += of_media
        self.listed = {kind: len(refs) for kind, refs in self.waiting.items()}
        if record.get("markers") not in (*EMPTY, "text"):
            detail = f"{shown(record['markers'])} is unknown; valid: 'text', if the markers are text"
            raise RecordError("bad markers", detail, "markers")
        self.markers_are_text = record.get("markers") == "text"
        self.unlisted: list[str] = []
        """Markers in the texts of a record that lists no media."""
        self.asked = dict.fromkeys(KINDS, 0)
        self.media: list[tuple[str, Any]] = []
        self.fields: list[str] = []

    def ignore(self, location: str, item: dict[str, Any], *read: str | None) -> None:
        """Notes the keys of an object except those that are ``read`` and those with the empty values that
        exported tables use for absent keys."""
        self.ignored += unread(location, item, *read)

    def references(self, record: dict[str, Any], field_name: str) -> list[tuple[Any, str]]:
        """Returns (reference, field) of each medium listed in a field; notes keys that have
        no effect there."""
        value = record.get(field_name)
        if value is None or value == "":
            return []
        listed = [(value, field_name)]
        if isinstance(value, list):
            listed = [(item, f"{field_name}[{i}]") for i, item in enumerate(value)]
        found = []

        for item, where in listed:
            if isinstance(item, dict):
                medium, rate = self.medium(field_name.removesuffix("s"), item, where, item, f"{where}.")
                self.ignore("listed media", item, "path", "url", "bytes", rate)
            else:
                medium, rate = self.medium(field_name.removesuffix("s"), item, where, record, "")
                self.rates |= {rate} if rate else set()
            found.append((medium, where))

        return found

    def medium(
        self, kind: str, item: Any, where: str, beside: dict[str, Any], prefix: str
    ) -> tuple[Any, str | None]:
        """The reference of a medium, and the key that says how many pictures it has a second.

        Args:
            where: its field. beside: the object that may have such a key. prefix: of the object's keys.
        """
        if kind == "video" and isinstance(item, list):
            if not item:
                raise RecordError("bad media reference", "a video of no frames", where)
            pictures: Any = tuple(self.located(each, f"{where}[{i}]") for i, each in enumerate(item))
            rate = read_rate(beside, prefix, listed=True)
            return Frames(pictures, rate[1] if rate else None), rate[0] if rate else None

        found = self.located(item, where)
        if kind == "video" and may_be_folder(found):
            rate = read_rate(beside, prefix, listed=False)
            if rate:
                return Frames(found, rate[1]), rate[0]
        return found, None

    def located(self, item: Any, where: str) -> Any:
        """The reference of a medium, in the record's folder."""
        found = reference(item, where)
        if not self.base or not isinstance(found, str) or "://" in found or found[:5].lower() == "data:":
            return found
        return f"{self.base.rstrip('/')}/{found}" if not found.startswith("/") else found

    def turns(self, turns: Any) -> list[Message]:
        """Reads a list of turns; calls that are turns of their own join the answer in front of them."""
        messages: list[Message] = []
        for i, turn in enumerate(turns):
            message = self.message(turn, i)
            if message.pop("call", False) and tools.merge_calls(messages, message):
                continue
            messages.append(message)
        return messages

    def message(self, turn: Any, index: int) -> Message:
        where = f"{self.place}[{index}]"
        if not isinstance(turn, dict):
            raise RecordError(
                "bad turn", f"turn {index + 1} is a {type(turn).__name__}, not an object", where
            )

        role_field = "role" if "role" in turn else "from"
        content_field = "content" if "content" in turn else "value"
        refuse_listed_audio(turn, f"{where}.")
        written = turn.get(role_field)
        role = ROLES.get(written) if isinstance(written, str) else None
        if role is None:
            detail = f"turn {index + 1} has the unknown role {shown(written)}; valid: {', '.join(ROLES)}"
            raise RecordError("unknown role", detail, f"{where}.{role_field}")

        read = STRUCTURE.get(role, TURN_KEYS)
        self.ignore("turns", turn, role_field, content_field, *read)
        message: Message = {"role": "assistant" if role == "call" else role, "content": ""}
        content = turn.get(content_field)
        if role == "call":
            tools.refuse_second_calls(turn, content_field, ("tool_calls", "function_call"), f"{where}.")
            said, calls = tools.calls_in_text(text(content, f"{where}.{content_field}"), where)
            message |= {"content": said, "tool_calls": calls, "call": True}
        else:
            calls = tools.read_calls(turn, f"{where}.") if role == "assistant" else []
            if content is None and calls:
                content = ""
            self.fill(message, content, f"{where}.{content_field}")
            if calls:
                message["tool_calls"] = [*message.get("tool_calls", []), *calls]
        if role in ("assistant", "call"):
            self.add_reasoning(message, turn, where)
        if role == "call" and message["content"] and "reasoning_content" in message:
            detail = f"the turn has reasoning in its {content_field!r} and beside it"
            raise RecordError("two reasonings", detail, where)
        turn_weight(turn, message, f"{where}.")
        return message

    def fill(self, message: Message, content: Any, where: str) -> None:
        """Reads the content of a turn into its message."""
        if message["role"] != "assistant":
            self.check_audio(content, where)
        if not isinstance(content, list):
            said = text(content, where)
            message["content"] = joined(self.text(said, strip=self.strip and message["role"] == "user"))
            return

        parts: list[dict[str, Any]] = []
        for i, item in enumerate(content):
            for part in self.part(item, f"{where}[{i}]"):
                kind = part["type"]
                if kind in ("text", *KINDS):
                    parts.append(part)
                elif message["role"] != "assistant":
                    detail = f"a content part of type {kind!r} in the {message['role']}'s turn"
                    raise RecordError("unknown content part", detail, f"{where}[{i}]")
                elif kind == "reasoning":
                    message["reasoning_content"] = message.get("reasoning_content", "") + part["text"]
                else:
                    message.setdefault("tool_calls", []).append(part["call"])
        message["content"] = joined(parts)

    def add_reasoning(self, message: Message, turn: dict[str, Any], where: str) -> None:
        """Reads the reasoning that stands beside an answer."""
        for key in REASONING:
            if turn.get(key) in EMPTY:
                continue
            said = text(turn[key], f"{where}.{key}")
            if message.get("reasoning_content", said) != said:
                raise RecordError(
                    "two reasonings", "the turn holds two different reasonings", f"{where}.{key}"
                )
            message["reasoning_content"] = said

    def check_audio(self, content: Any, where: str) -> None:
        """Refuses a turn whose text has a placeholder for a sound."""
        texts = [(content, where)]
        if isinstance(content, list):
            texts = [(item, f"{where}[{i}]") for i, item in enumerate(content)]

        for item, location in texts:
            if isinstance(item, dict):
                key = "text" if item.get("text") is not None else "value"
                item = item.get(key)
                location = f"{location}.{key}"
            if isinstance(item, str):
                refuse_audio_in(item, location, anywhere=any(self.listed.values()))

    def text(self, written: str, strip: bool = False) -> list[dict[str, Any]]:
        """The parts of a text with markers; ``strip`` removes white space around each text."""
        if self.markers_are_text or not any(self.listed.values()):
            self.unlisted += MARKER.findall(written)
            return [{"type": "text", "text": written.strip() if strip else written}]
        pieces = MARKER.split(written)
        if strip:
            pieces = [piece.strip() for piece in pieces]
        return [
            self.next(piece[1:-1]) if MARKER.fullmatch(piece) else {"type": "text", "text": piece}
            for piece in pieces
            if piece
        ]

    def part(self, item: Any, where: str) -> list[dict[str, Any]]:
        """Reads a typed part: its reference is in the field of its type (``image``, ``image_url``, ...), in
        ``value`` (LLaMA-Factory v1), or listed separately. A part without a type has one of the keys
        ``text``, ``image`` and ``video``, as Qwen's API writes it."""
        if isinstance(item, str):
            return self.text(text(item, where))

        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, dict) and kind is None:
            present = [key for key in ("text", *KINDS) if item.get(key) not in EMPTY]
            kind = present[0] if len(present) == 1 else None
        if kind in audio.PARTS:
            raise audio_error(f"a content part of type {kind!r}", where)
        if isinstance(item, dict):
            refuse_listed_audio(item, f"{where}.")
        if kind not in PARTS:
            detail = f"a content part of type {shown(kind)}; valid: {', '.join(PARTS)}"
            raise RecordError("unknown content part", detail, where)

        if kind in ("text", "reasoning", "thinking", "tool_call"):
            return self.text_part(item, kind, where)
        return self.media_part(item, kind, where)

    def text_part(self, item: dict[str, Any], kind: str, where: str) -> list[dict[str, Any]]:
        key = next((key for key in (kind, "text", "value") if item.get(key) is not None), "text")
        self.ignore("content parts", item, "type", key)
        value = item.get(key)
        if kind == "tool_call":
            return [{"type": "tool_call", "call": tools.read_call(value, f"{where}.{key}")}]
        said = text(value, f"{where}.{key}")
        return self.text(said) if kind == "text" else [{"type": "reasoning", "text": said}]

    def media_part(self, item: dict[str, Any], kind: str, where: str) -> list[dict[str, Any]]:
        name = kind.removesuffix("_url")
        other = "video" if name == "image" else "image"
        if also := next((key for key in (other, f"{other}_url") if item.get(key) not in EMPTY), None):
            detail = f"a content part of type {kind!r} that also has {also!r}; write two parts"
            raise RecordError("two media in a part", detail, f"{where}.{also}")

        spellings = (kind, f"{name}_url", name, "url", "path", "value")
        key = next((key for key in spellings if item.get(key) is not None), None)
        value = item[key] if key else None
        of_value: list[tuple[str, str]] = []
        if isinstance(value, dict) and "bytes" not in value:
            of_value = unread("content parts", value, "url")
            value = value.get("url")
        if value is None and self.listed[name]:
            self.ignored += [*unread("content parts", item, "type", key), *of_value]
            return [self.next(name)]

        place = f"{where}.{key or name}"
        medium, rate = self.medium(name, value, place, item, f"{where}.")
        self.ignored += [*unread("content parts", item, "type", key, rate), *of_value]
        self.media.append((name, medium))
        self.fields.append(place)
        return [{"type": name}]

    def next(self, kind: str) -> dict[str, Any]:
        """Returns the next listed medium of a kind; :meth:`finish` reports a missing one,
        with both counts."""
        self.asked[kind] += 1
        if self.waiting[kind]:
            found, where = self.waiting[kind].pop(0)
            self.media.append((kind, found))
            self.fields.append(where)
        return {"type": kind}

    def finish(self) -> None:
        """Refuses markers without media, and media without markers.

        In a record whose media are content parts, or which says so, markers are text.
        """
        if not self.media and not self.markers_are_text:
            for marker in self.unlisted:
                self.asked[marker[1:-1]] += 1

        for kind in KINDS:
            if self.asked[kind] != self.listed[kind]:
                detail = (
                    f"{self.asked[kind]} <{kind}> in the text, but {self.listed[kind]} listed under "
                    f"'{kind}' / '{kind}s'"
                )
                if kind == "video" and 1 <= self.asked[kind] < self.listed[kind]:
                    detail += "; to give one video as pictures, write a list of them in the place of its file"
                unread_fields = [key for where, key in self.ignored if where == "records"]
                if self.unlisted and unread_fields:
                    detail += f"; nothing is read from {shown(', '.join(unread_fields))}"
                if self.unlisted:
                    detail += "; if the text is about the marker itself, give the record 'markers': 'text'"
                raise RecordError("markers and media differ", detail, self.place)


def unread(location: str, item: dict[str, Any], *read: str | None) -> list[tuple[str, str]]:
    """(location, key) of each key of an object that has a value and is not ``read``."""
    return [
        (location, key[:LONGEST_KEY]) for key, value in item.items() if key not in read and value not in EMPTY
    ]


def reference(value: Any, where: str) -> Any:
    """A medium's path, address or bytes. In a structure of both, as tables have it, bytes come first."""
    if isinstance(value, dict):
        data = value.get("bytes")
        value = data if isinstance(data, bytes) and data else value.get("path", value.get("url"))
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value:
        found = "an empty string" if value == "" else f"a {type(value).__name__}"
        detail = f"a path, a data: URI or bytes are required, but this is {found}"
        raise RecordError("bad media reference", detail, where)
    return value
