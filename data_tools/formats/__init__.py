"""Reads conversations of all formats into one canonical form, with their media in the order of the text.

:data:`FORMATS` is the table of formats, one file each. A record's format is recognised by its fields,
or given.
Text stays as it is, including white space (``qwen`` excepted). Nothing is guessed: a record is refused if its
markers and media disagree, if its roles do not follow the order (system,) user, assistant, user, ..., if an
answer has no text, or if it holds something that belongs to the task and cannot be shown to the model: boxes
beside the text, preferences, audio (:mod:`data_tools.audio` says what counts as audio). Keys that nothing
reads are listed in :attr:`Conversation.ignored`.
"""

from __future__ import annotations

from typing import Any

from . import alpaca, llamafactory, openai, pairs, qwen, sharegpt
from .canonical import (
    Conversation,
    RecordError,
    add_system,
    check_answers,
    check_order,
    check_weights,
    identity,
    refuse_audio_in,
    refuse_listed_audio,
    shown,
    text,
    without_answer,
)
from .content import EMPTY
from .kind import Format
from .tools import leave_out_fillers, read_tools
from .weights import apply_record_weight

__all__ = ["FORMATS", "Conversation", "RecordError", "format_of", "read_conversation", "read_prompt"]

FORMATS: dict[str, Format] = {
    module.FORMAT.name: module.FORMAT for module in (llamafactory, openai, qwen, sharegpt, pairs, alpaca)
}
"""In the order in which they are tried: one that is a special case of another comes first."""
CONVERSATIONS = ("messages", "conversations", "conversation")
MEANING = {
    "objects": "boxes beside the text; write them into the text as the model's family does",
    "bbox": "boxes beside the text; write them into the text as the model's family does",
    "bboxes": "boxes beside the text; write them into the text as the model's family does",
    "chosen": "preferences, which supervised training cannot learn",
    "rejected": "preferences, which supervised training cannot learn",
    "rejected_response": "preferences, which supervised training cannot learn",
    "rejected_messages": "preferences, which supervised training cannot learn",
    "chosen_messages": "preferences, which supervised training cannot learn",
    "kto_tag": "judgements of answers, which supervised training cannot learn",
}
"""Fields that belong to the task and have no place in a supervised sample."""


def read_prompt(record: Any, format: str = "") -> Conversation:
    """Reads what is said before the requested answer: a record without a last turn that is the assistant's.

    Raises:
        RecordError: like :func:`read_conversation`, but the record need not contain anything to learn.
    """
    conversation = read_conversation(record, format, prompt=True)
    without_answer(conversation)
    if not conversation.messages or conversation.messages[-1]["role"] not in ("user", "tool"):
        raise RecordError("no user turn", "a prompt must end with a user's turn")
    return conversation


def read_conversation(record: Any, format: str = "", *, prompt: bool = False) -> Conversation:
    """Reads a record.

    Args:
        format: name in :data:`FORMATS`; empty: recognise it. prompt: the record needs no assistant turn.

    Raises:
        RecordError: the record cannot be used.
    """
    if not isinstance(record, dict):
        listed = isinstance(record, list) and any(isinstance(item, dict) for item in record)
        advice = "; if it is a pack of conversations, write each as a record of its own" if listed else ""
        detail = f"the record is a {type(record).__name__}, not an object{advice}"
        raise RecordError("not an object", detail)

    refuse_listed_audio(record, "")
    chosen = FORMATS[format] if format else format_of(record)
    _refuse_meaning(record)
    reader = chosen.reader(record)
    messages = chosen.read(record, reader)
    reader.finish()
    if not prompt:
        check_answers(messages, chosen.place)

    if record.get("system") not in (None, ""):
        system = text(record["system"], "system")
        refuse_audio_in(system, "system", anywhere=False)
        add_system(messages, system, "system", chosen.place)
    check_order(messages, chosen.place, prompt=prompt)
    apply_record_weight(record, messages)
    if not prompt:
        check_weights(messages, chosen.place)
    tools = read_tools(record)
    leave_out_fillers(messages, tools)
    return Conversation(
        messages,
        reader.media,
        reader.fields,
        identity(record.get("id")),
        reader.ignored,
        tools,
        chosen.name,
    )


def format_of(record: dict[str, Any]) -> Format:
    """Recognises the format of a record. Raises RecordError if it has none, or the turns of two."""
    found = [name for name in CONVERSATIONS if record.get(name) not in EMPTY]
    if len(found) > 1:
        names = " and ".join(f"'{name}'" for name in found)
        detail = f"the record has both {names}, but only one can be learnt; leave out one"
        raise RecordError("two conversations", detail, found[1])
    for candidate in FORMATS.values():
        if candidate.matches(record):
            return candidate
    detail = (
        "the record has neither 'messages' nor 'conversations', nor 'instruction' and 'output'; "
        f"it has {shown(sorted(record))}"
    )
    raise RecordError("no conversation", detail)


def _refuse_meaning(record: dict[str, Any]) -> None:
    for key, what in MEANING.items():
        if record.get(key) not in EMPTY:
            raise RecordError("not supervised text", f"{key!r} holds {what}", key)
    label = record.get("label")
    if isinstance(label, bool):
        raise RecordError(
            "not supervised text", "a 'label' of true or false judges the answer (KTO)", "label"
        )
