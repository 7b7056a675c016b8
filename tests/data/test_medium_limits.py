"""Clips, times of images and limits of one medium: by hand, against qwen-vl-utils, and through the loader."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
from PIL import Image

from data_tools.formats import RecordError, read_conversation
from data_tools.formats.medium_limits import FrameSequence
from data_tools.sample_sizes import index_datasets
from megatron_vl.config import DataConfig
from megatron_vl.data.loader import build_loader
from megatron_vl.data.row_encoder import cook_sample
from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.grids import VideoInfo, frame_indices, image_grid, video_grid
from megatron_vl.data.sample.pixel_settings import PixelSettings, read_pixel_settings
from megatron_vl.data.source.energon_datasets import open_sample_reader
from megatron_vl.data.source.sample_sizes import SampleSizeCounter
from megatron_vl.spec.families import read_spec
from tests.data.datasets import converted
from tests.data.helpers import VIDEO, user
from tests.data.media import encoded, video, write
from tests.data_tools.test_parts_of_media import ANSWER, in_address, in_part, listed
from tests.tiny import tiny_checkpoint

UNIT = 28 * 28


def released_limits(unit: int, frames: int = 1, **others: Any) -> PixelSettings:
    """The constants of qwen-vl-utils, for an image and for so many frames of a video."""
    others |= {"video_min_pixels": 128 * unit * frames, "video_max_pixels": 768 * unit * frames}
    return PixelSettings(min_pixels=4 * unit, max_pixels=16384 * unit, video_max_frames=768, **others)


QWEN2_5 = released_limits(UNIT)


def qwen3(frames: int) -> PixelSettings:
    """Limits of a video are those of all its frames together."""
    return released_limits(32 * 32, frames, patch_size=16, video_spread=True)


def size_of(grid: Any, settings: PixelSettings) -> tuple[int, int]:
    return grid.h * settings.patch_size, grid.w * settings.patch_size


IMAGES = ["a.png", "b.png", "c.png", "d.png", "e.png"]

# --- Images -------------------------------------------------------------------------------------------------

IMAGE_LIMITS: list[dict[str, int]] = [
    {"max_pixels": 50176},
    {"min_pixels": 200704},
    {"min_pixels": 40000, "max_pixels": 60000},
    {"resized_height": 100, "resized_width": 210},
    {"resized_height": 10, "resized_width": 20, "max_pixels": 784},
    {"resized_height": 280, "resized_width": 280, "min_pixels": 10**6},
]


@pytest.mark.parametrize("settings", [QWEN2_5, qwen3(1)], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize("limits", IMAGE_LIMITS, ids=str)
def test_image_sizes_equal_qwen_vl_utils(settings, limits) -> None:
    utils = pytest.importorskip("qwen_vl_utils")
    for height, width in ((480, 640), (100, 200), (33, 31), (700, 60), (12, 500)):
        image = Image.new("RGB", (width, height))
        expected = utils.fetch_image({"image": image, **limits}, image_patch_size=settings.patch_size)
        assert size_of(image_grid(height, width, settings, limits), settings) == expected.size[::-1]


def test_image_sizes_worked_out_by_hand() -> None:
    """640 x 480 in 64 units of 28 x 28: divided by 2.474, 193.9 x 258.6, rounded down to 6 x 9 units."""
    grid = image_grid(480, 640, QWEN2_5, {"max_pixels": 64 * UNIT})
    assert (grid.h, grid.w) == (12, 18)
    # 100 and 210 are 3.6 and 7.5 units: 4 x 8. The run's smallest area does not hold for a given size.
    grid = image_grid(480, 640, QWEN2_5, {"resized_height": 100, "resized_width": 210})
    assert (grid.h, grid.w) == (8, 16)
    # What a part leaves open is the run's: its largest area, and its smallest up to the part's largest.
    small = dataclasses.replace(QWEN2_5, max_pixels=64 * UNIT)
    assert image_grid(480, 640, small, {"max_pixels": 10**7}) == image_grid(480, 640, small)
    large = dataclasses.replace(QWEN2_5, min_pixels=10**6)
    grid = image_grid(56, 56, large, {"max_pixels": 16 * UNIT})
    assert (grid.h, grid.w) == (8, 8)


@pytest.mark.parametrize("limits", [{"min_pixels": 65 * UNIT}, {"resized_height": 280, "resized_width": 280}])
def test_limits_above_the_runs_are_refused(limits) -> None:
    small = dataclasses.replace(QWEN2_5, max_pixels=64 * UNIT, video_max_pixels=64 * UNIT)
    with pytest.raises(PixelError, match=r"above the largest area of the run, 50176 pixels; raise data"):
        image_grid(480, 640, small, limits)
    with pytest.raises(PixelError, match=r"above the largest area of the run"):
        video_grid(VideoInfo(8, 2.0, 480, 640, limits=limits), small)


VIDEO_LIMITS: list[dict[str, float]] = [
    {"video_start": 5.0, "video_end": 8.0},
    {"video_start": 5.03},
    {"video_end": 3.99, "fps": 5.0},
    {"video_start": 2.0, "video_end": 99.0, "nframes": 9},
    {"nframes": 7},
    {"fps": 0.5, "min_frames": 7},
    {"fps": 8.0, "max_frames": 11, "min_pixels": 9000, "max_pixels": 60000},
    {"max_frames": 5, "min_pixels": 150000, "max_pixels": 160000},
    {"nframes": 4, "resized_height": 100, "resized_width": 210},
]


@pytest.mark.parametrize("limits", VIDEO_LIMITS, ids=str)
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_frames_and_sizes_of_videos_equal_qwen_vl_utils(limits, family, monkeypatch) -> None:
    utils = pytest.importorskip("qwen_vl_utils").vision_process
    reader = MagicMock()
    monkeypatch.setitem(sys.modules, "decord", SimpleNamespace(VideoReader=lambda path: reader))
    monkeypatch.setattr(utils, "get_video_reader_backend", lambda: "decord")
    patch_size = 14 if family == "qwen2.5" else 16
    for count, fps, size in ((100, 10.0, (480, 640)), (391, 23.976, (60, 90))):
        reader.__len__.return_value, reader.get_avg_fps.return_value = count, fps
        black = np.zeros((1, *size, 3), np.uint8)
        reader.get_batch = lambda numbers, one=black: Mock(asnumpy=lambda: one.repeat(len(numbers), 0))
        asked = {"video": "a.mp4", **limits}
        (frames, metadata), rate = utils.fetch_video(asked, patch_size, True, True)
        settings = QWEN2_5 if family == "qwen2.5" else qwen3(len(frames))
        info = VideoInfo(count, fps, *size, limits=limits)
        assert frame_indices(info, settings) == metadata["frames_indices"]
        grid = video_grid(info, settings)
        if limits.keys() & {"min_pixels", "max_pixels", "resized_height"}:
            assert size_of(grid, settings) == tuple(frames.shape[2:])
        assert (grid.t, grid.second_per_grid) == (len(frames) // 2, np.float32(2 / rate))


def test_images_of_a_list_are_resized_once() -> None:
    """qwen-vl-utils resizes twice, first to multiples of 56: 918 x 733 to 448 x 392, and not to 476 x 392."""
    grid = video_grid(VideoInfo(2, 2.0, 733, 918, "whole", limits={"max_pixels": 200704}), QWEN2_5)
    assert size_of(grid, QWEN2_5) == (392, 476)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"video_start": 11.0}, "less than two frames"),
        ({"video_start": 5.0, "video_end": 5.05}, "less than two frames"),
        ({"nframes": 102}, "102 frames are asked for of a video or clip of 100"),
        ({"video_end": 0.5, "nframes": 8}, "8 frames are asked for of a video or clip of 6"),
        ({"nframes": 1}, "0 frames are asked for"),
    ],
)
def test_impossible_frames_are_refused(limits, message) -> None:
    with pytest.raises(PixelError, match=message):
        frame_indices(VideoInfo(100, 10.0, 56, 56, limits=limits), QWEN2_5)


def test_more_frames_than_the_runs_are_refused_and_their_limits_bounded() -> None:
    run = dataclasses.replace(QWEN2_5, video_max_frames=8)
    with pytest.raises(PixelError, match=r"10 frames .* above data\.video_max_frames 8; raise that"):
        frame_indices(VideoInfo(100, 10.0, 56, 56, limits={"nframes": 10}), run)
    assert len(frame_indices(VideoInfo(100, 10.0, 56, 56, limits={"max_frames": 20}), run)) == 8


def test_times_of_images_worked_out_by_hand() -> None:
    """Frames 0, 30, 60, 90, 120 of 30 a second are 0 to 4 s; the last image is repeated."""
    read = read_conversation(in_part(video=IMAGES, frames_indices=[0, 30, 60, 90, 120], fps=30))
    assert read.media_references == [("video", FrameSequence(tuple(IMAGES), 1.0))]
    assert read.media_limits == [{"timestamps": [0.0, 1.0, 2.0, 3.0, 4.0]}] and not read.ignored_keys
    grid = video_grid(VideoInfo(5, 1.0, 56, 56, "whole", limits=read.media_limits[0]), QWEN2_5)
    assert grid.timestamps == (0.5, 2.5, 4.0) and grid.second_per_grid == 2.0

    # 10, 12.5 and 20 s: 5 s between two images in the mean, so that a group covers 10 s.
    read = read_conversation(in_part(video=IMAGES[:3], timestamps=[10, 12.5, 20]))
    assert read.media_references[0][1].fps == 0.2
    grid = video_grid(VideoInfo(3, 0.2, 56, 56, "whole", limits=read.media_limits[0]), qwen3(4))
    assert grid.timestamps == (11.25, 20.0) and grid.second_per_grid == 10.0


def in_both(**limits: Any) -> dict[str, Any]:
    """A video with a rate in the list, and other limits in its part."""
    return {"videos": [{"path": "a.mp4", "fps": 1}], "messages": [user([VIDEO | limits]), ANSWER]}


@pytest.mark.parametrize(
    ("record", "limits"),
    [
        (in_part(video_start=5, video_end="8"), {"video_start": 5.0, "video_end": 8.0}),
        (in_part(video_start=0, video_end=8), {"video_end": 8.0}),
        (in_part(nframes=4.0, max_pixels="50176"), {"nframes": 4, "max_pixels": 50176}),
        (in_part("image", min_pixels=784, max_pixels=50176), {"min_pixels": 784, "max_pixels": 50176}),
        (in_part(video=["a.png", "b.png"], max_pixels=784, nframes=4), {"max_pixels": 784}),
        (in_part(video="clip", fps=5, video_end=3), {"fps": 5.0, "video_end": 3.0}),
        (in_address(max_pixels=784, fps=1), {"max_pixels": 784, "fps": 1.0}),
        (listed(entry={"path": "a.mp4", "video_start": 2}), {"video_start": 2.0}),
        (listed(fps=1, max_pixels=784), {}),
        (in_both(video_end=3), {"fps": 1.0, "video_end": 3.0}),
    ],
)
def test_limits_of_a_record_are_read(record, limits) -> None:
    assert read_conversation(record).media_limits == [limits]


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (in_part(nframes=2.5), "nframes"),
        (in_part(nframes=10**400), "nframes"),
        (in_part(fps=float("nan")), "fps"),
        (in_part(nframes=4, fps=2), "nframes"),
        (in_part(video_start=-1), "video_start"),
        (in_part(video_start=8, video_end=5), "video_start"),
        (in_part("image", min_pixels=100, max_pixels=50), "min_pixels"),
        (in_part("image", resized_height=56), "resized_height"),
        (in_both(nframes=4), "nframes"),
        (in_part(video=IMAGES, timestamps=[0, 1]), "timestamps"),
        (in_part(video=IMAGES[:2], timestamps=[1, 0]), "timestamps"),
        (in_part(video=IMAGES[:2], timestamps=[3, 3]), ""),  # at one time
        (in_part(video=IMAGES[:2], frames_indices=[0, 5]), "frames_indices"),
        (in_part(video=IMAGES[:2], video_start=1), "video_start"),
        (in_part(frames_indices=[0, 5], fps=2), "frames_indices"),
    ],
)
def test_impossible_limits_are_refused(record, field) -> None:
    with pytest.raises(RecordError) as caught:
        read_conversation(record)
    assert caught.value.field_path == f"messages[0].content[0].{field}"


def records(root: Path) -> list[dict[str, Any]]:
    write(root / "a.mp4", video(40))
    for seed, name in enumerate(IMAGES):
        write(root / name, encoded(70, 100, seed=seed))
    return [
        in_part(),
        in_part(video_start=1, video_end=3),
        in_part(nframes=20),
        in_part(fps=4, max_pixels=12544, max_frames=6),
        in_part("image", image="a.png", max_pixels=3136),
        in_part("image", image="a.png", resized_height=84, resized_width=112),
        in_part("image", image="a.png"),
        in_part(video=IMAGES, timestamps=[0.5, 10.0, 100.5, 1000.0, 1234.5]),
        in_part(video=IMAGES, frames_indices=[0, 5, 10, 15, 20], fps=10, max_pixels=12544),
        in_part("image", image="b.png", min_pixels=20000),
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_sizes_follow_limits_under_the_settings_of_any_run(family, tmp_path) -> None:
    """The index is made once, with another largest number of frames: of 8, 20 frames are too many."""
    hf = tiny_checkpoint(family)
    spec = read_spec(hf)
    out, report = converted(tmp_path, records(tmp_path / "media"))
    assert report.samples == 10

    def config(**changes: Any) -> DataConfig:
        return DataConfig(path=str(out), seq_len=8192, num_workers=0, **changes)

    index_datasets(config(video_max_frames=8), spec, hf)
    for data in (config(video_max_frames=8), config(), config(max_pixels=14000, video_fps=3.0)):
        loader = build_loader(data, spec, hf)
        context = loader._planning_context
        counted = SampleSizeCounter(context.row_encoder.chat_encoder, read_pixel_settings(hf, data))
        source, reader = context.sized_sources[0], open_sample_reader(context.datasets[0], None)
        tokens, patches = source.count_samples(counted, np.arange(report.samples))
        refused = []
        for number in range(report.samples):
            encoded_sample = context.row_encoder.preencode_sample(cook_sample(reader[number]))
            if encoded_sample.refused:
                refused.append(number)
                assert not tokens[number], encoded_sample.refused
            else:
                assert encoded_sample.token_and_patch_count == (tokens[number], patches[number])
        assert (2 in refused) == (data.video_max_frames == 8) and (9 in refused) == (data.max_pixels == 14000)
        assert set(refused) <= {2, 5, 9}, refused
