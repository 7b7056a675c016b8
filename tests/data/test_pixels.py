"""Compares pixels and token counts with the checkpoint's own HF processor."""

import io
import json

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor
from transformers.image_utils import load_image
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize
from transformers.video_utils import VideoMetadata

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.grids import VideoInfo, frame_indices, image_grid, video_grid
from megatron_vl.data.sample.images import decode_image, image_size, pixel_planes
from megatron_vl.data.sample.pixel_settings import (
    PixelNorm,
    PixelSettings,
    read_pixel_norm,
    read_pixel_settings,
)
from megatron_vl.data.sample.videos import probe_video, video_planes

from .media import all_frames, encoded, video

BASE = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2, "merge_size": 2}
ODD = {"image_mean": [0.31, 0.5, 0.77], "image_std": [0.2, 0.45, 1.3], "patch_size": 14}
RELEASED = BASE | {"patch_size": 14, "min_pixels": 3136, "max_pixels": 200704}
SMALL = {"min_pixels": 3136, "max_pixels": 50176}
EDGES = {"shortest_edge": 28 * 28 * 16, "longest_edge": 28 * 28 * 40}
PATCH_16 = BASE | {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536}}
PATCH_16 |= {"image_mean": [0.5] * 3}
STYLES: dict[str, dict] = {
    "released": RELEASED,
    "size": {**BASE, **ODD, "size": EDGES},
    "size in pixels": {**RELEASED, **SMALL, "size": SMALL},
    "unscaled": {**BASE, **ODD, **SMALL, "rescale_factor": 1 / 127.5},
    "patch 16": PATCH_16,
}
SHAPES = [(56, 56), (100, 300), (301, 57), (29, 28), (480, 640), (13, 900), (1, 40)]
KINDS = "png jpeg jpeg420 progressive grey grey_jpeg palette cmyk exif webp bilevel".split()


@pytest.fixture
def folder(tmp_path):
    def write(style: str):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(STYLES[style]))
        return tmp_path

    return write


def hf_pixels(folder, data: bytes):
    processor = AutoImageProcessor.from_pretrained(folder)
    out = processor(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="pt")
    return out["pixel_values"], out["image_grid_thw"][0].tolist()


def ours(data: bytes, settings: PixelSettings):
    grid = image_grid(*image_size(data), settings)
    planes = settings.norm.normalize_planes(pixel_planes(decode_image(data)[None], grid, settings))[0]
    p = settings.patch_size
    twice = planes.view(-1, 3, 1, p * p).expand(-1, -1, 2, -1)
    return twice.reshape(len(planes), -1), [grid.t, grid.h, grid.w]


def assert_same_pixels(folder, data: bytes):
    got, grid = ours(data, read_pixel_settings(folder))
    wanted, wanted_grid = hf_pixels(folder, data)
    assert grid == wanted_grid
    assert (got - wanted).abs().max() < 2e-6


@pytest.mark.parametrize(
    ("style", "shape"), [*((style, SHAPES[2]) for style in STYLES), *(("size", shape) for shape in SHAPES)]
)
def test_pixels_of_every_shape_equal_the_hf_processor(folder, style, shape):
    assert_same_pixels(folder(style), encoded(*shape, "png", seed=sum(shape)))


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_of_every_format_equal_the_hf_processor(folder, kind):
    assert_same_pixels(folder("released"), encoded(90, 130, kind))


def test_processor_config_prefers_nested_settings(folder):
    path, nested = folder("released"), {f"{kind}_processor": STYLES["size"] for kind in ("image", "video")}
    (path / "processor_config.json").write_text(json.dumps(nested))
    assert_same_pixels(path, encoded(100, 300))
    assert read_pixel_norm(path).mean == pytest.approx((0.31, 0.5, 0.77))


def test_pixel_settings_are_overridden_and_contradictions_refused(folder):
    path = folder("released")
    settings = read_pixel_settings(path, DataConfig(min_pixels=784, max_pixels=7840))
    assert (settings.min_pixels, settings.max_pixels, settings.video_max_pixels) == (784, 7840, 7840)
    assert read_pixel_settings(path, DataConfig(video_max_pixels=4000)).video_max_pixels == 4000
    with pytest.raises(PixelError, match="above the largest"):
        read_pixel_settings(path, DataConfig(min_pixels=300000))
    with pytest.raises(FileNotFoundError, match="preprocessor_config.json"):
        read_pixel_settings(path / "nowhere")


VIDEOS = [(50, 10, 2.0, 32), (50, 10, 2.0, 6), (9, 10, 2.0, 32), (61, 24, 1.0, 768), (5, 5, 2.0, 32)]
VIDEOS += [(240, 30, 2.0, 32), (7, 3, 4.0, 32)]


