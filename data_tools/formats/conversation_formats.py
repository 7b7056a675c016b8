"""The formats of conversations: lists of turns, pairs of question and answer, and fields of a table.

* A list has turns with a role and content each.
* Pairs are ``conversation`` with ``human`` and ``assistant`` (ms-swift), and ``texts`` with ``user`` and
  ``assistant`` (The Cauldron, FineVision).
* Alpaca has ``instruction``, ``input``, ``output``, ``history`` and ``system``; ms-swift query and response;
  TRL prompt and completion. The question is ``instruction``, a newline and ``input``, or the one of them that
  is not empty, as in LLaMA-Factory. ``history`` holds pairs of question and answer; their answers are trained
  on too.
"""

from typing import Any

from .conversation import Message, RecordError, checked_text, shorten_value
from .record_reader import RecordFormat, RecordReader, listed_turns, unread_keys

# --- Lists of turns -----------------------------------------------------------------------------------------


def _read_trl(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    prompt, completion = (listed_turns(record, name) for name in ("prompt", "completion"))
    messages = reader.read_turns([*prompt, *completion])
    for message in messages[: len(prompt)]:
        if message["role"] == "assistant":
            message["loss_weight"] = 0.0
    return messages


OPENAI = RecordFormat(
    "openai",
    "messages",
    lambda record: record.get("messages") is not None,
    read_fields=("parallel_tool_calls", "extra_info", "_dataset_name"),
)
"""TRL and ms-swift have it too. ``<image>`` in a text stands for an entry of ``image(s)``,
as in ShareGPT; where media are content parts, it is text."""
QWEN = RecordFormat(
    "qwen",
    "conversations",
    lambda record: record.get("conversations") is not None and isinstance(record.get("data_path"), str),
    read_fields=("data_path",),
    strip_user_text=True,
    media_folder_field="data_path",
)
"""Qwen's fine-tuning JSON. Only ``data_path`` tells it from ShareGPT, so a file without it is read by this
rule if ``--format qwen`` says so."""
SHAREGPT = RecordFormat("sharegpt", "conversations", lambda record: record.get("conversations") is not None)
"""LLaVA's own code moves an image to the beginning of its turn; here it stays where the text has it."""
TRL = RecordFormat(
    "trl",
    "completion",
    lambda record: isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list),
    _read_trl,
    read_fields=("prompt",),
)


# --- Pairs --------------------------------------------------------------------------------------------------


LISTED_TURNS = {"from": "conversations", "role": "messages"}
"""The field of turns that have this key."""


def _read_pairs(record: dict[str, Any], reader: RecordReader) -> list[Message]:
    messages: list[Message] = []
    turns_field = "texts" if _has_paired_texts(record) else "conversation"
    for i, turn_pair in enumerate(listed_turns(record, turns_field)):
        field_path = f"{turns_field}[{i}]"
        if not isinstance(turn_pair, dict):
            raise RecordError(
                "bad turn", f"an object is required, but this is {shorten_value(turn_pair)}", field_path
            )
        read_keys = []
        for role, role_keys in (("user", ("human", "user")), ("assistant", ("assistant", "gpt", "bot"))):
            text_key = next((name for name in role_keys if turn_pair.get(name) is not None), None)
            if text_key is None:
                listed_field = next((LISTED_TURNS[key] for key in LISTED_TURNS if key in turn_pair), "")
                advice = f"; did you mean the field {listed_field!r}?" if listed_field else ""
                detail = f"the {role}'s text is missing ({role_keys[0]!r}){advice}"
                raise RecordError("bad turn", detail, field_path)
            read_keys.append(text_key)
            messages.append(reader.read_content(role, turn_pair[text_key], f"{field_path}.{text_key}"))
        reader.ignored_keys += unread_keys("turns", turn_pair, *read_keys)

    return messages


def _has_paired_texts(record: dict[str, Any]) -> bool:
    texts = record.get("texts")
    return isinstance(texts, list) and bool(texts) and isinstance(texts[0], dict)


PAIRS = RecordFormat(
    "pairs",
    "conversation",
    lambda record: record.get("conversation") is not None or _has_paired_texts(record),
    _read_pairs,
    read_fields=("texts",),
)


# --- Fields of a table --------------------------------------------------------------------------------------


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
        role_turns += [
            ("user", history_pair[0], f"history[{i}][0]"),
            ("assistant", history_pair[1], f"history[{i}][1]"),
        ]
    return role_turns


def _read_alpaca(record: dict[str, Any], reader: RecordReader) -> list[Message]:
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
    role_turns += [
        ("user", question_text, question_fields[0]),
        # An empty turn shows that the answer is missing, which those of the history would hide.
        ("assistant", record[answer_field] if answer_field else "", answer_field or ANSWER_FIELDS[0]),
    ]
    return [reader.read_content(*turn) for turn in role_turns]


ALPACA = RecordFormat(
    "alpaca",
    "instruction",
    lambda record: (
        any(record.get(key) is not None for key in (*QUESTION_FIELDS, "input"))
        and any(key in record for key in ANSWER_FIELDS)
    ),
    _read_alpaca,
    read_fields=(*QUESTION_FIELDS, "input", *ANSWER_FIELDS, "history"),
)


FORMATS = (OPENAI, QWEN, SHAREGPT, PAIRS, TRL, ALPACA)
