"""Frames of every container, of variable rates, of long and of damaged files; each shows its own number."""

import io
import random
import weakref
import zipfile
from fractions import Fraction
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch

from megatron_vl.data.sample import deadline, videos
from megatron_vl.data.sample.deadline import SampleTimeoutError, limited_time
from megatron_vl.data.sample.frame_archive import FrameArchive, FrameArchiveInfo, PixelError, pack_frames
from megatron_vl.data.sample.grids import VideoInfo, frame_indices, video_grid
from megatron_vl.data.sample.images import ImageTooLargeError
from megatron_vl.data.sample.medium import UnusableError, inspect_medium
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.sample.videos import probe_video, video_planes
from tests.data.media import encoded, image, video_frames, video_of

SIDE = 64
DIGITS = 12
CONTAINERS = [("mp4", "libx264"), ("mp4", "mpeg4"), ("mov", "libx265"), ("matroska", "libx264")]
CONTAINERS += [("webm", "libvpx-vp9"), ("webm", "libvpx"), ("avi", "mpeg4"), ("avi", "mjpeg")]
CONTAINERS += [("mpegts", "libx264"), ("gif", "gif")]
PIXEL_FORMATS = {"gif": "rgb8", "mjpeg": "yuvj420p"}


def numbered(number: int) -> np.ndarray:
    """uint8 [64, 64, 3]: twelve squares of 16 x 20 pixels that are the number's binary digits."""
    image = np.zeros((SIDE, SIDE, 3), np.uint8)
    digits = (number >> np.arange(DIGITS) & 1).reshape(3, 4)
    image[:60] = 255 * digits.repeat(20, 0).repeat(16, 1)[..., None]
    return image


def numbers(frames: torch.Tensor) -> list[int]:
    squares = frames[:, :, :60].float().unflatten(3, (4, 16)).unflatten(2, (3, 20))
    digits = squares[:, :, :, 5:15, :, 4:12].mean((1, 3, 5)).flatten(1) > 127
    return (digits.long() << torch.arange(DIGITS)).sum(1).tolist()


def written(
    form: str, codec: str, count: int, *, times: list[int] | None = None, key: int = 12, reordered: str = ""
) -> bytes:
    """A video file of numbered frames.

    ``times``: in tenths of a second, None: one after the other; ``key``: frames from a key frame to the next;
    ``reordered``: frames in a row that depend on a later one, "": 2, or 0 with ``times``.
    """
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width = stream.height = SIDE
        stream.pix_fmt = PIXEL_FORMATS.get(codec, "yuv420p")
        stream.codec_context.gop_size = key
        stream.codec_context.time_base = Fraction(1, 10)
        if codec == "libx264":
            stream.options = {"preset": "ultrafast", "bf": reordered or ("0" if times else "2"), "qp": "10"}
        if codec == "libx265":
            stream.options = {"preset": "ultrafast", "x265-params": "log-level=none"}
        if codec.startswith("libvpx"):
            stream.options = {"deadline": "realtime", "cpu-used": "8"}
            stream.bit_rate = 2_000_000
        for i in range(count):
            frame = av.VideoFrame.from_ndarray(numbered(i), format="rgb24")
            frame.pts = times[i] if times else i
            frame.time_base = Fraction(1, 10)
            if times:
                frame.duration = (times[i + 1] if i + 1 < count else times[i] + 2) - times[i]
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


@pytest.mark.parametrize(("form", "codec"), CONTAINERS)
def test_frames_of_every_container_are_those_asked_for(form, codec):
    data = written(form, codec, 100)
    info = probe_video(data)
    assert (info.frame_count, info.height, info.width) == (100, SIDE, SIDE)
    assert info.fps == pytest.approx(10, rel=0.02)
    wanted = [0, 1, 14, 83, 99]  # farther apart than FAR
    assert numbers(video_frames(data, info, wanted)) == wanted


@pytest.mark.parametrize(("form", "codec"), CONTAINERS[:8])
def test_seeking_gives_the_pixels_of_a_whole_decode(form, codec, monkeypatch):
    data = written(form, codec, 100)
    info = probe_video(data)
    wanted = [3, 40, 41, 70, 99]
    monkeypatch.setattr(videos, "SEEK_DISTANCE", 1000)
    whole = video_frames(data, info, wanted)
    monkeypatch.setattr(videos, "SEEK_DISTANCE", 0)
    monkeypatch.setattr(videos, "MAX_DECODED_GAP", 0)
    assert torch.equal(video_frames(data, info, wanted), whole)


