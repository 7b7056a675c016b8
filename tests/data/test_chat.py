"""Compares text, tokens and loss mask with transformers, with a small vocabulary and the released one."""

import base64
import importlib.util
import json
import re
import shutil
import tempfile
import zlib
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer
from transformers import AutoProcessor, AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_vl.data.sample.chat import ChatEncoder, ChatError
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW, mrope_positions
from tests.conftest import REPOSITORY
from tests.data.helpers import IMAGE, VIDEO, assistant, spec_of, system, text, user
from tests.tiny import tiny_checkpoint
from toolkit.common.hf_loading import apply_video_prompt
from toolkit.common.tiny_checkpoint import _write_tokenizer

TURNS = [
    user([text("First"), IMAGE, text(" then "), IMAGE, text("?")]),
    assistant([text("Two images.\n\nBoth grey.")]),
    user([VIDEO, text("Now?")]),
    assistant("A road 12 345. "),
    user("Café ☕ 漢字 Cafe\u0301?"),
    assistant("日本 ☕\u200d!  "),
]
CONVERSATIONS: dict[str, tuple[list[dict], list[GridTHW]]] = {
    "text": ([user("Hello"), assistant("Hi there.")], []),
    "system": ([system("Be brief."), user("Hello"), assistant("Hi.")], []),
    "image": ([user([IMAGE, text("What?")]), assistant("A cat.")], [GridTHW(1, 4, 6)]),
    "turns": (TURNS, [GridTHW(1, 4, 4), GridTHW(1, 2, 8), GridTHW(3, 4, 4, "video")]),
    "two answers": ([user("Hi"), assistant("Same."), assistant("Same.")], []),
    "assistant first": ([assistant("Welcome."), user("Thanks")], []),
    "image in the answer": ([user("Draw"), assistant([text("Here: "), IMAGE])], [GridTHW(1, 4, 4)]),
    "empty answer": ([user("Hi"), assistant("")], []),
}


MARKED = ("think", "tool_call", "tool_response")
"""Pairs of marks that are tokens."""


@cache
def released_tokenizer_folder() -> Path:
    """A checkpoint folder with Qwen2's released vocabulary and Qwen3.5's tokens for thinking and tools. To
    recover merges from the tiktoken file's ranks takes ten seconds, so that they are kept for later."""
    file = Path(importlib.util.find_spec("dashscope").origin).parent / "resources" / "qwen.tiktoken"
    content = file.read_bytes()
    ranks = {base64.b64decode(t): int(r) for t, r in (line.split() for line in content.splitlines())}
    chars = bytes_to_unicode()
    written = {token: "".join(chars[b] for b in token) for token in ranks}
    kept = REPOSITORY / ".pytest_cache" / f"merges-{zlib.crc32(content):08x}.json"
    kept.parent.mkdir(exist_ok=True)
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            splits = (last_merge(token, rank, ranks) for token, rank in ranks.items())
            kept.write_text(json.dumps([[written[p] for p in split] for split in splits if split]))
    merges = list(map(tuple, json.loads(kept.read_text())))

    folder = Path(tempfile.mkdtemp())
    _write_tokenizer(folder, {written[t]: r for t, r in ranks.items()}, merges)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"<{end}{name}>" for name in MARKED for end in ("", "/")])
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(tiny_checkpoint() / "preprocessor_config.json", folder)
    return folder


def last_merge(token: bytes, rank: int, ranks: dict[bytes, int]) -> list[bytes]:
    """The two pieces that byte-pair encoding joins last to get ``token``; empty for single bytes."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, rank), i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False))]
        best, i = min(pairs)
        assert best < rank
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts if len(parts) == 2 else []


@pytest.fixture(scope="module", params=["small", pytest.param("released", marks=pytest.mark.slow)])
def encoder(request):
    """transformers' tokenizer of a vocabulary, and an encoder with it."""
    folder = released_tokenizer_folder() if request.param == "released" else tiny_checkpoint("qwen2_5_vl")
    spec = spec_of("qwen2_5_vl") if request.param == "released" else read_spec(folder)
    return AutoTokenizer.from_pretrained(folder), ChatEncoder(folder, spec)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_text_and_tokens_equal_transformers(encoder, name):
    reference, ours = encoder
    messages, grids = CONVERSATIONS[name]
    rendered = reference.apply_chat_template(messages, tokenize=False)
    assert ours.render_conversation(messages) == rendered
    media = iter(grids)
    expanded = re.sub(r"<\|(image|video)_pad\|>", lambda pad: pad[0] * next(media).num_tokens(2), rendered)
    assert ours.encode(messages, grids)[0].tolist() == reference(expanded)["input_ids"]


