"""Alpaca: ``instruction``, ``input``, ``output``, ``history`` and ``system``; ms-swift's query and response;
TRL's prompt and completion.

The question is ``instruction``, a newline and ``input``, or the one of them that is not empty, as in
LLaMA-Factory. ``history`` holds pairs of question and answer; their answers are learnt too.
"""

from __future__ import annotations

from typing import Any

from .conversation import Message, RecordError, shorten_value
from .record_reader import RecordFormat, RecordReader

QUESTION_FIELDS = ("instruction", "query", "prompt")
ANSWER_FIELDS = ("output", "response", "completion")


def _filled_field(record: dict[str, Any], field_names: tuple[str, ...]) -> str | None:
    """The field of these names that has a value. Raises RecordError if several have."""
    filled_fields = [name for name in field_names if record.get(name) not in (None, "")]
    if len(filled_fields) > 1:
        raise RecordError(
            "two conversations",
            f"the record has both {filled_fields[0]!r} and {filled_fields[1]!r}",
            filled_fields[1],
        )
    return filled_fields[0] if filled_fields else None


def _history_turns(record: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """(role, content, location) of the turns in ``history``."""
    history = record.get("history") or []
    if not isinstance(history, list):
        raise RecordError(
            "bad history", f"pairs are required, but this is {shorten_value(history)}", "history"
        )
    role_turns = []
    for i, history_pair in enumerate(history):
        if not isinstance(history_pair, (list, tuple)) or len(history_pair) != 2:
            raise RecordError(
                "bad history",
                f"a pair of question and answer is required, but this is {shorten_value(history_pair)}",
                f"history[{i}]",
            )
        role_turns.append(("user", history_pair[0], f"history[{i}][0]"))
        role_turns.append(("assistant", history_pair[1], f"history[{i}][1]"))
    return role_turns


def _read_messages(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    role_turns = _history_turns(record)
    # The question is the instruction and its input, of which one may be missing.
    question_fields = []
    for name in (_filled_field(record, QUESTION_FIELDS), _filled_field(record, ("input",))):
        if name and not isinstance(record[name], str):
            raise RecordError(
                "bad text", f"a string is required, but this is {shorten_value(record[name])}", name
            )
        if name:
            question_fields.append(name)
    if not question_fields:
        raise RecordError("no conversation", "'instruction' and 'input' are empty", "instruction")
    question_text = "\n".join(record[name] for name in question_fields)

    answer_field = _filled_field(record, ANSWER_FIELDS)
    if answer_field is not None:
        answer_turns = [("assistant", record[answer_field], answer_field)]
    else:  # without an empty turn, the answers of the history would hide that this one is missing
        answer_turns = [("assistant", "", ANSWER_FIELDS[0])] if role_turns else []

    messages = []
    for role, content, field_path in (
        *role_turns,
        ("user", question_text, question_fields[0]),
        *answer_turns,
    ):
        messages.append(reader.read_content(role, content, field_path))
    return messages


FORMAT = RecordFormat(
    "alpaca",
    "instruction",
    "instruction, input, output, history and system (LLaMA-Factory); query and response (ms-swift); prompt"
    " and completion (TRL)",
    lambda record: (
        any(record.get(key) is not None for key in (*QUESTION_FIELDS, "input"))
        and any(key in record for key in ANSWER_FIELDS)
    ),
    _read_messages,
    read_fields=(*QUESTION_FIELDS, "input", *ANSWER_FIELDS, "history"),
)
