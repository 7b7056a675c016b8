"""No record with audio, which the models cannot hear, is trained on as if it were text."""

from __future__ import annotations

import time
from typing import Any

import pytest

from data_tools.audio import find_audio_placeholder
from data_tools.formats import RecordError, read_conversation

SOUND = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA="


def openai(*turns: Any, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(turns)]
    return {"messages": messages, **more}


def sharegpt(*turns: str, **more: Any) -> dict[str, Any]:
    roles = ("human", "gpt")
    conversations = [{"from": roles[i % 2], "value": value} for i, value in enumerate(turns)]
    return {"conversations": conversations, **more}


TEXT = {"type": "text", "text": "What is in this recording?"}
HELLO = {"role": "assistant", "content": "Hello"}
HEARD_TEXTS = [
    # Qwen-Audio's and ms-swift's older spelling has the place, or the sound, in the text.
    "Audio 1:<audio>https://example.com/glass breaking.wav</audio>\nWhat is it?",
    f"<audio>data:audio/wav;base64,{SOUND}</audio>What is it?",
    # Tokens of Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni, Phi-4, MiniCPM and Kimi-Audio, and prompts by hand.
    "<|audio_bos|><|AUDIO|><|audio_eos|>What is it?",
    "<|audio_start|><|audio_pad|><|audio_end|>What is it?",
    "What is <audio_1> about?",
    "<question>\n<audio>\nWhat is it?\n</question>",
    # The list is lost, the placeholder is left.
    "Transcribe this.\n<audio>",
    "<audio>",
]
HEARD_FIELDS = {
    "audios": ["glass.wav"],
    "audio": "glass.wav",
}
HEARD_VALUES = [
    {"path": None, "array": [0.0, 0.0]},
    {"path": "glass.wav", "array": [0.0, 0.1], "sampling_rate": 16000},
]
HEARD_PARTS = [
    ({"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}, ""),  # OpenAI's
    ({"type": "audio", "audio_url": "glass.wav"}, ""),  # transformers' processors
    ({"type": "audio_url", "audio_url": {"url": "file:///glass.wav"}}, ""),  # vLLM's
    ({"audio": "glass.wav"}, ".audio"),
    ({**TEXT, "audio": "glass.wav"}, ".audio"),
    ({"type": "text", "text": "<audio>"}, ".text"),
]
QUESTION = "conversations[0].value"
HEARD = [
    *((openai(text, "Glass."), "messages[0].content") for text in HEARD_TEXTS),
    *((sharegpt("What is it?", "Glass.", **{field: value}), field) for field, value in HEARD_FIELDS.items()),
    *((sharegpt("What is it?", "Glass.", audio=value), "audio") for value in HEARD_VALUES),
    *((openai([part, TEXT], "Glass."), f"messages[0].content[0]{field}") for part, field in HEARD_PARTS),
    (openai("<audio><image><video>?", "y", audios=["a.wav"], images=["b.png"], videos=["c.mp4"]), "audios"),
    ({"messages": [{"role": "user", "content": "?"}, {**HELLO, "audio": {"id": "a"}}]}, "messages[1].audio"),
    ({"messages": [{"role": "user", "content": "?", "audios": ["a"]}, HELLO]}, "messages[0].audios"),
    (openai("Hi", "Hello", "<audio>And this?", "Glass."), "messages[2].content"),
    (openai("Hi", "Hello", system="<audio>\nSpeak like this."), "system"),
    (sharegpt("<image><audio>\nDo they match?", "Yes.", image="a.png"), QUESTION),
]


@pytest.mark.parametrize("record,field", HEARD)
def test_records_with_audio_are_refused(record: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordError) as error:
        read_conversation(record)
    assert (error.value.reason, error.value.field_path) == ("audio not supported", field)


READ_TEXTS = [
    "How do I use the <audio> tag in HTML?",
    "Explain\n```html\n<audio>\n```",
    '<audio src="a.mp3" controls>',
    "What is an audio codec?",
]
EMPTY_FIELDS: list[dict[str, Any]] = [
    {"audio": None, "audios": []},
    {"audio": {"bytes": None, "path": None, "sampling_rate": 16000}},  # datasets' Audio, where a row has none
    {"audios": [{"bytes": None, "path": "", "sampling_rate": 16000}]},
]
READ = [
    *(openai(text, "It plays sound.") for text in READ_TEXTS),
    *(sharegpt("Hi", "Hello", **fields) for fields in EMPTY_FIELDS),
    sharegpt("<image>\nWhere would I put `<audio>`?", "In the body.", image="a.png"),
    sharegpt("Which element plays sound?", "<audio>"),
    openai("A page with sound, please.", '<audio>\n<source src="a.mp3">\n</audio>'),
    openai([{**TEXT, "audio": None, "input_audio": {"data": None, "format": "wav"}}], "Hello"),
]


@pytest.mark.parametrize("record", READ)
def test_talk_about_audio_is_read_as_it_is(record: dict[str, Any]) -> None:
    conversation = read_conversation(record)
    turns = record.get("messages") or record["conversations"]

    for turn, message in zip(turns, conversation.messages, strict=True):
        written = turn.get("content", turn.get("value"))
        parts = written if isinstance(written, list) else [{"text": written}]
        read = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        shown = "".join(part.get("text", f"<{part.get('type')}>") for part in read)
        assert shown == "".join(part["text"] for part in parts)


@pytest.mark.parametrize("piece", ["x <audio> x", "`<audio>", "x<audio>.</audio", "\n" + " " * 300])
def test_long_texts_are_searched_in_linear_time(piece: str) -> None:
    """A search that is quadratic anywhere would take minutes."""
    text = "x" + piece * 50_000 + "x"
    begin = time.process_time()
    find_audio_placeholder(text)
    assert time.process_time() - begin < 8
