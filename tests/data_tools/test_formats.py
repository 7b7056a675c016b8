"""Every format: a record as its users write it, and the exact canonical messages."""

import json
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_tools.convert import ConversionOptions, convert_dataset
from data_tools.formats import FORMATS, RecordError, detect_format, read_conversation
from data_tools.formats.conversation import refuse_audio_in
from data_tools.records import ConvertError
from megatron_vl.config import DataConfig
from tests.data.datasets import open_loader
from tests.data.media import encoded, write
from tests.tiny import tiny_checkpoint


def ask(content="Hi", **more):
    return {"role": "user", "content": content, **more}


def say(content="Hello", **more):
    return {"role": "assistant", "content": content, **more}


ASK, SAY = ask(), say()
IMAGE = {"type": "image"}
MARKED = ask("<image>\nHi")
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {}}}
ROLES = ("system", "user", "assistant", "user", "assistant")


def chat(*contents):
    """A system prompt, two questions and their answers."""
    return [{"role": role, "content": content} for role, content in zip(ROLES, contents, strict=True)]


def text_part(text):
    return {"type": "text", "text": text}


ASKED = "<image>\nFirst, <image> then?"
IMAGE_PARTS = [IMAGE, text_part("\nFirst, "), IMAGE, text_part(" then?")]
IMAGES = chat("Be brief.", IMAGE_PARTS, "A cat.", "Sure?", "Yes.")
MEDIA = [("image", "a.png"), ("image", "b.png")]
LISTED = {"images": ["a.png", "b.png"]}


def address(name):
    return {"type": "image_url", "image_url": {"url": name}}


PARTS = [address("a.png"), text_part("\nFirst, "), address("b.png"), text_part(" then?")]
BARE_PARTS = [{"image": "a.png"}, {"text": "\nFirst, "}, {"image": "b.png"}, {"text": " then?"}]
TALK = (("human", ASKED), ("gpt", "A cat."), ("human", "Sure?"), ("gpt", "Yes."))
SHAREGPT = [{"from": role, "value": text} for role, text in TALK]
PAIRS = [{"human": ASKED, "assistant": "A cat."}, {"human": "Sure?", "assistant": "Yes."}]
HISTORY = {"system": "Be brief.", "history": [[ASKED, "A cat."]], **LISTED}
OPENAI = chat([text_part("Be "), text_part("brief.")], PARTS, "A cat.", [text_part("Sure?")], "Yes.")
SAME = {
    "sharegpt": {"system": "Be brief.", **LISTED, "conversations": SHAREGPT},
    "llava": {
        "id": "1",
        "image": ["a.png", "b.png"],
        "conversations": [{"from": "system", "value": "Be brief."}, *SHAREGPT],
    },
    "openai": {"messages": [OPENAI[0] | {"role": "developer"}, *OPENAI[1:4], OPENAI[4] | {"refusal": None}]},
    "messages with markers": {
        "images": [{"path": "a.png", "bytes": None}, "b.png"],
        "messages": chat("Be brief.", ASKED, "A cat.", "Sure?", "Yes."),
    },
    "alpaca": {**HISTORY, "instruction": "Sure?", "input": "", "output": "Yes."},
    "query": {**HISTORY, "query": "Sure?", "response": "Yes."},
    "pairs": {"system": "Be brief.", **LISTED, "conversation": PAIRS},
    "parts without a type": {
        "messages": chat(
            [{"text": "Be brief."}], BARE_PARTS, *([{"text": t}] for t in ("A cat.", "Sure?", "Yes."))
        )
    },
}
"""One conversation with two images as each format writes it."""


@pytest.mark.parametrize("name", SAME)
def test_conversation_has_the_same_canonical_messages_in_every_format(name):
    """The format is recognised by its fields."""
    conversation = read_conversation(SAME[name])
    assert conversation.messages == IMAGES
    assert conversation.media_references == MEDIA
    assert conversation.ignored_keys == []
    assert conversation.tool_definitions == []


