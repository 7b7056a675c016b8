"""Alpaca: ``instruction``, ``input``, ``output``, ``history`` and ``system``; ms-swift's query and response;
TRL's prompt and completion.

The question is ``instruction``, a newline and ``input``, or the one of them that is not empty, as in
LLaMA-Factory. ``history`` holds pairs of question and answer; their answers are trained on too.
"""

from __future__ import annotations

from typing import Any

from .conversation import Message, RecordError, checked_text, shorten_value
from .record_reader import RecordFormat, RecordReader

QUESTION_FIELDS = ("instruction", "query", "prompt")
ANSWER_FIELDS = ("output", "response", "completion")


def filled_field(record: dict[str, Any], field_names: tuple[str, ...]) -> str | None:
    """The field of these names that has a value. Raises RecordError if several have."""
    filled_fields = [name for name in field_names if record.get(name) not in (None, "")]
    if len(filled_fields) > 1:
        detail = f"the record has both {filled_fields[0]!r} and {filled_fields[1]!r}"
        raise RecordError("two conversations", detail, filled_fields[1])
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
            detail = f"a pair of question and answer is required, but this is {shorten_value(history_pair)}"
            raise RecordError("bad history", detail, f"history[{i}]")
        role_turns.append(("user", history_pair[0], f"history[{i}][0]"))
        role_turns.append(("assistant", history_pair[1], f"history[{i}][1]"))
    return role_turns


def _read_messages(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    role_turns = _history_turns(record)
    # The question is the instruction and its input, of which one may be missing.
    question_fields = list(
        filter(None, (filled_field(record, QUESTION_FIELDS), filled_field(record, ("input",))))
    )
    if not question_fields:
        detail = f"no question among the fields {shorten_value(sorted(record))}"
        raise RecordError("no conversation", detail, "instruction")
    question_text = "\n".join(checked_text(record[name], name) for name in question_fields)

    answer_field = filled_field(record, ANSWER_FIELDS)
    if answer_field is None and not role_turns:
        detail = f"no answer among the fields {shorten_value(sorted(record))}: there is nothing to train on"
        raise RecordError("no assistant turn", detail, "instruction")
    # An empty turn shows that the answer is missing, which those of the history would hide.
    answer = record[answer_field] if answer_field else ""
    role_turns.append(("user", question_text, question_fields[0]))
    role_turns.append(("assistant", answer, answer_field or ANSWER_FIELDS[0]))
    return [reader.read_content(*turn) for turn in role_turns]


FORMAT = RecordFormat(
    "alpaca",
    "instruction",
    lambda record: (
        any(record.get(key) is not None for key in (*QUESTION_FIELDS, "input"))
        and any(key in record for key in ANSWER_FIELDS)
    ),
    _read_messages,
    read_fields=(*QUESTION_FIELDS, "input", *ANSWER_FIELDS, "history"),
)
