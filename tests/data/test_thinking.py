"""What is trained on under the released templates of thinking models, written out by hand, token by token.

The vocabulary is Qwen2's released one with Qwen3.5's tokens for thinking and tools: where tokens begin and
end around thinking is the same in Qwen3.5's.
"""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.data.sample.thinking import GeneratedAnswer, opens_thinking, split_thinking
from megatron_vl.spec.positions import GridTHW
from tests.data.helpers import IMAGE, assistant, mask_one_by_one, spec_of, system, text, user
from tests.data.test_chat import released_tokenizer_folder

TEMPLATES = Path(__file__).resolve().parents[1] / "hf_configs"
LARGE, SMALL, LATER = "Qwen3.5-9B", "Qwen3.5-0.8B", "Qwen3.6-27B"
QUESTION, NEXT = user("Hi"), user("And?")
PLAIN, THOUGHT = assistant("Yes."), assistant("<think>\nHm.\n</think>\n\nNo.")
APART = assistant("No.", reasoning_content="Hm.")
RAIN_CALL = {"type": "function", "function": {"name": "rain", "arguments": {"city": "Rome"}}}
CALL = assistant("", reasoning_content="Look.", tool_calls=[RAIN_CALL])
RESULT = {"role": "tool", "content": "dry"}

OPEN = ["<|im_start|>", "assistant", "\n"]
HI = ["<|im_start|>", "user", "\n", "Hi", "<|im_end|>", "\n"]
AND = ["<|im_start|>", "user", "\n", "And", "?", "<|im_end|>", "\n"]
BLOCK = ["<think>", "\n\n", "</think>", "\n\n"]
DRY = [*HI[:3], "<tool_response>", "\n", "dry", "\n", "</tool_response>", "<|im_end|>", "\n"]
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


YES, NO = ["Yes", ".", "<|im_end|>"], ["No", ".", "<|im_end|>"]
HM = ["H", "m", ".\n", "</think>", "\n\n", *NO]
THINK = ["<think>", "\n"]
# Messages, settings, and the tokens: those that are trained on have a 1. A newline follows each answer.
GOLDEN: dict[str, tuple[list[dict], dict[str, str], list[tuple[list[str], int]]]] = {
    # A served model is asked with the whole empty block, or with its opening.
    "without thinking": ([QUESTION, PLAIN], {}, [(HI + OPEN + BLOCK, 0), (YES, 1), (["\n"], 0)]),
    "without thinking, trained": (
        [QUESTION, PLAIN],
        {"empty_think": "trained"},
        # "\n\n" is one token; a request ends within it, so it cannot be trained on.
        [(HI + OPEN + BLOCK[:2], 0), (BLOCK[2:] + YES, 1), (["\n"], 0)],
    ),
    "with thinking": ([QUESTION, THOUGHT], {}, [(HI + OPEN + THINK, 0), (HM, 1), (["\n"], 0)]),
    # The template drops the thinking of the first answer.
    "several turns": (
        [QUESTION, THOUGHT, NEXT, PLAIN],
        {},
        [(HI + OPEN, 0), (NO, 1), (["\n"] + AND + OPEN + BLOCK, 0), (YES, 1), (["\n"], 0)],
    ),
    "several turns, the last ones": (
        [QUESTION, PLAIN, NEXT, THOUGHT],
        {"earlier_answers": "masked"},
        [(HI + OPEN + YES + ["\n"] + AND + OPEN + THINK, 0), (HM, 1), (["\n"], 0)],
    ),
    # After the question, the thinking before a call stays.
    "a tool": (
        [QUESTION, CALL, RESULT, PLAIN],
        {},
        [
            (HI + OPEN + THINK, 0),
            (["Look", ".\n", "</think>", "\n\n", *TOOL_CALL, "<|im_end|>"], 1),
            (["\n"] + DRY + OPEN + BLOCK, 0),
            (YES, 1),
            (["\n"], 0),
        ],
    ),
    "nothing after the question": (
        [QUESTION, PLAIN, NEXT],
        {},
        [(HI + OPEN, 0), (YES, 1), (["\n"] + AND, 0)],
    ),
}


@pytest.mark.parametrize("model", [LARGE, SMALL, LATER])
@pytest.mark.parametrize("name", GOLDEN)
def test_tokens_and_loss_written_by_hand(model, name) -> None:
    messages, rule, expected = GOLDEN[name]
    assert pieces(thinking_encoder(model, **rule), messages) == expected


# --- Requests -----------------------------------------------------------------------------------------------

# The end of the prompt: 9B and 3.6 think unless told otherwise, 0.8B thinks only if asked to.
OPENED, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
REQUESTED = {(model, think): OPENED for model in (LARGE, LATER, SMALL) for think in (None, True, False)}
REQUESTED |= {(LARGE, False): CLOSED, (LATER, False): CLOSED, (SMALL, None): CLOSED, (SMALL, False): CLOSED}
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


# --- Turns found together equal turns found one by one ------------------------------------------------------

WORDS = [
    *("Yes.", "answer", "answerx", " spaces ", "", "\n\nnew lines\n", "Café ☕ 漢字", "assistant\n"),
    *("<think>\nHm.\n</think>\n\nNo.", "<think>\n\n</think>\n\nNo.", "<think>open", "</think>", "a</think>b"),
    *("<|im_end|>", "<|im_start|>assistant\n"),
    "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
]
TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object", "properties": {}}}}


def random_conversation(draw: random.Random, features: bool) -> list[dict]:
    """Up to about eight turns with images and weights; with ``features`` also with thinking and calls."""

    def content() -> str | list[dict]:
        words = [draw.choice(WORDS) for _ in range(draw.choice([1, 1, 2]))]
        parts = [draw.choice([IMAGE, text(w)]) if draw.random() < 0.3 else w for w in words]
        if draw.random() < 0.6:
            return "".join(p for p in parts if isinstance(p, str))
        return [text(p) if isinstance(p, str) else p for p in parts]

    messages: list[dict] = [system("Be brief.")] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 4)):
        if draw.random() < 0.9 or features:
            messages.append(user(content()))
        for _ in range(draw.choice([1, 1, 1, 2])):
            answer = assistant(content())
            if draw.random() < 0.3:
                answer["loss_weight"] = draw.choice([0.0, 0.5, 2.0])
            if features and draw.random() < 0.3:
                answer["reasoning_content"] = draw.choice(WORDS)
            if features and draw.random() < 0.3:
                calls = [RAIN_CALL] * draw.randint(1, 2)
                messages += [answer | {"tool_calls": calls}, *([RESULT] * len(calls))]
                continue
            messages.append(answer)
    if draw.random() < 0.2:
        messages.append(user(content()))
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
        # Thinking may hold some, and is dropped.
        images = ours.render_conversation(plain, tools=tools).count(ours.image_token)
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
