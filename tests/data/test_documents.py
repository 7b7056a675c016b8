"""Documents and samples longer than a row: tokens, loss and cuts by hand, and each part once a pass."""

import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_tools.sample_sources import open_encoder
from data_tools.statistics import count_statistics
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import validation_rows
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.data.sample.documents import encode_document
from megatron_vl.data.sample.parts import SamplePart, cut_conversation, cut_document
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW, mrope_positions
from tests.tiny import tiny_checkpoint
from toolkit.data.statistics import facts_sentences

from .datasets import converted, open_loader, turns
from .helpers import IMAGE, assistant, system, text, tiny_encoder, user
from .media import encoded, video, write
from .mixtures import write as write_blend
from .test_thinking import LARGE, thinking_encoder

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]
START, END, STOP = "<|vision_start|>", "<|vision_end|>", "<|endoftext|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
GRID = GridTHW(1, 4, 6)
"""2 x 3 tokens."""


# --- Tokens -------------------------------------------------------------------------------------------------

HAND_WRITTEN: list[tuple[list[dict[str, Any]], list[str], list[int], list[list[int]]]] = [
    ([text("Hi you.")], [*"Hi you.", STOP], [0, 1, 1, 1, 1, 1, 1, 1], [[i] * 3 for i in range(8)]),
    (
        [text("Hi "), {"type": "image"}, text("you")],
        [*"Hi ", START, *[IMAGE_PAD] * 6, END, *"you", STOP],
        [0, 1, 1, *[0] * 8, 1, 1, 1, 1],
        [
            *([i] * 3 for i in range(4)),
            *([4, 4 + row, 4 + column] for row in range(2) for column in range(3)),
            *([i] * 3 for i in range(7, 12)),
        ],
    ),
]
"""Parts, tokens, loss mask and positions (time, row, column). The last position of the image is 4 + 2, so
that what follows begins at 7."""
VIDEO_DOCUMENT = [{"type": "video"}, text("Go"), {"type": "image"}]
"""Of two frame groups of 2 x 2 tokens."""