def test_encoder_rejects_media_that_do_not_match_the_text(encoder):
    _, ours = encoder
    messages, grids = CONVERSATIONS["image"]
    with pytest.raises(ChatError, match="placeholders for image; the conversation has nothing"):
        ours.encode(messages, [])
    with pytest.raises(ChatError, match="the conversation has video"):
        ours.encode(messages, [GridTHW(1, 4, 4, "video")])
    with pytest.raises(ChatError, match="placeholders for image; the conversation"):
        ours.encode([user("a literal <|image_pad|> in the text")], [])


TIMED = GridTHW(3, 4, 6, "video", timestamps=(0.25, 1.0, 12.35))
VIDEO_TURNS = [
    user([IMAGE, VIDEO, IMAGE, text("\nLook!"), VIDEO, text(" then?")]),
    assistant("A road, 12 seconds."),
    user("And <3 seconds> ago?"),
    assistant([text("This: "), VIDEO, text(" and this.")]),
]
SHORT = GridTHW(1, 2, 2, "video", timestamps=(0.05,))


def test_timestamps_equal_the_hf_processor():
    folder = tiny_checkpoint("qwen3_vl")
    spec = read_spec(folder)
    processor = AutoProcessor.from_pretrained(folder)
    ours = ChatEncoder(folder, spec)
    messages, grids = VIDEO_TURNS, [GridTHW(1, 4, 4), TIMED, GridTHW(1, 2, 8), SHORT, TIMED]
    clips = [grid for grid in grids if grid.kind == "video"]
    # Frame numbers at 1000 frames a second whose means are the times.
    frames = [[round(1000 * time) for time in grid.timestamps for _ in (0, 1)] for grid in clips]
    metadata = [SimpleNamespace(fps=1000, frames_indices=numbers) for numbers in frames]
    videos = {"video_grid_thw": torch.tensor([[g.t, g.h, g.w] for g in clips]), "video_metadata": metadata}
    written = [processor.replace_video_token(videos, i) for i in range(len(clips))]
    images = [processor.image_token * grid.num_tokens(2) for grid in grids if grid.kind == "image"]
    rendered = apply_video_prompt(ours.render_conversation(messages), processor, spec)
    expanded, _ = processor.get_text_with_replacements([rendered], images, written)

    ids, mask = ours.encode(messages, grids)
    assert ids.tolist() == processor.tokenizer(expanded[0])["input_ids"]
    prompt = processor.tokenizer(expanded[0] + "<|im_start|>assistant\n")["input_ids"]
    assert ours.encode_prompt(messages, grids).tolist() == prompt

    # What stands for a video is nothing that the assistant says.
    assert ours.tokenizer.decode(ids[mask]) == "A road, 12 seconds.<|im_end|>This:  and this.<|im_end|>"


SYSTEM_TURN = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
CLIP = GridTHW(3, 4, 6, "video", timestamps=(0.2, 1.0, 12.3))
PADS = f"<|vision_start|>{'<|video_pad|>' * 6}<|vision_end|>"
GROUPS = "".join(f"<{time} seconds>{PADS}" for time in CLIP.timestamps)


@pytest.mark.slow
def test_video_prompt_written_by_hand():
    # There are 14 tokens of turns, then < 0 . 2 seconds > and <|vision_start|>: the first group is at 14 + 7.
    # It spans 3 columns, so that its <|vision_end|> is at 24. The second one is seven tokens later (25 to
    # 31), the third one eight (36 to 43: 12 is two). Its <|vision_end|> is at 47, "Who?" at 48 and 49.
    frames, last = [21, 32, 44], 49
    spec = spec_of("qwen3_vl")
    ours = ChatEncoder(released_tokenizer_folder(), spec)
    ids = ours.encode_prompt([user([VIDEO, text("Who?")])], [CLIP])
    end = "<|im_end|>\n<|im_start|>assistant\n"
    assert ours.tokenizer.decode(ids) == f"{SYSTEM_TURN}<|im_start|>user\n{GROUPS}Who?{end}"

    positions = mrope_positions(ids, [CLIP], spec)
    pads = positions[:, ids == spec.video_token_id]
    assert pads[0].tolist() == [first for first in frames for _ in range(6)]
    assert pads[1].tolist() == [first + row for first in frames for row in (0, 0, 0, 1, 1, 1)]
    assert pads[2].tolist() == [first + column for first in frames for _ in (0, 1) for column in (0, 1, 2)]
    tail = len(ours.tokenizer(end)["input_ids"])
    assert positions[:, -tail - 1].tolist() == [last] * 3 and positions[:, -1].tolist() == [last + tail] * 3
