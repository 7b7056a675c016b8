"""Tools and calls: what the released template of Qwen3.5 writes, and what is trained on of it.

The template (Apache-2.0) was released with Qwen3.5-4B and larger. The expected text below was written by hand
from it, and transformers renders the same file.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_tools.formats import read_conversation
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.spec.families import read_spec
from tests.data_tools.test_formats import TOOL, WITH_TOOLS
from tests.tiny import tiny_checkpoint

TEMPLATE = Path(__file__).parents[1] / "hf_configs" / "Qwen3.5-9B.chat_template.jinja"
CALLED = """<|im_start|>assistant
<think>

</think>

I look.

<tool_call>
<function=weather>
<parameter=city>
Oslo
</parameter>
</function>
</tool_call><|im_end|>
"""
ANSWERED = """<|im_start|>user
<tool_response>
{"rain": true}
</tool_response><|im_end|>
<|im_start|>assistant
<think>

</think>

Yes.<|im_end|>
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint folder with the released template of Qwen3.5."""
    path = tmp_path_factory.mktemp("qwen3_5") / "hf"
    shutil.copytree(tiny_checkpoint("qwen2_5_vl"), path)
    (path / "chat_template.json").unlink()
    (path / "chat_template.jinja").write_text(TEMPLATE.read_text())
    return path


def test_tool_calls_of_all_formats_equal_the_released_template(folder):
    encoder = ChatEncoder(folder, read_spec(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for record in WITH_TOOLS.values():
        conversation = read_conversation(record)
        text = encoder.render_conversation(conversation.messages, tools=conversation.tool_definitions)
        assert text == tokenizer.apply_chat_template(
            conversation.messages,
            tools=conversation.tool_definitions,
            chat_template=TEMPLATE.read_text(),
            tokenize=False,
        )
        head, question, rest = text.partition("<|im_start|>user\nRain?<|im_end|>\n")
        assert question and rest == CALLED + ANSWERED
        assert (
            head.startswith("<|im_start|>system\n# Tools\n")
            and f"<tools>\n{json.dumps(TOOL)}\n</tools>" in head
        )


@pytest.mark.parametrize("part", ["tools", "tool calls", "reasoning_content"])
def test_encoder_rejects_template_that_leaves_something_out(part):
    """Qwen2-VL's and Qwen2.5-VL's released template ignores all of them without a word."""
    encoder = ChatEncoder(tiny_checkpoint("qwen2_5_vl"), read_spec(tiny_checkpoint("qwen2_5_vl")))
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "Yes."}]
    tools = []
    if part == "tools":
        tools = [TOOL]
    elif part == "tool calls":
        turns = read_conversation(WITH_TOOLS["openai"]).messages
    else:
        turns[1] = {**turns[1], "reasoning_content": "Clouds."}
    with pytest.raises(ChatError, match=f"template does not write {part}"):
        encoder.encode(turns, [], tools)
    with pytest.raises(ChatError, match=f"template does not write {part}"):
        encoder.encode_prompt(turns[:3], [], tools)
