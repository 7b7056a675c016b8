"""Reads the functions that an assistant may call, its calls, and calls written as text.

Qwen3.5 writes an argument as it is, between ``<parameter=NAME>`` and ``</parameter>``, and the other families
write a call between ``<tool_call>`` and ``</tool_call>``. A server takes the first closing tag for the end,
so arguments with one are refused.
"""

import math
import re
from typing import Any

from megatron_vl.data.sample.conversation_checks import iterate_texts

from ..records import EXACT_DECODER, DuplicateKeyError, RoundedNumber
from .conversation import Message, RecordError, checked_text, shorten_value

NO_CALLS: tuple[Any, ...] = (None, "", [], {}, "[]", "{}")
THINK_BLOCK = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
"""Reasoning in front of a call, as LLaMA-Factory has it in a turn of the role function_call."""
CLOSING_TAG = re.compile("</(?:parameter|function|tool_call)>")
MAX_JSON_DEPTH = 200
"""Levels of lists and objects in a function or in arguments."""


def read_tools(record: dict[str, Any]) -> list[dict[str, Any]]:
    """The record's functions, each as ``{"type": "function", "function": {...}}``.

    They may be a list or a JSON text of one, and each may be the function alone.

    Raises:
        RecordError: they are something else.
    """
    present_fields = [key for key in ("tools", "functions") if record.get(key) not in NO_CALLS]
    if not present_fields:
        return []
    if len(present_fields) > 1:
        raise RecordError("bad tools", "the record has both 'tools' and 'functions'", present_fields[1])

    field_path = present_fields[0]
    tools = parse_json_text(record[field_path], field_path, "bad tools")
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list):
        raise RecordError(
            "bad tools", f"a list of functions is required, but this is {shorten_value(tools)}", field_path
        )
    return [_read_tool(tool, f"{field_path}[{i}]") for i, tool in enumerate(tools)]


def _read_tool(tool: Any, field_path: str) -> dict[str, Any]:
    tool = parse_json_text(tool, field_path, "bad tools")
    if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(
            "bad tools", f"a function with a name is required, but this is {shorten_value(tool)}", field_path
        )
    check_plain_json(tool, field_path, "bad tools")
    return tool


def read_template_arguments(record: dict[str, Any]) -> dict[str, Any]:
    """The record's own arguments of the chat template. Raises RecordError if they are no object."""
    field_path, reason = "chat_template_kwargs", "bad template arguments"
    if record.get(field_path) in NO_CALLS:
        return {}
    arguments = parse_json_text(record[field_path], field_path, reason)
    if not isinstance(arguments, dict):
        raise RecordError(reason, f"an object is required, not {shorten_value(arguments)}", field_path)
    check_plain_json(arguments, field_path, reason)
    # Tables have all columns in every row.
    return {name: value for name, value in arguments.items() if value is not None}


def check_plain_json(json_value: Any, field_path: str, reason: str, depth: int = 0) -> None:
    """Checks that a value is plain JSON whose texts, also its keys, could stand in a turn.

    Raises:
        RecordError: it holds something else, for instance a date of a table, is nested too deeply, or would
            not be written as in the record (a number that a float rounds).
    """
    if isinstance(json_value, RoundedNumber):
        detail = "a number has more digits, or another exponent, than a float holds; write it as a string"
        raise RecordError(reason, detail, field_path)
    if depth > MAX_JSON_DEPTH:
        raise RecordError(reason, f"more than {MAX_JSON_DEPTH} levels of lists and objects", field_path)
    if isinstance(json_value, dict):
        for object_key, item in json_value.items():
            checked_text(object_key, field_path)
            check_plain_json(item, field_path, reason, depth + 1)
    elif isinstance(json_value, list):
        for item in json_value:
            check_plain_json(item, field_path, reason, depth + 1)
    elif isinstance(json_value, str):
        checked_text(json_value, field_path)
    elif isinstance(json_value, float) and not math.isfinite(json_value):
        raise RecordError(reason, f"{json_value} is not a number of JSON", field_path)
    elif json_value is not None and not isinstance(json_value, (bool, int, float)):
        raise RecordError(reason, f"a {type(json_value).__name__} cannot be written as JSON", field_path)


def parse_json_text(json_value: Any, field_path: str, reason: str) -> Any:
    """A value that may be written as JSON text."""
    if not isinstance(json_value, str):
        return json_value
    try:
        return EXACT_DECODER.decode(json_value)
    except DuplicateKeyError as error:
        raise RecordError(reason, str(error), field_path) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(reason, f"{shorten_value(json_value)} is not JSON: {error}", field_path) from error


