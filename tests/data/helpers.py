"""Shared parts of the data tests: specs of the families, and media of any grid."""

import json
from typing import Any

import numpy as np
import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample
from megatron_vl.data.sample.chat import ChatEncoder
from megatron_vl.data.sample.thinking import EMPTY_THINK_BLOCK, first_trained_character
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import GridTHW, placeholder_runs
from tests.conftest import REPOSITORY
from tests.tiny import tiny_checkpoint

IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


def text(content: str) -> dict[str, str]:
    return {"type": "text", "text": content}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def tiny_encoder(family: str, **data: Any) -> ChatEncoder:
    folder = tiny_checkpoint(family)
    return ChatEncoder(folder, read_spec(folder), DataConfig(**data))


RELEASED = {"qwen2_vl": "Qwen2-VL-7B-Instruct", "qwen2_5_vl": "Qwen2.5-VL-7B-Instruct"}
RELEASED |= {"qwen3_vl": "Qwen3-VL-8B-Instruct", "qwen3_5": "Qwen3.5-9B"}
TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
TOKENS |= {"vision_start_token_id": 151652, "vision_end_token_id": 151653}


def hf_config(family: str) -> dict:
    """A released config, with the special tokens of Qwen2's vocabulary."""
    config = json.loads((REPOSITORY / f"tests/hf_configs/{RELEASED[family]}.json").read_text()) | TOKENS
    config.get("text_config", {}).setdefault("bos_token_id", 151643)
    return config


def spec_of(family: str) -> ModelSpec:
    return read_spec(hf_config(family))


def sample_of(spec: ModelSpec, parts: list[int | GridTHW], seed: int = 0) -> TokenizedSample:
    """A sample of text runs (a number of tokens) and media (a grid), with random text, mask and pixels."""
    draw = torch.Generator().manual_seed(seed)
    vision = spec.vision
    ids: list[torch.Tensor] = []
    media = []
    for part in parts:
        if isinstance(part, int):
            ids.append(torch.randint(0, 1000, (part,), generator=draw))
            continue
        token = spec.image_token_id if part.kind == "image" else spec.video_token_id
        start, end = torch.tensor([spec.vision_start_token_id]), torch.tensor([spec.vision_end_token_id])
        for run in placeholder_runs([part], spec):
            ids += [start, torch.full((run.num_tokens(vision.spatial_merge_size),), token), end]
        frames = 1 if part.kind == "image" else part.t * vision.temporal_patch_size
        shape = (frames, part.h * part.w, vision.in_channels * vision.patch_size**2)
        media.append(MediaItem(part, torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)))

    tokens = torch.cat(ids)
    return TokenizedSample(tokens, torch.rand(len(tokens), generator=draw) < 0.5, media)


def positions_one_by_one(tokens: torch.Tensor, grids: list[GridTHW], spec: ModelSpec) -> list[list[int]]:
    """(time, row, column) of each token by the released models' rule, counted in plain Python."""
    merge = spec.vision.spatial_merge_size
    media = iter(placeholder_runs(grids, spec))
    found: list[list[int]] = []
    here = 0
    while len(found) < len(tokens):
        if tokens[len(found)] not in (spec.image_token_id, spec.video_token_id):
            found.append([here] * 3)
            here += 1
            continue

        grid = next(media)
        # Multiplied in float32, as tensors are: group 5 of 0.9 seconds each is at 9, not at 8.9999998.
        timed = spec.vision.tokens_per_second and grid.kind == "video"
        speed = np.float32(grid.second_per_grid) * np.float32(2) if timed else np.float32(1)
        medium = [
            [here + int(np.float32(group) * speed), here + row, here + column]
            for group in range(grid.t)
            for row in range(grid.h // merge)
            for column in range(grid.w // merge)
        ]

        found += medium
        here = max(map(max, medium)) + 1

    return found


def spans_one_by_one(
    ours: ChatEncoder, messages: list[dict], tools: list[dict] | tuple[()] = ()
) -> list[tuple[int, int]]:
    """What each assistant turn teaches, from texts rendered for this turn alone.

    With thinking, a turn's place is what changes when another answer stands there; without, it is the
    difference of the texts rendered with and without the turn.
    """
    text = ours.render_conversation(messages, tools=tools)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue

        if not ours.template_writes_thinking:
            before = ours.render_conversation(messages[:i], tools=tools) if i else ""
            after = ours.render_conversation(messages[: i + 1], tools=tools)
            prompt = ours.render_conversation(messages[: i + 1], generation_prompt=True, tools=tools)
            header = prompt[len(after) :]
            start = after.find(header, len(before))
            assert text.startswith(after) and after.startswith(before) and header and start >= 0
            spans.append((start + len(header), len(after.rstrip())))
            continue

        other = [*messages[:i], {"role": "assistant", "content": "\ue000"}, *messages[i + 1 :]]
        before, mark, after = ours.render_conversation(other, tools=tools).partition("\ue000")
        before, ending = before.removesuffix(EMPTY_THINK_BLOCK), after.split("\n")[0]
        start, end = len(before), len(text) - len(after)
        assert mark and ending and start <= end and text.startswith(before) and text.endswith(after)
        first = first_trained_character(text[start:end], ours.data_config)
        spans.append((end, end) if first is None else (start + first, end + len(ending)))

    return spans


def mask_one_by_one(
    ours: ChatEncoder, messages: list[dict], tools: list[dict] | tuple[()] = ()
) -> tuple[list[int], list[float]]:
    """Token ids and loss weights of a conversation without media that are expanded, token by token."""
    weights = [m.get("loss_weight", 1.0) for m in messages if m["role"] == "assistant"]
    plain = [{k: v for k, v in m.items() if k != "loss_weight"} for m in messages]
    spans = spans_one_by_one(ours, plain, tools)
    encoded = ours.tokenizer(ours.render_conversation(plain, tools=tools), return_offsets_mapping=True)
    media = {ours.spec.image_token_id, ours.spec.video_token_id}
    mask = []
    for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        inside = [w for (a, b), w in zip(spans, weights, strict=True) if a <= start < end <= b]
        mask.append(inside[0] if inside and token not in media else 0.0)
    return encoded["input_ids"], mask
