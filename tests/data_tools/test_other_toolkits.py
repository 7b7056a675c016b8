"""What the page on other toolkits says of their files, on small files like those in their documentation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from data_tools.convert import ConversionOptions, ConvertError, convert_dataset
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
    "LLaMA-Factory's mllm_video_demo": (
        {"messages": [user("<video>What is it?"), assistant("A dot.")], "videos": ["a.mp4"]},
        "[video]What is it? > A dot.",
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
    "LLaMA-Factory's alpaca": (
        {"instruction": "Add.", "input": "1 + 1", "output": "2", "system": "S", "history": [["a", "b"]]},
        "S > a > b > Add.\n1 + 1 > 2",
    ),
    "ms-swift's messages": (
        {"messages": [user("<image><image>Which?"), assistant("The first.")], "images": ["a.png", "b.png"]},
        "[image][image]Which? > The first.",
    ),
    "ms-swift's pairs": (
        {"system": "S", "conversation": [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]},
        "S > a > b > c > d",
    ),
    "ms-swift's query": ({"query": "c", "response": "d", "history": [["a", "b"]]}, "a > b > c > d"),
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
    "LLaVA": (
        {"id": "9", "image": "p/9.png", "conversations": asked("<image>\nIs it?")},
        "[image]\nIs it? > It is.",
    ),
    "LLaVA without an image": ({"id": "w", "model": "", "conversations": asked("Is it?")}, "Is it? > It is."),
    "ShareGPT4V": (
        {"id": "0", "image": "coco/0.png", "conversations": asked("Is it?\n<image>")},
        "Is it?\n[image] > It is.",
    ),
    "Qwen's image": (
        {"image": "a.png", "conversations": asked("<image>\nIs it?")},
        "[image]\nIs it? > It is.",
    ),
    "Qwen's images": (
        {"images": ["a.png", "b.png"], "conversations": asked("<image>\n<image>\nIs it?")},
        "[image]\n[image]\nIs it? > It is.",
    ),
    "Qwen's video": (
        {"video": "a.mp4", "conversations": asked("<video>\nIs it?")},
        "[video]\nIs it? > It is.",
    ),
    "Qwen's boxes": (
        {
            "image": "a.png",
            "conversations": asked("<image>\nWhere?", '{\n"bbox_2d": [135, 114, 1016, 672]\n}'),
        },
        '[image]\nWhere? > {\n"bbox_2d": [135, 114, 1016, 672]\n}',
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
    "TRL's texts": ({"prompt": "The sky is", "completion": " blue."}, "The sky is >  blue."),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "LLaMA-Factory's audio": (
        {"messages": [user("<audio>What?"), assistant("A.")], "audios": ["a.mp3"]},
        "audio",
    ),
    "LLaMA-Factory's preferences": (
        {"conversations": asked("a")[:1], "chosen": asked("a", "b")[1], "rejected": asked("a", "c")[1]},
        "preferences",
    ),
    "LLaMA-Factory's kto": ({"messages": [user("a"), assistant("b")], "label": True}, "KTO"),
    "boxes without markers": (
        {"messages": [user("a"), assistant("b")], "bbox": [[90.9, 160.8, 135, 212.8]]},
        "boxes without a place in the text",
    ),
    "ms-swift's preferences": (
        {"messages": [user("a"), assistant("b")], "rejected_response": "c"},
        "preferences",
    ),
    "ms-swift's image to draw": (
        {"messages": [user("Draw."), assistant("<image>")], "images": ["a.png"]},
        "no text",
    ),
    "Qwen's pack": ([{"conversations": asked("a")}], "write each as a record of its own"),
    "TRL's preferences": (
        {"prompt": [user("a")], "chosen": [assistant("b")], "rejected": [assistant("c")]},
        "preferences",
    ),
    "columns of other names": ({"ask": "a", "reply": "b"}, "--columns"),
}
WITHOUT_MARKER = {
    "an early mllm_demo": {"messages": [user("What?"), assistant("A dot.")], "images": ["a.png"]},
    "TRL's texts beside images": {
        "prompt": [user("What?")],
        "completion": [assistant("A dot.")],
        "images": ["a.png"],
    },
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


@pytest.mark.parametrize("source", WITHOUT_MARKER)
def test_media_without_markers_need_an_option(source: str):
    with pytest.raises(RecordError, match="--missing-markers first"):
        read_conversation(WITHOUT_MARKER[source])
    messages = read_conversation(WITHOUT_MARKER[source], missing_markers="first").messages
    assert written(messages) == "[image]What? > A dot."


def test_index_of_llamafactory_is_followed(tmp_path: Path):
    """The entries that its own file has for the demos, and one on the Hub."""
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    index = {
        "identity": {"file_name": "identity.json"},
        "glaive": {
            "file_name": "glaive.json",
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "tools": "tools"},
        },
        "mllm_demo": {
            "file_name": "mllm_demo.json",
            "formatting": "sharegpt",
            "columns": {"messages": "messages", "images": "images"},
            "tags": tags,
        },
        "alpaca_en": {"hf_hub_url": "llamafactory/alpaca_en", "ms_hub_url": "llamafactory/alpaca_en"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(index))
    (tmp_path / "a.png").write_bytes(encoded(56, 56))
    (tmp_path / "identity.json").write_text('[{"instruction": "hi", "input": "", "output": "Hello!"}]')
    for name, source in (("glaive", "glaive_toolcall"), ("mllm_demo", "mllm_demo")):
        (tmp_path / f"{name}.json").write_text(json.dumps([READ[f"LLaMA-Factory's {source}"][0]]))

    options = ConversionOptions(media_root=(tmp_path,), out=tmp_path / "out", workers=1)
    local = tmp_path / "dataset_info.json:identity,glaive,mllm_demo"
    assert convert_dataset([local], options).samples == 3
    with pytest.raises(
        ConvertError, match="alpaca_en is on a hub.*hf download --repo-type dataset llamafactory"
    ):
        convert_dataset([tmp_path / "dataset_info.json"], options)


def test_repeated_ids_need_an_option(tmp_path: Path):
    """LLaVA's mixtures join sets whose ids are the same."""
    record = {"id": "9", "conversations": asked("Is it?")}
    (tmp_path / "mix.json").write_text(json.dumps([record, record]))

    def samples(**options: Any) -> int:
        out = tmp_path / f"out{len(options)}"
        all_options = ConversionOptions(media_root=(tmp_path,), out=out, workers=1, **options)
        return convert_dataset([tmp_path / "mix.json"], all_options).samples

    assert (samples(), samples(duplicate_ids="keep")) == (1, 2)
