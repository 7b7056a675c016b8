"""The canonical conversation that every format is read into, and what must hold for each of them.

Messages are those of ``transformers``: ``role`` (system, user, assistant, tool) and ``content``, which is a
string, or a list of parts of type text, image and video if it has media. An assistant's message may also
have ``reasoning_content`` (text), ``tool_calls`` (``{"type": "function", "function": {"name", "arguments"}}``
with an object of arguments) and ``loss_weight`` (a float; without it the weight is 1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_vl.data.sample.conversation_checks import find_special_token
from megatron_vl.data.sample.medium import UnusableError

from .. import audio

Message = dict[str, Any]


class RecordError(UnusableError):
    """An unusable record.

    Attributes:
        field_path: the location of the fault in the record.
    """

    def __init__(self, reason: str, detail: str = "", field_path: str = "") -> None:
        super().__init__(reason, detail)
        self.field_path = field_path


@dataclass
class Conversation:
    """Messages with typed content, or a document.

    The i-th image or video part belongs to ``media_references[i]``.
    """

    messages: list[Message]
    media_references: list[tuple[str, Any]] = field(default_factory=list)
    """(kind, reference as written) in the order of the text. A reference is a path, an address, a ``data:``
    URI, or the bytes of the file."""
    field_paths: list[str] = field(default_factory=list)
    """The location in the record that names each medium."""
    record_identity: str = ""
    """The record's ``id`` (``str: x`` or ``int: 5``); empty if it has none."""
    ignored_keys: list[tuple[str, str]] = field(default_factory=list)
    """(location, key) of each key that has a value and no effect; the location is ``records``, ``turns``,
    ``content parts``, ``listed media`` or ``tool calls``."""
    tool_definitions: list[dict[str, Any]] = field(default_factory=list)
    """The functions that the assistant may call, as the chat template takes them."""
    template_arguments: dict[str, Any] = field(default_factory=dict)
    """The record's ``chat_template_kwargs``."""
    media_limits: list[dict[str, Any]] = field(default_factory=list)
    """The own limits of each medium, such as ``max_pixels``; empty if it has none."""
    unfinished_turns: int = 0
    """Number of turns after the last answer, which are left out."""
    document: list[dict[str, Any]] = field(default_factory=list)
    """The parts of a document (type text, image or video), which has no messages."""
    loss_weight: float = 1.0
    """Of a document."""
    objects: list[dict[str, Any]] = field(default_factory=list)
    """What its markers stand for, in their order (:mod:`megatron_vl.data.sample.boxes`)."""
    unsaid_boxes: int = 0
    """Number of answers and documents with boxes whose frame of reference nothing says."""

    @property
    def answer_media(self) -> int:
        """Number of images and videos in the assistant's turns. The model sees them but is not trained on
        them."""
        answers = [message for message in self.messages if message["role"] == "assistant"]
        return sum(map(count_media, answers))


def count_media(message: Message) -> int:
    """Number of images and videos in a message."""
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] != "text" for part in content)


def join_text_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Content with neighbouring texts joined; a string if it has no media."""
    joined_parts: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and joined_parts and joined_parts[-1]["type"] == "text":
            joined_parts[-1] = {"type": "text", "text": joined_parts[-1]["text"] + part["text"]}
        elif part != {"type": "text", "text": ""}:
            joined_parts.append(part)
    if all(part["type"] == "text" for part in joined_parts):
        return "".join(part["text"] for part in joined_parts)
    return joined_parts


def record_identity(id_value: Any) -> str:
    """The form in which ids are compared: 1 and "1" differ. It is empty for what is neither text nor a
    whole number."""
    if not isinstance(id_value, str | int) or isinstance(id_value, bool) or id_value == "":
        return ""
    return f"{type(id_value).__name__}: {id_value}"


def shorten_value(field_value: Any) -> str:
    """A value in a message, cut if it is long."""
    text = repr(field_value)
    return text if len(text) <= 60 else text[:57] + "..."


def add_system(record: dict[str, Any], messages: list[Message], turns_field: str) -> None:
    """Puts the system prompt of a record's field ``system``, if it has one, first.

    Raises:
        RecordError: the turns begin with another system prompt.
    """
    if record.get("system") in (None, ""):
        return
    system_prompt = checked_text(record["system"], "system")
    refuse_audio_in(system_prompt, "system")
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    elif messages[0]["content"] != system_prompt:
        raise RecordError("two system prompts", f"'system' and {turns_field}[0] differ", "system")


ALLOWED_NEXT_ROLES = {
    "": ("user",),
    "user": ("assistant", "user"),
    "assistant": ("user", "assistant"),
    "call": ("tool",),
    "tool": ("assistant", "tool", "user"),
}
"""Whose turn may follow; ``call`` is an assistant's turn that calls tools."""


