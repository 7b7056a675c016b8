"""Orders of roles, digits of arguments, and conversations that end unfinished."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from data_tools.formats import RecordError, read_conversation
from data_tools.records import read_records
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatTemplateError
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE
from megatron_vl.data.sample.written_numbers import WrittenNumber, dump_json, read_number
from tests.data.datasets import converted, open_loader
from tests.data.helpers import IMAGE, assistant, spec_of, system, text, user
from tests.data.test_chat import released_tokenizer_folder
from tests.data.test_thinking import LARGE, LATER, thinking_encoder
from tests.tiny import tiny_checkpoint
from toolkit.cli import main

ASK, SAY, RULE = user("Hi"), assistant("Hello"), system("Be brief.")
DRY = {"role": "tool", "content": "dry"}
DRAWN = {"role": "tool", "content": [IMAGE, text("seen")]}


def call(arguments: Any = None) -> dict[str, Any]:
    function = {"name": "look", "arguments": {"x": 1} if arguments is None else arguments}
    return assistant("", tool_calls=[{"type": "function", "function": function}])


@pytest.fixture(scope="module")
def encoders(tmp_path_factory) -> dict[str, ChatEncoder]:
    root = tmp_path_factory.mktemp("roles")
    dropping = root / "dropping.jinja"  # as Qwen3-VL's, it passes over a late system turn without a word
    dropping.write_text(
        "{% for m in messages %}{% if loop.first or m.role != 'system' %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    )
    plain, spec = released_tokenizer_folder(), spec_of("qwen3_vl")
    return {
        "qwen2_vl": ChatEncoder(plain, spec),
        "tools": ChatEncoder(plain, spec, DataConfig(chat_template=TOOLS_TEMPLATE)),
        "dropping": ChatEncoder(plain, spec, DataConfig(chat_template=str(dropping))),
        **{model: thinking_encoder(model) for model in (LARGE, LATER)},
    }


def trained_text(ours: ChatEncoder, messages: list[dict], grids: Any = (), **more: Any) -> str:
    """The tokens that are trained on, and that the whole text is transformers' own rendering."""
    ids, mask = ours.encode(messages, grids, **more)
    if not grids:
        rendered = ours.tokenizer.apply_chat_template(
            messages, chat_template=ours.chat_template, tokenize=False, tools=more.get("tools")
        )
        assert ids.tolist() == ours.tokenizer(rendered)["input_ids"]
    return ours.tokenizer.decode(ids[mask.bool()])


ORDERS = {
    "a late system turn": [ASK, SAY, RULE, ASK, SAY],
    "two system turns": [RULE, system("Be kind."), ASK, SAY],
    "two users": [ASK, user("Hm?"), SAY],
    "two assistants": [ASK, SAY, assistant("Anything else?")],
    "a user after a result": [ASK, call(), DRY, ASK, SAY],
}
HELLO, MORE, BLOCK = "Hello<|im_end|>", "Anything else?<|im_end|>", "<tool_call>\n"
CALLED = '<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call><|im_end|>'
TRAINED = {
    ("qwen2_vl", "a late system turn"): HELLO * 2,
    ("qwen2_vl", "two system turns"): HELLO,
    ("qwen2_vl", "two users"): HELLO,
    ("qwen2_vl", "two assistants"): HELLO + MORE,
    ("tools", "a user after a result"): CALLED + HELLO,
    ("tools", "a late system turn"): HELLO * 2,
    (LARGE, "two users"): HELLO,
    (LARGE, "two assistants"): HELLO + MORE,
}


@pytest.mark.parametrize(("model", "order"), TRAINED)
def test_orders_that_the_template_writes_are_trained_on(encoders, model, order) -> None:
    messages = read_conversation({"messages": ORDERS[order]}).messages
    assert messages == ORDERS[order]
    assert trained_text(encoders[model], messages) == TRAINED[model, order]


@pytest.mark.parametrize("model", [LARGE, LATER, "dropping"])
@pytest.mark.parametrize("order", ["a late system turn", "two system turns"])
def test_system_turns_that_the_template_does_not_write_are_to_be_joined(encoders, model, order) -> None:
    with pytest.raises(ChatTemplateError, match="does not write a system turn after the start; join them"):
        encoders[model].encode(ORDERS[order], [])