def test_long_video_is_decoded_only_near_its_samples(monkeypatch):
    data = written("mp4", "libx264", 3000, key=30)
    info = VideoInfo(3000, 10.0, SIDE, SIDE)
    wanted = frame_indices(info, PixelSettings(video_max_frames=8))
    assert wanted == [0, 375, 750, 1125, 1500, 1875, 2250, 2625]

    decoded = _count_decoded(monkeypatch)
    assert numbers(video_frames(data, info, wanted)) == wanted
    # At most a group of 30 for each wanted frame; a whole decode up to the last takes 2,626.
    assert 8 <= len(decoded) <= 8 * 30

    monkeypatch.setattr(videos, "LONG_VIDEO_FRAMES", 2000)
    assert probe_video(data) == info


def _count_decoded(monkeypatch) -> list[int]:
    """The times of all frames that are decoded from now on after seeking."""
    decoded: list[int] = []
    real = videos._seek_frames

    def counted(container, table, frames):
        def decode(stream):
            for frame in container.decode(stream):
                decoded.append(frame.pts)
                yield frame

        counting = SimpleNamespace(streams=container.streams, seek=container.seek, decode=decode)
        return real(counting, table, frames)

    monkeypatch.setattr(videos, "_seek_frames", counted)
    return decoded


PLAIN_RULE = PixelSettings(video_max_frames=768, video_max_pixels=300 * 28 * 28)
PIXELS = {"video_min_pixels": 4096, "video_max_pixels": 114_688 * 2 * 32 * 32}
SPREAD_RULE = PixelSettings(patch_size=16, video_max_frames=768, video_spread=True, **PIXELS)


@pytest.mark.parametrize(
    ("settings", "first", "last", "times"),
    [
        # Frame i is int(i x 90000 / 768) = int(i x 117.1875). A group lasts 2 / (768 / 90000 x 25) = 9.375 s.
        (PLAIN_RULE, [0, 117, 234, 351], [89_765, 89_882], 9.375),
        # Frame i is round(i x 89999 / 767) = round(i x 117.339); groups are at (0 + 117) / 50 s and
        # (89882 + 89999) / 50 s.
        (SPREAD_RULE, [0, 117, 235, 352], [89_882, 89_999], (2.34, 3597.62)),
    ],
    ids=["qwen2_vl and qwen2_5_vl", "qwen3_vl, qwen3_vl_moe and qwen3_5"],
)
def test_hour_of_video_worked_out_by_hand(settings, first, last, times):
    """An hour of 720p at 25 frames a second: 7,200 frames at 2 a second are cut to 768, 384 groups.

    Qwen2.5-VL, 300 tokens a group: 720 x 1280 is divided by sqrt(921600 / 235200) = 1.97949. That gives
    363.7 x 646.6, and 12 x 23 tokens of 28 pixels. Qwen3-VL, 114,688 tokens for the whole video: the divisor
    is sqrt(768 x 921600 / 234881024) = 1.73591. That gives 414.8 x 737.4, and 12 x 23 tokens of 32 pixels.
    """
    info = VideoInfo(90_000, 25.0, 720, 1280)
    indices = frame_indices(info, settings)
    assert (len(indices), indices[:4], indices[-2:]) == (768, first, last)

    grid = video_grid(info, settings)
    assert (grid.t, grid.h, grid.w) == (384, 24, 46)
    assert grid.num_tokens(2) == 384 * 12 * 23 == 105_984
    if settings.video_spread:
        assert (grid.timestamps[0], grid.timestamps[-1]) == pytest.approx(times)
    else:
        assert grid.second_per_grid == times


def test_video_decoding_keeps_memory_flat(monkeypatch):
    """Frames of stored size are large: at most those of two resizes and the next one are there at a time."""
    real, living, counts = videos.iterate_frames, weakref.WeakSet(), []

    def counted(*arguments):
        for frame in real(*arguments):
            living.add(frame)
            counts.append(len(living))
            yield frame

    monkeypatch.setattr(videos, "iterate_frames", counted)
    data, info = written("mp4", "libx264", 72), VideoInfo(72, 10.0, SIDE, SIDE)
    settings = PixelSettings(video_fps=10.0, video_max_frames=72)
    assert len(video_planes(data, info, video_grid(info, settings), settings)) == len(counts) == 72
    assert max(counts) <= 2 * videos.FRAMES_PER_RESIZE + 1