@pytest.mark.parametrize("frames,rate,fps,most", VIDEOS)
def test_sampled_frames_equal_the_hf_video_processor(frames, rate, fps, most):
    settings = PixelSettings(video_fps=fps, video_max_frames=most)
    processor = Qwen2VLVideoProcessor(min_pixels=3136, max_pixels=50176)
    metadata = VideoMetadata(total_num_frames=frames, fps=float(rate))
    wanted = processor.sample_frames(metadata, fps=fps, max_frames=most)
    assert frame_indices(VideoInfo(frames, rate, 64, 64), settings) == wanted.tolist()
    metadata.frames_indices = wanted
    seconds = torch.tensor([2 / metadata.sampled_fps])
    grid = video_grid(VideoInfo(frames, rate, 64, 64), settings)
    assert grid.second_per_grid == seconds.item() and grid.t == -(-len(wanted) // 2)


QWEN3_VIDEO = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor"}
QWEN3_VIDEO |= {"temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN3_VIDEO |= {"patch_size": 16}
QWEN3_VIDEO |= {"size": {"shortest_edge": 4 * 64 * 64, "longest_edge": 6 * 96 * 128}}


@pytest.fixture
def qwen3_folder(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PATCH_16 | {"image_std": [0.5] * 3}))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(QWEN3_VIDEO))
    return tmp_path


@pytest.mark.parametrize(
    "frames,rate,fps,most", [*VIDEOS, (23, 10, 2.0, 5), (90, 29.97, 1.0, 7), (3, 10, 2.0, 32)]
)
@pytest.mark.parametrize("shape", [(70, 100), (20, 300), (400, 31), (64, 64)], ids=str)
def test_frames_area_and_times_equal_qwen3_vl(qwen3_folder, frames, rate, fps, most, shape):
    data = DataConfig(video_fps=fps, video_max_frames=most, max_pixels=4096)
    settings = read_pixel_settings(qwen3_folder, data)
    processor = Qwen3VLVideoProcessor(**QWEN3_VIDEO, max_frames=most)
    metadata = VideoMetadata(total_num_frames=frames, fps=rate)
    wanted = processor.sample_frames(metadata, fps=fps).tolist()
    info = VideoInfo(frames, rate, *shape)
    assert frame_indices(info, settings) == wanted
    grid = video_grid(info, settings)
    size = video_resize(len(wanted), *shape, 2, 32, *QWEN3_VIDEO["size"].values())
    assert (grid.t, grid.h * 16, grid.w * 16) == (-(-len(wanted) // 2), *size)
    assert list(grid.timestamps) == Qwen3VLProcessor._calculate_timestamps(None, list(wanted), rate, 2)


@pytest.mark.parametrize(("family", "most"), [("qwen2", 32), ("qwen3", 32), ("qwen3", 5)])
def test_video_pixels_equal_the_hf_video_processor(qwen3_folder, family, most):
    data = video(23, 70, 100)
    info = probe_video(data)
    assert (info.frame_count, info.fps, info.height, info.width) == (23, 10.0, 70, 100)
    mean_and_std = {"image_mean": [0.3, 0.4, 0.5], "image_std": [0.2, 0.3, 0.4]}
    if family == "qwen2":
        norm = PixelNorm(*map(tuple, mean_and_std.values()))
        settings = PixelSettings(video_min_pixels=3136, video_max_pixels=50176, video_fps=4.0, norm=norm)
        processor = Qwen2VLVideoProcessor(min_pixels=3136, max_pixels=50176, **mean_and_std)
    else:
        settings = read_pixel_settings(qwen3_folder, DataConfig(video_max_frames=most, video_fps=4.0))
        processor = Qwen3VLVideoProcessor(**QWEN3_VIDEO, max_frames=most)
    grid = video_grid(info, settings)
    got = settings.norm.normalize_planes(video_planes(data, info, grid, settings))
    got = torch.cat([got, got[-1:].expand(grid.t * 2 - len(got), -1, -1)])
    asked = {"do_sample_frames": True, "fps": 4.0} | ({"max_frames": most} if family == "qwen2" else {})
    asked |= {"video_metadata": [VideoMetadata(total_num_frames=23, fps=10.0)]}
    out = processor(videos=[torch.stack(list(all_frames(data)))], return_tensors="pt", **asked)
    assert out["video_grid_thw"][0].tolist() == [grid.t, grid.h, grid.w]
    area = settings.patch_size**2
    expected = out["pixel_values_videos"].view(grid.t, grid.h * grid.w, 3, 2, area)
    found = got.view(grid.t, 2, grid.h * grid.w, 3, area).permute(0, 2, 3, 1, 4)
    assert (expected - found).abs().max() < 2e-6


def test_video_rule_is_that_of_the_folder(qwen3_folder):
    assert read_pixel_settings(qwen3_folder).video_spread
    (qwen3_folder / "video_preprocessor_config.json").unlink()
    assert not read_pixel_settings(qwen3_folder).video_spread
    processor = PATCH_16 | {"processor_class": "Qwen3VLProcessor"}
    (qwen3_folder / "preprocessor_config.json").write_text(json.dumps(processor))
    settings = read_pixel_settings(qwen3_folder)
    assert settings.video_spread and (settings.video_min_pixels, settings.video_max_pixels) == (4096, 65536)


def test_video_with_a_missing_frame_is_refused():
    data = video(10)
    settings = PixelSettings(video_min_pixels=3136, video_max_pixels=50176, video_fps=10)
    claimed = VideoInfo(20, 10, 64, 96)
    with pytest.raises(PixelError, match="frame 10 of the video is missing"):
        video_planes(data, claimed, video_grid(claimed, settings), settings)
