"""Videos given as images: frames and times worked out by hand, and the pixels of a file of them."""

import io
import zipfile

import numpy as np
import pytest
import torch

from megatron_vl.data.sample import deadline
from megatron_vl.data.sample.deadline import SampleTimeoutError, limited_time
from megatron_vl.data.sample.frame_archive import FrameArchive, FrameArchiveInfo, PixelError, pack_frames
from megatron_vl.data.sample.grids import VideoInfo, frame_indices, video_grid
from megatron_vl.data.sample.images import ImageTooLargeError
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.sample.videos import probe_video, video_planes
from tests.data.media import encoded, image, video_frames, video_of

QWEN2_5 = PixelSettings(video_min_pixels=3136, video_max_pixels=50176)
QWEN3 = PixelSettings(patch_size=16, video_min_pixels=4096, video_max_pixels=6 * 96 * 128, video_spread=True)


INFO = FrameArchiveInfo(2.0, "whole")


def packed(count: int, info: FrameArchiveInfo = INFO) -> bytes:
    """An archive of different images of 70 x 100 pixels."""
    return pack_frames(((f"{i}.png", encoded(70, 100, seed=i)) for i in range(count)), info)


# Images, a second -> frame groups, seconds of a group (2 / fps), times of the groups: mean of 2i / fps and
# (2i + 1) / fps, also where the second of them is a repeated image.
@pytest.mark.parametrize("settings", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize(
    ("count", "fps", "groups", "seconds", "times"),
    [
        (4, 2.0, 2, 1.0, (0.25, 1.25)),
        (5, 1.0, 3, 2.0, (0.5, 2.5, 4.5)),
        (1, 2.0, 1, 1.0, (0.25,)),
        (3, 0.5, 2, 4.0, (1.0, 5.0)),
        (6, 10.0, 3, 0.2, (0.05, 0.25, 0.45)),
    ],
)
def test_image_list_times_worked_out_by_hand(settings, count, fps, groups, seconds, times):
    video = VideoInfo(count, fps, 70, 100, "whole")
    assert frame_indices(video, settings) == list(range(count))
    grid = video_grid(video, settings)
    assert grid.t == groups
    assert grid.second_per_grid == np.float32(seconds)
    assert grid.timestamps == pytest.approx(times, abs=1e-12)


@pytest.mark.parametrize("settings", [QWEN2_5, QWEN3], ids=["qwen2.5", "qwen3"])
@pytest.mark.parametrize(("count", "rate"), [(12, 2), (9, 5), (40, 30), (1, 1)])
def test_frame_folder_is_sampled_like_a_video_file(settings, count, rate):
    images = (image(70, 100, seed=i) for i in range(count))
    file = video_of(images, "matroska", "ffv1", rate=rate, pixels="bgr0")  # the pixels survive
    folder = packed(count, FrameArchiveInfo(rate, "as a file"))
    of_file, of_folder = probe_video(file), probe_video(folder)
    assert (of_file.frame_count, of_file.fps, of_file.height) == (of_folder.frame_count, of_folder.fps, 70)
    grid = video_grid(of_folder, settings)
    assert grid == video_grid(of_file, settings)
    planes = video_planes(folder, of_folder, grid, settings)
    assert torch.equal(planes, video_planes(file, of_file, grid, settings))


def test_image_list_longer_than_the_limit_is_sampled():
    settings = PixelSettings(video_max_frames=8)
    listed, file = VideoInfo(20, 2.0, 64, 64, "whole"), VideoInfo(20, 2.0, 64, 64)
    assert frame_indices(listed, settings) == frame_indices(file, settings) != list(range(20))
    assert video_grid(listed, settings) == video_grid(file, settings)


def test_frame_archive_depends_on_its_images_alone():
    data = packed(3)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.namelist() == ["000000000 0.png", "000000001 1.png", "000000002 2.png"]
        assert archive.read("000000001 1.png") == encoded(70, 100, seed=1)
    assert data == packed(3)
    strange = pack_frames([("a/../\ud800\n" + "x" * 300, b"")], INFO)
    assert FrameArchive(strange).image_name(0) == "x" * 60


def test_frame_archive_names_unusable_images():
    whole = encoded(70, 100, "jpeg")
    for name, bad, said in (
        ("cut.jpg", whole[: len(whole) // 2], "cut.jpg: not a readable image"),
        ("none.jpg", b"", "none.jpg: not a readable image"),
        ("wide.png", encoded(70, 112), r"wide.png has 112 x 70 pixels \(width x height\), one.jpg 100 x 70"),
    ):
        with pytest.raises(PixelError, match=said):
            probe_video(pack_frames([("one.jpg", whole), (name, bad)], INFO))
    with pytest.raises(ImageTooLargeError, match="one.jpg"):
        probe_video(pack_frames([("one.jpg", whole)], INFO), 6999)
    with pytest.raises(PixelError, match="0 frames"):
        probe_video(pack_frames([], INFO))


def test_frame_archive_with_fewer_frames_is_refused(monkeypatch):
    data = packed(4)
    for claimed in (VideoInfo(6, 2.0, 70, 100, "whole"), VideoInfo(4, 2.0, 70, 101, "whole")):
        with pytest.raises(PixelError):
            video_frames(data, claimed, frame_indices(claimed, QWEN2_5))
    with pytest.raises(ImageTooLargeError):
        video_frames(data, VideoInfo(4, 2.0, 7, 10), [0])
    monkeypatch.setattr(deadline, "SAMPLE_TIMEOUT_S", 0.0)
    with limited_time(), pytest.raises(SampleTimeoutError):
        video_frames(data, probe_video(data), [0])


def test_frame_archive_rejects_other_zip_files():
    """Such as those that grow when they are read, or hold other files."""
    comment = zipfile.ZipFile(io.BytesIO(packed(1))).comment
    for compression, name, said in (
        (zipfile.ZIP_DEFLATED, "000000000", comment),
        (zipfile.ZIP_STORED, "a.png", comment),
        (zipfile.ZIP_STORED, "000000000", b""),
        (zipfile.ZIP_STORED, "000000000", comment.replace(b"2.0", b"NaN")),
        (zipfile.ZIP_STORED, "000000000", comment.replace(b"whole", b"other")),
    ):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", compression) as archive:
            archive.writestr(name, encoded(70, 100))
            archive.comment = said
        with pytest.raises(PixelError, match="not an archive of frames"):
            probe_video(out.getvalue())
    data = packed(1)
    for end in range(0, len(data), 997):
        with pytest.raises(PixelError):
            probe_video(data[:end])
