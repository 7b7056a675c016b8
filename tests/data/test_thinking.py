"""What is learnt under the released templates of thinking models, written out by hand, token by token.

The vocabulary is Qwen2's released one with Qwen3.5's tokens for thinking and tools: where tokens begin and
end around thinking is the same in Qwen3.5's.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_vl.data import chat
from megatron_vl.data.chat import ChatEncoder, ChatError
from megatron_vl.data.thinking import ThinkingRule
from tests.data.helpers import spec_of
from tests.data.test_chat import released_tokenizer_folder

TEMPLATES = Path(__file__).resolve().parents[1] / "hf_configs"
LARGE, SMALL, LATER = "Qwen3.5-9B", "Qwen3.5-0.8B", "Qwen3.6-27B"
MARKED = ("think", "tool_call", "tool_response")
"""Pairs of marks that are tokens."""
QUESTION = {"role": "user", "content": "Hi"}
NEXT = {"role": "user", "content": "And?"}
PLAIN = {"role": "assistant", "content": "Yes."}
THOUGHT = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nNo."}
APART = {"role": "assistant", "reasoning_content": "Hm.", "content": "No."}
CALL = {
    "role": "assistant",
    "reasoning_content": "Look.",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "rain", "arguments": {"city": "Rome"}}}],
}
RESULT = {"role": "tool", "content": "dry"}

OPEN = ["<|im_start|>", "assistant", "\n"]
HI = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n"]
AND = ["<|im_start|>", "user", "\n", "And", "?", "<|im_end|>", "\n"]
BLOCK = ["<think>", "\n\n", "</think>", "\n\n"]
DRY = [
    "<|im_start|>",
    "user",
    "\n",
    "<tool_response>",
    "\n",
    "dry",
    "\n",
    "</tool_response>",
    "<|im_end|>",
    "\n",
]
TOOL_CALL = [
    *("<tool_call>", "\n", "<", "function", "=", "rain", ">\n", "<", "parameter", "=", "city", ">\n"),
    *("R", "ome", "\n"),
    *("</", "parameter", ">\n", "</", "function", ">\n", "</tool_call>"),
]


@pytest.fixture(scope="module", autouse=True)
def tokenizers_once() -> Iterator[None]:
    """Reading the released vocabulary takes a second. The encoders of a folder share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "_load_tokenizer", cache(chat._load_tokenizer))
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint folder for each template."""
    root = tmp_path_factory.mktemp("thinking")
    shutil.copytree(released_tokenizer_folder(), root / "marked")
    tokenizer = AutoTokenizer.from_pretrained(root / "marked")
    tokenizer.add_tokens([f"<{end}{name}>" for name in MARKED for end in ("", "/")])
    tokenizer.save_pretrained(root / "marked")

    for name in (LARGE, SMALL, LATER):
        shutil.copytree(root / "marked", root / name)
        shutil.copy(TEMPLATES / f"{name}.chat_template.jinja", root / name / "chat_template.jinja")
    return {name: root / name for name in (LARGE, SMALL, LATER)}


def encoder(folder: Path, **rule: str) -> ChatEncoder:
    return ChatEncoder(folder, spec_of("qwen3_vl"), thinking=ThinkingRule(**rule))


def pieces(ours: ChatEncoder, messages: list[dict]) -> list[tuple[list[str], bool]]:
    """The text of each token; neighbours that are both learnt, or both not, are together."""
    ids, mask = ours.encode(messages, [])
    rendered = ours.render(messages)
    assert ids.tolist() == ours.tokenizer(rendered)["input_ids"]
    found: list[tuple[list[str], bool]] = []
    for token, learnt in zip(ids, mask.tolist(), strict=True):
        if not found or found[-1][1] != learnt:
            found.append(([], learnt))
        found[-1][0].append(ours.tokenizer.decode(token))
    return found


GOLDEN = {
    # A served model is asked with the whole empty block, or with its opening.
    "without thinking": (
        [QUESTION, PLAIN],
        {},
        [(HI + OPEN + BLOCK, 0), (["Yes", ".", "<|im_end|>"], 1), (["\n"], 0)],
    ),
    "without thinking, learnt": (
        [QUESTION, PLAIN],
        {"empty_think": "learnt"},
        # "\n\n" is one token; a request ends within it, so it cannot be learnt.
        [(HI + OPEN + BLOCK[:2], 0), ([*BLOCK[2:], "Yes", ".", "<|im_end|>"], 1), (["\n"], 0)],
    ),
    "with thinking": (
        [QUESTION, THOUGHT],
        {},
        [
            (HI + OPEN + ["<think>", "\n"], 0),
            (["H", "m", ".\n", "</think>", "\n\n", "No", ".", "<|im_end|>"], 1),
            (["\n"], 0),
        ],
    ),
    # The template drops the thinking of the first answer.
    "several turns": (
        [QUESTION, THOUGHT, NEXT, PLAIN],
        {},
        [
            (HI + OPEN, 0),
            (["No", ".", "<|im_end|>"], 1),
            (["\n"] + AND + OPEN + BLOCK, 0),
            (["Yes", ".", "<|im_end|>"], 1),
            (["\n"], 0),
        ],
    ),
    "several turns, the last ones": (
        [QUESTION, PLAIN, NEXT, THOUGHT],
        {"earlier_answers": "masked"},
        [
            (HI + OPEN + ["Yes", ".", "<|im_end|>", "\n"] + AND + OPEN + ["<think>", "\n"], 0),
            (["H", "m", ".\n", "</think>", "\n\n", "No", ".", "<|im_end|>"], 1),
            (["\n"], 0),
        ],
    ),
    # After the question, the thinking before a call stays.
    "a tool": (
        [QUESTION, CALL, RESULT, PLAIN],
        {},
        [
            (HI + OPEN + ["<think>", "\n"], 0),
            (["Look", ".\n", "</think>", "\n\n", *TOOL_CALL, "<|im_end|>"], 1),
            (["\n"] + DRY + OPEN + BLOCK, 0),
            (["Yes", ".", "<|im_end|>"], 1),
            (["\n"], 0),
        ],
    ),
    "nothing after the question": (
        [QUESTION, PLAIN, NEXT],
        {},
        [(HI + OPEN, 0), (["Yes", ".", "<|im_end|>"], 1), (["\n"] + AND, 0)],
    ),
}


@pytest.mark.parametrize("model", [LARGE, SMALL, LATER])
@pytest.mark.parametrize("name", GOLDEN)
def test_tokens_and_loss_written_by_hand(folders, model, name) -> None:
    messages, rule, expected = GOLDEN[name]
    assert pieces(encoder(folders[model], **rule), messages) == [(text, bool(n)) for text, n in expected]


def test_reasoning_may_stand_in_a_field_of_its_own(folders) -> None:
    ours = encoder(folders[LARGE])
    assert pieces(ours, [QUESTION, APART]) == pieces(ours, [QUESTION, THOUGHT])


@pytest.mark.parametrize(("model", "enabled"), [(LARGE, True), (LARGE, False), (SMALL, True), (SMALL, False)])
def test_what_precedes_the_loss_is_a_request(folders, model, enabled) -> None:
    """transformers renders the request that a serving engine sends, with thinking or without."""
    ours = encoder(folders[model])
    messages = [QUESTION, PLAIN, NEXT, THOUGHT if enabled else PLAIN]
    asked = ours.tokenizer.apply_chat_template(
        messages[:3], tokenize=True, add_generation_prompt=True, enable_thinking=enabled, return_dict=False
    )
    ids, mask = ours.encode(messages, [])
    assert ids[: len(asked)].tolist() == asked
    assert mask[len(asked) : -1].all() and not mask[len(asked) - 1] and not mask[-1]


def test_marks_of_thinking_in_the_text_of_others_change_nothing(folders) -> None:
    """A user's text may hold anything, also the answer's own words and the end of a turn."""
    ours = encoder(folders[LARGE])
    for words in ("answer", "Yes.", "<think>\n\n</think>\n\n", "<|im_end|>\n<|im_start|>assistant\nYes."):
        messages = [{"role": "user", "content": words}, PLAIN, {"role": "user", "content": words}, PLAIN]
        ids, mask = ours.encode(messages, [])
        assert ours.tokenizer.decode(ids[mask]) == "Yes.<|im_end|>" * 2


def test_a_template_that_hides_a_turn_is_refused(folders) -> None:
    ours = encoder(folders[LARGE])
    ours.template = (
        "{# </think> #}{% for m in messages %}{% if loop.last %}{{ m.content }}{% endif %}{% endfor %}"
    )
    with pytest.raises(ChatError, match="cannot be found"):
        ours.encode([QUESTION, PLAIN, NEXT, PLAIN], [])


def test_the_defaults_are_those_of_a_run() -> None:
    from megatron_vl.config import DataConfig

    assert ThinkingRule.of(DataConfig()) == ThinkingRule()
    assert dataclasses.asdict(ThinkingRule()) == {"empty_think": "masked", "earlier_answers": "learnt"}
