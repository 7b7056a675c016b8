"""The canonical conversation that every format is read into, and what must hold for each of them.

Messages are those of ``transformers``: ``role`` (system, user, assistant, tool) and ``content``, which is a
string, or a list of parts of type text, image and video if it has media. An assistant's message may also
have ``reasoning_content`` (text), ``tool_calls`` (``{"type": "function", "function": {"name", "arguments"}}``
with an object of arguments) and ``loss_weight`` (a float; without it the weight is 1).

A turn's weight is spelled ``loss_weight``, ``weight`` (OpenAI, OpenChat), ``loss`` (ms-swift: false, true or
a number), ``loss_scale``, or ``train`` (Axolotl: false or true). A record's weight is ``loss_weight``,
``sample_weight`` or ``weight``; it multiplies those of its turns.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from megatron_vl.data.sample.conversation_checks import find_special_token
from megatron_vl.data.sample.medium import UnusableError

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
        return sum(count_media(message) for message in self.messages if message["role"] == "assistant")


def count_media(message: Message) -> int:
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


def check_answers(messages: list[Message], turns_field: str) -> None:
    """Raises RecordError if an answer has neither text nor calls.

    From such an answer, a model would only learn to end its turn at once.
    """
    for i, message in enumerate(messages):
        content = message["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if message["role"] == "assistant" and not text.strip() and not message.get("tool_calls"):
            detail = f"the assistant's turn {i + 1} holds no text to train on"
            raise RecordError("empty answer", detail, f"{turns_field}[{i}]")


def checked_text(text_value: Any, field_path: str) -> str:
    """A text without placeholders or control tokens. Raises RecordError if it is something else."""
    if not isinstance(text_value, str):
        raise RecordError(
            "bad text", f"a string is required, but this is a {type(text_value).__name__}", field_path
        )
    if special_token := find_special_token(text_value):
        raise RecordError(*special_token, field_path)
    if audio_token := AUDIO_TOKEN.search(text_value):
        raise unsupported_audio_error(audio_token[0], field_path)
    try:
        text_value.encode()
    except UnicodeEncodeError as error:
        raise RecordError("bad text", f"the text is not valid Unicode: {error.reason}", field_path) from error
    return text_value


# --- Audio --------------------------------------------------------------------------------------------------

# No Qwen-VL model can hear, and a record with audio is useless without it: the model would learn to guess the
# answer, and a placeholder would be trained on as text. Sounds are listed beside the conversation or a turn
# (audios of LLaMA-Factory and ms-swift, audio of OpenAI's answers and of Hugging Face's data sets), are
# content parts (input_audio of OpenAI, audio of transformers' processors, audio_url of vLLM), or have a
# placeholder in the text. <audio> is also HTML. It counts as a placeholder where placeholders stand, at the
# beginning or the end of a line, and is text within a sentence and as code (in backticks). Answers are never
# searched.

AUDIO_KEYS = ("audios", "audio", "audio_url", "input_audio", "audio_path", "audio_paths", "audio_file")
"""Fields of records, turns and content parts that hold sounds."""
CONTENT_KEYS = ("bytes", "path", "url", "array", "data", "id")
"""Fields of a structure that hold a sound. Other fields, such as a rate or a format, do not show that there
is one."""
AUDIO_PART_TYPES = ("audio", "audio_url", "input_audio")
AUDIO_TOKEN = re.compile(r"<\|audio(?:_pad|_\d{1,4})?\|>", re.IGNORECASE)
"""Placeholder for a sound or its features in Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni and Phi-4."""
AUDIO_PLACEHOLDER = re.compile(
    r"^[ \t]*<audio>|</?audio>[ \t]*$|<audio_?\d{1,4}>", re.IGNORECASE | re.MULTILINE
)
CODE_SPAN = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


def refuse_listed_audio(json_object: dict[str, Any], field_prefix: str) -> None:
    """Raises RecordError if a record, turn or content part holds a sound.

    Args:
        field_prefix: prefix of its field names in messages.
    """
    for key in AUDIO_KEYS:
        # Some tables count sounds: 0 is none. In a list, it is silence.
        if not _is_empty_value(value := json_object.get(key)) and value != 0:
            raise unsupported_audio_error(f"{key!r}, {shorten_value(value)},", f"{field_prefix}{key}")


def _is_empty_value(field_value: Any) -> bool:
    """Exported tables fill columns and structures with empty values; a flag is not a sound."""
    if isinstance(field_value, dict):
        content_values = [field_value[key] for key in CONTENT_KEYS if key in field_value]
        return all(map(_is_empty_value, content_values or field_value.values()))
    if isinstance(field_value, list):
        return all(map(_is_empty_value, field_value))
    return field_value is None or field_value == "" or isinstance(field_value, bool)


def refuse_audio_in(text: str, field_path: str) -> None:
    """Raises RecordError if a user's text or a system prompt has the placeholder of a sound."""
    # Code is replaced by a word, so that the text around it still counts as one sentence.
    if "audio" in text.lower() and (match := AUDIO_PLACEHOLDER.search(CODE_SPAN.sub("code", text))):
        advice = "; if the text is about the tag, write it as code (`<audio>`)"
        raise unsupported_audio_error(shorten_value(match[0].strip()), field_path, advice)