def test_gif_is_decoded_from_its_start(monkeypatch):
    data = written("gif", "gif", 100)
    monkeypatch.setattr(videos, "_seek_frames", lambda *a: pytest.fail("a GIF has no key frames"))
    assert numbers(video_frames(data, probe_video(data), [99])) == [99]


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_variable_frame_rate_worked_out_by_hand(form):
    """Eight frames at 0, 0.1, 0.2, 1, 2, 2.1, 2.2 and 3 s, the last for 0.1 s: 8 in 3.1 s are 80/31 a second.

    transformers and qwen-vl-utils take frames by their number and the mean rate, and so do the models: at 2
    frames a second, int(3.1 x 2) = 6 frames, spread over 0 to 7: 0, 1.4, 2.8, 4.2, 5.6, 7. A frame's time is
    its number x 31/80 s; a group's the mean of its two.
    """
    data = written(form, "libx264", 8, times=[0, 1, 2, 10, 20, 21, 22, 30])
    info = probe_video(data)
    assert info.frame_count == 8
    assert info.fps == pytest.approx(80 / 31, rel=1e-3)
    spread = PixelSettings(patch_size=16, video_spread=True, video_fps=2.0)
    known = VideoInfo(8, 80 / 31, SIDE, SIDE)
    indices = frame_indices(known, spread)
    assert indices == [0, 1, 3, 4, 6, 7]
    assert video_grid(known, spread).timestamps == pytest.approx((0.19375, 1.35625, 2.51875))
    assert numbers(video_frames(data, known, indices)) == indices

    # Qwen2.5-VL: 6.2 frames are rounded down to 6, frame i is int(i x 8 / 6), and a group covers
    # 2 / (6 / 8 x 80 / 31) s.
    plain = PixelSettings(video_fps=2.0)
    assert frame_indices(known, plain) == [0, 1, 2, 4, 5, 6]
    assert video_grid(known, plain).second_per_grid == pytest.approx(31 / 30)


@pytest.mark.parametrize("form", ["mp4", "matroska", "mpegts"])
@pytest.mark.parametrize("reordered", ["0", "2"])
def test_seeking_works_with_a_variable_frame_rate(form, reordered, monkeypatch):
    """400 frames, 1 to 9 tenths of a second apart, with and without frames that are stored out of order."""
    draw = random.Random(form)
    times = [0]
    while len(times) < 400:
        times.append(times[-1] + draw.choice([1, 1, 1, 2, 9]))
    data = written(form, "libx264", 400, times=times, key=20, reordered=reordered)
    info = probe_video(data)
    assert info.frame_count == 400
    decoded = _count_decoded(monkeypatch)
    wanted = [7, 8, 150, 171, 300, 301, 399]
    assert numbers(video_frames(data, info, wanted)) == wanted
    assert 0 < len(decoded) <= 7 * 24  # sought, not decoded from the start


def test_decode_ends_at_its_deadline(monkeypatch):
    data = written("mp4", "libx264", 300)
    info = probe_video(data)
    monkeypatch.setattr(deadline, "SAMPLE_TIMEOUT_S", 1e-9)
    for wanted in ([0, 5], [0, 299]):  # decoded from the start, and sought
        with limited_time(), pytest.raises(SampleTimeoutError, match="took longer than 1e-09 s"):
            video_frames(data, info, wanted)
    assert numbers(video_frames(data, info, [0, 299])) == [0, 299]


def test_data_tool_rejects_what_is_no_video():
    for data in (b"", b"\0" * 5000, b"#EXTM3U\nfile:///etc/passwd\n", written("gif", "gif", 3)[:30]):
        with pytest.raises(UnusableError, match="clip"):
            inspect_medium("video", "clip.mp4", data, 1 << 20)


# --- Videos given as images ---------------------------------------------------------------------------------

QWEN2_5 = PixelSettings(video_min_pixels=3136, video_max_pixels=50176)
QWEN3 = PixelSettings(patch_size=16, video_min_pixels=4096, video_max_pixels=6 * 96 * 128, video_spread=True)


INFO = FrameArchiveInfo(2.0, "whole")


def packed(count: int, info: FrameArchiveInfo = INFO) -> bytes:
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