def video_tokens(family: str) -> tuple[GridTHW, list[str], list[list[int]]]:
    """The video's grid, its tokens and their positions, and the position after it as the last entry."""
    if family == "qwen2_5_vl":
        # A second is two positions, and a frame group covers one second.
        grid = GridTHW(2, 4, 4, "video", second_per_grid=1.0)
        units = [[1 + time, 1 + row, 1 + column] for time in (0, 2) for row in (0, 1) for column in (0, 1)]
        return grid, [START, *[VIDEO_PAD] * 8, END], [[0] * 3, *units, [4] * 3, [5] * 3]

    grid = GridTHW(2, 4, 4, "video", timestamps=(0.5, 1.5))
    group = [START, *[VIDEO_PAD] * 4, END]
    # The vocabulary splits " seconds>" into four.
    tokens = [*"<0.5", " secon", *"ds>", *group, *"<1.5", " secon", *"ds>", *group]
    positions = []
    for first in (0, 12):
        positions += [[first + i] * 3 for i in range(9)]
        positions += [[first + 9, first + 9 + row, first + 9 + column] for row in (0, 1) for column in (0, 1)]
        positions.append([first + 11] * 3)
    return grid, tokens, [*positions, [24] * 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_document_tokens_loss_and_positions_by_hand(family):
    encoder = tiny_encoder(family)

    def check(parts, grids, tokens, mask, positions):
        token_ids, loss_mask, spans = encode_document(encoder, parts, grids)
        assert encoder.tokenizer.convert_ids_to_tokens(token_ids) == [t.replace(" ", "Ġ") for t in tokens]
        assert loss_mask.int().tolist() == mask
        assert mrope_positions(token_ids, grids, encoder.spec).T.tolist() == positions
        for start, end in spans:
            assert not loss_mask[start:end].any()

    for parts, tokens, mask, positions in HAND_WRITTEN:
        check(parts, [GRID] if IMAGE_PAD in tokens else [], tokens, mask, positions)

    grid, tokens, positions = video_tokens(family)
    first = positions.pop()[0]
    mask = [*[0] * len(tokens), 1, 1, *[0] * 8, 1]
    image = [[first + 3, first + 3 + row, first + 3 + column] for row in range(2) for column in range(3)]
    rest = [*([first + i] * 3 for i in range(3)), *image, [first + 6] * 3, [first + 7] * 3]
    tokens = [*tokens, *"Go", START, *[IMAGE_PAD] * 6, END, STOP]
    check(VIDEO_DOCUMENT, [grid, GRID], tokens, mask, [*positions, *rest])


@pytest.mark.parametrize(
    ("parts", "grids", "message"),
    [
        ([text("a<|endoftext|>b")], [], "control token"),
        ([text("a<|im_"), text("end|>b")], [], "control token"),
        ([text("a"), {"type": "image"}], [], "media of the document"),
        ([text("a<|image_pad|>b")], [], "stand for no medium"),
        # One number would be repeated for both placeholders.
        ([{"type": "image"}, text("a<|image_pad|>b")], [GRID], "stand for no medium"),
    ],
)
def test_document_refuses_what_it_cannot_write(parts, grids, message):
    with pytest.raises(ChatError, match=message):
        encode_document(tiny_encoder("qwen2_5_vl"), parts, grids)


# --- Cuts ---------------------------------------------------------------------------------------------------


def test_cut_by_hand():
    thirds = [SamplePart(start, min(start + 10, 25), 0, 0, 0) for start in (0, 10, 20)]
    assert cut_document(25, [], [], 10, 0) == thirds
    # The medium of tokens 8 to 13 would be cut, so the second part begins with it.
    with_medium = [SamplePart(0, 8, 0, 0, 0), SamplePart(8, 18, 0, 1, 24), SamplePart(18, 25, 1, 1, 0)]
    assert cut_document(25, [(8, 14)], [24], 10, 0) == with_medium
    # Two media of 24 patches do not share a part of 40 patches, though their tokens would fit.
    apart = [SamplePart(0, 5, 0, 1, 24), SamplePart(5, 12, 1, 2, 24)]
    assert cut_document(12, [(1, 4), (5, 8)], [24, 24], 20, 40) == apart
    # A medium that fills a row; one that ends a part; one that does not fit.
    assert cut_document(12, [(1, 11)], [4], 10, 0)[1] == SamplePart(1, 11, 0, 1, 4)
    assert cut_document(12, [(4, 10)], [4], 10, 0)[0] == SamplePart(0, 10, 0, 1, 4)
    assert cut_document(30, [(1, 12)], [4], 10, 0) == []
    assert cut_document(30, [(1, 4)], [44], 10, 40) == []
    assert len(cut_document(10, [(1, 4)], [8], 10, 8)) == 1


def documents(root: Path) -> list[dict[str, Any]]:
    write(root / "media/a.png", encoded(56, 84, "png", seed=1))
    write(root / "media/b.png", encoded(112, 112, "png", seed=2))
    draw = np.random.default_rng(5)
    records: list[dict[str, Any]] = []
    for i in range(14):
        texts: list[str | None] = [f"Document {i}."]
        images: list[str | None] = [None]
        for _ in range(i % 5):
            texts += ["word " * int(draw.integers(1, 25)), None]
            images += [None, "ab"[int(draw.integers(2))] + ".png"]
        records.append({"texts": [*texts, "end " * (7 * (i % 3))], "images": [*images, None]})
    return [*records, {"text": "long " * 200}, {"image": "a.png", "caption": "A thing."}]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("documents")
    path, report = converted(root, documents(root), samples_per_shard=6)
    assert report.samples == report.records == 16
    return path


@pytest.fixture(scope="module")
def talks(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("talks")
    talks = [{"conversations": turns(words)} for words in (3, 9, 20, 1, 14)]
    long_talk = [turn for words in (15, 4, 12, 8, 13) for turn in turns(words)]
    return converted(root, [*talks, {"conversations": long_talk, "system": "Be brief."}])[0]


def settings(path: Any, **fields: Any) -> DataConfig:
    return DataConfig(path=path if isinstance(path, list) else str(path), seq_len=64, num_workers=0, **fields)


def tokens_by_sample(rows: list[TrainingRow]) -> dict[tuple[int, str], list[tuple[list[int], int]]]:
    """The tokens and the number of labels of each (source, key), each time that it is drawn."""
    found: dict[tuple[int, str], list[tuple[list[int], int]]] = {}
    for row in rows:
        bounds = row.cu_seqlens.tolist()
        for i, key in enumerate(row.sample_keys):
            place = slice(bounds[i], bounds[i + 1])
            assert row.position_ids[:, bounds[i]].tolist() == [0, 0, 0], "each part begins at position 0"
            source = row.source_indices[i] if row.source_indices else 0
            sample = row.tokens[place].tolist(), int(row.loss_mask[place].sum())
            found.setdefault((source, key), []).append(sample)
    return found


@pytest.mark.parametrize(("family", "max_patches"), zip(FAMILIES, (0, 80, 80), strict=True))
def test_parts_of_documents_come_once_a_pass_and_hold_every_token(dataset, family, max_patches):
    hf = tiny_checkpoint(family)
    config = settings(dataset, max_patches=max_patches)
    rows = list(open_loader(config, hf, epochs=1))
    assert not any(row.dropped_counts for row in rows)
    assert all(row.num_patches <= (max_patches or 10**6) for row in rows)
    found = tokens_by_sample(rows)
    assert all(len(drawn) == 1 for drawn in found.values())
    uncut = replace(config, seq_len=4096, max_patches=0, pack=False)
    whole = tokens_by_sample(list(open_loader(uncut, hf, epochs=1)))
    assert len(found) > len(whole) + 10
    for (_, key), [(tokens, labels)] in whole.items():
        parts = [part for _, part in found if part.partition("#")[0] == key]
        pieces = [found[0, k][0] for k in sorted(parts, key=lambda k: int(k.partition("#")[2] or 1))]
        assert sum((piece[0] for piece in pieces), []) == tokens
        # Nothing predicts the first token of a part, which has a label if it is text within the document.
        media_ids = {read_spec(hf).image_token_id, read_spec(hf).vision_start_token_id}
        first_texts = sum(piece[0][0] not in media_ids for piece in pieces[1:])
        assert labels - sum(piece[1] for piece in pieces) == first_texts
        assert all(len(piece[0]) <= 64 for piece in pieces)

    validated = tokens_by_sample(list(validation_rows(config, read_spec(hf), hf, "train")))
    assert validated == found


def test_parts_of_documents_survive_resume_on_other_ranks_in_a_mixture(dataset, talks, tmp_path):
    hf = tiny_checkpoint("qwen2_5_vl")
    parts = [{"path": str(dataset), "repetitions": 1}, {"path": str(talks), "repetitions": 2}]
    config = settings(write_blend(tmp_path, train={"blend_epochized": parts}))

    def loader(rank: int, ranks: int) -> Any:
        return open_loader(config, hf, dp_rank=rank, dp=ranks, rows_per_step=4, epochs=2)

    straight = loader(0, 1)
    steps: list[list[TrainingRow]] = []
    states = [straight.state_dict()]
    while step := list(islice(straight, 4)):
        steps.append(step)
        states.append(straight.state_dict())
    whole = tokens_by_sample([row for step in steps for row in step])
    parts = {key for key in whole if "#" in key[1]}
    assert len(parts) > 20 and {source for source, _ in parts} == {0, 1}
    assert {len(drawn) for (source, _), drawn in whole.items() if source == 0} == {2}, "two passes"
    assert {len(drawn) for (source, _), drawn in whole.items() if source == 1} == {4}

    for stop in range(0, len(steps), 4):
        ranks = loader(0, 2), loader(1, 2)
        for rank in ranks:
            rank.load_state_dict(states[stop])
        for step in steps[stop:]:
            resumed = [row for rank in ranks for row in islice(rank, 2)]
            assert seen(resumed) == seen(step)


def seen(rows: list[TrainingRow]) -> tuple[list[str], list[list[int]]]:
    return sorted(key for row in rows for key in row.sample_keys), sorted(row.tokens.tolist() for row in rows)


@pytest.mark.parametrize("rule", ["cut", "drop"])
def test_tokens_that_each_rule_keeps_by_hand(tmp_path, rule):
    """Documents of 8, 141 and 105 tokens (the last one's image has 100); conversations whose exchanges have
    15, 133 and 17 tokens after a system turn of 10, and 133 after the default one of 14."""
    write(tmp_path / "media/b.png", encoded(280, 280, "png"))
    records = [{"text": "Hi you."}, {"text": "Hi you." * 20}, {"text": "Hi", "image": "b.png"}]
    records.append({"conversations": [*turns(1), *turns(60), *turns(2)], "system": "No."})
    path = converted(tmp_path, [*records, {"conversations": turns(60)}])[0]
    hf, data = tiny_checkpoint("qwen2_5_vl"), settings(path, too_long=rule)
    loader = open_loader(data, hf, epochs=1)
    said = f"longer than data.seq_len {data.seq_len}: 4 of 5, the longest of 175 tokens; they are "
    assert said + ("cut, or" if rule == "cut" else "left out") in loader.start_notes[-1]
    rows = list(loader)
    counted = count_statistics(open_encoder(data, read_spec(hf), hf), hf)
    counts = counted.token_counts()
    trained = sum(len(tokens) for drawn in tokens_by_sample(rows).values() for tokens, _ in drawn)
    dropped = sum((Counter(row.dropped_counts) for row in rows), Counter())
    assert dropped == {"longer than seq_len": 4 if rule == "drop" else 3}, "one of them an exchange"
    lost = 105 + 14 + 133
    if rule == "drop":
        nothing = dict.fromkeys(("samples", "parts", "tokens", "lost_exchanges", "lost_tokens"), 0)
        lost += 141 + 10 + 15 + 133 + 17
        assert counts == {"whole": 8, "cut": nothing, "left_out": {"longer than seq_len": lost}}
        assert trained == 8
        return
    kept = 141 + (10 + 15) + (10 + 17)
    cut = {"samples": 2, "parts": 3 + 2, "tokens": kept, "lost_exchanges": 1, "lost_tokens": 10 + 133}
    assert counts == {"whole": 8, "cut": cut, "left_out": {"longer than seq_len": lost}}
    assert trained == 8 + kept and counted.left_out_reasons() == {"longer than seq_len": 2}
    said = facts_sentences({"pass": counted.pass_facts(4), "tokens": counts, "left_out": {}, "samples": 5})[1]
    assert f"2 samples into 5 parts with {kept} tokens; 1 exchange with 143 tokens left out; 8 tokens" in said


def test_weight_of_a_document_multiplies_its_losses(tmp_path):
    path = converted(tmp_path, [{"text": "half", "loss_weight": 0.5}, {"text": "none", "weight": 0}])[0]
    [row] = open_loader(settings(path), tiny_checkpoint("qwen2_5_vl"), epochs=1)
    assert row.loss_mask.tolist()[:6] == [0.5, 0.5, 0.5, 0.5, 0, 0]


def test_state_of_an_earlier_version_says_nothing_of_cuts(talks):
    hf = tiny_checkpoint("qwen2_5_vl")
    state = open_loader(settings(talks), hf).state_dict()
    del state["identity"]["too_long"]  # as version 0.2.0 wrote it
    for too_long in ("cut", "drop"):
        resumed = open_loader(settings(talks, too_long=too_long), hf)
        resumed.load_state_dict(state)
        assert ("are cut at whole exchanges" in "".join(resumed.start_notes)) == (too_long == "cut")


def test_damaged_document_counts_with_each_part(dataset, tmp_path):
    """Its text has changed since it was indexed, so none of its planned parts can be read."""
    copy = shutil.copytree(dataset, tmp_path / "copy")
    hf = tiny_checkpoint("qwen2_5_vl")
    open_loader(settings(copy), hf)
    shard = copy / "train-000002.tar"
    content = shard.read_bytes()
    place = content.index(b"long long")
    shard.write_bytes(content[:place] + b"LONG" + content[place + 4 :])
    rows = list(open_loader(settings(copy), hf, epochs=1))
    dropped = [sample for row in rows for sample in row.dropped_samples]
    assert {(one.key, one.reason) for one in dropped} == {("000000014", "text changed since conversion")}
    assert len(dropped) == sum(sum(row.dropped_counts.values()) for row in rows) > 1
    assert not any(key.startswith("000000014") for _, key in tokens_by_sample(rows))


# --- Conversations longer than a row: cut at whole exchanges -----------------------------------------------

SYSTEM = system("S.")


def exchange(question: Any, *answers: str) -> list[dict[str, Any]]:
    return [user(question), *map(assistant, answers)]


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


def records(root: Path) -> list[dict[str, Any]]:
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
def conversations(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("long")
    path, report = converted(root, records(root), samples_per_shard=5)
    assert report.samples == report.records == 12
    return path


def config(path: Path, **fields: Any) -> DataConfig:
    return replace(settings(path, video_fps=1.0), **fields)


def dropped(rows: list[TrainingRow]) -> Counter[str]:
    return sum((Counter(row.dropped_counts) for row in rows), Counter())


@pytest.mark.parametrize(("family", "max_patches"), zip(FAMILIES, (0, 60, 60), strict=True))
def test_exchanges_are_trained_on_once_a_pass_with_their_media(conversations, family, max_patches):
    """Parts have the tokens of the whole conversation, and what fits no row alone is counted by its part."""
    hf = tiny_checkpoint(family)
    spec = read_spec(hf)
    rows = list(open_loader(config(conversations, seq_len=96, max_patches=max_patches), hf, epochs=1))
    assert dropped(rows) == {"longer than seq_len": 2}
    lost = sorted(one.key for row in rows for one in row.dropped_samples)
    assert lost == ["000000010#2", "000000011"], "of the last one, no exchange fits"
    found = tokens_by_sample(rows)
    assert all(len(drawn) == 1 for drawn in found.values())
    whole = tokens_by_sample(list(open_loader(config(conversations, pack=False, seq_len=4096), hf, epochs=1)))
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

    validated = list(
        validation_rows(config(conversations, seq_len=96, max_patches=max_patches), spec, hf, "train")
    )
    assert tokens_by_sample(validated) == found and dropped(validated) == dropped(rows)


def test_weights_of_answers_stay_with_them(tmp_path):
    said = [*exchange("a " * 10, "A."), *exchange("b " * 10, "B.")]
    said[1]["loss_weight"], said[3]["loss_weight"] = 0.5, 0.0
    path = converted(tmp_path, [{"messages": said}])[0]
    rows = list(open_loader(settings(path, pack=False), tiny_checkpoint("qwen2_5_vl"), epochs=1))
    sums = {row.sample_keys[0]: float(row.loss_mask.sum()) for row in rows}
    assert sums == {"000000000#1": 1.5, "000000000#2": 0.0}