def read_tool_call(call: Any, field_path: str) -> dict[str, Any]:
    """Reads a call: ``{"function": {"name", "arguments"}}`` or ``{"name", "arguments"}``.

    The arguments are an object, or the JSON text of one.

    Raises:
        RecordError: it is something else.
    """
    call = parse_json_text(call, field_path, "bad tool call")
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(call, dict) and call.get("type") not in (None, "function"):
        raise RecordError(
            "bad tool call", f"a call of type {shorten_value(call['type'])}; valid: function", field_path
        )
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(
            "bad tool call", f"a call with a name is required, but this is {shorten_value(call)}", field_path
        )

    arguments, arguments_path = (
        function.get("arguments", function.get("parameters")),
        f"{field_path}.arguments",
    )
    arguments = {} if arguments == "" else parse_json_text(arguments, arguments_path, "bad tool call")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, dict):
        detail = f"arguments must be an object, but these are {shorten_value(arguments)}"
        raise RecordError("bad tool call", detail, arguments_path)
    checked_text(function["name"], f"{field_path}.name")
    check_plain_json(arguments, arguments_path, "bad tool call")
    if closing_tag := next(filter(None, map(CLOSING_TAG.search, iterate_texts(arguments))), None):
        detail = (
            f"an argument has {closing_tag[0]}, which a server would take for the end of the argument or call"
        )
        raise RecordError("bad tool call", detail, arguments_path)
    call_id = {"id": call["id"]} if call.get("id") not in (None, "") else {}
    return {"type": "function", **call_id, "function": {"name": function["name"], "arguments": arguments}}


def read_tool_calls(turn: dict[str, Any], field_prefix: str) -> list[dict[str, Any]]:
    """The calls of an assistant's turn: ``tool_calls``, or one ``function_call`` (OpenAI's first form)."""
    calls, function_call = turn.get("tool_calls"), turn.get("function_call")
    refuse_second_calls(turn, "tool_calls", ("function_call",), field_prefix)
    if calls in (None, "", []):
        has_call = function_call not in (None, "", {})
        return [read_tool_call(function_call, f"{field_prefix}function_call")] if has_call else []

    calls = parse_json_text(calls, f"{field_prefix}tool_calls", "bad tool call")
    if not isinstance(calls, list):
        detail = f"a list of calls is required, but this is {shorten_value(calls)}"
        raise RecordError("bad tool call", detail, f"{field_prefix}tool_calls")
    return [read_tool_call(call, f"{field_prefix}tool_calls[{i}]") for i, call in enumerate(calls)]


def refuse_second_calls(
    turn: dict[str, Any], first_field: str, other_fields: tuple[str, ...], field_prefix: str
) -> None:
    """Raises RecordError if a turn has calls in a field and in another one, whose order is unknown."""
    second_field = next((key for key in other_fields if turn.get(key) not in NO_CALLS), None)
    if second_field and turn.get(first_field) not in NO_CALLS:
        detail = f"the turn has calls in {first_field!r} and in {second_field!r}; leave out one"
        raise RecordError("bad tool call", detail, f"{field_prefix}{second_field}")


def read_text_calls(turn_text: str, field_path: str) -> tuple[str, list[dict[str, Any]]]:
    """The reasoning and the calls of a turn whose role says that its text is a call."""
    think_match = THINK_BLOCK.match(turn_text)
    think_text = think_match[0] if think_match else ""
    calls = parse_json_text(turn_text[len(think_text) :], field_path, "bad tool call")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise RecordError("bad tool call", "the turn holds no call", field_path)
    return think_text.strip(), [read_tool_call(call, field_path) for call in calls]


def merge_calls(messages: list[Message], call_message: Message) -> bool:
    """Adds the calls of a turn of calls to the assistant's turn in front of it, if they can be one turn.

    Returns:
        Whether the calls were added.
    """
    last: Message = messages[-1] if messages else {"role": ""}
    if last["role"] != "assistant" or last.get("loss_weight") != call_message.get("loss_weight"):
        return False
    text, thought = call_message["content"], call_message.get("reasoning_content")
    # Text between two calls, or after media, has no place in one turn; neither has a second thought, or one
    # between two calls.
    if text and (last.get("tool_calls") or not isinstance(last["content"], str)):
        return False
    last_thought = last.get("reasoning_content")
    if thought and thought != last_thought and (last_thought or last.get("tool_calls")):
        return False
    if text:
        last["content"] += text
    if thought:
        last["reasoning_content"] = thought
    last["tool_calls"] = [*last.get("tool_calls", []), *call_message["tool_calls"]]
    return True
