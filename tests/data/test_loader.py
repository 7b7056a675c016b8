"""Data tool, loader and rows are compared with the HF processor on the same conversations."""

import io
import json
import shutil
from itertools import pairwise
from operator import attrgetter

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from transformers.image_utils import load_image
from transformers.video_utils import VideoMetadata

from megatron_vl.config import DataConfig
from megatron_vl.data.loader import validation_rows
from megatron_vl.data.sample.chat_template import TOOLS_TEMPLATE
from megatron_vl.data.sample.pixel_settings import read_pixel_norm
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.positions import GridTHW
from tests.tiny import tiny_checkpoint, with_released_template
from toolkit.common.hf_loading import apply_video_prompt

from .datasets import converted, mixed_records, open_loader
from .helpers import positions_one_by_one
from .media import all_frames, video, write
from .pair_tars import read_tar

PIXELS = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 24}
VOLUME = 4 * 56 * 56
"""The largest number of pixels in all frames of a video together, for the family that limits these."""
COUNT = 20


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    records = mixed_records(folder / "media", COUNT)
    out, report = converted(folder, records, val_fraction=0.2, samples_per_shard=7)
    assert report.samples == COUNT and not report.refused
    return out


def config(path, **changes) -> DataConfig:
    settings = {"seq_len": 320, "num_workers": 0, **PIXELS, **changes}
    return DataConfig(path=str(path), **settings)


def loader(path, family="qwen2_5_vl", **changes):
    return open_loader(config(path, **changes), tiny_checkpoint(family))


def stored(path):
    samples = {key: parts for shard in path.glob("*.tar") for key, parts in read_tar(shard).items()}
    return {key: (json.loads(parts["json"]), parts) for key, parts in samples.items()}


def hf_inputs(folder, record, parts):
    """The HF processor's inputs for a stored conversation, with this loader's limits."""
    processor = AutoProcessor.from_pretrained(folder)
    media = {kind: [m for m in record["media"] if m["kind"] == kind] for kind in ("image", "video")}
    images = [load_image(Image.open(io.BytesIO(parts[m["key"]]))) for m in media["image"]]
    videos = {}
    if media["video"]:
        videos["videos"] = [torch.stack(list(all_frames(parts[m["key"]]))) for m in media["video"]]
        videos["video_metadata"] = [VideoMetadata(m["frames"], fps=m["fps"]) for m in media["video"]]
    sampling = {"do_sample_frames": True, "fps": 2.0, "max_frames": 32}
    limits: dict = PIXELS | (sampling if videos else {})
    if type(processor.video_processor).__name__ == "Qwen3VLVideoProcessor":
        # Its areas are those of all frames together.
        areas = {"shortest_edge": PIXELS["min_pixels"], "longest_edge": PIXELS["max_pixels"]}
        volumes = {"shortest_edge": processor.video_processor.size["shortest_edge"], "longest_edge": VOLUME}
        limits = {"images_kwargs": {"size": areas}, "videos_kwargs": {"size": volumes} | sampling}

    text = processor.apply_chat_template(record["messages"], tokenize=False)
    text = apply_video_prompt(text, processor, read_spec(folder))
    return processor(text=[text], images=images or None, return_tensors="pt", **limits, **videos)


def hf_grids(hf, record):
    seconds = iter(hf.get("second_per_grid_ts", []))
    sizes = {kind: torch.as_tensor(hf.get(f"{kind}_grid_thw", [])) for kind in ("image", "video")}
    grids = {kind: iter(each.tolist()) for kind, each in sizes.items()}
    found = []
    for medium in record["media"]:
        kind = medium["kind"]
        found.append(GridTHW(*next(grids[kind]), kind, float(next(seconds, 1.0)) if kind == "video" else 1.0))
    return found


