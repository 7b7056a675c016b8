"""Texts, results and numbers that a template or a parser would drop or read otherwise are refused."""

import json

import pytest

from data_tools.formats import RecordError, read_conversation
from data_tools.records import read_records
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.spec.families import read_spec
from tests.data.ordinary_answers import TOOL, ordinary_records
from tests.tiny import with_released_template, write_tiny_checkpoint

USER = {"role": "user", "content": "Hi"}
DONE = {"role": "assistant", "content": "Done."}


@pytest.fixture(scope="module", params=["Qwen3.5-9B", "Qwen3.5-0.8B", "Qwen3.6-27B"])
def encoder(request, tmp_path_factory) -> ChatEncoder:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("thinking") / "hf", "qwen3_5")
    with_released_template(folder, request.param)
    return ChatEncoder(folder, read_spec(folder))


def trained_text(encoder: ChatEncoder, record: dict) -> str:
    conversation = read_conversation(record)
    ids, mask = encoder.encode(conversation.messages, [], conversation.tool_definitions)
    return encoder.tokenizer.decode(ids[mask.bool()])


LOST = {
    "two closing tags": "alpha</think>beta</think>gamma",
    "text before the block": "alpha <think>beta</think> gamma",
    "two blocks": "<think>alpha</think> beta <think>gamma</think> delta",
    "a block in a block": "<think>alpha <think>beta</think> gamma</think> delta",
    "a closing tag in a sentence": "alpha `</think>` beta",
}


@pytest.mark.parametrize("name", LOST)
@pytest.mark.parametrize("later", [[], [USER, DONE]], ids=["last", "earlier"])
def test_answers_that_the_template_drops_are_refused(encoder, name, later):
    record = {"messages": [USER, {"role": "assistant", "content": LOST[name]}, *later]}
    with pytest.raises(ChatError, match="leaves out a text or reads it as thinking"):
        trained_text(encoder, record)


@pytest.mark.parametrize(
    ("answer", "trained"),
    [
        ("alpha beta.\n</think>\n\ngamma", "alpha beta.\n</think>\n\ngamma"),
        ("<think>\nalpha\n</think>\n\nbeta", "alpha\n</think>\n\nbeta"),
        ("<think>alpha</think>beta\n\n", "alpha\n</think>\n\nbeta"),
        ("<think>\nalpha beta", "<think>\nalpha beta"),
        ("The tag `<think>` opens.", "The tag `<think>` opens."),
    ],
)
def test_answers_with_thinking_are_trained_on_whole(encoder, answer, trained):
    record = {"messages": [USER, {"role": "assistant", "content": answer}]}
    assert trained_text(encoder, record) == f"{trained}<|im_end|>"


def test_thinking_of_earlier_answers_is_left_out_as_served(encoder):
    answer = {"role": "assistant", "content": "<think>\nalpha\n</think>\n\nbeta"}
    assert "beta<|im_end|>" in trained_text(encoder, {"messages": [USER, answer, USER, DONE]})


def test_tags_in_reasoning_are_refused():
    answer = {**DONE, "reasoning_content": "<think>\nHm.\n</think>"}
    with pytest.raises(RecordError, match="reasoning_content has the tag <think>"):
        read_conversation({"messages": [USER, answer]})


def test_templates_that_drop_other_texts_are_refused(encoder):
    changed = ChatEncoder.__new__(ChatEncoder)
    changed.__dict__.update(encoder.__dict__)
    head, tag, tail = encoder.chat_template.rpartition("<tool_response>")
    changed.chat_template = head.replace("args_value | string", "''") + tag
    changed.chat_template += tail.replace("{{- content }}", "{{- content[:4] }}")
    call = {"role": "assistant", "content": "", "tool_calls": [call_of("1", {"q": "Oslo"})]}
    for messages, lost in (
        ([USER, call, result_of("1"), DONE], "Oslo"),
        ([USER, {**call, "tool_calls": [call_of("1", {})]}, result_of("1"), DONE], "result of 1"),
    ):
        with pytest.raises(ChatError, match=lost):
            trained_text(changed, {"messages": messages})


@pytest.mark.parametrize("count", [80, pytest.param(350, marks=pytest.mark.full)])
def test_ordinary_answers_are_accepted(encoder, count):
    for record in ordinary_records(count, seed=len(encoder.chat_template)):  # for each of three templates
        trained_text(encoder, record)


def call_of(call_id: object, arguments: object = None) -> dict:
    function = {"name": f"f{call_id}", "arguments": {} if arguments is None else arguments}
    return {"id": call_id, "type": "function", "function": function}


def result_of(call_id: object) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": f"result of {call_id}"}


def results_read(calls: list[dict], results: list[dict]) -> str:
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    conversation = read_conversation({"messages": [USER, turn, *results, DONE]})
    assert not any("id" in call for m in conversation.messages for call in m.get("tool_calls", ()))
    assert not any("tool_call_id" in m for m in conversation.messages)
    return "".join(m["content"][-1] for m in conversation.messages if m["role"] == "tool")


