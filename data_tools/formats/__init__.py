"""Reads conversations and documents of all formats into one form, with their media in the order of the text.

:data:`FORMATS` is the table of formats. A record's format is given, or recognised by its
fields. Text stays as it is, including white space (except in ``qwen``). Nothing is guessed. A record is
refused if its markers and media disagree, if its first turn is not the user's, if an answer has no text, or
if it holds something that belongs to the task and cannot be shown to the model: boxes without markers,
preferences, audio (:mod:`.conversation` says what counts as audio). Keys that nothing reads are listed in
:attr:`Conversation.ignored_keys`.
"""

from difflib import get_close_matches
from typing import Any, Literal

from megatron_vl.data.sample.boxes import FRAMES, MARKER
from megatron_vl.data.sample.conversation_checks import (
    ChatError,
    check_control_tokens,
    iterate_texts,
    order_results,
)

from ..input_files import MAX_SHOWN_NAMES
from . import conversation_formats, documents
from .conversation import (
    RECORD_WEIGHT_KEYS,
    Conversation,
    Message,
    RecordError,
    add_system,
    check_answers,
    check_role_order,
    count_media,
    read_loss_weight,
    record_identity,
    refuse_listed_audio,
)
from .conversation_formats import ANSWER_FIELDS, QUESTION_FIELDS
from .objects import ObjectReader
from .record_reader import (
    BOX_KEYS,
    CLIP_KEYS,
    EMPTY_VALUES,
    MEDIA_MARKER,
    OBJECT_FIELDS,
    TIME_KEYS,
    RecordFormat,
    RecordReader,
    refuse_unread_keys,
    unread_keys,
)
from .tool_calls import read_template_arguments, read_tools

__all__ = ["FORMATS", "Conversation", "RecordError", "detect_format", "read_conversation"]

FORMATS: dict[str, RecordFormat] = {
    record_format.name: record_format for record_format in (*conversation_formats.FORMATS, *documents.FORMATS)
}
"""In the order in which they are tried: one that is a special case of another comes first."""
CONVERSATION_FIELDS = ("messages", "conversations", "conversation")
USUAL_COLUMNS = {
    "user": ("question", *QUESTION_FIELDS, "user", "human", "problem", "input"),
    "assistant": ("answer", *ANSWER_FIELDS, "assistant", "gpt", "solution"),
    "image": ("image", "images", "image_path", "image_file", "img"),
    "video": ("video", "videos", "video_path"),
}
"""Names of columns, by their part in ``--columns``."""
BOXES = "boxes without a place in the text; write 'objects' and markers, as docs/boxes.md says"
PREFERENCES = "preferences, which supervised training cannot use"
UNSUPERVISED_FIELDS = {
    **dict.fromkeys(("bbox", "bboxes"), BOXES),
    **dict.fromkeys(("chosen", "rejected", "rejected_response"), PREFERENCES),
    **dict.fromkeys(("rejected_messages", "chosen_messages"), PREFERENCES),
    "kto_tag": "judgements of answers, which supervised training cannot use",
}
"""Fields that belong to the task and have no place in a supervised sample."""


def read_conversation(
    record: Any,
    format_name: str = "",
    missing_markers: Literal["first", "refuse"] = "refuse",
    caption_prompt: str = "",
) -> Conversation:
    """Reads a record. Raises RecordError if it cannot be used.

    Args:
        format_name: name in :data:`FORMATS`; empty: the format is recognised.
        missing_markers: whether listed media come first if no text has a marker, or the record is refused.
        caption_prompt: the question to which a caption is the answer; empty: a caption is a document.
    """
    if not isinstance(record, dict):
        detail = f"the record is a {type(record).__name__}, not an object"
        if isinstance(record, list) and any(isinstance(item, dict) for item in record):
            detail += "; if it is a pack of conversations, write each as a record of its own"
        raise RecordError("not an object", detail)
    refuse_listed_audio(record, "")
    try:
        record_format = FORMATS[format_name] if format_name else detect_format(record)
    except RecordError:
        _refuse_unsupervised_fields(record)  # which says more
        raise
    if not record_format.is_document:  # whose text is trained on, whatever stands beside it
        _refuse_unsupervised_fields(record)
    reader = RecordReader(record, record_format)
    messages = record_format.read_messages(record, reader)
    if caption_prompt and messages[0]["role"] == "document":
        messages = documents.answer_prompt(record, messages, caption_prompt)
    # Media are known to belong to their markers only after all turns are read.
    if missing_markers == "first":
        reader.place_media_first(messages)
    reader.check_media_counts()
    if reader.media_references:
        refuse_unread_keys(record, (*CLIP_KEYS, *BOX_KEYS[isinstance(record.get("boxes"), str) :]), "")
    if any(kind == "video" for kind, _ in reader.media_references):
        refuse_unread_keys(record, TIME_KEYS, "")
    if record_format.is_document:
        record = _without_unread_objects(record, messages, reader)
    if messages[0]["role"] == "document":
        return _checked_document(record, messages, reader)
    check_answers(messages, record_format.turns_field)

    # The order of roles is checked with the system prompt in place.
    add_system(record, messages, record_format.turns_field)
    check_role_order(messages, record_format.turns_field)
    # Nothing is trained on after the last answer or call.
    last_answer = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    messages, unfinished = messages[: last_answer + 1], messages[last_answer + 1 :]
    num_media = len(reader.media_references) - sum(map(count_media, unfinished))
    # Before results are ordered, because objects are in the order of the record.
    object_reader = ObjectReader(record, [kind for kind, _ in reader.media_references], num_media)
    messages = object_reader.read_messages([*messages, *unfinished])[: len(messages)]
    record_weight, _ = read_loss_weight(record, RECORD_WEIGHT_KEYS, "")
    answers = [message for message in messages if message["role"] == "assistant"]
    for answer in answers if record_weight != 1 else ():
        answer["loss_weight"] = record_weight * answer.get("loss_weight", 1.0)
    if all(answer.get("loss_weight") == 0 for answer in answers):
        raise RecordError("no loss", "every assistant turn has the loss weight 0", record_format.turns_field)

    tools = read_tools(record)
    try:
        messages = order_results(messages)
        check_control_tokens(messages, tools)
    except ChatError as error:
        raise RecordError(error.reason, str(error), record_format.turns_field) from error
    return Conversation(
        messages,
        reader.media_references[:num_media],
        reader.field_paths[:num_media],
        record_identity(record.get("id")),
        reader.ignored_keys,
        tools,
        read_template_arguments(record),
        reader.media_limits[:num_media],
        len(unfinished),
        objects=object_reader.take_objects(messages),
        unsaid_boxes=object_reader.unsaid_boxes,
    )