def unsupported_audio_error(audio_text: str, field_path: str, advice: str = "") -> RecordError:
    detail = f"{audio_text} stands for audio, which the models cannot hear{advice}"
    return RecordError("audio not supported", detail, field_path)


# --- Loss weights -------------------------------------------------------------------------------------------


TURN_WEIGHT_KEYS = ("loss_weight", "weight", "loss", "loss_scale", "train")
RECORD_WEIGHT_KEYS = ("loss_weight", "sample_weight", "weight")
MAX_LOSS_WEIGHT = 1e4
"""A larger weight is a mistake rather than an intention: one sample would outweigh all others of a step."""


def read_loss_weight(
    json_object: dict[str, Any], weight_keys: tuple[str, ...], field_prefix: str
) -> tuple[float, str]:
    """The weight of a turn or record and the field that gives it; 1 and no text if no field does.

    Raises:
        RecordError: it is not a number from 0 to 10000, or two fields differ.
    """
    weight: tuple[float, str] | None = None
    for weight_key in weight_keys:
        weight_value = json_object.get(weight_key)
        if weight_value is None or weight_value == "":
            continue
        field_path = f"{field_prefix}{weight_key}"
        # Not a number is not between them either.
        if not isinstance(weight_value, int | float) or not 0 <= weight_value <= MAX_LOSS_WEIGHT:
            detail = (
                f"{shorten_value(weight_value)} is no loss weight; valid: "
                f"a number from 0 to {MAX_LOSS_WEIGHT:g}, true or false"
            )
            raise RecordError("bad loss weight", detail, field_path)
        if weight is not None and weight[0] != float(weight_value):
            detail = f"{weight[1]} is {weight[0]:g}, but {field_path} is {shorten_value(weight_value)}"
            raise RecordError("bad loss weight", detail, field_path)
        weight = weight or (float(weight_value), field_path)
    return weight or (1.0, "")


def apply_turn_weight(turn: dict[str, Any], message: Message, field_prefix: str) -> None:
    """Sets the weight of an assistant's message.

    Raises:
        RecordError: a turn that is not the assistant's has a weight above 0; only answers are trained on.
    """
    weight, field_path = read_loss_weight(turn, TURN_WEIGHT_KEYS, field_prefix)
    is_answer = message["role"] == "assistant"
    # True and 1 are what tools write into every turn; other numbers were chosen for this one.
    if not is_answer and weight not in (0.0, 1.0):
        detail = (
            f"the {message['role']}'s turn has the loss weight {weight:g}, but only answers are trained on"
        )
        raise RecordError("loss on a prompt", detail, field_path)
    if is_answer and weight != 1:
        message["loss_weight"] = weight