MISMATCH, NUMBERS = r"the calls have the ids \['1', '2'\]", "2 calls have 1 results"


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ("12", "12", "12"),
        ("12", "21", "12"),
        *[("12", results, MISMATCH) for results in ("1", "19", "123", "11", "91", "2")],
        ("11", "11", "each call needs one result"),
        ("12", ["1", None], "each call needs one result"),
        ([None, "2"], "12", "each call needs one result"),
        # No ids to compare: the results stay in their order.
        ([None, None], "12", "12"),
        ("12", [None, None], "ee"),
        ("12", [None], NUMBERS),
        ("12", [None] * 3, "2 calls have 3 results"),
        ([None, None], "1", "each call needs one result"),
    ],
)
def test_results_are_put_to_their_calls_or_refused(calls, results, expected):
    arguments = [call_of(i) for i in calls], [result_of(i) for i in results]
    if len(expected) == 2:  # the last letters of the results; "None" ends with an e
        assert results_read(*arguments) == expected
        return
    with pytest.raises(RecordError, match=expected) as caught:
        results_read(*arguments)
    assert caught.value.reason == "results and calls differ"


def test_results_with_media_are_not_moved():
    image = {"role": "tool", "tool_call_id": "2", "content": [{"type": "image", "image": "a.png"}]}
    with pytest.raises(RecordError, match="write them in that order"):
        results_read([call_of("1"), call_of("2")], [image, result_of("1")])


def test_calls_as_turns_have_ids_too():
    turns = [{"role": "tool_call", "tool_call_id": i, "content": json.dumps({"name": f"f{i}"})} for i in "12"]
    read = read_conversation({"messages": [USER, *turns, result_of("2"), result_of("1"), DONE]}).messages
    assert [m["content"] for m in read if m["role"] == "tool"] == ["result of 1", "result of 2"]


TOKENS = [f"<|{name}|>" for name in "im_end im_start endoftext vision_start vision_end vision_pad".split()]


def records_with(text: str) -> dict[str, dict]:

    def calls(arguments: object) -> dict:
        return {**DONE, "content": "", "tool_calls": [call_of("1", arguments)]}

    parts = [{"type": "text", "text": piece} for piece in (text[:5], text[5:])]
    messages = {
        "user": [{**USER, "content": text}, DONE],
        "answer": [USER, {**DONE, "content": text}],
        "reasoning": [USER, {**DONE, "reasoning_content": text}],
        "result": [USER, calls({}), {**result_of("1"), "content": text}, DONE],
        "key of an argument": [USER, calls({"list": [{text: 1}]})],
        "argument as JSON": [USER, calls('{"a": "\\u003c' + text[1:] + '"}')],
        "two parts": [{**USER, "content": parts}, DONE],
    }
    tool = {"type": "function", "function": {**TOOL["function"], "description": text}}
    return {name: {"messages": turns} for name, turns in messages.items()} | {
        "system": {"system": text, "messages": [USER, DONE]},
        "tool": {"messages": [USER, DONE], "tools": [tool]},
    }


@pytest.mark.parametrize("token", TOKENS)
def test_control_tokens_are_refused_wherever_they_stand(token):
    for place, record in records_with(token).items():
        with pytest.raises(RecordError, match="control token") as caught:
            read_conversation(record)
        assert caught.value.reason == "control token in text", place


def test_training_refuses_control_tokens_as_conversion_does(encoder):
    for messages in (
        [{"role": "user", "content": "a<|im_end|>"}, DONE],
        [USER, {**DONE, "content": "<|im_start|>"}],
    ):
        with pytest.raises(ChatError, match="control token"):
            encoder.encode(messages, [])
        with pytest.raises(ChatError, match="control token"):
            encoder.encode_prompt(messages, [])


@pytest.mark.parametrize("text", ["<|im_end |> im_end </s>", "<|box_start|>(1,2)<|box_end|><|user|>"])
def test_texts_like_control_tokens_are_accepted(encoder, text):
    for record in records_with(text).values():
        trained_text(encoder, record)


CHANGED = {
    "a key twice": '{"a": 1, "a": 2}',
    "25 digits": '{"a": 0.1234567890123456789012345}',
    "1e-400": '{"a": 1e-400}',
    "1e400": '{"a": [1e400]}',
    "a large number with a fraction": '{"a": 12345678901234567890.5}',
    "NaN": '{"a": NaN}',
}


@pytest.mark.parametrize("as_text", [True, False])
@pytest.mark.parametrize("name", CHANGED)
def test_arguments_that_parsing_would_change_are_refused(name, as_text, tmp_path):
    written = json.dumps(CHANGED[name]) if as_text else CHANGED[name]
    call = f'{{"type": "function", "function": {{"name": "f", "arguments": {written}}}}}'
    messages = f'[{json.dumps(USER)}, {{"role": "assistant", "content": "", "tool_calls": [{call}]}}]'
    (tmp_path / "in.json").write_text(f'{{"messages": {messages}, "score": 1e-400}}\n')
    [(_, record)] = read_records(tmp_path / "in.json")
    if "twice" in name and not as_text:  # the reader refuses any object with a key twice
        assert record.reason == "duplicate key"
        return
    with pytest.raises(RecordError) as caught:
        read_conversation(record)
    assert caught.value.reason == "bad tool call" and "arguments" in caught.value.field_path
