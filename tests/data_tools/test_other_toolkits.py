"""What the page on other toolkits says of their files, on small files like those in their documentation."""

from __future__ import annotations

import json
from typing import Any

import pytest

from data_tools.formats import RecordError, read_conversation
from tests.data.media import encoded


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def asked(question: str, answer: str = "It is.") -> list[dict[str, str]]:
    return [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]


def calls(role: str, *cities: str) -> list[dict[str, str]]:
    call = '{"name": "air", "arguments": {"city": "%s"}}'
    return [{"role": role, "content": call % city} for city in cities]


AIR = {"name": "air", "description": "Quality of air.", "parameters": {"type": "object", "properties": {}}}
SWIFT_TOOLS = json.dumps([{"type": "function", "function": AIR}])
TRL_PARTS = [
    {"index": None, "text": "What is it?\n", "type": "text"},
    {"index": 0, "text": None, "type": "image"},
]
READ: dict[str, tuple[dict[str, Any], str]] = {
    "LLaMA-Factory's mllm_demo": (
        {"messages": [user("<image>What is it?"), assistant("A dot.")], "images": ["a.png"]},
        "[image]What is it? > A dot.",
    ),
    "LLaMA-Factory's glaive_toolcall": (
        {
            "conversations": [
                {"from": "human", "value": "Air?"},
                {"from": "function_call", "value": '{"name": "air", "arguments": {"sizes": [5, 3]}}'},
                {"from": "observation", "value": '{"aqi": 15}'},
                {"from": "gpt", "value": "Good."},
            ],
            "tools": json.dumps([AIR]),
        },
        'Air? > air({"sizes": [5, 3]}) > {"aqi": 15} > Good.',
    ),
    "ms-swift's agent": (
        {
            "tools": SWIFT_TOOLS,
            "messages": [
                user("Air?"),
                *calls("tool_call", "Oslo", "Rome"),
                {"role": "tool_response", "content": "10"},
                {"role": "tool_response", "content": "72"},
                assistant("Good and bad."),
            ],
        },
        'Air? > air({"city": "Oslo"})air({"city": "Rome"}) > 10 > 72 > Good and bad.',
    ),
    "ms-swift's agent with images": (
        {
            "tools": SWIFT_TOOLS,
            "messages": [
                user("<image>Air?"),
                assistant("<think>\nI look.\n</think>\n"),
                *calls("tool_call", "Oslo"),
                {"role": "tool_response", "content": '{"images": "<image>"}'},
                assistant("Good."),
            ],
            "images": ["a.png", "b.png"],
        },
        '[image]Air? > <think>\nI look.\n</think>\nair({"city": "Oslo"}) > {"images": "[image]"} > Good.',
    ),
    "ms-swift's grounding of the model": (
        {
            "messages": [
                user("<image>Find the <|object_ref_start|>sheep<|object_ref_end|>"),
                assistant("<|box_start|>(101,201),(150,266)<|box_end|>"),
            ],
            "images": ["a.png"],
            "objects": {"ref": [], "bbox": []},
        },
        "[image]Find the <|object_ref_start|>sheep<|object_ref_end|> > "
        "<|box_start|>(101,201),(150,266)<|box_end|>",
    ),
    "ms-swift's objects": (
        {
            "messages": [user("<image>Find the <ref-object>"), assistant("<bbox><bbox>")],
            "images": ["a.png"],
            "objects": {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]]},
        },
        "[image]Find the <ref-object> > <bbox><bbox>",
    ),
    "TRL's messages": (
        {
            "messages": [user(TRL_PARTS), assistant([{"index": None, "text": "A dot.", "type": "text"}])],
            "images": [{"bytes": encoded(8, 8), "path": None}],
        },
        "What is it?\n[image] > A dot.",
    ),
    "TRL's prompt and completion": (
        {
            "prompt": [user([{"type": "image"}, {"type": "text", "text": "What?"}])],
            "completion": [assistant("A dot.")],
            "image": "a.png",
        },
        "[image]What? > A dot.",
    ),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "LLaMA-Factory's preferences": (
        {"conversations": asked("a")[:1], "chosen": asked("a", "b")[1], "rejected": asked("a", "c")[1]},
        "preferences",
    ),
    "boxes without markers": (
        {"messages": [user("a"), assistant("b")], "bbox": [[90.9, 160.8, 135, 212.8]]},
        "boxes without a place in the text",
    ),
    "columns of other names": ({"ask": "a", "reply": "b"}, "--columns"),
}


def written(messages: list[dict[str, Any]]) -> str:
    """Messages in a line: media in brackets, calls as functions, turns between arrows."""
    turns = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = "".join(part.get("text", f"[{part['type']}]") for part in parts)
        functions = [call["function"] for call in message.get("tool_calls", ())]
        turns.append(text + "".join(f"{f['name']}({json.dumps(f['arguments'])})" for f in functions))
    return " > ".join(turns)


@pytest.mark.parametrize("source", READ)
def test_records_of_others_are_read(source: str):
    record, expected = READ[source]
    assert written(read_conversation(record).messages) == expected


@pytest.mark.parametrize("source", REFUSED)
def test_records_of_others_are_refused_with_the_reason(source: str):
    record, reason = REFUSED[source]
    with pytest.raises(RecordError, match=reason):
        read_conversation(record)
