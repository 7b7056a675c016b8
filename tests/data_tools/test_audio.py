"""No record with audio, which the models cannot hear, is trained on as if it were text."""

import time
from contextlib import suppress
from typing import Any

import pytest

from data_tools.formats import RecordError, read_conversation
from data_tools.formats.conversation import refuse_audio_in

TEXT = {"type": "text", "text": "What is in this recording?"}
HELLO = {"role": "assistant", "content": "Hello"}


def asked(content: Any = "What is it?", answer: str = "Glass.", **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, {**HELLO, "content": answer}], **more}


HEARD_TEXTS = [
    # Qwen-Audio's and ms-swift's older spelling has the place in the text.
    "Audio 1:<audio>https://example.com/glass breaking.wav</audio>\nWhat is it?",
    # Tokens of Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni, Phi-4, MiniCPM and Kimi-Audio, and prompts by hand.
    "<|audio_bos|><|AUDIO|><|audio_eos|>What is it?",
    "<|audio_start|><|audio_pad|><|audio_end|>What is it?",
    "What is <audio_1> about?",
    # The list is lost, the placeholder is left.
    "Transcribe this.\n<audio>",
]
HEARD_FIELDS: list[dict[str, Any]] = [
    {"audios": ["glass.wav"]},
    {"audio": "glass.wav"},
    {"audio": {"path": None, "array": [0.0, 0.0]}},
]
HEARD_PARTS = [
    ({"type": "input_audio", "input_audio": {"data": "UklGRi", "format": "wav"}}, ""),  # OpenAI's
    ({"type": "audio_url", "audio_url": {"url": "file:///glass.wav"}}, ""),  # vLLM's
    ({"audio": "glass.wav"}, ".audio"),
    ({**TEXT, "audio": "glass.wav"}, ".audio"),
    ({"type": "text", "text": "<audio>"}, ".text"),
]
CONVERSATION = [
    {"from": "human", "value": "<image><audio>\nDo they match?"},
    {"from": "gpt", "value": "Yes."},
]
HEARD = [
    *((asked(text), "messages[0].content") for text in HEARD_TEXTS),
    *((asked(**fields), next(iter(fields))) for fields in HEARD_FIELDS),
    *((asked([part, TEXT]), f"messages[0].content[0]{field}") for part, field in HEARD_PARTS),
    ({"messages": [{"role": "user", "content": "?"}, {**HELLO, "audio": {"id": "a"}}]}, "messages[1].audio"),
    (asked(system="<audio>\nSpeak like this."), "system"),
    ({"conversations": CONVERSATION, "image": "a.png"}, "conversations[0].value"),
]


@pytest.mark.parametrize("record,field", HEARD)
def test_records_with_audio_are_refused(record: dict[str, Any], field: str) -> None:
    with pytest.raises(RecordError) as error:
        read_conversation(record)
    assert (error.value.reason, error.value.field_path) == ("audio not supported", field)


EMPTY: dict[str, Any] = {
    "bytes": None,
    "path": None,
    "sampling_rate": 16000,
}  # datasets' Audio, where a row has none
READ = [
    asked("How do I use the <audio> tag in HTML?"),
    asked("Explain\n```html\n<audio>\n```"),
    asked('<audio src="a.mp3" controls>'),
    asked(audio=None, audios=[]),
    asked(audio=EMPTY, audios=[EMPTY]),
    asked("A page with sound, please.", '<audio>\n<source src="a.mp3">\n</audio>'),
    asked([{**TEXT, "audio": None, "input_audio": {"data": None, "format": "wav"}}]),
]


@pytest.mark.parametrize("record", READ)
def test_talk_about_audio_is_read_as_it_is(record: dict[str, Any]) -> None:
    question, answer = (turn["content"] for turn in record["messages"])
    read = [message["content"] for message in read_conversation(record).messages]
    assert read == [question if isinstance(question, str) else question[0]["text"], answer]


@pytest.mark.parametrize("piece", ["x <audio> x", "`<audio>", "x<audio>.</audio", "\n" + " " * 300])
def test_long_texts_are_searched_in_linear_time(piece: str) -> None:
    """A search that is quadratic anywhere would take minutes."""
    begin = time.process_time()
    with suppress(RecordError):
        refuse_audio_in("x" + piece * 50_000 + "x", "")
    assert time.process_time() - begin < 8
