"""The template with tools for Qwen2-VL and Qwen2.5-VL, and other templates that a run is given.

Without tools it is the released template of these families, and with tools that of Qwen2.5's text models
(both Apache-2.0). The expected text was written by hand from the two.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from converters.convert import convert_weights, export_weights
from data_tools.formats import RecordError, read_conversation
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatError, ChatTemplateError
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE, read_run_template
from megatron_vl.data.source.dataset_description import read_description
from megatron_vl.data.source.sample_sizes import compute_tokenization_id, missing_sizes_advice
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import read_chat_template
from megatron_vl.weights.run_folder import EXPORT_FACTS_FILE
from tests.data.datasets import converted, open_loader
from tests.data.helpers import IMAGE, VIDEO, assistant, system, text, tiny_encoder, user
from tests.data.test_thinking import (
    GOLDEN,
    HI,
    HM,
    LATER,
    NEXT,
    OPEN,
    PLAIN,
    QUESTION,
    TEMPLATES,
    THINK,
    THOUGHT,
    pieces,
    thinking_encoder,
)
from tests.data_tools.test_formats import TOOL, WITH_TOOLS
from tests.support.tiny_run import metrics, prepare, trainings
from tests.tiny import tiny_checkpoint
from toolkit.generate.answers import with_trained_media

TEXT_TEMPLATE = Path(__file__).parents[1] / "hf_configs" / "Qwen2.5-7B-Instruct.chat_template.jinja"
PADS = "<|vision_start|><|image_pad|><|vision_end|>"
EXPECTED = f"""<|im_start|>system
You are a helpful assistant.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{{"type": "function", "function": {{"name": "zoom", "description": "Zooms.", "parameters": {{}}}}}}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call><|im_end|>
<|im_start|>user
{PADS}What is written?<|im_end|>
<|im_start|>assistant
I look closer.
<tool_call>
{{"name": "zoom", "arguments": {{"box": [1, 2], "name": "Ä"}}}}
</tool_call>
<tool_call>
{{"name": "zoom", "arguments": {{}}}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
{PADS}
</tool_response>
<tool_response>
nothing
</tool_response><|im_end|>
<|im_start|>assistant
<tool_call>
{{"name": "zoom", "arguments": {{}}}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
more
</tool_response><|im_end|>
<|im_start|>assistant
STOP<|im_end|>
"""  # noqa: E501
ZOOM = {"type": "function", "function": {"name": "zoom", "description": "Zooms.", "parameters": {}}}


def call(**arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "zoom", "arguments": arguments}}


CONVERSATION: list[dict[str, Any]] = [
    user([IMAGE, text("What is written?")]),
    assistant("I look closer.", tool_calls=[call(box=[1, 2], name="Ä"), call()]),
    *({"role": "tool", "content": result} for result in ([IMAGE], "nothing")),
    *(assistant("", tool_calls=[call()]), {"role": "tool", "content": "more"}, assistant("STOP")),
]


def encoder(template: str = TOOLS_TEMPLATE) -> ChatEncoder:
    return tiny_encoder("qwen2_5_vl", chat_template=template)


def test_tools_template_writes_what_was_worked_out_by_hand():
    assert encoder().render_conversation(CONVERSATION, tools=[ZOOM]) == EXPECTED


@pytest.mark.parametrize("rule", ["", "Be brief."])
@pytest.mark.parametrize("form", list(WITH_TOOLS))
def test_tools_template_equals_the_text_models(form: str, rule: str):
    conversation = read_conversation(WITH_TOOLS[form])
    turns = [turn for turn in conversation.messages if turn["role"] != "system"]
    turns = [system(rule or "You are a helpful assistant."), *turns]
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen2_5_vl"))
    for tools in ([TOOL, ZOOM], []):
        for prompt in (True, False):
            given = {"chat_template": TEXT_TEMPLATE.read_text(), "add_generation_prompt": prompt}
            expected = tokenizer.apply_chat_template(turns, tools=tools or None, tokenize=False, **given)
            asked = turns if rule else turns[1:]
            written = encoder().render_conversation(asked, tools=tools, generation_prompt=prompt)
            assert written == expected and "Oslo" in written


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize("settings", [{}, {"add_vision_id": True}, {"add_generation_prompt": True}])
def test_tools_template_without_tools_is_the_released_one(family: str, settings: dict[str, Any]):
    folder = tiny_checkpoint(family)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [VIDEO, text(" a\n"), IMAGE, {"image_url": "x"}]
    conversations = [
        [user("\nHi {{ there }} "), assistant("")],
        [user(parts), assistant([text("b")])],
        [system([text("S")]), user(parts)],
        [user("1"), system("2"), user([])],
    ]
    for turns in conversations:
        texts = [
            tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, **settings)
            for template in (read_chat_template(folder), read_run_template(folder, TOOLS_TEMPLATE))
        ]
        assert texts[0] == texts[1]


def test_refusal_of_tools_names_the_template_that_writes_them():
    with pytest.raises(ChatError, match=f"does not write tools; give --data.chat_template {TOOLS_TEMPLATE}"):
        encoder(template="").encode(CONVERSATION, [], [ZOOM])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[-1]['content'] }}", "cannot be found in what the chat template writes"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "cannot be found|leaves out a text"),
        ("{% if %}", "the chat template refuses the conversation .TemplateSyntaxError"),
        (" ", "is empty"),
        (None, "cannot be read .*No such file.*: qwen2_vl_tools"),
    ],
)
def test_templates_that_cannot_be_used_are_refused_by_name(template: str | None, reason: str, tmp_path: Path):
    path = tmp_path / "mine.jinja"
    if template is not None:
        path.write_text(template)
    with pytest.raises(ChatError, match=f"(?s)data.chat_template .*mine.jinja.*({reason})"):
        encoder(template=str(path))


def test_another_template_is_another_tokenization(tmp_path: Path):
    folder = tiny_checkpoint("qwen2_5_vl")

    def name(template: str) -> str:
        return compute_tokenization_id(folder, read_spec(folder), DataConfig(chat_template=template))

    copy = tmp_path / "moved.jinja"
    copy.write_text(read_chat_template(folder))
    assert name(str(copy)) == name("") != name(TOOLS_TEMPLATE)


@pytest.mark.parametrize("part", ["tools", "tool calls", "reasoning_content"])
def test_encoder_rejects_template_that_leaves_something_out(part):
    """Qwen2-VL's and Qwen2.5-VL's released template ignores all of them without a word."""
    turns = {
        "tools": [user("Rain?"), assistant("Yes.")],
        "tool calls": read_conversation(WITH_TOOLS["openai"]).messages,
        "reasoning_content": [user("Rain?"), assistant("Yes.", reasoning_content="Clouds.")],
    }[part]
    plain, tools = encoder(template=""), [TOOL] * (part == "tools")
    for encode, said in ((plain.encode, turns), (plain.encode_prompt, turns[:3])):
        with pytest.raises(ChatError, match=f"template does not write {part}"):
            encode(said, [], tools)


# --- Arguments of the template: of a run, of a record, in states, sizes and exports -------------------------

PRESERVE = {"preserve_thinking": True}


def later_encoder(**arguments: object) -> ChatEncoder:
    return thinking_encoder(LATER, template_arguments=arguments)


def test_earlier_thinking_is_trained_on_if_the_template_keeps_it() -> None:
    messages, _, dropped = GOLDEN["several turns"]
    kept = [(HI + OPEN + THINK, 0), (HM, 1), *dropped[2:]]
    assert pieces(later_encoder(**PRESERVE), messages) == kept

    ours = later_encoder()
    given = {"chat_template": ours.chat_template, "tokenize": False, **PRESERVE}
    rendered = ours.tokenizer.apply_chat_template(messages, **given)
    assert rendered.count("<think>") == 2
    for given in (PRESERVE, {**PRESERVE, "enable_thinking": False}):
        assert later_encoder(**given).render_conversation(messages) == rendered

    # A record's own arguments come first, and the others of the run stay.
    ids, mask = ours.encode(messages, [], template_arguments=PRESERVE)
    assert ids.tolist() == ours.tokenizer(rendered)["input_ids"]
    own = later_encoder(**PRESERVE).encode(messages, [], template_arguments={"preserve_thinking": False})
    assert [each.tolist() for each in own] == [each.tolist() for each in ours.encode(messages, [])]
    assert int(mask.sum()) == int(own[1].sum()) + 5


@pytest.mark.parametrize("name", ["keep_thinking", "messages", "tools", "add_generation_prompt"])
def test_argument_that_is_not_the_templates_is_refused(name) -> None:
    with pytest.raises(ChatError, match=rf"data\.template_arguments: .* never reads {name}; it"):
        later_encoder(**{name: True})
    with pytest.raises(ChatTemplateError, match=r"chat_template_kwargs: .* it reads .*preserve_thinking"):
        later_encoder().encode([QUESTION, PLAIN], [], template_arguments={name: True})


def test_arguments_of_a_record_are_an_object() -> None:
    record = {"messages": [QUESTION, PLAIN]}
    vision = ('{"add_vision_id": true}', {"add_vision_id": True})
    for written, arguments in ((PRESERVE, PRESERVE), vision, ({"a": None}, {}), (None, {})):
        read = read_conversation(record | {"chat_template_kwargs": written})
        assert read.template_arguments == arguments and not read.ignored_keys
    for written in ([1], "yes", True):
        with pytest.raises(RecordError) as caught:
            read_conversation(record | {"chat_template_kwargs": written})
        assert caught.value.field_path == "chat_template_kwargs"


def test_arguments_belong_to_sizes_and_states(tmp_path) -> None:
    """Qwen2.5-VL's template numbers images, which makes samples longer."""
    hf = tiny_checkpoint("qwen2_5_vl")
    out, _ = converted(tmp_path, [{"messages": [QUESTION, PLAIN]}] * 4)
    without = DataConfig(path=str(out), seq_len=256, num_workers=0)
    numbered = replace(without, template_arguments={"add_vision_id": True})
    spec = read_spec(hf)
    assert compute_tokenization_id(hf, spec, without) != compute_tokenization_id(hf, spec, numbered)
    advice = missing_sizes_advice(read_description(numbered.path), hf, numbered)
    assert """ --data.template_arguments '{"add_vision_id": true}'`""" in advice

    state = open_loader(without, hf).state_dict()
    del state["identity"]["template_arguments"]  # as version 0.2.0 wrote it
    open_loader(without, hf).load_state_dict(state)
    with pytest.raises(LoaderStateError, match=r"set data\.template_arguments back"):
        open_loader(numbered, hf).load_state_dict(state)


@pytest.mark.ranks
def test_run_and_its_export_name_the_arguments(tmp_path) -> None:
    """Those of the run, also none, replace those of the export it began with; a resume must have them."""
    prepared = prepare(tmp_path / "prepared", tiny_checkpoint("qwen2_5_vl", dtype=torch.float32), samples=4)
    path, _ = converted(tmp_path, [{"messages": [QUESTION, THOUGHT, NEXT, PLAIN]}])
    data = DataConfig(path=str(path), chat_template=f"{TEMPLATES / LATER}.chat_template.jinja")
    for arguments in (PRESERVE, {}):  # else each run does it
        open_loader(replace(data, template_arguments=arguments), prepared["hf"])
    options = f"--data.path {path} --data.chat_template {data.chat_template}"
    options += " --data.seq_len 80 --optimizer.warmup_steps 0 --global_batch_size 1 --data.num_workers 0"

    def start(name: str, steps: int, **arguments: object) -> tuple[Path, list[str]]:
        words = [*options.split(), "--steps", str(steps), "--data.template_arguments", json.dumps(arguments)]
        return tmp_path / name, words

    def exported(name: str, hf: Path) -> tuple[Path, dict]:
        export_weights(tmp_path / name / "step_00000001", hf, tmp_path / f"{name}_hf")
        return tmp_path / f"{name}_hf", json.loads((tmp_path / f"{name}_hf" / EXPORT_FACTS_FILE).read_text())

    starts = start("first", 1, **PRESERVE), start("first", 2), start("second", 1)
    refused = trainings(prepared, *starts)[1]
    assert f"saved with template_arguments = {PRESERVE}, this loader has {{}}" in refused
    run_json = json.loads((tmp_path / "first/step_00000001/run.json").read_text())
    assert run_json["fields"]["data.template_arguments"] == PRESERVE
    first, facts = exported("first", prepared["hf"])
    assert facts["template_arguments"] == PRESERVE
    assert with_trained_media(DataConfig(), first).template_arguments == PRESERVE
    convert_weights(first, tmp_path / "again")
    export_weights(tmp_path / "again", prepared["hf"], tmp_path / "back")
    again = json.loads((tmp_path / "back" / EXPORT_FACTS_FILE).read_text())
    assert again["template_arguments"] == facts["template_arguments"]

    _, facts = exported("second", first)
    assert "template_arguments" not in facts
    # Each character is a token, except for "hi". "Hm.", the end of the block and three breaks are 13.
    trained = {name: metrics(tmp_path / name)[0]["loss_tokens"] for name in ("first", "second")}
    assert trained == {"first": 13 + len("No.|Yes.|"), "second": len("No.|Yes.|")}
