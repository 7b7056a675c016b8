"""What is trained on under the released templates of thinking models, written out by hand, token by token.

The vocabulary is Qwen2's released one with Qwen3.5's tokens for thinking and tools: where tokens begin and
end around thinking is the same in Qwen3.5's.
"""

import json
import random
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.data.sample.stop_tokens import read_stop_tokens
from megatron_vl.data.sample.thinking import GeneratedAnswer, opens_thinking, split_thinking
from megatron_vl.spec.positions import GridTHW
from tests.data.helpers import mask_one_by_one, spec_of
from tests.data.test_chat import released_tokenizer_folder

TEMPLATES = Path(__file__).resolve().parents[1] / "hf_configs"
LARGE, SMALL, LATER = "Qwen3.5-9B", "Qwen3.5-0.8B", "Qwen3.6-27B"
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


def thinking_encoder(model: str, family: str = "qwen3_vl", **settings: Any) -> ChatEncoder:
    """With a released template. All share one tokenizer, which takes seconds to load."""
    template = TEMPLATES / f"{model}.chat_template.jinja"
    data_config = DataConfig(chat_template=str(template), **settings)
    return ChatEncoder(released_tokenizer_folder(), spec_of(family), data_config)


def pieces(ours: ChatEncoder, messages: list[dict]) -> list[tuple[list[str], bool]]:
    """The text of each token; neighbours that are both trained on, or both not, are together."""
    ids, mask = ours.encode(messages, [])
    rendered = ours.render_conversation(messages)
    assert ids.tolist() == ours.tokenizer(rendered)["input_ids"]
    found: list[tuple[list[str], bool]] = []
    for token, trained in zip(ids, mask.tolist(), strict=True):
        if not found or found[-1][1] != trained:
            found.append(([], trained))
        found[-1][0].append(ours.tokenizer.decode(token))
    return found


