"""ms-swift's form of ShareGPT: ``conversation``, a list of objects with ``human`` and ``assistant``."""

from __future__ import annotations

from typing import Any

from .canonical import Message, RecordError, shown
from .content import Reader
from .kind import Format, listed_turns

ASKED = ("human", "user")
ANSWERED = ("assistant", "gpt", "bot")


def _read(record: dict[str, Any], reader: Reader) -> list[Message]:
    messages: list[Message] = []
    for i, pair in enumerate(listed_turns(record, "conversation")):
        where = f"conversation[{i}]"
        if not isinstance(pair, dict):
            raise RecordError("bad turn", f"an object is required, but this is {shown(pair)}", where)
        read = []
        for role, names in (("user", ASKED), ("assistant", ANSWERED)):
            key = next((name for name in names if pair.get(name) is not None), None)
            if key is None:
                raise RecordError("bad turn", f"the {role}'s text is missing ({names[0]!r})", where)
            read.append(key)
            message: Message = {"role": role, "content": ""}
            reader.fill(message, pair[key], f"{where}.{key}")
            messages.append(message)
        reader.ignore("turns", pair, *read)

    return messages


FORMAT = Format(
    "pairs",
    "conversation",
    "conversation, a list of objects with human and assistant (ms-swift)",
    lambda record: record.get("conversation") is not None,
    _read,
)
