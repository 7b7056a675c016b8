"""Rows of 1,048,576 tokens: what the loader plans, counts and sends of them."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample, pack_row
from megatron_vl.data.packing.fill_row import choose_row_samples
from megatron_vl.data.packing.plan_rows import plan_rows
from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.data.sample.grids import VideoInfo, video_grid
from megatron_vl.data.sample.pixel_settings import PixelSettings, read_pixel_settings
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.positions import GridTHW, mrope_positions, placeholder_runs
from megatron_vl.training.rows.row_message import serialize_row
from megatron_vl.training.rows.row_shards import RowSharding
from tests.tiny import tiny_checkpoint

from .datasets import converted, open_loader

MILLION = 2**20
CONFIGS = Path(__file__).parents[1] / "hf_configs"
RANKS = 8


# --- Packing ------------------------------------------------------------------------------------------------


def test_planned_rows_of_a_million_tokens_are_full() -> None:
    draw = np.random.default_rng(0)
    tokens = draw.integers(300, 900, 4 * 1800)
    patches = 4 * draw.integers(100, 299, len(tokens))
    rows = plan_rows(tokens, patches, 3, MILLION)
    for row in range(3):
        assert 0.995 * MILLION < tokens[rows == row].sum() <= MILLION
    # Samples as long as rows, whose tokens and patches together pass 32 bits.
    rows = plan_rows(np.full(2100, MILLION), np.full(2100, 4 * MILLION), 2100, MILLION)
    assert sorted(rows) == [*range(2100)]


def test_row_choice_among_many_samples_is_full() -> None:
    """The oldest are taken first, and the last 64 fill the rest; a table for each would take 7 GB."""
    draw = random.Random(0)
    sizes = [(draw.randint(300, 900), draw.randint(100, 500)) for _ in range(2000)]
    end = next(i for i in range(64, 2000) if sum(tokens for tokens, _ in sizes[:i]) >= MILLION)
    row = choose_row_samples(sizes[:end], MILLION)
    assert row[: end - 64] == list(range(end - 64)) and row == sorted(set(row))
    assert 0.999 * MILLION < sum(sizes[i][0] for i in row) <= MILLION

    # Where patches are short, the oldest stop before.
    row = choose_row_samples(sizes[:end], MILLION, 60_000)
    assert 59_000 < sum(sizes[i][1] for i in row) <= 60_000


def million_row(spec: ModelSpec, documents: int) -> TrainingRow:
    """Documents of 4,000 images with 192 tokens each, and text. Of pixels, one byte a patch."""
    grid = GridTHW(1, 24, 32)
    placeholders = torch.full((194,), spec.image_token_id)
    placeholders[0], placeholders[-1] = spec.vision_start_token_id, spec.vision_end_token_id
    planes = torch.zeros(1, 24 * 32, 1, dtype=torch.uint8)
    samples = []
    images = 4000 // documents
    for _ in range(documents):
        length = MILLION // documents - 7
        text = torch.full((length - images * 194,), 5)
        token_ids = torch.cat([placeholders.repeat(images), text])
        loss_mask = torch.zeros(length, dtype=torch.bool)
        loss_mask[-len(text) // 2 :] = True
        samples.append(TokenizedSample(token_ids, loss_mask, [MediaItem(grid, planes)] * images))
    return pack_row(samples, spec, MILLION)


@pytest.mark.parametrize("documents", [1, pytest.param(1000, marks=pytest.mark.full)])
def test_row_of_a_million_tokens_is_sent_in_parts(documents: int) -> None:
    """Positions, segments, indices and routes of CP8 as each part gets them."""
    spec = read_spec(CONFIGS / "Qwen3-VL-8B-Instruct.json")
    row = million_row(spec, documents)
    assert row.cu_seqlens[-1] == MILLION and row.num_patches == 4000 * 768
    length, images = MILLION // documents - 7, 4000 // documents
    assert row.cu_seqlens[1] == length
    # An image of 12 x 16 units moves the text after it by 16 instead of 192 positions.
    last = images * (2 + 16) + length - images * 194 - 1
    assert row.position_ids[:, :length].max() == last

    sharding = RowSharding(RANKS, 1, spec.vision, tower_is_decoupled=False)
    header, buffers = serialize_row(row, sharding)
    part = MILLION // RANKS
    assert len(header["parts"]) == RANKS
    sent = np.array(header["features"])
    assert sent.sum() == 4000 * 192
    # Each part gets as many features as it has placeholders.
    parts = (row.tokens == spec.image_token_id).view(RANKS, part)
    assert sent.sum(0).tolist() == parts.sum(1).tolist()
    assert sent.sum(1).tolist() == [4000 * 192 // RANKS] * RANKS

    begin = 0
    for name in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens"):
        count = int(np.prod(header["shapes"][name]))
        values = buffers["text"][begin : begin + count]
        if name != "loss_mask":
            assert torch.equal(values.long(), getattr(row, name).long().flatten()), name
        begin += count
    indices = buffers["ints"][-2 * 4000 * 192 :]
    feature_index, feature_order = indices.chunk(2)
    assert feature_index.min() >= 0 and feature_index.max() < part
    assert feature_order.min() == 0 and feature_order.max() == sent.sum(1).max() - 1


# --- A sample -----------------------------------------------------------------------------------------------


@pytest.mark.full
def test_document_of_a_million_tokens_is_written_indexed_planned_and_read(tmp_path: Path):
    """Three bytes of each character are a token each. There is one too much, so that the end is cut off."""
    text = "字字 " * (MILLION // 7) + "字"
    assert len(text.encode()) + 1 == MILLION  # <|endoftext|>
    folder, _ = converted(tmp_path, [{"text": text}, {"text": "Hi you."}])
    data = DataConfig(path=str(folder), seq_len=MILLION - 1, num_workers=0)
    rows = list(open_loader(data, tiny_checkpoint("qwen3_vl"), epochs=1))
    assert not any(row.dropped_counts for row in rows)
    assert sorted(key for row in rows for key in row.sample_keys) == [
        "000000000#1",
        "000000000#2",
        "000000001",
    ]
    [row] = [row for row in rows if "000000000#1" in row.sample_keys]
    assert row.sample_keys == ["000000000#1"] and row.cu_seqlens.tolist()[:2] == [0, MILLION - 1]
    assert len(row.tokens) == MILLION - 1 == row.loss_mask.sum() + 1
    assert torch.equal(row.labels[:-1], row.tokens[1:].long())
    assert row.position_ids[:, -1].tolist() == [MILLION - 2] * 3
    three, seven = row.tokens[:3].tolist(), row.tokens[:7].tolist()
    assert row.tokens[: MILLION - 4].tolist() == seven * (MILLION // 7)
    assert row.tokens[MILLION - 4 : MILLION - 1].tolist() == three


# --- A video of four hours ----------------------------------------------------------------------------------

FOUR_HOURS = VideoInfo(frame_count=4 * 3600 * 25, fps=25.0, height=720, width=1280)


def video_tokens(spec: ModelSpec, grid: GridTHW) -> torch.Tensor:
    """A video alone; with four tokens of time before each frame group from Qwen3-VL on."""
    time = [5] * 4 * spec.vision.video_timestamps
    token_ids: list[int] = []
    for run in placeholder_runs([grid], spec):
        placeholders = [spec.video_token_id] * run.num_tokens(2)
        token_ids += [*time, spec.vision_start_token_id, *placeholders, spec.vision_end_token_id]
    return torch.tensor(token_ids)


# Rows and columns of units, of frames of 720 x 1280 pixels. Qwen2-VL and Qwen2.5-VL, 28 pixels a unit: the
# released folders allow 16,384 units a frame, so 25.7 and 45.7 are rounded. qwen-vl-utils and SGLang allow
# 768, and of 768 frames 2 * 0.9 * 128,000 / 768 = 300. Sides are divided by sqrt(921,600 / 602,112) = 1.237
# to 20.8 and 36.9 units, or by sqrt(921,600 / 235,200) = 1.979 to 12.99 and 23.1. Qwen3-VL and Qwen3.5, 32
# pixels a unit: 25,165,824 pixels in all frames; divided by sqrt(768 * 921,600 / 25,165,824) = 5.303 to 4.2
# and 7.5.
@pytest.mark.parametrize(
    ("family", "config", "max_pixels", "units"),
    [
        ("qwen2_vl", "Qwen2-VL-7B-Instruct", 0, (26, 46)),
        ("qwen2_5_vl", "Qwen2.5-VL-7B-Instruct", 0, (26, 46)),
        ("qwen2_5_vl", "Qwen2.5-VL-7B-Instruct", 768 * 28 * 28, (20, 36)),
        ("qwen2_5_vl", "Qwen2.5-VL-7B-Instruct", 300 * 28 * 28, (12, 23)),
        ("qwen3_vl", "Qwen3-VL-8B-Instruct", 25_165_824, (4, 7)),
        ("qwen3_5", "Qwen3.5-9B", 25_165_824, (4, 7)),
    ],
)
def test_video_of_four_hours_within_the_budget_of_its_family(family, config, max_pixels, units) -> None:
    """768 frames: 384 groups of rows x columns units, a token each; from Qwen3-VL on, a time before each."""
    data = DataConfig(video_max_frames=768, video_max_pixels=max_pixels)
    settings = read_pixel_settings(tiny_checkpoint(family), data)
    grid = video_grid(FOUR_HOURS, settings)
    assert (grid.t, grid.h // 2, grid.w // 2) == (384, *units)
    spec = read_spec(CONFIGS / f"{config}.json")
    token_ids = video_tokens(spec, grid)
    assert int((token_ids == spec.video_token_id).sum()) == 384 * units[0] * units[1] < MILLION
    if spec.vision.video_timestamps:
        assert grid.timestamps[-1] == pytest.approx(4 * 3600, abs=12)
        # Each group follows 4 tokens of its time and a mark, and one mark follows it.
        assert mrope_positions(token_ids, [grid], spec).max() == 384 * (4 + 1 + 7 + 1) - 1


def test_positions_of_a_video_of_four_hours_follow_its_seconds() -> None:
    """Qwen2.5-VL: 768 frames, a group every 37.5 seconds, at 2 positions a second: the last at 28,725."""
    spec = read_spec(CONFIGS / "Qwen2.5-VL-7B-Instruct.json")
    settings = PixelSettings(video_fps=2.0, video_max_frames=768)
    grid = video_grid(FOUR_HOURS, settings)
    assert grid.t == 384 and grid.second_per_grid == pytest.approx(37.5)
    token_ids = video_tokens(spec, grid)
    positions = mrope_positions(token_ids, [grid], spec)
    assert positions[0].max() == 1 + 383 * 75 + 1  # the mark before it, the last group, and the mark after it
    # Far beyond the 32,768 of the pretraining if it has twice the frames a second.
    longer = VideoInfo(FOUR_HOURS.frame_count * 2, 25.0, 720, 1280)
    assert int(mrope_positions(token_ids, [video_grid(longer, settings)], spec).max()) > 50_000
