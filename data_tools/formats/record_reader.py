"""What a format is, and how its records are read.

The turns and their content are read, and the listed media are assigned, in order, to markers and to parts
without a medium.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import tool_calls
from .conversation import (
    AUDIO_PART_TYPES,
    RECORD_WEIGHT_KEYS,
    TURN_WEIGHT_KEYS,
    Message,
    RecordError,
    apply_turn_weight,
    checked_text,
    join_text_parts,
    refuse_audio_in,
    refuse_listed_audio,
    shorten_value,
    unsupported_audio_error,
)
from .medium_limits import FrameSequence, read_frame_rate, read_medium_limits

ROLE_SPELLINGS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "bot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "tool_response", "function"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
}
"""What each spelling of a role stands for; ``call`` is an assistant's turn whose text is a call."""
MEDIA_MARKER = re.compile("(<image>|<video>)")
MEDIA_KINDS = ("image", "video")
CONTENT_PART_TYPES = ("text", "image", "image_url", "video", "video_url")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
ROLE_TURN_KEYS = {
    "assistant": ("tool_calls", "function_call", "tool_call_id", "name", *REASONING_KEYS, *TURN_WEIGHT_KEYS),
    "call": ("tool_call_id", "name", *REASONING_KEYS, *TURN_WEIGHT_KEYS),
    "tool": ("tool_call_id", "name", *TURN_WEIGHT_KEYS),
}
"""Keys of a turn, by its role, that are read, or only connect turns with each other."""
EMPTY_VALUES: tuple[Any, ...] = (None, "", [], {})
CLIP_KEYS = ("video_start", "video_end", "frames_indices", "frame_indices", "video_metadata")
BOX_KEYS = ("boxes", "grounding")
TIME_KEYS = ("start", "end", "start_time", "end_time", "timestamps")
MEDIUM_KEYS = (*CLIP_KEYS, *TIME_KEYS, *BOX_KEYS, "bbox", "bboxes")
"""Keys of a medium that change what the sample shows. Beside a turn, those of times are only counted."""
MAX_SHOWN_KEY = 60
"""Characters of an ignored key that are shown; keys come from untrusted input."""


OBJECT_FIELDS = ("objects", "boxes")
COMMON_FIELDS = (
    *("id", "system", "image", "images", "video", "videos", "markers", "tools", "functions"),
    "chat_template_kwargs",
    *OBJECT_FIELDS,
)


def listed_turns(record: dict[str, Any], turns_field: str) -> list[Any]:
    """The list of turns in a field. Raises RecordError if it is something else."""
    turns = record.get(turns_field)
    if not isinstance(turns, list) or not turns:
        raise RecordError(
            "no conversation", f"'{turns_field}' is not a list with at least one turn", turns_field
        )
    return turns


@dataclass(frozen=True)
class RecordFormat:
    """One way to write a conversation.

    A format is recognised by its fields alone, so that every record of a file is judged by itself.
    """

    name: str
    turns_field: str
    """The field with the turns, or the one that says that there is a conversation."""
    matches_record: Callable[[dict[str, Any]], bool]
    read_messages: Callable[[dict[str, Any], "RecordReader"], list[Message]] = lambda record, reader: (
        reader.read_turns(listed_turns(record, reader.turns_field))
    )
    """Raises RecordError if the turns are something else."""
    read_fields: tuple[str, ...] = ()
    """Fields of the record that it reads, beside those of every format."""
    strip_user_text: bool = False
    """Whether white space around the user's texts, also between media, is removed."""
    media_folder_field: str = ""
    is_document: bool = False
    """Whether the records are documents, which are read into one message of the role ``document``."""
    own_media_fields: tuple[str, ...] = ()


