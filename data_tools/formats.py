"""Converts ShareGPT and OpenAI conversations into HF messages, with their media in the order of the text.

* ShareGPT: ``conversations`` with ``from`` (human/user, gpt/assistant, system) and ``value``; ``<image>`` and
  ``<video>`` in the text stand for the entries of ``image(s)`` and ``video(s)``, each a string or a list.
* OpenAI: ``messages`` with ``role`` and ``content``, a string or parts of type text, image, image_url, video,
  video_url. Text with ``<image>`` markers and ``image(s)`` next to ``messages`` is read as in ShareGPT.

Text stays as it is, including white space. Nothing is guessed. A record is refused if its markers and media
disagree, if its roles (in ``messages`` and ``conversations`` alike) do not follow the order (system,) user,
assistant, user, assistant, ..., or if an answer has no text. The last turn may be a user's. Keys that nothing
reads are listed in :attr:`Conversation.ignored`. Records with audio are refused (:mod:`data_tools.audio` says
what counts as audio).
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from typing import Any

from megatron_vl.errors import UserError

from . import audio

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
MARKER = re.compile("(<image>|<video>)")
PLACEHOLDER = re.compile(r"<\|(?:image|video)_pad\|>")
KINDS = ("image", "video")
PARTS = ("text", "image", "image_url", "video", "video_url")
RECORD_KEYS = ("messages", "conversations", "system", "image", "images", "video", "videos", "id")
EMPTY: tuple[Any, ...] = (None, "", [], {})
LONGEST_KEY = 60
"""Characters of an ignored key that are shown; keys come from untrusted input."""


class RecordError(UserError, ValueError):
    """An unusable record. ``reason`` is the heading under which it is counted, ``field`` its location in the
    record, and the message gives details."""

    def __init__(self, reason: str, detail: str = "", field: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.field = field


@dataclass
class Conversation:
    """Messages with typed content; the i-th image or video part belongs to ``media[i]``."""

    messages: list[dict[str, Any]]
    media: list[tuple[str, str]] = field(default_factory=list)
    """(kind, reference as written) in the order of the text."""
    fields: list[str] = field(default_factory=list)
    """The location in the record that names each medium."""
    identity: str = ""
    """The record's ``id`` (``str: x`` or ``int: 5``); empty if it has none."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """(location, key) of each key that has a value and no effect; the location is ``records``, ``turns``,
    ``content parts`` or ``listed media``."""

    @property
    def answer_media(self) -> int:
        """Number of images and videos in the assistant's turns; the model sees them but learns
        nothing from them."""
        answers = [
            m["content"] for m in self.messages if m["role"] == "assistant" and isinstance(m["content"], list)
        ]
        return sum(part["type"] != "text" for parts in answers for part in parts)


def read_prompt(record: Any) -> Conversation:
    """Reads what is said before the requested answer: a record without a last turn that is the assistant's.

    Raises:
        RecordError: like :func:`read_conversation`, but the record need not contain anything to learn.
    """
    conversation = read_conversation(record, prompt=True)
    last = conversation.messages[-1]
    if last["role"] == "assistant":
        conversation.messages.pop()
        dropped = (
            sum(part["type"] != "text" for part in last["content"])
            if isinstance(last["content"], list)
            else 0
        )
        keep = len(conversation.media) - dropped
        conversation.media = conversation.media[:keep]
        conversation.fields = conversation.fields[:keep]
    if not conversation.messages or conversation.messages[-1]["role"] != "user":
        raise RecordError("no user turn", "a prompt must end with a user's turn")
    return conversation


def read_conversation(record: Any, *, prompt: bool = False) -> Conversation:
    """Reads a record of either format; a ``prompt`` needs no assistant turn. Raises :class:`RecordError`."""
    if not isinstance(record, dict):
        raise RecordError("not an object", f"the record is a {type(record).__name__}, not an object")

    _refuse_listed_audio(record, "")
    name = "messages" if record.get("messages") is not None else "conversations"
    turns = record.get(name)
    if turns is None:
        raise RecordError("no conversation", "the record has neither 'messages' nor 'conversations'")
    if name == "messages" and record.get("conversations"):
        detail = (
            "the record has both 'messages' and 'conversations', but only one can be learnt; leave out one"
        )
        raise RecordError("two conversations", detail, "conversations")

    if not isinstance(turns, list) or not turns:
        raise RecordError("no conversation", f"'{name}' is not a list with at least one turn", name)

    reader = _Reader(record, name)
    messages = [reader.message(turn, i) for i, turn in enumerate(turns)]
    reader.finish()
    if not prompt:
        _check_answers(messages, name)
    _add_system(record, messages, name)
    _check_order(messages, name, prompt)
    return Conversation(messages, reader.media, reader.fields, _identity(record.get("id")), reader.ignored)


def _identity(value: Any) -> str:
    return f"{type(value).__name__}: {value}" if isinstance(value, (str, int)) and value != "" else ""


def _add_system(record: dict[str, Any], messages: list[dict[str, Any]], name: str) -> None:
    """Puts a record's ``system`` prompt first."""
    if record.get("system") in (None, ""):
        return
    system = _text(record["system"], "system")
    _refuse_audio_in(system, "system", anywhere=False)
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif messages[0]["content"] != system:
        raise RecordError("two system prompts", f"'system' and {name}[0] differ", "system")


