"""Reads the functions that an assistant may call, its calls, and calls written as text."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from .canonical import Message, RecordError, shown, text

THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
"""Reasoning in front of a call, as LLaMA-Factory has it in a turn of the role function_call."""
DEEPEST = 200
"""Levels of lists and objects in a function or in arguments."""


def read_tools(
    record: dict[str, Any], keys: tuple[str, ...] = ("tools", "functions")
) -> list[dict[str, Any]]:
    """The record's functions, each as ``{"type": "function", "function": {...}}``.

    They may be a list or a JSON text of one, and each may be the function alone.

    Raises:
        RecordError: they are something else.
    """
    given = [(key, record[key]) for key in keys if record.get(key) not in (None, "", [], {}, "[]")]
    if not given:
        return []
    if len(given) > 1:
        raise RecordError("bad tools", "the record has both 'tools' and 'functions'", given[1][0])

    where, value = given[0]
    tools = parsed(value, where, "bad tools")
    if isinstance(tools, dict):
        tools = [tools]
    if not isinstance(tools, list):
        raise RecordError("bad tools", f"a list of functions is required, but this is {shown(tools)}", where)
    return [_tool(tool, f"{where}[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if isinstance(tool, str):
        tool = parsed(tool, where, "bad tools")
    if isinstance(tool, dict) and "function" not in tool and isinstance(tool.get("name"), str):
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(
            "bad tools", f"a function with a name is required, but this is {shown(tool)}", where
        )
    check_json(tool, where, "bad tools")
    return tool


def check_json(value: Any, where: str, reason: str, depth: int = 0) -> None:
    """Checks that a value is plain JSON whose texts, also its keys, could stand in a turn.

    Raises:
        RecordError: it holds something else, for instance a date of a table, or is nested too deeply.
    """
    if depth > DEEPEST:
        raise RecordError(reason, f"more than {DEEPEST} levels of lists and objects", where)
    if isinstance(value, dict):
        for key, item in value.items():
            text(key, where)
            check_json(item, where, reason, depth + 1)
    elif isinstance(value, list):
        for item in value:
            check_json(item, where, reason, depth + 1)
    elif isinstance(value, str):
        text(value, where)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RecordError(reason, f"{value} is not a number of JSON", where)
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise RecordError(reason, f"a {type(value).__name__} cannot be written as JSON", where)


def parsed(value: Any, where: str, reason: str) -> Any:
    """A value that may be written as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecordError(reason, f"{shown(value)} is not JSON: {error}", where) from error


def read_call(call: Any, where: str) -> dict[str, Any]:
    """One call: ``{"function": {"name", "arguments"}}`` or ``{"name", "arguments"}``, with arguments as
    an object or as JSON text of one.

    Raises:
        RecordError: it is something else.
    """
    call = parsed(call, where, "bad tool call")
    function = call.get("function", call) if isinstance(call, dict) else None
    if isinstance(call, dict) and call.get("type") not in (None, "function"):
        raise RecordError("bad tool call", f"a call of type {shown(call['type'])}; valid: function", where)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(
            "bad tool call", f"a call with a name is required, but this is {shown(call)}", where
        )

    arguments = function.get("arguments", function.get("parameters"))
    arguments = parsed(arguments, f"{where}.arguments", "bad tool call") if arguments != "" else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        detail = f"arguments must be an object, but these are {shown(arguments)}"
        raise RecordError("bad tool call", detail, f"{where}.arguments")
    text(function["name"], f"{where}.name")
    check_json(arguments, f"{where}.arguments", "bad tool call")
    return {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def leave_out_fillers(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """Takes null arguments out of calls that another one of the record's functions has, and this one not.

    Tables fill them in where calls of several functions share a column, and whoever writes such a table as
    JSON keeps them. A template would write them into the call.
    """
    names = {tool["function"]["name"]: _parameters(tool["function"]) for tool in tools}
    of_any = set().union(*names.values())
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if (own := names.get(function["name"])) is not None:
                function["arguments"] = {
                    name: value
                    for name, value in function["arguments"].items()
                    if value is not None or name not in of_any - own
                }


def _parameters(function: dict[str, Any]) -> set[str]:
    """The names of a function's parameters, as far as it describes them."""
    schema = function.get("parameters")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return set(properties) if isinstance(properties, dict) else set()


def read_calls(turn: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """The calls of an assistant's turn: ``tool_calls``, or one ``function_call`` (OpenAI's first form)."""
    calls = turn.get("tool_calls")
    refuse_second_calls(turn, "tool_calls", ("function_call",), prefix)
    if calls in (None, "", []):
        single = turn.get("function_call")
        return [] if single in (None, "", {}) else [read_call(single, f"{prefix}function_call")]
    calls = parsed(calls, f"{prefix}tool_calls", "bad tool call")
    if not isinstance(calls, list):
        detail = f"a list of calls is required, but this is {shown(calls)}"
        raise RecordError("bad tool call", detail, f"{prefix}tool_calls")
    return [read_call(call, f"{prefix}tool_calls[{i}]") for i, call in enumerate(calls)]


def refuse_second_calls(turn: dict[str, Any], first: str, others: tuple[str, ...], prefix: str) -> None:
    """Raises RecordError if a turn has calls in a field and in another one, whose order is unknown."""
    empty: tuple[Any, ...] = (None, "", [], {}, "[]", "{}")
    second = next((key for key in others if turn.get(key) not in empty), None)
    if second and turn.get(first) not in empty:
        detail = f"the turn has calls in {first!r} and in {second!r}; leave out one"
        raise RecordError("bad tool call", detail, f"{prefix}{second}")


def calls_in_text(written: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    """The reasoning and the calls of a turn whose role says that its text is a call."""
    thought = THOUGHT.match(written)
    said = thought[0] if thought else ""
    calls = parsed(written[len(said) :], where, "bad tool call")
    calls = calls if isinstance(calls, list) else [calls]
    if not calls:
        raise RecordError("bad tool call", "the turn holds no call", where)
    return said.strip(), [read_call(call, where) for call in calls]


def merge_calls(messages: list[Message], call: Message) -> bool:
    """Adds the calls of a turn of calls to the assistant's turn in front of it. Returns whether it could."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or (last.get("tool_calls") and call["content"]):
        return False
    if last.get("loss_weight") != call.get("loss_weight"):
        return False
    thought = call.get("reasoning_content")
    known = last.get("reasoning_content")
    # A thought between two calls, or a second one, has no place in one turn.
    if thought and thought != known and (known or last.get("tool_calls")):
        return False
    if isinstance(last["content"], str) and call["content"]:
        last["content"] = f"{last['content']}{call['content']}"
    elif call["content"]:
        return False

    if thought:
        last["reasoning_content"] = thought
    last["tool_calls"] = [*last.get("tool_calls", []), *call["tool_calls"]]
    return True