@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=pytest.mark.full)]
)
def test_rows_equal_the_hf_processor(dataset, family):
    """Compares tokens, M-RoPE positions and pixels of every sample in the rows; no sample is missing."""
    folder, samples = tiny_checkpoint(family), stored(dataset)
    spec, norm = read_spec(folder), read_pixel_norm(folder)
    volume = VOLUME if spec.vision.video_timestamps else 0
    rows = list(validation_rows(config(dataset, video_max_pixels=volume), spec, folder))
    seen = [key for row in rows for key in row.sample_keys]
    assert len(seen) == len(set(seen)) == 4 and any(row.num_samples > 1 for row in rows)

    for row in rows:
        features = pixel_table(row, spec, norm)
        for key, (start, end) in zip(row.sample_keys, pairwise(row.cu_seqlens.tolist()), strict=False):
            hf = hf_inputs(folder, *samples[key])
            assert row.tokens[start:end].tolist() == hf["input_ids"][0].tolist()

            media = hf_grids(hf, samples[key][0])
            ours = row.position_ids[:, start:end]
            assert ours.T.tolist() == positions_one_by_one(hf["input_ids"][0], media, spec)

            names = {spec.image_token_id: "pixel_values", spec.video_token_id: "pixel_values_videos"}
            for token, name in names.items():
                places = (row.tokens[start:end] == token).nonzero().flatten() + start
                if len(places):
                    got = torch.cat([features[int(p)] for p in places])
                    assert (got - hf[name]).abs().max() < 2e-6


def pixel_table(row, spec, norm):
    """Token positions -> the normalised patches [merge_unit, patch_dim] of their unit, in HF's order."""
    planes = norm.normalize_planes(row.vision.planes)[row.vision.plane_index.long()]
    patches = planes.unflatten(-1, (3, -1)).transpose(1, 2)
    patches = patches.reshape(-1, spec.vision.merge_unit, spec.vision.patch_dim)
    return {int(place): patch for place, patch in zip(row.vision.feature_index, patches, strict=False)}


def same(a, b) -> bool:
    tensors = attrgetter("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens")
    vision = attrgetter("planes", "plane_index", "feature_index", "cu_window_seqlens")
    both = zip(tensors(a) + vision(a.vision), tensors(b) + vision(b.vision), strict=True)
    return a.sample_keys == b.sample_keys and all(torch.equal(one, other) for one, other in both)


@pytest.mark.parametrize(
    ("field", "other", "advice"),
    [
        ("empty_think", "trained", r"set data.empty_think back"),
        ("earlier_answers", "masked", r"set data.earlier_answers back"),
        ("chat_template", TOOLS_TEMPLATE, "give the chat template .*run.json"),
        ("too_long", "drop", r"data\.too_long"),
    ],
)
def test_resume_rejects_other_rules_for_text(dataset, tmp_path, field, other, advice):
    needs_thinking = field in ("empty_think", "earlier_answers")
    folder = shutil.copytree(tiny_checkpoint("qwen3_5"), tmp_path / "hf")
    if needs_thinking:
        with_released_template(folder)
    plain, changed = (open_loader(config(dataset, **each), folder) for each in ({}, {field: other}))
    for resumed, state in ((plain, changed.state_dict()), (changed, plain.state_dict())):
        with pytest.raises(LoaderStateError, match=rf"{field} = .*{advice}"):
            resumed.load_state_dict(state)
    changed.load_state_dict(changed.state_dict())
    if not needs_thinking:
        return
    # A rule for thinking belongs to a state only if the template writes thinking.
    without_thinking = loader(dataset, "qwen3_5", **{field: other})
    state = without_thinking.state_dict()
    assert field not in state["identity"] and field not in without_thinking.row_settings
    loader(dataset, "qwen3_5").load_state_dict(state)


def test_template_may_have_another_place(dataset, tmp_path):
    tools, moved = loader(dataset, chat_template=TOOLS_TEMPLATE), tmp_path / "moved.jinja"
    moved.write_text(tools.row_settings["chat_template"])
    loader(dataset, chat_template=str(moved)).load_state_dict(tools.state_dict())


def test_worker_decodes_video_after_its_parent_did(tmp_path):
    """The parent has started converter threads; they do not survive the fork."""
    write(tmp_path / "media/a.mp4", data := video(12, 480, 640))
    next(all_frames(data))
    asked = [{"from": "human", "value": "<video>?"}, {"from": "gpt", "value": "y"}]
    path, _ = converted(tmp_path, [{"video": "a.mp4", "conversations": asked}] * 4)
    rows = loader(path, num_workers=2)
    assert next(rows).num_images >= 1
    rows.close()