def _check_order(messages: list[dict[str, Any]], name: str, prompt: bool) -> None:
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if not prompt and not any(message["role"] == "assistant" for message in turns):
        raise RecordError("no assistant turn", "without an assistant turn there is nothing to learn", name)
    for i, (message, wanted) in enumerate(
        zip(turns, itertools.cycle(("user", "assistant")), strict=False), 1
    ):
        if message["role"] != wanted:
            found = f"turn {i} (not counting a system prompt) is the {message['role']}'s"
            detail = f"{found}, but must be the {wanted}'s"
            raise RecordError("wrong role order", detail, name)


def _check_answers(messages: list[dict[str, Any]], name: str) -> None:
    """From an answer without text, a model would only learn to end the turn at once."""
    for i, message in enumerate(messages):
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        if message["role"] == "assistant" and not any(text.strip() for text in texts):
            raise RecordError(
                "empty answer", f"the assistant's turn {i + 1} holds no text to learn", f"{name}[{i}]"
            )


class _Reader:
    """Reads turns and assigns the media listed beside them, in order, to markers and empty parts."""

    def __init__(self, record: dict[str, Any], name: str) -> None:
        self.name = name
        self.ignored: list[tuple[str, str]] = []
        self.ignore("records", record, *RECORD_KEYS)
        self.waiting = {
            kind: [*self.references(record, kind), *self.references(record, kind + "s")] for kind in KINDS
        }
        self.listed = {kind: len(refs) for kind, refs in self.waiting.items()}
        self.markers = name == "conversations" or any(self.listed.values())
        self.asked = dict.fromkeys(KINDS, 0)
        self.media: list[tuple[str, str]] = []
        self.fields: list[str] = []

    def ignore(self, location: str, item: dict[str, Any], *read: str | None) -> None:
        """Notes the keys of an object except those that are ``read`` and those with the empty values that
        exported tables use for absent keys."""
        self.ignored += [
            (location, key[:LONGEST_KEY])
            for key, value in item.items()
            if key not in read and value not in EMPTY
        ]

    def references(self, record: dict[str, Any], field_name: str) -> list[tuple[str, str]]:
        """Returns (reference, field) of each medium listed in a field; notes keys that have
        no effect there."""
        value = record.get(field_name)
        if value is None or value == "":
            return []
        listed = [(value, field_name)]
        if isinstance(value, list):
            listed = [(item, f"{field_name}[{i}]") for i, item in enumerate(value)]
        for item, _ in listed:
            if isinstance(item, dict):
                self.ignore("listed media", item, "path", "url")
        return [(_reference(item, where), where) for item, where in listed]

    def message(self, turn: Any, index: int) -> dict[str, Any]:
        where = f"{self.name}[{index}]"
        if not isinstance(turn, dict):
            raise RecordError(
                "bad turn", f"turn {index + 1} is a {type(turn).__name__}, not an object", where
            )

        role_field = "role" if "role" in turn else "from"
        content_field = "content" if "content" in turn else "value"
        _refuse_listed_audio(turn, f"{where}.")
        written, content = turn.get(role_field), turn.get(content_field)
        self.ignore("turns", turn, role_field, content_field)
        role = ROLES.get(written) if isinstance(written, str) else None
        if role is None:
            detail = f"turn {index + 1} has the unknown role {_shown(written)}; valid: {', '.join(ROLES)}"
            raise RecordError("unknown role", detail, f"{where}.{role_field}")

        where = f"{where}.{content_field}"
        if role != "assistant":
            self.check_audio(content, where)
        if isinstance(content, list):
            parts = [part for i, item in enumerate(content) for part in self.part(item, f"{where}[{i}]")]
            return {"role": role, "content": parts}

        parts = self.text(_text(content, where))
        if all(part["type"] == "text" for part in parts):
            return {"role": role, "content": "".join(part["text"] for part in parts)}

        return {"role": role, "content": parts}

    def check_audio(self, content: Any, where: str) -> None:
        """Refuses a turn whose text has a placeholder for a sound."""
        texts = [(content, where)]
        if isinstance(content, list):
            texts = [(item, f"{where}[{i}]") for i, item in enumerate(content)]

        for item, location in texts:
            if isinstance(item, dict):
                item = item.get("text")
                location = f"{location}.text"
            if isinstance(item, str):
                _refuse_audio_in(item, location, anywhere=any(self.listed.values()))

    def text(self, text: str) -> list[dict[str, Any]]:
        if not self.markers:
            return [{"type": "text", "text": text}]
        parts = (piece for piece in MARKER.split(text) if piece)
        return [
            self.next(piece[1:-1]) if MARKER.fullmatch(piece) else {"type": "text", "text": piece}
            for piece in parts
        ]

    def part(self, item: Any, where: str) -> list[dict[str, Any]]:
        """Reads a typed part: its reference is in the field of its type (``image``, ``image_url``, ...)
        or listed separately."""
        if isinstance(item, str):
            return self.text(_text(item, where))

        kind = item.get("type") if isinstance(item, dict) else None
        if kind in audio.PARTS:
            raise _audio_error(f"a content part of type {kind!r}", where)

        if isinstance(item, dict):
            _refuse_listed_audio(item, f"{where}.")
        if kind == "text":
            self.ignore("content parts", item, "type", "text")
            return self.text(_text(item.get("text"), f"{where}.text"))
        if kind not in PARTS:
            raise RecordError(
                "unknown content part",
                f"a content part of type {_shown(kind)}; valid: {', '.join(PARTS)}",
                where,
            )

        name = kind.removesuffix("_url")
        key = next(
            (key for key in (kind, f"{name}_url", name, "url", "path") if item.get(key) is not None), None
        )
        value = item[key] if key else None
        self.ignore("content parts", item, "type", key)
        if isinstance(value, dict):
            self.ignore("content parts", value, "url")
            value = value.get("url")
        if value is None and self.listed[name]:
            return [self.next(name)]

        where = f"{where}.{key or name}"
        self.media.append((name, _reference(value, where)))
        self.fields.append(where)
        return [{"type": name}]

    def next(self, kind: str) -> dict[str, Any]:
        """Returns the next listed medium of a kind; :meth:`finish` reports a missing one,
        with both counts."""
        self.asked[kind] += 1
        if self.waiting[kind]:
            reference, where = self.waiting[kind].pop(0)
            self.media.append((kind, reference))
            self.fields.append(where)
        return {"type": kind}

    def finish(self) -> None:
        for kind in KINDS:
            if self.asked[kind] != self.listed[kind]:
                detail = (
                    f"{self.asked[kind]} <{kind}> in the text, but {self.listed[kind]} listed under "
                    f"'{kind}' / '{kind}s'"
                )
                raise RecordError("markers and media differ", detail, self.name)