def test_fields_decide_between_formats_unless_one_is_given():
    assert detect_format({"conversations": SHAREGPT, "data_path": "cats"}).name == "qwen"
    both = {"instruction": "Hi", "output": "Hello", "messages": [ASK, SAY]}
    assert detect_format(both).name == "openai"
    assert read_conversation(both, "alpaca").messages == [ASK, SAY]


def test_qwen_strips_the_text_around_media_and_looks_in_data_path():
    """As `_build_messages` of Qwen's fine-tuning code does, which leaves only answers as they are."""
    turns = [{"from": "human", "value": "<image>\n<image>\n Which? \n"}, {"from": "gpt", "value": " Both. "}]
    record = {"image": ["a.png", "/data/b.png"], "data_path": "cats/", "conversations": turns}
    conversation = read_conversation(record)
    assert conversation.messages == [ask([IMAGE, IMAGE, text_part("Which?")]), say(" Both. ")]
    assert conversation.media_references == [("image", "cats/a.png"), ("image", "/data/b.png")]
    assert read_conversation({**record, "data_path": ""}).media_references[0] == ("image", "a.png")
    alone = {"conversations": [{"from": "human", "value": " Hi "}, turns[1]]}
    assert read_conversation(alone, "qwen").messages[0]["content"] == "Hi"


@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_parts_are_read_in_every_spelling(kind):
    address = f"{kind}_url"
    for fields in (
        {"type": kind, kind: "a"},
        {"type": address, address: {"url": "a"}},
        {"type": address, address: "a"},
        {"type": kind, "path": "a"},
    ):
        conversation = read_conversation(asks_in_parts(fields))
        assert conversation.media_references == [(kind, "a")]
        assert conversation.messages[0]["content"] == [{"type": kind}]


# --- Tools --------------------------------------------------------------------------------------------------


def turn(role, content, **more):
    return {"role": role, "content": content, **more}


RAINS = '{"rain": true}'
RAIN, LOOK, YES = ask("Rain?"), say("I look."), say("Yes.")
CALLS = [RAIN, {**LOOK, "tool_calls": [CALL]}, turn("tool", RAINS), YES]
WRITTEN = json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})
FUNCTION = {"name": "weather", "arguments": '{"city": "Oslo"}'}
WITH_ID = {"id": "c1", "type": "function", "function": FUNCTION}
SPOKEN = [("human", "Rain?"), ("gpt", "I look."), ("function_call", WRITTEN), ("observation", RAINS)]
SPOKEN.append(("gpt", "Yes."))
WITH_TOOLS = {
    "openai": {
        "tools": [TOOL],
        "messages": [RAIN, {**LOOK, "tool_calls": [WITH_ID]}, turn("tool", RAINS, tool_call_id="c1"), YES],
    },
    "openai's first form": {
        "functions": [TOOL["function"]],
        "messages": [RAIN, {**LOOK, "function_call": FUNCTION}, turn("function", RAINS, name="weather"), YES],
    },
    "ms-swift": {
        "tools": json.dumps([TOOL]),
        "messages": [RAIN, LOOK, turn("tool_call", WRITTEN), turn("tool_response", RAINS), YES],
    },
    "llamafactory": {
        "tools": json.dumps([TOOL["function"]]),
        "conversations": [{"from": role, "value": text} for role, text in SPOKEN],
    },
}


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tool_calls_become_the_same_messages_in_every_format(name):
    conversation = read_conversation(WITH_TOOLS[name])
    assert conversation.messages == CALLS
    assert conversation.tool_definitions == [TOOL]
    assert conversation.ignored_keys == []


def test_images_may_stand_in_results():
    """As in ms-swift's agents."""
    thought = {**LOOK, "content": "<think>\nI look.\n</think>\n"}
    turns = [turn("tool_call", WRITTEN), turn("tool_response", '{"x": "<image>"}')]
    record = {"messages": [{**RAIN, "content": "<image>Rain?"}, thought, *turns, YES], **LISTED}
    read = read_conversation(record)
    result = turn("tool", [text_part('{"x": "'), IMAGE, text_part('"}')])
    question = {**RAIN, "content": [IMAGE, text_part("Rain?")]}
    assert read.messages == [question, {**thought, "tool_calls": [CALL]}, result, YES]
    assert read.media_references == MEDIA