@pytest.mark.parametrize("order", ["two users", "two assistants"])
def test_turns_that_the_template_refuses_are_to_be_joined(order, tmp_path) -> None:
    """A run trains on the other samples, and lists why it left this one out."""
    raising = tmp_path / "raising.jinja"
    raising.write_text(
        "{% for m in messages %}{% if not loop.first and m.role == loop.previtem.role %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    path, _ = converted(tmp_path, [{"messages": [ASK, SAY]}, {"messages": ORDERS[order]}])
    data = DataConfig(path=str(path), chat_template=str(raising), num_workers=0)
    [row] = open_loader(data, tiny_checkpoint(), epochs=1)
    [dropped] = row.dropped_samples
    assert (row.sample_keys, dropped.key) == (["000000000"], "000000001")
    said = f"roles must alternate); the {order[4:-1]} has several turns in a row: join them"
    assert dropped.detail.endswith(said)


@pytest.mark.parametrize(
    "messages",
    [[SAY, ASK, SAY], [RULE, SAY], [ASK, SAY, DRAWN, SAY], [ASK, call(), ASK, SAY], [ASK, call(), SAY]],
)
def test_conversations_without_a_question_or_a_result_are_refused(messages) -> None:
    with pytest.raises(RecordError) as caught:
        read_conversation({"messages": messages, "images": ["a.png"] * (DRAWN in messages)})
    assert caught.value.reason == "wrong role order"


TWO = {**call(), "tool_calls": call()["tool_calls"] * 2}
UNFINISHED = {
    "a user's turn": ([ASK, SAY, ASK], 2, 1),
    "two users' turns and a rule": ([ASK, SAY, RULE, ASK, ASK], 2, 3),
    "a result": ([ASK, SAY, ASK, call(), DRY], 4, 1),
    "a call without its result": ([ASK, call()], 2, 0),
    "one of two results": ([ASK, TWO, DRY], 2, 1),
    "nothing": ([ASK, SAY], 2, 0),
}


@pytest.mark.parametrize("end", UNFINISHED)
def test_finished_turns_are_kept(encoders, end) -> None:
    messages, kept, left_out = UNFINISHED[end]
    read = read_conversation({"messages": messages})
    assert (read.messages, read.unfinished_turns) == (messages[:kept], left_out)
    assert trained_text(encoders["tools"], read.messages)


DIGITS = '{"x": 0.10, "deep": [1.50, {"y": -0.0, "z": 1e5}], "n": 7, "f": 2.5}'


def read_line(arguments: str, tmp_path: Path) -> dict[str, Any]:
    """A record in a file, with arguments as an object in JSON, and the text of one."""
    ask, function = json.dumps(ASK), f'{{"name": "look", "arguments": {arguments}}}'
    turn = f'{{"role": "assistant", "content": "", "tool_calls": [{{"function": {function}}}]}}'
    path = tmp_path / "in.jsonl"
    path.write_text(f'{{"messages": [{ask}, {turn}, {json.dumps(DRY)}, {json.dumps(SAY)}]}}\n')
    [(_, record)] = read_records(path)
    return record


@pytest.mark.parametrize("as_text", [True, False])
def test_arguments_keep_their_digits(encoders, tmp_path, as_text) -> None:
    """transformers writes arguments that are a text as they are, if the template does."""
    record = read_line(json.dumps(DIGITS) if as_text else DIGITS, tmp_path)
    messages = read_conversation(record).messages
    given = [messages[0], call(DIGITS), *messages[2:]]
    ours = encoders["tools"]
    reference = ours.tokenizer.apply_chat_template(given, chat_template=ours.chat_template, tokenize=False)
    assert DIGITS in reference and ours.render_conversation(messages) == reference
    ids, mask = ours.encode(messages, [])
    assert ids.tolist() == ours.tokenizer(reference)["input_ids"]
    assert DIGITS in ours.tokenizer.decode(ids[mask.bool()])
    for model in (LARGE, LATER):
        written = encoders[model].render_conversation(messages)
        assert (
            '<parameter=x>\n0.10\n</parameter>\n<parameter=deep>\n[1.50, {"y": -0.0, "z": 1e5}]\n' in written
        )
        assert "<parameter=n>\n7\n</parameter>\n<parameter=f>\n2.5\n" in written and "\ufdd0" not in written


def test_digits_are_stored_as_they_were_written(tmp_path: Path) -> None:
    record = read_line(DIGITS, tmp_path)
    lines = dump_json(record)
    assert DIGITS in lines
    (tmp_path / "lines.jsonl").write_text(lines + "\n")
    words = ["--input", str(tmp_path / "lines.jsonl"), "--out", str(tmp_path / "out"), "--workers", "2"]
    assert main(["data", "convert", *words]) == 0
    with tarfile.open(tmp_path / "out/train-000000.tar") as tar:
        stored = tar.extractfile("000000000.json").read().decode()
    assert DIGITS in stored
    [called] = json.loads(stored, parse_float=read_number)["messages"][1]["tool_calls"]
    read = called["function"]["arguments"]
    assert read == json.loads(DIGITS) and isinstance(read["x"], WrittenNumber) and type(read["f"]) is float


def test_texts_with_the_mark_stay(encoders) -> None:
    texts = ["\ufdd0a\ufdd0", '"\ufdd0"', "\ufdd0"]
    assert json.loads(dump_json(texts)) == texts
