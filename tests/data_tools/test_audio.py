"""No record with audio, which the models cannot hear, is trained on as if it were text."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from data_tools.audio import find_audio_placeholder
from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.formats import RecordError, read_conversation
from tests.data.media import encoded, write

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
HEARD = {
    # LLaMA-Factory's data/mllm_audio_demo.json, its first record
    "llama-factory": (
        openai("<audio>What's that sound?", "It is the sound of glass.", audios=["mllm_demo_data/1.mp3"]),
        "audios",
    ),
    # ms-swift's documentation of custom data sets
    "ms-swift": (
        openai("<audio>What did the audio say?", "The weather is really nice today.", audios=["/xxx/x.mp3"]),
        "audios",
    ),
    "ms-swift with all kinds": (
        openai(
            "<audio><image><video>Describe all.", "y", audios=["a.wav"], images=["b.png"], videos=["c.mp4"]
        ),
        "audios",
    ),
    # Qwen-Audio's and ms-swift's older spelling has the place in the text
    "a path in the text": (
        openai("Audio 1:<audio>https://example.com/glass breaking.wav</audio>\nWhat is it?", "Glass."),
        "messages[0].content",
    ),
    "the sound in the text": (
        openai(f"<audio>data:audio/wav;base64,{SOUND}</audio>What is it?", "Glass."),
        "messages[0].content",
    ),
    # OpenAI's chat completions: a part of the user's turn, an object beside the assistant's
    "input_audio": (
        openai([TEXT, {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}], "A bell."),
        "messages[0].content[1]",
    ),
    "spoken answer": (
        {
            "messages": [
                {"role": "user", "content": "Say hello"},
                {"role": "assistant", "content": "Hello", "audio": {"id": "audio_1", "transcript": "Hello"}},
            ]
        },
        "messages[1].audio",
    ),
    # Parts as transformers' processors (Qwen2-Audio, Qwen2.5-Omni), vLLM, and Qwen's own files write them
    "audio part": (
        openai([{"type": "audio", "audio_url": "glass.wav"}, TEXT], "Glass."),
        "messages[0].content[0]",
    ),
    "audio_url part": (
        openai([{"type": "audio_url", "audio_url": {"url": "file:///glass.wav"}}, TEXT], "Glass."),
        "messages[0].content[0]",
    ),
    "part without a type": (
        openai([{"audio": "glass.wav"}, {"text": "What is it?"}], "Glass."),
        "messages[0].content[0].audio",
    ),
    "text part with audio": (
        openai([{**TEXT, "audio": "glass.wav"}], "Glass."),
        "messages[0].content[0].audio",
    ),
    "omni tokens": (
        openai("<|audio_bos|><|AUDIO|><|audio_eos|>What is it?", "Glass."),
        "messages[0].content",
    ),
    "new omni tokens": (
        sharegpt("<|audio_start|><|audio_pad|><|audio_end|>What is it?", "Glass."),
        "conversations[0].value",
    ),
    # Tokens and spellings of other families: Phi-4, MiniCPM, Kimi-Audio and prompts by hand
    "a token of its own": (openai("<|audio|>What is that?", "Glass."), "messages[0].content"),
    "a numbered token": (openai("<|audio_1|>What is that?", "Glass."), "messages[0].content"),
    "a numbered placeholder": (openai("What is <audio_1> about?", "Glass."), "messages[0].content"),
    "a capital": (sharegpt("<Audio>What is that?", "Glass."), "conversations[0].value"),
    "capitals": (sharegpt("What is that?\n<AUDIO>", "Glass."), "conversations[0].value"),
    "sound": (sharegpt("<sound>\nWhat is that?", "Glass."), "conversations[0].value"),
    "speech": (sharegpt("What is said?\n<speech>", "Hello."), "conversations[0].value"),
    "a sound in the text": (openai("<sound>a.wav</sound>What is it?", "Glass."), "messages[0].content"),
    "beside a document's part": (
        openai("<question>\n<audio>\nWhat is it?\n</question>", "Glass."),
        "messages[0].content",
    ),
    # Listed, in whatever form
    "audio_path": (sharegpt("What is it?", "Glass.", audio_path="a.wav"), "audio_path"),
    "sound listed": (sharegpt("What is it?", "Glass.", sound="https://a.b/c.MP3?d=e"), "sound"),
    "sounds listed": (sharegpt("What is it?", "Glass.", sounds=[{"path": "a"}]), "sounds"),
    "speech listed": (sharegpt("What is said?", "Hello.", speech=["a.wav"]), "speech"),
    "speech with its bytes": (sharegpt("What is said?", "Hello.", speech={"bytes": "UklG"}), "speech"),
    "a silent array": (sharegpt("What?", "No.", audio={"path": None, "array": [0.0, 0.0]}), "audio"),
    "an unknown structure": (sharegpt("What is it?", "Glass.", audio={"uri": "x"}), "audio"),
    "one path": (sharegpt("<audio>\nWhat is it?", "Glass.", audio="glass.wav"), "audio"),
    "a datasets column": (
        openai(
            "What is it?", "Glass.", audio={"path": "glass.wav", "array": [0.0, 0.1], "sampling_rate": 16000}
        ),
        "audio",
    ),
    "no marker": (sharegpt("What is it?", "Glass.", audios=["glass.wav"]), "audios"),
    "in a turn": (
        {
            "messages": [
                {"role": "user", "content": "What is it?", "audios": ["a.wav"]},
                {"role": "assistant", "content": "Glass."},
            ]
        },
        "messages[0].audios",
    ),
    # The list is lost, the placeholder is left
    "placeholder first": (openai("<audio>What's that sound?", "Glass."), "messages[0].content"),
    "placeholder last": (sharegpt("Transcribe this.\n<audio>", "Hello."), "conversations[0].value"),
    "placeholder alone": (openai("<audio>", "Hello."), "messages[0].content"),
    "placeholder on its line": (
        sharegpt("Listen:\n <audio> \nWhat is it?", "Glass."),
        "conversations[0].value",
    ),
    "two of them": (openai("<audio><audio> Which is louder?", "The first."), "messages[0].content"),
    "in a later turn": (openai("Hi", "Hello", "<audio>And this?", "Glass."), "messages[2].content"),
    "in a part": (
        openai([{"type": "text", "text": "<audio>"}, TEXT], "Glass."),
        "messages[0].content[0].text",
    ),
    "in the system prompt": (openai("Hi", "Hello", system="<audio>\nSpeak like this."), "system"),
    "beside an image": (
        sharegpt("<image><audio>\nDo they match?", "Yes.", image="a.png"),
        "conversations[0].value",
    ),
    "in a sentence beside an image": (
        sharegpt("<image>\nDoes <audio> match?", "Yes.", image="a.png"),
        "conversations[0].value",
    ),
}


@pytest.mark.parametrize("record,field", HEARD.values(), ids=HEARD)
def test_a_record_with_audio_is_refused(record: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordError) as error:
        read_conversation(record)
    assert (error.value.reason, error.value.field_path) == ("audio not supported", field)


READ = {
    "a question about the tag": openai("How do I use the <audio> tag in HTML?", "Write `<audio controls>`."),
    "the same in ShareGPT": sharegpt("What is the purpose of the <audio> tag?", "It embeds sound."),
    "code in a question": sharegpt(
        'Why so silent?\n<audio>\n <source src="a.mp3">\n</audio>', "A wrong path."
    ),
    "a fence": openai("Explain\n```html\n<audio>\n```", "It plays sound."),
    "backticks at the end": openai("Explain `<audio>`", "It plays sound."),
    "attributes": openai('<audio src="a.mp3" controls>', "A player."),
    "text for old browsers": openai(
        "<audio>Your browser has no audio.</audio> What does this do?", "It shows it."
    ),
    "code beside an image": sharegpt("<image>\nWhere would I put `<audio>`?", "In the body.", image="a.png"),
    "an answer": sharegpt("Which element plays sound?", "<audio>"),
    "an answer of code": openai("A page with sound, please.", '<audio>\n<source src="a.mp3">\n</audio>'),
    "empty columns": openai("Hi", "Hello", audio=None, audios=[]),
    "empty columns of turns and parts": {
        "messages": [
            {"role": "user", "content": [{**TEXT, "audio": None, "input_audio": {}}], "audio": ""},
            {"role": "assistant", "content": "Hello", "audio": None},
        ]
    },
    # datasets' Audio feature where a row has none
    "an empty structure": sharegpt(
        "Hi", "Hello", audio={"bytes": None, "path": None, "sampling_rate": 16000}
    ),
    "empty structures": openai("Hi", "Hello", audios=[{"bytes": None, "path": "", "sampling_rate": 16000}]),
    "an empty part of OpenAI's": openai([{**TEXT, "input_audio": {"data": None, "format": "wav"}}], "Hello"),
    "no sounds": sharegpt("Hi", "Hello", audio=0),
    "code without an end": sharegpt(
        "Why does this not play?\n<audio>\n  <source src='a.mp3'>\nThanks", "It has no end tag."
    ),
    "code around it": openai("What is missing?\n<div>\n  <audio>\n  Hear!\n</div>", "The end tag."),
    "code around it in capitals": openai("What is missing?\n<BODY>\n<AUDIO>\n</BODY>", "The end tag."),
    "code beside a video": sharegpt(
        "<video>\nWhat is it?\n<audio>\n<source src=a.mp3>", "A page.", video="a.mp4"
    ),
    "a part of a document": openai("<speech>\nDear all, ...\n</speech>\nSum it up.", "A greeting."),
    "a speech as text": openai("Who said this?", "Lincoln.", speech="Four score and seven years ago"),
    "a sound as a word": openai("Which animal is it?", "A cow.", sound="moo"),
    "the word": sharegpt("What is an audio codec?", "A coder and decoder of audio."),
}


@pytest.mark.parametrize("record", READ.values(), ids=READ)
def test_talk_about_audio_is_read_as_it_is(record: dict[str, Any]) -> None:
    conversation = read_conversation(record)
    turns = record.get("messages") or record["conversations"]

    for turn, message in zip(turns, conversation.messages, strict=True):
        written = turn.get("content", turn.get("value"))
        parts = written if isinstance(written, list) else [{"text": written}]
        read = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
        shown = "".join(part.get("text", f"<{part.get('type')}>") for part in read)
        assert shown == "".join(part["text"] for part in parts)


@pytest.mark.parametrize(
    "piece",
    [
        "x <audio> x",
        "<audio>" + " " * 300,
        "`<audio>",
        "x <audio>x.wav ",
        "```x",
        "x<audio>.</audio",
        "<sound><audio>",
        "<div>" + " " * 300,
        "<div",
        "<source <audio> ",
    ],
)
def test_long_texts_are_searched_in_linear_time(piece: str) -> None:
    """A search that is quadratic anywhere would take minutes."""
    text = "x" + piece * 50_000 + "x"
    begin = time.process_time()
    find_audio_placeholder(text, match_anywhere=False)
    assert time.process_time() - begin < 8


def test_refused_audio_is_counted_and_listed(tmp_path: Path) -> None:
    write(tmp_path / "media/a.png", encoded(30, 30))
    write(tmp_path / "media/mllm_demo_data/1.mp3", b"ID3")
    heard = [HEARD[name][0] for name in ("llama-factory", "input_audio", "beside an image")]
    records = [heard[0], READ["the same in ShareGPT"], *heard[1:]]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))

    report = convert_dataset([tmp_path / "in.jsonl"], ConversionOptions(tmp_path / "media", tmp_path / "out"))
    assert (report.records, report.samples) == (4, 1)
    assert report.refused == {"in.jsonl": {"audio not supported": 3}}

    lines = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [line["record"] for line in lines] == [1, 3, 4]
    assert "mllm_demo_data/1.mp3" in lines[0]["detail"]
    assert all(len(line["detail"]) < 300 for line in lines)