# --- Reasoning and weights ----------------------------------------------------------------------------------


RESULT = {"role": "tool", "content": "rain"}
LOOKED = turn("tool_call", WRITTEN, reasoning_content="Look it up.")
CALLED = {"reasoning_content": "Look it up.", "tool_calls": [CALL]}
THINKING = "<think>\nWhich city?\n</think>"
BOXES = {"ref": ["sheep"], "bbox": [[90.9, 160.8, 135, 212.8], [360.9, 480.8, 495, 532.8]]}
SHEEP, DOTS = "Find the <|object_ref_start|>sheep<|object_ref_end|>", "<|box_start|>(1,2)<|box_end|>"
TRL = [{"index": None, "text": "What?\n", "type": "text"}, {"index": 0, "text": None, "type": "image"}]
READ = {
    "alpaca": (
        {"instruction": "Translate.", "input": "Chat", "output": "Cat"},
        [ask("Translate.\nChat"), say("Cat")],
    ),
    "alpaca without an instruction": (
        {"instruction": "", "input": "Chat", "output": "Cat"},
        [ask("Chat"), say("Cat")],
    ),
    "TRL: parts with all keys, images as tables hold them": (
        {
            "messages": [ask(TRL), say([{"index": None, "text": "A dot.", "type": "text"}])],
            "images": [{"bytes": b"png", "path": None}],
        },
        [ask([text_part("What?\n"), IMAGE]), say("A dot.")],
    ),
    "ms-swift: boxes beside the texts": (
        {
            "messages": [ask("<image>Find the <ref-object>"), say("<bbox><bbox>")],
            "objects": BOXES,
            "image": "a",
        },
        [ask([IMAGE, text_part("Find the <ref-object>")]), say("<bbox><bbox>")],
    ),
    "ms-swift: boxes in the texts": (
        {"messages": [ask(f"<image>{SHEEP}"), say(DOTS)], "objects": {"bbox": []}, "image": "a"},
        [ask([IMAGE, text_part(SHEEP)]), say(DOTS)],
    ),
    "last question and empty columns": (
        {"system": "a", "messages": [{"role": "system", "content": "a"}, ASK, SAY, ASK], "conversations": []},
        [{"role": "system", "content": "a"}, ASK, SAY],
    ),
    "thought in front of a call": (
        {"messages": [ASK, turn("tool_call", f"{THINKING}\n\n{WRITTEN}"), RESULT, SAY]},
        [ASK, say(THINKING, tool_calls=[CALL]), RESULT, SAY],
    ),
    "parallel calls": (
        {"messages": [ASK, turn("tool_call", f"[{WRITTEN}, {WRITTEN}]"), RESULT, RESULT, SAY]},
        [ASK, say("", tool_calls=[CALL, CALL]), RESULT, RESULT, SAY],
    ),
    "reasoning of a call": ({"messages": [ASK, LOOKED, RESULT, SAY]}, [ASK, say("", **CALLED), RESULT, SAY]),
    "reasoning of a call after an answer": (
        {"messages": [ASK, SAY, LOOKED, RESULT, SAY]},
        [ASK, say(**CALLED), RESULT, SAY],
    ),
    "reasoning of an answer and its call": (
        {"messages": [ASK, say(reasoning="Look it up."), LOOKED, RESULT, SAY]},
        [ASK, say(**CALLED), RESULT, SAY],
    ),
    "another reasoning of an answer": (
        {"messages": [ASK, say(reasoning_content="Other."), LOOKED, RESULT, SAY]},
        [ASK, say(reasoning_content="Other."), say("", **CALLED), RESULT, SAY],
    ),
    "reasoning beside an answer": (
        {"messages": [ASK, say(reasoning="A greeting."), ASK, say(reasoning_content="Again.")]},
        [ASK, say(reasoning_content="A greeting."), ASK, say(reasoning_content="Again.")],
    ),
    "reasoning within an answer": ({"messages": [ASK, say(THINKING)]}, [ASK, say(THINKING)]),
    "weights of a record and its turns": (
        {"weight": 0.5, "messages": [ask(weight=0), say(weight=3), ASK, SAY]},
        [ASK, say(loss_weight=1.5), ASK, say(loss_weight=0.5)],
    ),
    "weight 1": ({"weight": 1, "messages": [ASK, SAY]}, [ASK, SAY]),
}