class RecordReader:
    """Reads the turns of one record."""

    def __init__(self, record: dict[str, Any], record_format: RecordFormat) -> None:
        self.turns_field: str = record_format.turns_field
        self.strip_user_text = record_format.strip_user_text
        folder_field = record_format.media_folder_field
        self.media_folder = (record.get(folder_field) if folder_field else "") or ""
        if not isinstance(self.media_folder, str):
            raise RecordError("bad media reference", f"{folder_field!r} must be a folder", folder_field)

        self.ignored_keys: list[tuple[str, str]] = []
        self.frame_rate_keys: set[str] = set()
        """Keys of the record that give the frame rate of a video."""
        self.unplaced_media: dict[str, list[tuple[Any, str, dict[str, Any]]]] = {
            kind: [
                one
                for name in (kind, f"{kind}s")
                if name not in record_format.own_media_fields
                for one in self.listed_references(record, name)
            ]
            for kind in MEDIA_KINDS
        }

        # The record's own keys come first, but which of them have an effect is known only now.
        read_keys = (*COMMON_FIELDS, *RECORD_WEIGHT_KEYS, self.turns_field, *record_format.read_fields)
        self.ignored_keys[:0] = unread_keys("records", record, *read_keys, *self.frame_rate_keys)
        self.listed_counts = {kind: len(refs) for kind, refs in self.unplaced_media.items()}
        if record.get("markers") not in (*EMPTY_VALUES, "text"):
            detail = f"{shorten_value(record['markers'])} is unknown; valid: 'text', if the markers are text"
            raise RecordError("bad markers", detail, "markers")
        self.markers_are_text = record.get("markers") == "text"
        self.unlisted_markers: list[str] = []
        """Markers in the texts of a record that lists no media."""
        self.marker_counts = dict.fromkeys(MEDIA_KINDS, 0)
        self.media_references: list[tuple[str, Any]] = []
        self.field_paths: list[str] = []
        self.media_limits: list[dict[str, Any]] = []

    def listed_references(
        self, record: dict[str, Any], field_name: str
    ) -> list[tuple[Any, str, dict[str, Any]]]:
        """Returns (reference, field, own limits) of each medium listed in a field, and notes keys without
        effect."""
        field_value = record.get(field_name)
        if field_value is None or field_value == "":
            return []
        kind, located_media = field_name.removesuffix("s"), []
        for item, field_path in _located_items(field_value, field_name):
            # The rate of a video's images stands beside the video: in its own object, or in the record.
            parent, prefix = (item, f"{field_path}.") if isinstance(item, dict) else (record, "")
            reference, rate_key = self.medium_reference(kind, item, field_path, parent, prefix)
            limits: dict[str, Any] = {}
            if isinstance(item, dict):
                reference, limits, limit_keys = read_medium_limits(kind, reference, item, prefix)
                refuse_unread_keys(item, MEDIUM_KEYS, prefix, limit_keys)
                self.ignored_keys += unread_keys(
                    "listed media", item, "path", "url", "bytes", rate_key, *limit_keys
                )
            elif rate_key:
                self.frame_rate_keys.add(rate_key)
            located_media.append((reference, field_path, limits))
        return located_media

    def medium_reference(
        self,
        media_kind: str,
        media_value: Any,
        field_path: str,
        parent_object: dict[str, Any],
        key_prefix: str,
    ) -> tuple[Any, str | None]:
        """The reference of a medium, and the key that says how many images it has a second.

        Args:
            field_path: the location of the medium in the record, for messages.
            parent_object: the object that may have such a key.
            key_prefix: prefix of the object's keys in messages.
        """
        if media_kind == "video" and isinstance(media_value, list):
            if not media_value:
                raise RecordError("bad media reference", "a video of no frames", field_path)
            located_images = _located_items(media_value, field_path)
            images = tuple(self.reference_in_folder(image, path) for image, path in located_images)
            rate_key, fps = read_frame_rate(parent_object, key_prefix)
            return FrameSequence(images, fps), rate_key
        return self.reference_in_folder(media_value, field_path), None

    def reference_in_folder(self, media_value: Any, field_path: str) -> Any:
        """A medium's path, address or bytes. In a structure of both, as tables have it, bytes come first."""
        reference = media_value
        if isinstance(reference, dict):
            has_bytes = isinstance(reference.get("bytes"), bytes) and reference["bytes"]
            reference = has_bytes or reference.get("path", reference.get("url"))
        if not isinstance(reference, str | bytes) or not reference:
            found_text = "an empty string" if reference == "" else f"a {type(reference).__name__}"
            detail = f"a path, a data: URI or bytes are required, but this is {found_text}"
            raise RecordError("bad media reference", detail, field_path)
        if not self.media_folder or isinstance(reference, bytes):
            return reference
        if "://" in reference or reference[:5].lower() == "data:" or reference.startswith("/"):
            return reference
        return f"{self.media_folder.rstrip('/')}/{reference}"

    def read_turns(self, turns: Any) -> list[Message]:
        """Reads a list of turns. Calls that are turns of their own join the answer in front of them."""
        messages: list[Message] = []
        for i, turn in enumerate(turns):
            message = self.read_turn(turn, i)
            if not (message.pop("call", False) and tool_calls.merge_calls(messages, message)):
                messages.append(message)
        return messages

    def read_turn(self, turn: Any, turn_index: int) -> Message:
        """Reads one turn. Raises RecordError if it cannot be used.

        The message has the key ``call`` if the turn consists of calls written as text.
        """
        field_path = f"{self.turns_field}[{turn_index}]"
        if not isinstance(turn, dict):
            raise RecordError(
                "bad turn", f"turn {turn_index + 1} is a {type(turn).__name__}, not an object", field_path
            )

        role_field = "role" if "role" in turn else "from"
        content_field = "content" if "content" in turn else "value"
        refuse_listed_audio(turn, f"{field_path}.")
        refuse_unread_keys(turn, (*CLIP_KEYS, *BOX_KEYS), f"{field_path}.")
        written_role = turn.get(role_field)
        role = ROLE_SPELLINGS.get(written_role) if isinstance(written_role, str) else None
        if role is None:
            detail = (
                f"turn {turn_index + 1} has the unknown role "
                f"{shorten_value(written_role)}; valid: {', '.join(ROLE_SPELLINGS)}"
            )
            raise RecordError("unknown role", detail, f"{field_path}.{role_field}")

        structure_keys = ROLE_TURN_KEYS.get(role, TURN_WEIGHT_KEYS)
        self.ignored_keys += unread_keys("turns", turn, role_field, content_field, *structure_keys)
        if role == "call":
            message = self.read_call_turn(turn, content_field, field_path)
        elif role == "assistant":
            message = self.read_answer(turn, content_field, field_path)
        else:
            message = self.read_content(role, turn.get(content_field), f"{field_path}.{content_field}")
            if role == "tool" and turn.get("tool_call_id") not in EMPTY_VALUES:
                message["tool_call_id"] = turn["tool_call_id"]
        apply_turn_weight(turn, message, f"{field_path}.")
        return message

    def read_call_turn(self, turn: dict[str, Any], content_field: str, field_path: str) -> Message:
        """Reads a turn whose text is a call, perhaps after reasoning."""
        tool_calls.refuse_second_calls(turn, content_field, ("tool_calls", "function_call"), f"{field_path}.")
        content_text = checked_text(turn.get(content_field), f"{field_path}.{content_field}")
        reasoning_text, turn_calls = tool_calls.read_text_calls(content_text, field_path)
        if len(turn_calls) == 1 and turn.get("tool_call_id") not in EMPTY_VALUES:
            turn_calls[0]["id"] = turn["tool_call_id"]
        message = {"role": "assistant", "content": reasoning_text, "tool_calls": turn_calls, "call": True}
        self.add_turn_reasoning(message, turn, field_path)
        if reasoning_text and "reasoning_content" in message:
            raise RecordError(
                "two reasonings", f"the turn has reasoning in its {content_field!r} and beside it", field_path
            )
        return message

    def read_answer(self, turn: dict[str, Any], content_field: str, field_path: str) -> Message:
        turn_calls = tool_calls.read_tool_calls(turn, f"{field_path}.")
        turn_content = turn.get(content_field)
        if turn_content is None and turn_calls:  # as OpenAI writes a turn of calls only
            turn_content = ""
        message = self.read_content("assistant", turn_content, f"{field_path}.{content_field}")
        if turn_calls:
            message["tool_calls"] = turn_calls
        self.add_turn_reasoning(message, turn, field_path)
        return message

    def read_content(self, role: str, turn_content: Any, field_path: str) -> Message:
        for item, text_path in _located_items(turn_content, field_path) if role != "assistant" else ():
            if isinstance(item, dict):
                item, text_path = item.get("text"), f"{text_path}.text"
            if isinstance(item, str):
                refuse_audio_in(item, text_path)
        if isinstance(turn_content, list):
            located = _located_items(turn_content, field_path)
            parts = [part for item, part_path in located for part in self.read_part(item, part_path)]
        else:
            text, strips = checked_text(turn_content, field_path), self.strip_user_text and role == "user"
            parts = self.text_parts(text, strips)
        return {"role": role, "content": join_text_parts(parts)}

    def add_turn_reasoning(self, message: Message, turn: dict[str, Any], field_path: str) -> None:
        for key in REASONING_KEYS:
            if turn.get(key) in EMPTY_VALUES:
                continue
            reasoning_text = checked_text(turn[key], f"{field_path}.{key}")
            if message.get("reasoning_content", reasoning_text) != reasoning_text:
                raise RecordError(
                    "two reasonings", "the turn holds two different reasonings", f"{field_path}.{key}"
                )
            message["reasoning_content"] = reasoning_text

    def text_parts(self, marked_text: str, strip_text: bool = False) -> list[dict[str, Any]]:
        """The parts of a text with markers, with the next listed medium in the place of each marker.

        Args:
            strip_text: whether to remove white space around each piece of text.
        """
        pieces = MEDIA_MARKER.split(marked_text)
        if self.markers_are_text or not any(self.listed_counts.values()):
            self.unlisted_markers += pieces[1::2]
            pieces = [marked_text]
        if strip_text:
            pieces = [piece.strip() for piece in pieces]
        return [
            self.next_listed_medium(piece[1:-1]) if i % 2 else {"type": "text", "text": piece}
            for i, piece in enumerate(pieces)  # every second one is a marker
        ]

    def read_part(self, item: Any, field_path: str) -> list[dict[str, Any]]:
        """Reads a typed part: its reference is in the field of its type (``image``, ``image_url``, ...), or
        listed separately. A part without a type has one of the keys ``text``, ``image`` and ``video``, as
        Qwen's API writes it."""
        if isinstance(item, str):
            return self.text_parts(checked_text(item, field_path))

        part_type = item.get("type") if isinstance(item, dict) else None
        if isinstance(item, dict) and part_type is None:
            present_keys = [key for key in ("text", *MEDIA_KINDS) if item.get(key) not in EMPTY_VALUES]
            part_type = present_keys[0] if len(present_keys) == 1 else None
        if part_type in AUDIO_PART_TYPES:
            raise unsupported_audio_error(f"a content part of type {part_type!r}", field_path)
        if isinstance(item, dict):
            refuse_listed_audio(item, f"{field_path}.")
        if part_type not in CONTENT_PART_TYPES:
            raise RecordError(
                "unknown content part",
                f"a content part of type {shorten_value(part_type)}; valid: {', '.join(CONTENT_PART_TYPES)}",
                field_path,
            )

        if part_type != "text":
            return [self.read_media_part(item, part_type, field_path)]
        self.ignored_keys += unread_keys("content parts", item, "type", "text")
        return self.text_parts(checked_text(item.get("text"), f"{field_path}.text"))

    def read_media_part(self, item: dict[str, Any], part_type: str, field_path: str) -> dict[str, Any]:
        media_kind = part_type.removesuffix("_url")
        other_kind = "video" if media_kind == "image" else "image"
        for conflicting_key in (other_kind, f"{other_kind}_url"):
            if item.get(conflicting_key) not in EMPTY_VALUES:
                detail = (
                    f"a content part of type {part_type!r} that also has {conflicting_key!r}; write two parts"
                )
                raise RecordError("two media in a part", detail, f"{field_path}.{conflicting_key}")

        reference_keys = (part_type, f"{media_kind}_url", media_kind, "url", "path")
        reference_key = next((key for key in reference_keys if item.get(key) is not None), None)
        media_value = item[reference_key] if reference_key else None
        prefix, value_prefix = f"{field_path}.", f"{field_path}.{reference_key}."
        value_object = media_value if isinstance(media_value, dict) else {}
        if value_object and "bytes" not in value_object:
            media_value = value_object.get("url")

        rate_key = None
        media_field_path = f"{field_path}.{reference_key or media_kind}"
        is_listed = media_value is None and self.listed_counts[media_kind] > 0
        waiting = self.unplaced_media[media_kind]
        medium, listed_path, listed_limits = waiting[0] if is_listed and waiting else (None, "", {})
        if not is_listed:
            medium, rate_key = self.medium_reference(media_kind, media_value, media_field_path, item, prefix)
        limits = listed_limits | value_object | item
        medium, limits, limit_keys = read_medium_limits(media_kind, medium, limits, prefix)
        refuse_unread_keys(item, MEDIUM_KEYS, prefix, limit_keys)
        refuse_unread_keys(value_object, MEDIUM_KEYS, value_prefix, limit_keys)
        if not is_listed:
            self._add_medium(media_kind, medium, media_field_path, limits)
        elif waiting:
            waiting[0] = (medium, listed_path, limits)
        self.ignored_keys += unread_keys("content parts", item, "type", reference_key, rate_key, *limit_keys)
        if "bytes" not in value_object:
            self.ignored_keys += unread_keys("content parts", value_object, "url", *limit_keys)
        return self.next_listed_medium(media_kind) if is_listed else {"type": media_kind}

    def next_listed_medium(self, media_kind: str) -> dict[str, Any]:
        """Returns the next listed medium of a kind; :meth:`check_media_counts` reports a missing one,
        with both counts."""
        self.marker_counts[media_kind] += 1
        if self.unplaced_media[media_kind]:
            self._add_medium(media_kind, *self.unplaced_media[media_kind].pop(0))
        return {"type": media_kind}

    def all_listed_media(self) -> list[dict[str, Any]]:
        return [
            self.next_listed_medium(kind) for kind in MEDIA_KINDS for _ in range(self.listed_counts[kind])
        ]

    def placed_medium(
        self, media_kind: str, media_value: Any, field_path: str, parent_object: dict[str, Any]
    ) -> dict[str, Any]:
        """The part of a medium that the format places itself. Arguments as :meth:`medium_reference`."""
        reference, rate_key = self.medium_reference(media_kind, media_value, field_path, parent_object, "")
        self.ignored_keys = [entry for entry in self.ignored_keys if entry != ("records", rate_key)]
        self._add_medium(media_kind, reference, field_path, {})
        return {"type": media_kind}

    def _add_medium(self, media_kind: str, reference: Any, field_path: str, limits: dict[str, Any]) -> None:
        self.media_references.append((media_kind, reference))
        self.field_paths.append(field_path)
        self.media_limits.append(limits)

    def place_media_first(self, messages: list[Message]) -> None:
        """Puts the listed media before the text of the first question, if no text has a marker."""
        question = next((message for message in messages if message["role"] == "user"), None)
        if question is None or self.media_references or any(self.marker_counts.values()):
            return
        media = self.all_listed_media()
        text = question["content"]
        question["content"] = [*media, *([{"type": "text", "text": text}] if isinstance(text, str) else text)]

    def check_media_counts(self) -> None:
        """Refuses markers without media, and media without markers.

        In a record whose media are content parts, or which says so, markers are text.
        """
        if not self.media_references and not self.markers_are_text:
            for marker in self.unlisted_markers:
                self.marker_counts[marker[1:-1]] += 1

        for kind in MEDIA_KINDS:
            markers, listed = self.marker_counts[kind], self.listed_counts[kind]
            if markers != listed:
                detail = f"{markers} <{kind}> in the text, but {listed} listed under '{kind}' / '{kind}s'"
                if kind == "video" and 1 <= markers < listed:
                    detail += "; to give one video as images, write a list of them in the place of its file"
                unread_fields = [key for key_location, key in self.ignored_keys if key_location == "records"]
                if not markers:
                    detail += "; --missing-markers first puts them before the first question"
                if self.unlisted_markers and unread_fields:
                    detail += f"; nothing is read from {shorten_value(', '.join(unread_fields))}"
                if self.unlisted_markers:
                    detail += "; if the text is about the marker itself, give the record 'markers': 'text'"
                raise RecordError("markers and media differ", detail, self.turns_field)