def _without_unread_objects(
    record: dict[str, Any], messages: list[Message], reader: RecordReader
) -> dict[str, Any]:
    """A document's record without the objects for which its text has no marker."""
    has_objects = any(record.get(field) for field in OBJECT_FIELDS)
    if not has_objects or any(map(MARKER.search, iterate_texts(messages))):
        return record
    if reader.media_references and record.get("boxes") in FRAMES:
        return record  # boxes are written in the text, and image_id numbers them
    unread_fields = OBJECT_FIELDS[: 1 if reader.media_references else 2]
    reader.ignored_keys += unread_keys("records", {key: record.get(key) for key in unread_fields})
    return {key: value for key, value in record.items() if key not in unread_fields}


def _checked_document(record: dict[str, Any], messages: list[Message], reader: RecordReader) -> Conversation:
    """A document. Raises RecordError if it is not to be trained on."""
    weight = read_loss_weight(record, RECORD_WEIGHT_KEYS, "")
    media_kinds = [kind for kind, _ in reader.media_references]
    object_reader = ObjectReader(record, media_kinds, len(media_kinds))
    if media_kinds or any(record.get(field) for field in OBJECT_FIELDS):  # text alone is not searched
        messages = object_reader.read_messages(messages)
    if weight[0] == 0:
        raise RecordError("no loss", "the document has the loss weight 0", weight[1])
    return Conversation(
        [],
        reader.media_references,
        reader.field_paths,
        record_identity(record.get("id")),
        reader.ignored_keys,
        media_limits=reader.media_limits,
        document=messages[0]["content"],
        loss_weight=weight[0],
        objects=object_reader.take_objects(messages),
        unsaid_boxes=object_reader.unsaid_boxes,
    )


def detect_format(record: dict[str, Any]) -> RecordFormat:
    """Recognises the format of a record. Raises RecordError if it has none, or the turns of two."""
    present_fields = [name for name in CONVERSATION_FIELDS if record.get(name) not in EMPTY_VALUES]
    if len(present_fields) > 1:
        quoted_names = " and ".join(map(repr, present_fields))
        detail = f"the record has both {quoted_names}, but only one can be trained on; leave out one"
        raise RecordError("two conversations", detail, present_fields[1])
    for candidate_format in FORMATS.values():
        if candidate_format.matches_record(record):
            return candidate_format
    names = ", ".join(map(repr, sorted(record))) or "no field"
    raise RecordError(
        "no conversation", f"the record has {names[:MAX_SHOWN_NAMES]}; {_format_advice(record)}"
    )


def _format_advice(record: dict[str, Any]) -> str:
    """What makes a record without a format readable: finished options, if its columns have usual names."""
    keys = {key.lower(): key for key in record}
    parts = {part: next(filter(None, map(keys.get, names)), "") for part, names in USUAL_COLUMNS.items()}
    if parts["user"] and parts["assistant"]:
        columns = ",".join(f"{key}={part}" for part, key in parts.items() if key)
        is_marked = MEDIA_MARKER.search(str(record[parts["user"]])) or not (parts["image"] or parts["video"])
        return f"give --columns {columns}{'' if is_marked else ' --missing-markers first'}"
    if near := [field for key in keys for field in get_close_matches(key, CONVERSATION_FIELDS, 1)]:
        return f"did you mean {near[0]!r}?"
    return (
        f"formats have {', '.join(CONVERSATION_FIELDS)}, a question ({', '.join(QUESTION_FIELDS)}) and its"
        f" answer ({', '.join(ANSWER_FIELDS)}), or {', '.join(documents.FIELDS)}; or name the columns with"
        " --columns COLUMN=user,COLUMN=assistant, and images with ,COLUMN=image --missing-markers first"
    )


def _refuse_unsupervised_fields(record: dict[str, Any]) -> None:
    for key, field_meaning in UNSUPERVISED_FIELDS.items():
        value = record.get(key)
        # Tables have all columns in every row: {"ref": [], "bbox": []} where there are no boxes.
        parts = value.values() if isinstance(value, dict) else [value]
        if any(part not in EMPTY_VALUES for part in parts):
            raise RecordError("not supervised text", f"{key!r} holds {field_meaning}", key)
    if isinstance(record.get("label"), bool):
        detail = "a 'label' of true or false judges the answer (KTO)"
        raise RecordError("not supervised text", detail, "label")