@pytest.mark.parametrize("name", READ)
def test_records_are_read_as_their_documentation_means_them(name):
    record, messages = READ[name]
    conversation = read_conversation(record)
    assert conversation.messages == messages
    assert conversation.ignored_keys in ([], [("content parts", "index")])  # TRL's


def test_calls_and_reasoning_of_a_result_are_ignored():
    result = {**RESULT, "tool_call_id": "1", "reasoning": "a", "tool_calls": [CALL]}
    read = read_conversation({"messages": [ASK, say(tool_calls=[CALL]), result, SAY]})
    assert read.ignored_keys == [("turns", "reasoning"), ("turns", "tool_calls")]


@pytest.mark.parametrize(
    "spelling,weight",
    [
        ({"weight": 0.5}, 0.5),
        ({"loss_weight": 2}, 2.0),
        ({"loss": False}, 0.0),
        ({"loss": 0.25}, 0.25),
        ({"loss_scale": 3.0}, 3.0),
        ({"train": False}, 0.0),
        ({"loss": True}, None),
        ({"weight": 1}, None),
        ({"loss": None, "weight": ""}, None),
    ],
)
def test_weights_of_turns_as_peers_spell_them(spelling, weight):
    conversation = read_conversation({"messages": [ASK, {**SAY, **spelling}, ASK, SAY]})
    assert conversation.messages[1].get("loss_weight") == weight and conversation.ignored_keys == []
    assert "loss_weight" not in conversation.messages[3]
    assert any("loss_weight" in message for message in conversation.messages) == (weight is not None)


# --- What is refused ----------------------------------------------------------------------------------------


