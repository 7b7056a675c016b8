"""Conversations longer than a row: cut at whole exchanges, by hand and as the template writes them."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_vl.config import DataConfig
from megatron_vl.data.loader import validation_rows
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.parts import SamplePart, cut_conversation
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW
from tests.tiny import tiny_checkpoint

from .datasets import converted, open_loader
from .helpers import IMAGE, assistant, system, text, tiny_encoder, user
from .media import encoded, video, write
from .test_documents import FAMILIES, settings, tokens_by_sample
from .test_thinking import LARGE, thinking_encoder

SYSTEM = system("S.")


def exchange(question: Any, *answers: str) -> list[dict[str, Any]]:
    return [user(question), *map(assistant, answers)]


# --- By hand ------------------------------------------------------------------------------------------------

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
HEAD = [IM_START, "s", "yst", "em", "Ċ", "S", ".", IM_END, "Ċ"]
PICTURE = ["<|vision_start|>", *["<|image_pad|>"] * 6, "<|vision_end|>"]
ANSWER = [IM_START, "a", "ss", "istant", "Ċ"]


def hand_written(question: list[str], answer: str) -> tuple[list[str], list[int]]:
    """The tokens of an exchange, and its loss mask: the answer and the token that ends it."""
    before = [IM_START, "user", "Ċ", *question, IM_END, "Ċ", *ANSWER]
    return [*before, *answer, IM_END, "Ċ"], [*[0] * len(before), *[1] * len(answer), 1, 0]


QUESTIONS = [*PICTURE, "A", "?"], ["B", "?"], ["C"]
EXCHANGES = list(map(hand_written, QUESTIONS, ("a.", "b.", "c")))
"""Of 24, 16 and 14 tokens."""
MESSAGES = [SYSTEM, *exchange([IMAGE, text("A?")], "a."), *exchange("B?", "b."), *exchange("C", "c")]


def test_exchanges_of_a_conversation_by_hand():
    encoder = tiny_encoder("qwen2_5_vl")
    starts: list[Any] = []
    token_ids, loss_mask = encoder.encode(MESSAGES, [GridTHW(1, 4, 6)], exchange_starts=starts)
    tokens, masks = zip(*EXCHANGES, strict=True)
    assert encoder.tokenizer.convert_ids_to_tokens(token_ids) == sum(tokens, HEAD)
    assert loss_mask.int().tolist() == sum(masks, [0] * 9)
    assert starts == [(9, 0), (33, 1), (49, 1)]


def test_cut_conversation_by_hand():
    starts = [(9, 0), (33, 1), (49, 1)]
    # Of 63 tokens; the head of 9 begins each part: 9 + 24, 9 + 16 + 14.
    two = [SamplePart(9, 33, 0, 1, 24, 9, 0), SamplePart(33, 63, 1, 1, 0, 9, 0)]
    assert cut_conversation(63, starts, [24], 48, 0) == two and [part.tokens for part in two] == [33, 39]
    wider = [SamplePart(9, 49, 0, 1, 24, 9, 0), SamplePart(49, 63, 1, 1, 0, 9, 0)]
    assert cut_conversation(63, starts, [24], 49, 0) == wider
    # The first exchange fits no row of 32 tokens or 23 patches, and the others keep their places.
    assert [part.tokens for part in cut_conversation(63, starts, [24], 32, 0)] == [33, 25, 23]
    assert cut_conversation(63, starts, [24], 100, 23) == two
    assert cut_conversation(63, starts, [24], 22, 0) == [], "nothing fits"
    # Media of the head are in every part. Two exchanges of one medium each share 60 patches with it.
    head = cut_conversation(60, [(20, 1), (30, 2), (40, 3)], [20, 20, 20, 20], 60, 60)
    assert head == [SamplePart(20, 40, 1, 3, 60, 20, 1), SamplePart(40, 60, 3, 4, 40, 20, 1)]
    assert cut_conversation(63, [(9, 0)], [24], 32, 0) == cut_conversation(63, [], [24], 32, 0) == []


AB, CD = exchange("a", "b"), exchange("c", "d")
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
CALLED = [user("w?"), assistant("", tool_calls=[CALL]), {"role": "tool", "content": "rain"}]
CALLED += [assistant("It rains.")]


@pytest.mark.parametrize(
    ("messages", "tools", "expected"),
    [
        ([*CALLED, *CALLED, *AB], [TOOL], [CALLED, CALLED, AB]),
        ([*exchange("a", "b", "c"), *exchange("d", "e")], [], [exchange("a", "b", "c"), exchange("d", "e")]),
        # A question without an answer stays with the last exchange, and nothing follows it.
        ([*AB, *CD, *exchange("e")], [], [AB, [*CD, *exchange("e")]]),
        ([*AB, *exchange("c")], [], []),
        # A system turn after the start holds for all answers after it.
        ([*AB, SYSTEM, *CD, *exchange("e", "f")], [], []),
    ],
)
def test_exchange_has_its_calls_results_and_answers(messages, tools, expected):
    """Each exchange has the tokens of a conversation of its own, without the head."""
    encoder = tiny_encoder("qwen2_5_vl", chat_template="qwen2_vl_tools")
    starts: list[Any] = []
    token_ids, _ = encoder.encode(messages, [], tools, exchange_starts=starts)
    assert len(starts) == len(expected)
    ends = [start for start, _ in [*starts, (len(token_ids), 0)]][1:]
    for (start, _), end, alone in zip(starts, ends, expected, strict=True):
        head_and_exchange = [*token_ids[: starts[0][0]].tolist(), *token_ids[start:end].tolist()]
        assert head_and_exchange == encoder.encode(alone, [], tools)[0].tolist()


def test_exchanges_under_a_thinking_template_keep_their_tokens():
    """The template writes a block of thinking into the last answer alone."""
    encoder = thinking_encoder(LARGE)
    messages = [SYSTEM, *exchange("a?", "A."), *exchange("b?", "B.")]
    starts: list[Any] = []
    token_ids, _ = encoder.encode(messages, [], exchange_starts=starts)
    pieces = np.split(token_ids.numpy(), [start for start, _ in starts])
    assert [encoder.tokenizer.decode(piece) for piece in pieces] == [
        "<|im_start|>system\nS.<|im_end|>\n",
        "<|im_start|>user\na?<|im_end|>\n<|im_start|>assistant\nA.<|im_end|>\n",
        "<|im_start|>user\nb?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nB.<|im_end|>\n",
    ]


# --- Rows ---------------------------------------------------------------------------------------------------


def records(root: Path) -> list[dict[str, Any]]:
    """Conversations with and without a system turn, and media in some of their exchanges."""
    write(root / "media/a.png", encoded(56, 84, "png", seed=1))
    write(root / "media/v.mp4", video(8, 56, 56))
    draw = np.random.default_rng(5)
    made: list[dict[str, Any]] = []
    for i in range(10):
        messages = [system(f"Talk {i}.")] * (i % 2)
        for k in range(i % 5 + 1):
            words = "why " * int(draw.integers(1, 7))
            kinds = [], [{"type": "image", "image": "a.png"}], [{"type": "video", "video": "v.mp4"}]
            media = kinds[(i + k) % 3 if i < 8 else 0]
            messages += exchange([*media, text(words)], f"Answer {i} {k}." * int(draw.integers(1, 3)))
        made.append({"messages": messages})
    too_long = exchange("long " * 100, "Nobody reads this.")
    made.append({"messages": [*exchange("One?", "First."), *too_long, *exchange("Three?", "Third.")]})
    made.append({"messages": [*too_long, *too_long]})
    return made


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("long")
    path, report = converted(root, records(root), samples_per_shard=5)
    assert report.samples == report.records == 12
    return path


def config(dataset: Path, **fields: Any) -> DataConfig:
    return replace(settings(dataset, video_fps=1.0), **fields)


def dropped(rows: list[TrainingRow]) -> Counter[str]:
    return sum((Counter(row.dropped_counts) for row in rows), Counter())


@pytest.mark.parametrize(("family", "max_patches"), zip(FAMILIES, (0, 60, 60), strict=True))
def test_exchanges_are_trained_on_once_a_pass_with_their_media(dataset, family, max_patches):
    """Parts have the tokens of the whole conversation, and what fits no row alone is counted by its part."""
    hf = tiny_checkpoint(family)
    spec = read_spec(hf)
    rows = list(open_loader(config(dataset, seq_len=96, max_patches=max_patches), hf, epochs=1))
    assert dropped(rows) == {"longer than seq_len": 2}
    lost = sorted(one.key for row in rows for one in row.dropped_samples)
    assert lost == ["000000010#2", "000000011"], "of the last one, no exchange fits"
    found = tokens_by_sample(rows)
    assert all(len(drawn) == 1 for drawn in found.values())
    whole = tokens_by_sample(list(open_loader(config(dataset, pack=False, seq_len=4096), hf, epochs=1)))
    decode = ChatEncoder(hf, spec).tokenizer.decode
    cut = 0
    for (_, key), [(tokens, labels)] in whole.items():
        parts = [found[0, part][0] for _, part in sorted(found) if part.partition("#")[0] == key]
        cut += len(parts) > 1
        assert all(len(piece[0]) <= 96 for piece in parts)
        if key < "000000010":
            assert sum(piece[1] for piece in parts) == labels
            head = decode(tokens).partition("<|im_start|>user")[0]
            texts = [decode(piece[0]) for piece in parts]
            assert all(one.startswith(head + "<|im_start|>user") for one in texts)
            assert head + "".join(one.removeprefix(head) for one in texts) == decode(tokens)
    assert cut >= 5
    assert [decode(found[0, f"000000010#{part}"][0][0]).count("?") for part in (1, 3)] == [1, 1]

    validated = list(validation_rows(config(dataset, seq_len=96, max_patches=max_patches), spec, hf, "train"))
    assert tokens_by_sample(validated) == found and dropped(validated) == dropped(rows)


def test_weights_of_answers_stay_with_them(tmp_path):
    said = [*exchange("a " * 10, "A."), *exchange("b " * 10, "B.")]
    said[1]["loss_weight"], said[3]["loss_weight"] = 0.5, 0.0
    path = converted(tmp_path, [{"messages": said}])[0]
    rows = list(open_loader(settings(path, pack=False), tiny_checkpoint("qwen2_5_vl"), epochs=1))
    sums = {row.sample_keys[0]: float(row.loss_mask.sum()) for row in rows}
    assert sums == {"000000000#1": 1.5, "000000000#2": 0.0}
