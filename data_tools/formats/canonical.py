"""The canonical conversation that every format is read into, and what must hold for each of them.

Messages are those of ``transformers``: ``role`` (system, user, assistant, tool) and ``content``, which is a
string, or a list of parts of type text, image and video if it has media. An assistant's message may also
have ``reasoning_content`` (text), ``tool_calls`` (``{"type": "function", "function": {"name", "arguments"}}``
with an object of arguments) and ``loss_weight`` (a float; without it the weight is 1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_vl.errors import UserError

from .. import audio

Message = dict[str, Any]
PLACEHOLDER = re.compile(r"<\|(?:image|video)_pad\|>")


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

    messages: list[Message]
    media: list[tuple[str, Any]] = field(default_factory=list)
    """(kind, reference as written) in the order of the text. A reference is a path, an address, a ``data:``
    URI, or the bytes of the file."""
    fields: list[str] = field(default_factory=list)
    """The location in the record that names each medium."""
    identity: str = ""
    """The record's ``id`` (``str: x`` or ``int: 5``); empty if it has none."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """(location, key) of each key that has a value and no effect; the location is ``records``, ``turns``,
    ``content parts``, ``listed media`` or ``tool calls``."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """The functions that the assistant may call, as the chat template takes them."""
    format: str = ""
    """Name of the format that the record was read as."""

    @property
    def answer_media(self) -> int:
        """Number of images and videos in the assistant's turns; the model sees them but learns
        nothing from them."""
        return sum(map(count_media, (m for m in self.messages if m["role"] == "assistant")))

    @property
    def weighted(self) -> bool:
        """Whether a turn has another loss weight than 1."""
        return any("loss_weight" in message for message in self.messages)


def count_media(message: Message) -> int:
    """Number of images and videos in a message."""
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] != "text" for part in content)


def text_of(message: Message) -> str:
    """The text of a message, without its media."""
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content with neighbouring texts joined; a string if it has no media."""
    out: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and out and out[-1]["type"] == "text":
            out[-1] = {"type": "text", "text": out[-1]["text"] + part["text"]}
        elif part != {"type": "text", "text": ""}:
            out.append(part)
    if all(part["type"] == "text" for part in out):
        return "".join(part["text"] for part in out)
    return out


def identity(value: Any) -> str:
    """The form in which ids are compared: 1 and "1" differ."""
    return f"{type(value).__name__}: {value}" if isinstance(value, (str, int)) and value != "" else ""


def shown(value: Any) -> str:
    """A value in a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def add_system(messages: list[Message], system: str, where: str, place: str) -> None:
    """Puts a record's system prompt first.

    Args:
        where: field of the prompt. place: field of the turns.
    """
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    elif messages[0]["content"] != system:
        raise RecordError("two system prompts", f"'{where}' and {place}[0] differ", where)


AFTER = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool",),
    "tool": ("assistant", "tool"),
}
"""Whose turn may follow; ``call`` is an assistant's turn that calls tools."""


def check_order(messages: list[Message], place: str, *, prompt: bool) -> None:
    """Raises RecordError if the roles do not follow the order (system,) user, assistant, user, ..., with
    results of tools after a turn that calls them. A ``prompt`` needs no assistant turn."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if not prompt and not any(message["role"] == "assistant" for message in turns):
        raise RecordError("no assistant turn", "without an assistant turn there is nothing to learn", place)

    before = ""
    for i, message in enumerate(turns, 1):
        role = message["role"]
        if role not in AFTER[before]:
            found = f"turn {i} (not counting a system prompt) is the {role}'s"
            wanted = " or ".join(f"the {name}'s" for name in AFTER[before])
            raise RecordError("wrong role order", f"{found}, but must be {wanted}", place)
        before = "call" if message.get("tool_calls") else role


def check_answers(messages: list[Message], place: str) -> None:
    """From an answer without text or calls, a model would only learn to end the turn at once."""
    for i, message in enumerate(messages):
        empty = not text_of(message).strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and empty:
            raise RecordError(
                "empty answer", f"the assistant's turn {i + 1} holds no text to learn", f"{place}[{i}]"
            )


def check_weights(messages: list[Message], place: str) -> None:
    """Raises RecordError if every answer has the weight 0."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if answers and all(message.get("loss_weight") == 0 for message in answers):
        raise RecordError("no loss", "every assistant turn has the loss weight 0", place)


def without_answer(conversation: Conversation) -> None:
    """Takes the last turn away, with its media, if it is the assistant's."""
    last = conversation.messages[-1]
    if last["role"] == "assistant":
        conversation.messages.pop()
        keep = len(conversation.media) - count_media(last)
        conversation.media = conversation.media[:keep]
        conversation.fields = conversation.fields[:keep]


def refuse_listed_audio(item: dict[str, Any], prefix: str) -> None:
    """Raises RecordError if a record, turn or content part holds a sound. ``prefix`` precedes
    its field names."""
    key = audio.listed_in(item)
    if key is not None:
        raise audio_error(f"{key!r}, {shown(item[key])},", f"{prefix}{key}")


def refuse_audio_in(text: str, where: str, anywhere: bool) -> None:
    """Raises RecordError if :func:`data_tools.audio.placeholder_in` finds a placeholder."""
    found = audio.placeholder_in(text, anywhere)
    if found is not None:
        advice = "; if the text is about the tag, write it as code (`<audio>`)"
        raise audio_error(shown(found), where, advice)


def audio_error(what: str, where: str, advice: str = "") -> RecordError:
    detail = f"{what} stands for audio, which the models cannot hear{advice}"
    return RecordError("audio not supported", detail, where)


def text(value: Any, where: str) -> str:
    """A text without placeholder tokens. Raises RecordError if it is something else."""
    if not isinstance(value, str):
        raise RecordError("bad text", f"a string is required, but this is a {type(value).__name__}", where)
    if PLACEHOLDER.search(value):
        raise RecordError(
            "placeholder token in text",
            "the text holds a token that stands for image or video features",
            where,
        )
    if found := audio.TOKEN.search(value):
        raise audio_error(found[0], where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError("bad text", f"the text is not valid Unicode: {error.reason}", where) from error
    return value