def calls(arguments):
    return says(tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


def offers(**more):
    return {"tools": [{"name": "f", **more}], "messages": [ASK, SAY]}


def says(**more):
    return {"messages": [ASK, say(**more)]}


def says_to(question, answer="Hello", **fields):
    return {"messages": [ask(question), say(answer)], **fields}


def mmc4(**image):
    return {"text_list": ["a"], "image_info": [image]}


def nested(depth):
    value = {}
    for _ in range(depth):
        value = {"x": value}
    return value


def asks_in_parts(*parts):
    return {"messages": [ask(list(parts)), SAY]}


def sharegpt(question, **fields):
    return {**fields, "conversations": [{"from": "human", "value": question}, GPT]}


HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
HERE = "messages[0].content[0]"
WEIGHT, PART, REFERENCE = "bad loss weight", "unknown content part", "bad media reference"
AUDIO = "audio not supported"
ARGUMENTS, THOUGHT = "messages[1].tool_calls[0].arguments", "<think>a</think>"
REFUSED = [
    (says(weight=-1), WEIGHT, "messages[1].weight"),
    (says(weight=1, loss=0), WEIGHT, "messages[1].loss"),
    ({"messages": [{**ASK, "weight": 0.5}, SAY]}, "loss on a prompt", "messages[0].weight"),
    ({"weight": 0, "messages": [ASK, SAY]}, "no loss", "messages"),
    (says(loss=False), "no loss", "messages"),
    ({"messages": [ASK, SAY], "objects": {"bbox": [[1, 2]]}}, "bad objects", "objects"),
    ({"messages": [ASK, SAY], "bboxes": [[1, 2]]}, "not supervised text", "bboxes"),
    ({"conversations": SHAREGPT[:1], "chosen": "b", "rejected": "c"}, "not supervised text", "chosen"),
    ({"instruction": "a", "output": "b", "kto_tag": True}, "not supervised text", "kto_tag"),
    ({"instruction": "a", "query": "b", "output": "c"}, "two conversations", "query"),
    ({"instruction": "a", "output": "b", "history": ["c"]}, "bad history", "history[0]"),
    ({"instruction": "<image>", "output": "b"}, "markers and media differ", "instruction"),
    # A field that is absent, empty or misnamed: the model would read the letters.
    ({"messages": [MARKED, SAY]}, "markers and media differ", "messages"),
    (says(content="A <video> of"), "markers and media differ", "messages"),
    (asks_in_parts({"type": "text", "text": "<image>"}), "markers and media differ", "messages"),
    ({"messages": [MARKED, SAY], "image": "a", "markers": "text"}, "markers and media differ", "messages"),
    ({"messages": [MARKED, SAY], "markers": "txt"}, "bad markers", "markers"),
    ({"instruction": "a", "output": ""}, "no assistant turn", "instruction"),
    ({"conversation": [{"human": "a"}]}, "bad turn", "conversation[0]"),
    (asks_in_parts({"type": "image", "image": "a", "video": "b"}), "two media in a part", HERE + ".video"),
    (asks_in_parts({"image": "a", "text": "b"}), PART, HERE),
    (asks_in_parts({"type": "reasoning", "text": "b"}), PART, HERE),
    ({"tools": "weather", "messages": [ASK, SAY]}, "bad tools", "tools"),
    ({"tools": [{"type": "function"}], "messages": [ASK, SAY]}, "bad tools", "tools[0]"),
    (calls("{"), "bad tool call", ARGUMENTS),
    ({"messages": [ASK, SAY, {"role": "tool", "content": "x"}]}, "wrong role order", "messages"),
    ({"messages": [ASK, say(tool_calls=[CALL]), ASK]}, "wrong role order", "messages"),
    ({"messages": [ASK, say(tool_calls=[CALL]), LOOKED, RESULT, SAY]}, "wrong role order", "messages"),
    (says(reasoning="a", thinking="b"), "two reasonings", "messages[1].thinking"),
    (says(tool_calls=[CALL], function_call=CALL["function"]), "bad tool call", "messages[1].function_call"),
    (says(role="tool_call", content=WRITTEN, tool_calls=[CALL]), "bad tool call", "messages[1].tool_calls"),
    (says(role="tool_call", content=THOUGHT + WRITTEN, reasoning="b"), "two reasonings", "messages[1]"),
    # What is no conversation.
    ([], "not an object", ""),
    ({"x": 1}, "no conversation", ""),
    ({"conversations": ["hi"]}, "bad turn", "conversations[0]"),
    ({"conversations": [{"from": "narrator", "value": "x"}, GPT]}, "unknown role", "conversations[0].from"),
    ({"messages": [ASK, {"role": None, "content": "x"}]}, "unknown role", "messages[1].role"),
    (sharegpt("a\ud800b"), "bad text", "conversations[0].value"),
    ({"conversations": [HUMAN]}, "no assistant turn", "conversations"),
    ({"messages": [{"role": "system", "content": "x"}, SAY]}, "wrong role order", "messages"),
    (sharegpt("x", system=5), "bad text", "system"),
    ({"system": "a", "messages": [{**ASK, "role": "system"}, ASK, SAY]}, "two system prompts", "system"),
    (sharegpt("x", messages=[ASK, SAY]), "two conversations", "conversations"),
    (
        {"image": "a", "conversations": [HUMAN, GPT | {"value": "<image>"}]},
        "empty answer",
        "conversations[1]",
    ),
    (sharegpt("x", image="a.jpg"), "markers and media differ", "conversations"),
    (sharegpt("<image>", image=5), REFERENCE, "image"),
    (sharegpt("<image>", images=["a", ""]), REFERENCE, "images[1]"),
    (asks_in_parts({"type": "tool_use"}), PART, HERE),
    (asks_in_parts({"type": "image"}), REFERENCE, HERE + ".image"),
    (asks_in_parts({"type": "video", "video": [["1.jpg"]]}), REFERENCE, HERE + ".video[0]"),
    # Documents.
    ({"text": " \n"}, "no text", "text"),
    ({"image": "a.png", "caption": None}, "no text", "caption"),
    ({"text": "a", "caption": "b"}, "two conversations", "caption"),
    ({"text": "a<|image_pad|>b"}, "placeholder token in text", "text"),
    ({"text": "<image>a<image>", "image": "a.png"}, "markers and media differ", "text"),
    ({"texts": [None], "images": ["a.png"]}, "no text", "texts"),
    ({"texts": ["a", None], "images": ["a.png"]}, "bad document", "images"),
    ({"texts": ["a"], "images": ["a.png"]}, "bad document", "texts[0]"),
    ({"texts": ["a", None], "images": [None, ["a.png", "b.png"]]}, "bad media reference", "images[1]"),
    (mmc4(image_name="a.png", matched_text_index=1), "bad document", "image_info[0].matched_text_index"),
    (mmc4(image_name="a.png", matched_text_index=True), "bad document", "image_info[0].matched_text_index"),
    (mmc4(matched_text_index=0), "bad media reference", "image_info[0].image_name"),
    ({"text_list": ["a"], "image_info": ["a.png"]}, "bad document", "image_info[0].matched_text_index"),
    ({"text_list": [], "image_info": []}, "no text", "text_list"),
    ({"text": "a", "loss_weight": 0}, "no loss", "loss_weight"),
    ({"text": "a", "image": "a.png", "boxes": [[1, 2]]}, "part of a medium", "boxes"),
    ({"text": "a", "audio": "a.wav"}, "audio not supported", "audio"),
    # Functions and arguments are text for the model too.
    (offers(description="\ud800"), "bad text", "tools[0]"),
    (offers(description="<|image_pad|>"), "placeholder token in text", "tools[0]"),
    (offers(parameters={"default": datetime(2026, 1, 1)}), "bad tools", "tools[0]"),
    (offers(parameters=nested(300)), "bad tools", "tools[0]"),
    (calls({"x": float("inf")}), "bad tool call", ARGUMENTS),
    (calls({"x": [{"y": "\udfff"}]}), "bad text", ARGUMENTS),
    (calls({"<|video_pad|>": 1}), "placeholder token in text", ARGUMENTS),
    (calls({1: 1}), "bad text", ARGUMENTS),
    # A server takes the first closing tag for the end of the argument or call.
    (calls({"x": "a</parameter>b"}), "bad tool call", ARGUMENTS),
    (calls('{"x": [{"\\u003c/function>": 1}]}'), "bad tool call", ARGUMENTS),
    # Audio, which the models cannot hear, is not trained on as if it were text. Qwen-Audio's and ms-swift's
    # older spelling has the place in the text.
    *(
        (says_to(text), AUDIO, "messages[0].content")
        for text in (
            "Audio 1:<audio>https://example.com/glass breaking.wav</audio>\nWhat is it?",
            # Tokens of Qwen2-Audio, Qwen2.5-Omni, Qwen3-Omni, Phi-4, MiniCPM and Kimi-Audio; by hand.
            "<|audio_bos|><|AUDIO|><|audio_eos|>What is it?",
            "<|audio_start|><|audio_pad|><|audio_end|>What is it?",
            "What is <audio_1> about?",
            "Transcribe this.\n<audio>",  # the list is lost, the placeholder is left
        )
    ),
    (says_to("What is it?", audios=["glass.wav"]), AUDIO, "audios"),
    (says_to("What is it?", audio="glass.wav"), AUDIO, "audio"),
    (says_to("What is it?", audio={"path": None, "array": [0.0, 0.0]}), AUDIO, "audio"),
    (says_to("What is it?", system="<audio>\nSpeak like this."), AUDIO, "system"),
    *(
        (asks_in_parts(part, text_part("What is it?")), AUDIO, HERE + field)
        for part, field in (
            ({"type": "input_audio", "input_audio": {"data": "UklGRi", "format": "wav"}}, ""),  # OpenAI's
            ({"type": "audio_url", "audio_url": {"url": "file:///glass.wav"}}, ""),  # vLLM's
            ({"audio": "glass.wav"}, ".audio"),
            ({**text_part("What is it?"), "audio": "glass.wav"}, ".audio"),
            (text_part("<audio>"), ".text"),
        )
    ),
    (says(audio={"id": "a"}), AUDIO, "messages[1].audio"),
    (sharegpt("<image><audio>\nDo they match?", image="a.png"), AUDIO, "conversations[0].value"),
]


@pytest.mark.parametrize(
    "record,reason,field", REFUSED, ids=[f"{i} {r}" for i, (_, r, _) in enumerate(REFUSED)]
)
def test_records_that_cannot_be_trained_on_are_refused(record, reason, field):
    with pytest.raises(RecordError) as error:
        read_conversation(record)
    assert (error.value.reason, error.value.field_path) == (reason, field)
    if record == asks_in_parts({"type": "tool_use"}):
        assert "valid: text, image, image_url" in str(error.value)


NO_AUDIO = {"bytes": None, "path": None, "sampling_rate": 16000}  # datasets' Audio, where a row has none


@pytest.mark.parametrize(
    "record",
    [
        says_to("How do I use the <audio> tag in HTML?"),
        says_to("Explain\n```html\n<audio>\n```"),
        says_to('<audio src="a.mp3" controls>'),
        says_to("A page with sound, please.", '<audio>\n<source src="a.mp3">\n</audio>'),
        says_to("Hi", audio=None, audios=[]),
        says_to("Hi", audio=NO_AUDIO, audios=[NO_AUDIO]),
        says_to([text_part("Hi") | {"audio": None, "input_audio": {"data": None, "format": "wav"}}]),
    ],
)
def test_talk_about_audio_is_read_as_it_is(record):
    question, answer = (turn["content"] for turn in record["messages"])
    read = [message["content"] for message in read_conversation(record).messages]
    assert read == [question if isinstance(question, str) else question[0]["text"], answer]


@pytest.mark.parametrize("piece", ["x <audio> x", "`<audio>", "x<audio>.</audio", "\n" + " " * 300])
def test_long_texts_are_searched_for_audio_in_linear_time(piece):
    """A search that is quadratic anywhere would take minutes."""
    begin = time.process_time()
    with suppress(RecordError):
        refuse_audio_in("x" + piece * 50_000 + "x", "")
    assert time.process_time() - begin < 8


@pytest.mark.parametrize(
    "record", [{"messages": [MARKED, SAY]}, asks_in_parts({"type": "text", "text": "<image>\nHi"})]
)
def test_markers_are_text_in_a_record_that_says_so(record):
    with pytest.raises(RecordError, match="1 <image> in the text, but 0 listed.*'markers': 'text'"):
        read_conversation(record)
    conversation = read_conversation(record | {"markers": "text"})
    assert conversation.messages[0]["content"] == "<image>\nHi"
    assert not conversation.ignored_keys


def test_misnamed_field_of_media_is_named():
    with pytest.raises(RecordError, match="nothing is read from 'image_paths'"):
        read_conversation({"messages": [MARKED, SAY], "image_paths": ["a.png"]})


@pytest.mark.parametrize(
    "record",
    [
        asks_in_parts({"type": "image", "image": "a.png"}, {"type": "text", "text": "<image>\nHi"}),
        asks_in_parts({"type": "image"}, {"type": "text", "text": "<image>\nHi"})
        | {"images": ["a.png"], "markers": "text"},
    ],
    ids=["in parts", "listed"],
)
def test_markers_are_text_beside_media_parts(record):
    conversation = read_conversation(record)
    assert "<image>\nHi" in json.dumps(conversation.messages[0]["content"]).replace("\\n", "\n")
    assert len(conversation.media_references) == str(record).count("a.png")
    assert not conversation.ignored_keys


MMC4 = [("b.png", 2), ("a.png", 0), ("c.png", 2)]
FORMS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("document", {"text": "One.\n"}, ["One.\n"]),
    ("document", {"text": "As <image> in <video> of HTML"}, ["As <image> in <video> of HTML"]),
    ("document", {"image": "a.png", "caption": "A thing."}, ["a.png", "A thing."]),
    ("document", {"images": ["a.png", "b.png"], "text": "Two."}, ["a.png", "b.png", "Two."]),
    ("document", {"images": ["a.png"], "text": "See <image>here"}, ["See ", "a.png", "here"]),
    ("document", {"images": ["a.png"], "text": "<image>s", "markers": "text"}, ["a.png", "<image>s"]),
    ("document", {"text": "x", "label": True, "bbox": [1]}, ["x"]),
    (
        "interleaved",
        {"texts": ["1", None, "two", "3", None, None], "images": [None, "a.png", None, None, None, "b.png"]},
        ["1", "a.png", "two\n\n3", "b.png"],
    ),
    ("interleaved", {"text": None, "texts": ["One"]}, ["One"]),
    ("interleaved", {"texts": ["One ", "two", "\nthree"], "images": None}, ["One two\nthree"]),
    ("interleaved", {"texts": [None, "A clip"], "videos": ["a.mp4", None]}, ["a.mp4", "A clip"]),
    (
        "mmc4",
        {
            "text_list": ["A.", "B.", "C."],
            "image_info": [
                *({"image_name": n, "matched_text_index": i, "raw_url": "x"} for n, i in MMC4),
                None,
            ],
        },
        ["a.png", "A. B. ", "b.png", "c.png", "C."],
    ),
    ("mmc4", {"text_list": ["A.", "B."], "image_info": None}, ["A. B."]),
]
"""Format, record, texts and media in the order of the text."""


