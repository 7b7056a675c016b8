"""Compares positions and packed rows with transformers' own functions; which tokens get logits."""

from functools import cache
from itertools import accumulate

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

from megatron_vl.data.packing.assemble_row import PackingError, pack_row
from megatron_vl.data.packing.training_row import LOSS_INDEX_MULTIPLE, loss_index
from megatron_vl.spec.positions import GridTHW, PositionError, mrope_positions, patch_positions, window_order

from .helpers import hf_config, positions_one_by_one, sample_of, spec_of

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
MODELS = dict(zip(FAMILIES, (Qwen2VLModel, Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model), strict=True))
SLOW_AND_LARGE = [GridTHW(2, 4, 4, "video", 3.0), GridTHW(1, 20, 22)]
CASES: dict[str, list[int | GridTHW]] = {
    "text": [17],
    "image first and last": [GridTHW(1, 4, 4), GridTHW(1, 2, 6)],
    "slow video": [3, GridTHW(4, 4, 4, "video", 2.9), 6],
    "fast video": [3, GridTHW(4, 4, 6, "video", 0.5), 6],
    "mixed": [2, GridTHW(2, 4, 6, "video", 1.5), 3, GridTHW(1, 6, 4), 1, *SLOW_AND_LARGE, 7],
}


@cache
def hf_model(family: str) -> torch.nn.Module:
    """get_rope_index needs no weights, only the config."""
    with torch.device("meta"):
        return MODELS[family](AutoConfig.for_model(**hf_config(family)))


def hf_positions(family: str, tokens: torch.Tensor, grids: list[GridTHW], spec) -> torch.Tensor:
    kinds = (tokens == spec.image_token_id).int() + 2 * (tokens == spec.video_token_id).int()
    by_kind = {k: [[g.t, g.h, g.w] for g in grids if g.kind == k] for k in ("image", "video")}
    sizes = {f"{kind}_grid_thw": torch.tensor(found) for kind, found in by_kind.items() if found}
    extra = {"second_per_grid_ts": torch.tensor([g.second_per_grid for g in grids if g.kind == "video"])}
    sizes |= extra if family == "qwen2_5_vl" and by_kind["video"] else {}
    return hf_model(family).get_rope_index(tokens[None], mm_token_type_ids=kinds[None], **sizes)[0][:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES)
def test_mrope_positions_equal_get_rope_index(family, case):
    spec = spec_of(family)
    sample = sample_of(spec, CASES[case])
    grids = [item.grid_thw for item in sample.media_items]
    videos = [grid for grid in grids if grid.kind == "video"]
    theirs = hf_positions(family, sample.token_ids, grids, spec)

    ours = mrope_positions(sample.token_ids, grids, spec)
    assert ours.dtype == torch.int64 and ours.shape == (3, len(sample))
    assert ours.T.tolist() == positions_one_by_one(sample.token_ids, grids, spec)
    if not videos or spec.vision.video_timestamps:
        assert torch.equal(ours, theirs)


GRIDS = [GridTHW(1, *sides) for sides in ((8, 8), (2, 2), (16, 24), (18, 34))]
GRIDS += [GridTHW(3, 10, 14, "video"), GridTHW(2, 6, 40, "video")]