def check_role_order(messages: list[Message], turns_field: str) -> None:
    """Raises RecordError if the first turn is not the user's, or results do not follow a turn that calls.

    System turns may stand anywhere. Whether a chat template writes them there is known only when samples are
    encoded.
    """
    turns = [message for message in messages if message["role"] != "system"]
    if not any(message["role"] == "assistant" for message in turns):
        raise RecordError(
            "no assistant turn", "without an assistant turn there is nothing to train on", turns_field
        )

    previous_role = ""
    for i, message in enumerate(turns, 1):
        role = message["role"]
        if role not in ALLOWED_NEXT_ROLES[previous_role]:
            found_text = f"turn {i} (not counting system prompts) is the {role}'s"
            expected_text = " or ".join(f"the {name}'s" for name in ALLOWED_NEXT_ROLES[previous_role])
            raise RecordError("wrong role order", f"{found_text}, but must be {expected_text}", turns_field)
        previous_role = "call" if message.get("tool_calls") else role


def cut_unfinished_turns(messages: list[Message]) -> list[Message]:
    """Removes the turns after the last answer or call, on which nothing is trained, and returns them."""
    last_answer = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    unfinished = messages[last_answer + 1 :]
    del messages[last_answer + 1 :]
    return unfinished


def check_answers(messages: list[Message], turns_field: str) -> None:
    """Raises RecordError if an answer has neither text nor calls.

    From such an answer, a model would only learn to end its turn at once.
    """
    for i, message in enumerate(messages):
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        is_empty = not text.strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and is_empty:
            detail = f"the assistant's turn {i + 1} holds no text to train on"
            raise RecordError("empty answer", detail, f"{turns_field}[{i}]")


def check_loss_weights(messages: list[Message], turns_field: str) -> None:
    """Raises RecordError if every answer has the weight 0."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if answers and all(message.get("loss_weight") == 0 for message in answers):
        raise RecordError("no loss", "every assistant turn has the loss weight 0", turns_field)


def refuse_listed_audio(json_object: dict[str, Any], field_prefix: str) -> None:
    """Raises RecordError if a record, turn or content part holds a sound.

    Args:
        field_prefix: prefix of its field names in messages.
    """
    key = audio.find_audio_field(json_object)
    if key is not None:
        raise unsupported_audio_error(f"{key!r}, {shorten_value(json_object[key])},", f"{field_prefix}{key}")


def refuse_audio_in(text: str, field_path: str) -> None:
    """Raises RecordError if :func:`data_tools.audio.find_audio_placeholder` finds a placeholder."""
    placeholder_text = audio.find_audio_placeholder(text)
    if placeholder_text is not None:
        advice = "; if the text is about the tag, write it as code (`<audio>`)"
        raise unsupported_audio_error(shorten_value(placeholder_text), field_path, advice)


def unsupported_audio_error(audio_text: str, field_path: str, advice: str = "") -> RecordError:
    detail = f"{audio_text} stands for audio, which the models cannot hear{advice}"
    return RecordError("audio not supported", detail, field_path)


def checked_text(text_value: Any, field_path: str) -> str:
    """A text without placeholders or control tokens. Raises RecordError if it is something else."""
    if not isinstance(text_value, str):
        raise RecordError(
            "bad text", f"a string is required, but this is a {type(text_value).__name__}", field_path
        )
    if special_token := find_special_token(text_value):
        raise RecordError(*special_token, field_path)
    if audio_token := audio.AUDIO_TOKEN.search(text_value):
        raise unsupported_audio_error(audio_token[0], field_path)
    try:
        text_value.encode()
    except UnicodeEncodeError as error:
        raise RecordError("bad text", f"the text is not valid Unicode: {error.reason}", field_path) from error
    return text_value