@pytest.mark.parametrize(("name", "record", "parts"), FORMS)
def test_document_forms_by_hand(name, record, parts):
    media = {"a.png": IMAGE, "b.png": IMAGE, "c.png": IMAGE, "a.mp4": {"type": "video"}}
    assert detect_format(record).name == name and FORMATS[name].is_document
    document = read_conversation(record)
    assert document.document == [media.get(part, text_part(part)) for part in parts] and not document.messages
    assert [reference for _, reference in document.media_references] == [p for p in parts if p in media]


def test_conversations_are_no_documents():
    assert not read_conversation({"text": "x", "messages": [ASK, SAY]}).document
    with pytest.raises(RecordError, match="no text to train on"):
        read_conversation({"messages": [ASK, SAY]}, "document")
    assert not read_conversation({"instruction": "a", "output": "b", "text": "a b"}).document


def test_caption_prompt_makes_a_conversation_of_a_caption_alone():
    caption = {"image": "a.png", "caption": "A thing.", "loss_weight": 0.5}
    asked = read_conversation(caption, caption_prompt="What is it?")
    answer = say("A thing.", loss_weight=0.5)
    assert asked.messages == [ask([IMAGE, text_part("What is it?")]), answer]
    assert asked.media_references == [("image", "a.png")] and not asked.document
    others = [record for name, record, *_ in FORMS if name != "document"]
    for record in ({"text": "no image"}, {"images": ["a.png"], "text": "See <image> here"}, *others):
        assert read_conversation(record, caption_prompt="What is it?").document
    talk = {"messages": [ASK, SAY]}
    assert read_conversation(talk, caption_prompt="What is it?") == read_conversation(talk)