def test_vision_order_equals_hf():
    vision = spec_of("qwen2_5_vl").vision
    thw = torch.tensor([[g.t, g.h, g.w] for g in GRIDS])
    units, windows = get_vision_window_index(thw, 2, vision.window_size, vision.patch_size)
    order = window_order(GRIDS, vision)
    assert torch.equal(order.unit_order, units)
    assert torch.equal(order.cu_window_seqlens, windows)
    assert torch.equal(order.cu_seqlens, get_vision_cu_seqlens(thw))
    assert torch.equal(torch.cat([patch_positions(g, 2) for g in GRIDS]), get_vision_position_ids(thw, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_row_holds_each_sample_as_it_would_be_alone(family):
    spec = spec_of(family)
    samples = [sample_of(spec, parts, seed) for seed, parts in enumerate(CASES.values())]
    used = sum(map(len, samples))
    row = pack_row(samples, spec, used + 13)
    assert row.cu_seqlens.tolist() == [0, *accumulate(map(len, samples)), used + 13]
    assert row.max_seqlen == int(row.cu_seqlens.diff().max())
    assert row.tokens[used:].tolist() == [151643] * 13 and row.loss_mask[used:].sum() == 0
    for sample, start in zip(samples, row.cu_seqlens.tolist(), strict=False):
        span = slice(start, start + len(sample))
        grids = [item.grid_thw for item in sample.media_items]
        assert torch.equal(row.tokens[span], sample.token_ids)
        assert torch.equal(row.position_ids[:, span], mrope_positions(sample.token_ids, grids, spec))
        wanted = torch.cat([sample.loss_mask[1:].float(), torch.zeros(1)])
        assert torch.equal(row.loss_mask[span], wanted)
        next_token = torch.cat([sample.token_ids[1:], torch.zeros(1, dtype=torch.int64)])
        assert torch.equal(row.labels[span], torch.where(wanted.bool(), next_token, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_features_go_to_their_own_placeholders(family):
    """Undoing the tower's order gives each medium's patches in HF's order, at its placeholders."""
    spec = spec_of(family)
    samples = [sample_of(spec, parts, seed) for seed, parts in enumerate(CASES.values())]
    row = pack_row(samples, spec, sum(map(len, samples)))
    vision = row.vision
    unit = spec.vision.merge_unit

    assert row.num_patches == len(vision.plane_index)
    assert row.num_images == sum(len(s.media_items) for s in samples)
    by_place = torch.argsort(vision.feature_index)
    is_media = (row.tokens == spec.image_token_id) | (row.tokens == spec.video_token_id)
    assert torch.equal(vision.feature_index[by_place], is_media.nonzero().flatten())
    patches = (by_place[:, None] * unit + torch.arange(unit)).flatten()
    pixels = vision.planes[vision.plane_index.long()][patches]
    first = 0
    for item in (m for s in samples for m in s.media_items):
        grid = item.grid_thw
        got = pixels[first : first + grid.num_patches].view(grid.t, grid.h * grid.w, 2, -1)
        frames = item.planes if grid.kind == "video" else item.planes.repeat(2, 1, 1)
        assert torch.equal(got, frames.view(grid.t, 2, grid.h * grid.w, -1).transpose(1, 2))
        positions = vision.position_hw[patches][first : first + grid.num_patches]
        assert torch.equal(positions.long(), patch_positions(grid, 2))
        first += grid.num_patches


def test_text_only_row_has_one_dummy_unit():
    spec = spec_of("qwen2_5_vl")
    row = pack_row([sample_of(spec, [10])], spec, 16)
    assert row.num_patches == 0 and row.num_images == 0
    assert row.vision.plane_index.shape == (4, 2) and row.vision.feature_index.numel() == 0
    assert row.vision.cu_seqlens.tolist() == row.vision.cu_window_seqlens.tolist() == [0, 4]
    assert row.vision.planes.sum() == 0


def test_pack_row_rejects_samples_that_do_not_fit():
    spec = spec_of("qwen2_vl")
    with pytest.raises(PackingError, match="row of 8 tokens"):
        pack_row([sample_of(spec, [9])], spec, 8)
    with pytest.raises(PackingError):
        pack_row([], spec, 8)
    sample = sample_of(spec, [3, GridTHW(1, 4, 4), 3])
    sample.media_items[0].grid_thw = GridTHW(1, 4, 8)
    with pytest.raises(PositionError, match="4 image and video placeholders; its media need 8"):
        pack_row([sample], spec, 64)
    swapped = sample_of(spec, [3, GridTHW(1, 4, 4), 3])
    swapped.media_items[0].grid_thw = GridTHW(1, 4, 4, "video")
    with pytest.raises(PositionError, match="video"):
        pack_row([swapped], spec, 64)


@pytest.mark.parametrize(("seq_len", "share"), [(1000, 0.0), (1024, 0.001), (1000, 0.8)])
def test_loss_index_has_every_loss_token(seq_len: int, share: float) -> None:
    for seed in range(20):
        mask = (torch.rand(seq_len, generator=torch.Generator().manual_seed(seed)) < share).float()
        index = loss_index(mask)
        assert index is not None and index.dtype == torch.int64
        assert (index.diff() > 0).all() and 0 <= index[0] and index[-1] < seq_len
        assert mask[index].sum() == mask.sum()
        assert len(index) % LOSS_INDEX_MULTIPLE == 0
        assert len(index) - max(1, mask.sum()) < LOSS_INDEX_MULTIPLE


@pytest.mark.parametrize("trained", [1024, 1000, 897])
def test_loss_index_of_a_short_row_or_one_of_loss_tokens_is_none(trained: int) -> None:
    mask = torch.zeros(1024)
    mask[:trained] = 1.0
    assert loss_index(mask) is None is loss_index(torch.zeros(LOSS_INDEX_MULTIPLE))
    mask[896:] = 0.0
    assert loss_index(mask).tolist() == list(range(896))