def refuse_unread_keys(
    json_object: dict[str, Any], keys: tuple[str, ...], key_prefix: str, read_keys: Sequence[str] = ()
) -> None:
    """Raises RecordError if one of the keys has a value: without it, the sample would be another one.

    A start at 0 changes nothing. ``read_keys`` are not refused.
    """
    for key in keys:
        value = None if key in read_keys else json_object.get(key)
        if value not in EMPTY_VALUES and value is not False and (value != 0 or "start" not in key):
            detail = (
                f"{key!r} names a part of a medium and is not read; cut the medium beforehand, or write the"
                " part into the text"
            )
            raise RecordError("part of a medium", detail, f"{key_prefix}{key}")


def unread_keys(
    key_location: str, json_object: dict[str, Any], *read_keys: str | None
) -> list[tuple[str, str]]:
    """(location, key) of each key of an object that has a value and is not ``read_keys``.

    Exported tables write empty values for absent keys, so these do not count.
    """
    keys = [key for key, value in json_object.items() if key not in read_keys and value not in EMPTY_VALUES]
    return [(key_location, key[:MAX_SHOWN_KEY]) for key in keys]


def _located_items(value: Any, field_path: str) -> list[tuple[Any, str]]:
    """(item, location) of the items of a list; a value that is no list stands for itself."""
    if not isinstance(value, list):
        return [(value, field_path)]
    return [(item, f"{field_path}[{i}]") for i, item in enumerate(value)]