def _reference(value: Any, where: str) -> str:
    if isinstance(value, dict):
        value = value.get("path", value.get("url"))
    if not isinstance(value, str) or not value:
        found = "an empty string" if value == "" else f"a {type(value).__name__}"
        detail = f"a path or data: URI is required, but this is {found}"
        raise RecordError("bad media reference", detail, where)
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RecordError("bad text", f"a string is required, but this is a {type(value).__name__}", where)
    if PLACEHOLDER.search(value):
        raise RecordError(
            "placeholder token in text",
            "the text holds a token that stands for image or video features",
            where,
        )
    if found := audio.TOKEN.search(value):
        raise _audio_error(found[0], where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError("bad text", f"the text is not valid Unicode: {error.reason}", where) from error
    return value


def _refuse_listed_audio(item: dict[str, Any], prefix: str) -> None:
    """Raises RecordError if a record, turn or content part holds a sound. ``prefix`` precedes
    its field names."""
    key = audio.listed_in(item)
    if key is not None:
        raise _audio_error(f"{key!r}, {_shown(item[key])},", f"{prefix}{key}")


def _refuse_audio_in(text: str, where: str, anywhere: bool) -> None:
    """Raises RecordError if :func:`data_tools.audio.placeholder_in` finds a placeholder."""
    found = audio.placeholder_in(text, anywhere)
    if found is not None:
        advice = "; if the text is about the tag, write it as code (`<audio>`)"
        raise _audio_error(_shown(found), where, advice)


def _audio_error(what: str, where: str, advice: str = "") -> RecordError:
    detail = f"{what} stands for audio, which the models cannot hear{advice}"
    return RecordError("audio not supported", detail, where)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