def convert(root: Path, input_path: Path, **options: Any) -> Any:
    (root / "media").mkdir(exist_ok=True)
    return convert_dataset([input_path], ConversionOptions(root / "media", root / "out", **options))


def test_columns_name_captions_and_texts(tmp_path):
    write(tmp_path / "media/a.png", encoded(56, 84, "png"))
    (tmp_path / "in.csv").write_text("url,alt,text\na.png,A thing.,noise\n,No image.,noise\n")
    report = convert(tmp_path, tmp_path / "in.csv", columns="url=image,alt=caption")
    assert (report.samples, report.images, report.refused) == (2, 1, {})
    [row] = open_loader(DataConfig(path=str(tmp_path / "out"), seq_len=64), tiny_checkpoint(), epochs=1)
    assert row.num_samples == 2
    for columns in ("url=image", "alt=caption,text=text", "alt=caption,text=assistant"):
        with pytest.raises(ConvertError, match="--columns"):
            convert(tmp_path, tmp_path / "in.csv", columns=columns)


def test_interleaved_parquet_with_bytes_and_nulls(tmp_path):
    image = encoded(56, 84, "png")
    images = [None, {"bytes": image, "path": None}, None]
    table = pa.Table.from_pylist([{"texts": ["One ", None, "two."], "images": images, "url": "x"}])
    pq.write_table(table, tmp_path / "in.parquet")
    report = convert(tmp_path, tmp_path / "in.parquet")
    assert (report.samples, report.images, report.ignored) == (1, 1, {"records": {"url": 1}})
