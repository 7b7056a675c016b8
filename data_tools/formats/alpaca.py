"""Alpaca: ``instruction``, ``input``, ``output``, ``history`` and ``system``; ms-swift's query and response.

The question is ``instruction``, a newline and ``input``, or the one of them that is not empty, as in
LLaMA-Factory. ``history`` holds pairs of question and answer; their answers are learnt too.
"""

from __future__ import annotations

from typing import Any

from .canonical import Message, RecordError, shown
from .content import Reader
from .kind import Format

QUESTIONS = ("instruction", "query", "prompt")
ANSWERS = ("output", "response")


def _field(record: dict[str, Any], names: tuple[str, ...]) -> str | None:
    """The field of these names that has a value. Raises RecordError if several have."""
    found = [name for name in names if record.get(name) not in (None, "")]
    if len(found) > 1:
        raise RecordError("two conversations", f"the record has both {found[0]!r} and {found[1]!r}", found[1])
    return found[0] if found else None


def _read(record: dict[str, Any], reader: Reader) -> list[Message]:
    turns: list[tuple[str, Any, str]] = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise RecordError("bad history", f"pairs are required, but this is {shown(history)}", "history")
    for i, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            detail = f"a pair of question and answer is required, but this is {shown(pair)}"
            raise RecordError("bad history", detail, f"history[{i}]")
        turns += [("user", pair[0], f"history[{i}][0]"), ("assistant", pair[1], f"history[{i}][1]")]

    asked = [name for name in (_field(record, QUESTIONS), _field(record, ("input",))) if name]
    question = [(record[name], name) for name in asked]
    if not question:
        raise RecordError("no conversation", "'instruction' and 'input' are empty", "instruction")
    if wrong := next((name for value, name in question if not isinstance(value, str)), None):
        raise RecordError("bad text", f"a string is required, but this is {shown(record[wrong])}", wrong)
    turns.append(("user", "\n".join(value for value, _ in question), question[0][1]))
    if (answer := _field(record, ANSWERS)) is not None:
        turns.append(("assistant", record[answer], answer))
    elif history:  # without the empty turn, the answers of the history would hide that this one is missing
        turns.append(("assistant", "", ANSWERS[0]))

    messages = []
    for role, content, where in turns:
        message: Message = {"role": role, "content": ""}
        reader.fill(message, content, where)
        messages.append(message)
    return messages


FORMAT = Format(
    "alpaca",
    "instruction",
    "instruction, input, output, history and system (LLaMA-Factory); query and response (ms-swift)",
    lambda record: (
        any(record.get(key) is not None for key in (*QUESTIONS, "input"))
        and any(key in record for key in ANSWERS)
    ),
    _read,
    fields=(*QUESTIONS, "input", *ANSWERS, "history"),
)
