"""The images of a step are spread evenly, at frames, and every rank gets the pixels of its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vl.data.packing.assemble_row import MediaItem, TokenizedSample, pack_row
from megatron_vl.estimate.flops import row_sizes, tower_forward_flops
from megatron_vl.models.decoupled import StepVision
from megatron_vl.models.frame_shares import frame_flops, make_tower_frames, split_by_cost
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW
from megatron_vl.training.rows.image_scatter import ImageShares, _concatenated_shares, frame_plane_bounds
from tests.tiny import tiny_checkpoint


def test_split_by_cost_worked_out_by_hand() -> None:
    assert split_by_cost(np.array([1, 1, 1, 1]), 2).tolist() == [0, 2, 4]
    assert split_by_cost(np.array([5, 1, 1, 1]), 2).tolist() == [0, 1, 4]
    assert split_by_cost(np.array([1, 1, 1, 5]), 2).tolist() == [0, 3, 4]
    assert split_by_cost(np.array([7]), 3).tolist() in ([0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1])
    assert split_by_cost(np.array([], dtype=np.int64), 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_split_by_cost_exceeds_the_mean_by_no_whole_frame(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, parts = rng.uniform(0, 10, rng.integers(1, 60)), int(rng.integers(1, 9))
    bounds = split_by_cost(costs, parts)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and (np.diff(bounds) >= 0).all()
    runs = [costs[a:b].sum() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert max(runs) <= costs.sum() / parts + costs.max() + 1e-9


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_costs_of_frames_are_the_flops_of_the_model(family: str) -> None:
    v = read_spec(tiny_checkpoint(family, dtype=torch.float32)).vision
    rows = [([64, 16], [16, 16, 16, 16, 16]), ([], []), ([32], [16, 16])]
    costs = frame_flops(v, make_tower_frames(rows))
    frames = [([64], [16] * 4), ([16], [16]), ([32], [16] * 2)]
    want = [sum(tower_forward_flops(v, row_sizes([], *frame, 0))) for frame in frames]
    assert costs == pytest.approx(want)


def random_rows(spec: Any, seed: int) -> list[Any]:
    """Rows with images, videos of even and odd numbers of frames, and no medium at all."""
    v, rng = spec.vision, random.Random(seed)
    made = []
    for _ in range(4):
        samples = []
        for _ in range(rng.randint(1, 3)):
            kind = rng.choice(["image", "video", "text"])
            frames = 1 if kind == "image" else rng.randint(2, 5)
            grid = GridTHW(
                1 if kind == "image" else -(-frames // 2),
                rng.randint(1, 4) * v.spatial_merge_size,
                rng.randint(1, 4) * v.spatial_merge_size,
                kind if kind == "video" else "image",
            )
            width = v.in_channels * v.patch_size**2
            planes = torch.randint(0, 256, (frames, grid.h * grid.w, width), dtype=torch.uint8)
            token = spec.video_token_id if kind == "video" else spec.image_token_id
            ids = [torch.tensor([1])]
            media = []
            if kind != "text":
                media = [MediaItem(grid, planes)]
                ids.append(torch.full((grid.num_tokens(v.spatial_merge_size),), token))
            ids.append(torch.tensor([2, 3]))
            text = torch.cat(ids)
            samples.append(TokenizedSample(text, torch.ones(len(text), dtype=torch.bool), media))
        made.append(pack_row(samples, spec, 512))
    return made


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_calls_of_the_tower_hold_the_pixels_and_positions_of_the_rows(seed: int, ranks: int) -> None:
    """What the tower reads in the calls of all ranks, in order, is what it would read row by row."""
    torch.manual_seed(seed)
    spec = read_spec(tiny_checkpoint("qwen2_5_vl", dtype=torch.float32))
    rows = random_rows(spec, seed)
    lengths = [
        (r.vision.cu_seqlens.diff().tolist(), r.vision.cu_window_seqlens.diff().tolist())
        if r.num_patches
        else ([], [])
        for r in rows
    ]
    bounds = [
        frame_plane_bounds(r.vision.plane_index.numpy(), full)
        for r, (full, _) in zip(rows, lengths, strict=True)
    ]
    shares = ImageShares(spec.vision, lengths, bounds, ranks)
    if not len(shares.frames.patches_per_frame):
        pytest.skip("the rows have no medium")
    names = ("plane_index", "position_hw", "frame_hw")
    fields = [{name: getattr(r.vision, name) for name in names} for r in rows]
    pixels, ints = _concatenated_shares(shares, ranks, fields, [r.vision.planes for r in rows])

    seen: dict[str, list[torch.Tensor]] = {name: [] for name in ("pixels", "position_hw", "frame_hw")}
    segments: list[int] = []
    windows: list[int] = []
    for rank in range(ranks):
        frames, plane_limits, count = shares.share_of_rank(rank)
        patches = int(frames.patches_per_frame.sum())
        index, position, frame, ints = ints.split([2 * patches] * 3 + [len(ints) - 6 * patches])
        step = StepVision(
            [],
            shares.features_of_rank,
            shares.features_of_row,
            frames,
            plane_limits,
            pixels[:count],
            index.view(-1, 2),
            position.view(-1, 2),
            frame.view(-1, 2),
            torch.from_numpy(np.concatenate(([0], frames.patches_per_frame.cumsum()))).int(),
            torch.from_numpy(np.concatenate(([0], frames.patches_per_window.cumsum()))).int(),
        )
        pixels = pixels[count:]
        for given, place in step.tower_inputs(40):
            assert (
                place.stop - place.start == len(given.plane_index) == int(given.full_segments.cu_seqlens[-1])
            )
            seen["pixels"].append(given.planes[given.plane_index.long()])
            seen["position_hw"].append(given.position_hw)
            seen["frame_hw"].append(given.frame_hw)
            segments += given.full_segments.cu_seqlens.diff().tolist()
            windows += given.window_segments.cu_seqlens.diff().tolist()
            assert given.full_segments.max_seqlen == int(given.full_segments.cu_seqlens.diff().max())

    real = [r.vision for r in rows if r.num_patches]
    assert torch.equal(torch.cat(seen["pixels"]), torch.cat([v.planes[v.plane_index.long()] for v in real]))
    assert torch.equal(torch.cat(seen["position_hw"]), torch.cat([v.position_hw for v in real]))
    assert torch.equal(torch.cat(seen["frame_hw"]), torch.cat([v.frame_hw for v in real]))
    assert segments == [n for full, _ in lengths for n in full]
    assert windows == [n for _, window in lengths for n in window]
    assert sum(shares.features_of_rank) == sum(len(v.feature_index) for v in real)
