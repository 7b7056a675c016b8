"""The template with tools for Qwen2-VL and Qwen2.5-VL, and other templates that a run is given.

Without tools it is the released template of these families, and with tools that of Qwen2.5's text models
(both Apache-2.0). The expected text was written by hand from the two.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from data_tools.formats import read_conversation
from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE, read_run_template
from megatron_vl.data.source.sample_sizes import compute_tokenization_id
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.families.hf_folder import read_chat_template
from tests.data.helpers import IMAGE, VIDEO, assistant, system, text, tiny_encoder, user
from tests.data_tools.test_formats import TOOL, WITH_TOOLS
from tests.tiny import tiny_checkpoint

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
    {"role": "tool", "content": [IMAGE]},
    {"role": "tool", "content": "nothing"},
    assistant("", tool_calls=[call()]),
    {"role": "tool", "content": "more"},
    assistant("STOP"),
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
    with pytest.raises(ChatError, match=f"template does not write {part}"):
        plain.encode(turns, [], tools)
    with pytest.raises(ChatError, match=f"template does not write {part}"):
        plain.encode_prompt(turns[:3], [], tools)