GOLDEN = {
    # A served model is asked with the whole empty block, or with its opening.
    "without thinking": (
        [QUESTION, PLAIN],
        {},
        [(HI + OPEN + BLOCK, 0), (["Yes", ".", "<|im_end|>"], 1), (["\n"], 0)],
    ),
    "without thinking, trained": (
        [QUESTION, PLAIN],
        {"empty_think": "trained"},
        # "\n\n" is one token; a request ends within it, so it cannot be trained on.
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
def test_tokens_and_loss_written_by_hand(model, name) -> None:
    messages, rule, expected = GOLDEN[name]
    assert pieces(thinking_encoder(model, **rule), messages) == [(text, bool(n)) for text, n in expected]


# --- Requests -----------------------------------------------------------------------------------------------

# The end of the prompt: 9B and 3.6 think unless told otherwise, 0.8B thinks only if asked to.
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
REQUESTED = {
    **{(model, think): OPENED for model in (LARGE, LATER) for think in (None, True)},
    **{(model, False): CLOSED for model in (LARGE, LATER)},
    **{(SMALL, think): OPENED if think else CLOSED for think in (None, True, False)},
}
EARLIER = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
"""The first answer, without what it thought."""
ASKED = "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("model", "think"), REQUESTED)
@pytest.mark.parametrize("earlier", [THOUGHT, APART], ids=["in the text", "apart"])
def test_thinking_prompt_written_by_hand(model, think, earlier) -> None:
    ours = thinking_encoder(model)
    prompt = ours.tokenizer.decode(ours.encode_prompt([QUESTION, earlier, NEXT], [], enable_thinking=think))
    assert prompt == EARLIER + ASKED + REQUESTED[model, think]
    assert opens_thinking(prompt) == (REQUESTED[model, think] == OPENED)


def test_thinking_switch_is_refused_where_a_template_has_none() -> None:
    ours = ChatEncoder(released_tokenizer_folder(), spec_of("qwen3_vl"))
    assert not opens_thinking(ours.tokenizer.decode(ours.encode_prompt([QUESTION], [])))
    for think in (True, False):
        with pytest.raises(ChatError, match="enable_thinking"):
            ours.encode_prompt([QUESTION], [], enable_thinking=think)


# --- Answers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generated", "opened", "said"),
    [
        ("Hm.\n</think>\n\nNo.", True, GeneratedAnswer("No.", "Hm.")),
        ("\n</think>\n\nNo.", True, GeneratedAnswer("No.")),
        # Cut off, or ended, while it thinks: there is no answer.
        ("The answer is B. But", True, GeneratedAnswer("", "The answer is B. But", is_block_closed=False)),
        ("", True, GeneratedAnswer("", "", is_block_closed=False)),
        ("Hm.</think>", True, GeneratedAnswer("", "Hm.")),
        # Qwen3's template leaves the opening to the model.
        ("<think>\nHm.\n</think>\n\nNo.", False, GeneratedAnswer("No.", "Hm.")),
        ("<think>\nHm", False, GeneratedAnswer("", "Hm", is_block_closed=False)),
        # VLMEvalKit and the template take what follows the last mark.
        ("A</think>B</think>C", True, GeneratedAnswer("C", "A</think>B")),
        # Without a block, the answer is left alone.
        (" The mark </think> closes it. ", False, GeneratedAnswer(" The mark </think> closes it. ")),
        ("No.", False, GeneratedAnswer("No.")),
    ],
)
def test_generated_answer_is_what_follows_the_thinking(generated, opened, said) -> None:
    assert split_thinking(generated, opened) == said


@pytest.mark.parametrize(
    ("generation", "config", "of_tokenizer", "stop"),
    [
        # Qwen3.5-27B: generation_config.json is all that counts.
        ({"eos_token_id": [248046, 248044]}, {"eos_token_id": 248044}, 248046, [248046, 248044]),
        # Up to 9B there is no such file, and config.json names <|endoftext|> alone.
        (None, {"text_config": {"eos_token_id": 248044}}, 248046, [248046, 248044]),
        (None, {"eos_token_id": 5}, None, [5]),
        ({"top_k": 1}, {}, 5, [5]),
        ({"eos_token_id": 0}, {}, 5, [0]),
    ],
)
def test_stop_tokens_end_a_turn(generation, config, of_tokenizer, stop, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_stop_tokens(tmp_path, SimpleNamespace(eos_token_id=of_tokenizer)) == stop


def test_stop_tokens_are_required(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ChatError, match="eos_token_id"):
        read_stop_tokens(tmp_path, SimpleNamespace(eos_token_id=None))


# --- What is trained on -------------------------------------------------------------------------------------


def test_reasoning_may_stand_in_a_field_of_its_own() -> None:
    ours = thinking_encoder(LARGE)
    assert pieces(ours, [QUESTION, APART]) == pieces(ours, [QUESTION, THOUGHT])


# --- Turns found together equal turns found one by one ------------------------------------------------------

WORDS = [
    *("Yes.", "answer", "answerx", " spaces ", "", "\n\nnew lines\n", "Café ☕ 漢字", "assistant\n"),
    *("<think>\nHm.\n</think>\n\nNo.", "<think>\n\n</think>\n\nNo.", "<think>open", "</think>", "a</think>b"),
    *(
        "<|im_end|>",
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>assistant\n",
    ),
]
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}
IMAGE = {"type": "image"}


def random_conversation(draw: random.Random, features: bool) -> list[dict]:
    """Up to about eight turns with images and weights; with ``features`` also with thinking and calls."""

    def content() -> str | list[dict]:
        words = [draw.choice(WORDS) for _ in range(draw.choice([1, 1, 2]))]
        parts = [
            draw.choice([IMAGE, {"type": "text", "text": w}]) if draw.random() < 0.3 else w for w in words
        ]
        if draw.random() < 0.6:
            return "".join(p for p in parts if isinstance(p, str))
        return [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]

    messages: list[dict] = [{"role": "system", "content": "Be brief."}] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.9 or features:
            messages.append({"role": "user", "content": content()})
        for _ in range(draw.choice([1, 1, 1, 2])):
            answer: dict = {"role": "assistant", "content": content()}
            if draw.random() < 0.3:
                answer["loss_weight"] = draw.choice([0.0, 0.5, 2.0])
            if features and draw.random() < 0.3:
                answer["reasoning_content"] = draw.choice(WORDS)
            if features and draw.random() < 0.3:
                calls = [CALL["tool_calls"][0]] * draw.randint(1, 2)
                messages += [answer | {"tool_calls": calls}, *([RESULT] * len(calls))]
                continue
            messages.append(answer)
    if draw.random() < 0.2:
        messages.append({"role": "user", "content": content()})
    return messages


@pytest.mark.parametrize("rule", [{}, {"empty_think": "trained", "earlier_answers": "masked"}])
@pytest.mark.parametrize("model", [LARGE, SMALL, LATER, "Qwen2-VL"])
def test_answers_found_together_equal_those_found_one_by_one(model, rule) -> None:
    thinks = model != "Qwen2-VL"
    plain_encoder = partial(ChatEncoder, released_tokenizer_folder(), spec_of("qwen3_vl"), DataConfig(**rule))
    ours = thinking_encoder(model, **rule) if thinks else plain_encoder()
    draw = random.Random(f"{model}{rule}")
    compared = encoded = 0
    for _ in range(60):
        messages = random_conversation(draw, features=thinks)
        tools = [TOOL] if thinks and draw.random() < 0.5 else []
        try:
            expected = mask_one_by_one(ours, messages, tools)
        except ChatError:  # the template has no question in it
            continue
        plain = [{k: v for k, v in m.items() if k != "loss_weight"} for m in messages]
        images = ours.render_conversation(plain, tools=tools).count(
            ours.image_token
        )  # thinking may hold some, and is dropped
        try:
            ids, mask = ours.encode(messages, [GridTHW(1, 2, 2)] * images, tools)
        except ChatError:
            # What is refused for its text has marks of turns or of thinking.
            assert any(mark in str(messages) for mark in ("<|im_", "think>")), messages
        else:
            assert (ids.tolist(), mask.float().tolist()) == expected, messages
            encoded += 1
        compared += 1
    assert compared > 40 and encoded > 8


def test_answers_are_found_in_a_text_full_of_the_mark() -> None:
    """The word that stands for an answer must not occur in the text, whatever the text holds."""
    ours = thinking_encoder(LARGE)
    ids, mask = ours.encode([{"role": "user", "content": "answer" + "x" * 200_000}, PLAIN], [])
    assert ours.tokenizer.decode(ids[mask]) == "Yes.<|im_end|>"
