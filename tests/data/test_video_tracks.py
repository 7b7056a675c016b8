"""Which track of a video file is shown and how, and files that are cut, damaged or no video."""

import io
import json
import struct
from collections.abc import Callable
from functools import cache

import av
import numpy as np
import pytest
from av.stream import Disposition
from PIL import Image

from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.grids import VideoInfo, video_grid
from megatron_vl.data.sample.medium import UnusableError, inspect_medium
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.sample.videos import probe_video, video_planes
from tests.data.helpers import assistant, user
from tests.data.media import video_frames, video_of, write
from toolkit.cli import main

from .media import encoded
from .test_images import TURNS, corners, saved
from .test_video_files import SIDE, written


def clip(form: str = "mp4", count: int = 12, height: int = 32, width: int = 64, **options: str) -> bytes:
    """Frames with a white quarter at the top left and a grey one at the top right, 10 a second."""
    image = np.zeros((height, width, 3), np.uint8)
    image[: height // 2, : width // 2] = 255
    image[: height // 2, width // 2 :] = 128
    return video_of([image] * count, form, "libx264", **options)


def with_matrix(data: bytes, a: float, b: float, c: float, d: float) -> bytes:
    """An MP4 whose track has another display matrix: version 0 of ``tkhd`` has it after 40 bytes."""
    at = data.index(b"tkhd") + 4 + 40
    a, b, c, d = (int(factor * 0x10000) for factor in (a, b, c, d))
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 0x40000000) + data[at + 36 :]


MATRICES = {  # by the number that EXIF gives to the same turn; x' = a x + c y, y' = b x + d y
    1: (1, 0, 0, 1),
    2: (-1, 0, 0, 1),
    3: (-1, 0, 0, -1),
    4: (1, 0, 0, -1),
    5: (0, 1, 1, 0),
    6: (0, 1, -1, 0),
    7: (0, -1, -1, 0),
    8: (0, -1, 1, 0),
}


@pytest.mark.parametrize("form", ["mp4", "mov"])
@pytest.mark.parametrize("turn", MATRICES)
def test_video_turns_are_applied(form, turn):
    data = with_matrix(clip(form), *MATRICES[turn])
    size = (64, 32) if turn > 4 else (32, 64)
    info = probe_video(data)
    assert (info.height, info.width) == size
    frame = video_frames(data, info, [3])[0]
    assert frame.shape == (3, *size) and corners(frame.float().mean(0).numpy()) == TURNS[turn]

    settings = PixelSettings(video_min_pixels=3136, video_max_pixels=50176)
    grid = video_grid(info, settings)
    assert (grid.h > grid.w) == (turn > 4)
    planes = video_planes(data, info, grid, settings)
    first_unit = planes[0, 0].float().mean()  # the patch at the top left
    assert (first_unit > 200) == (TURNS[turn][0] == "top left")
    with pytest.raises(PixelError, match="another size than when it was converted"):
        video_planes(data, VideoInfo(12, 10.0, 48, 48), grid, settings)


def test_video_matrices_of_other_turns_are_refused():
    """Players scale by a matrix or ignore it; an eighth turn has no pixels of its own."""
    matrices = (2, 0, 0, 2), (0, 0, 0, 0), (1 / 0x10000, 1, -1, -1 / 0x10000)
    assert [probe_video(with_matrix(clip(), *matrix)).height for matrix in matrices] == [32, 32, 64]
    with pytest.raises(PixelError, match="quarter turns"):
        probe_video(with_matrix(clip(), 0.7, 0.7, -0.7, 0.7))


def tracks(
    form: str, shades: dict[int, int], *, audio: float = 0, cover: bool = False, seconds: float = 1.2
) -> bytes:
    """A file of video tracks of one shade each with a disposition each, perhaps with audio and a cover."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        streams = []
        if cover and form == "matroska":
            container.add_attachment("cover.png", "image/png", encoded(96, 96))
        elif cover:
            stream = container.add_stream("mjpeg", rate=1)
            stream.width = stream.height = 96
            stream.pix_fmt, stream.disposition = "yuvj420p", Disposition.attached_pic
            streams.append((stream, 40, 1))
        for shade, disposition in shades.items():
            stream = container.add_stream("libx264", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
            stream.disposition = Disposition(disposition)
            streams.append((stream, shade, round(seconds * 10)))
        sound = container.add_stream("aac", rate=48000) if audio else None
        for i in range(int(audio * 46.875)):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 48000, i * 1024
            container.mux(sound.encode(frame))
        for stream, shade, count in streams:
            image = np.full((stream.height, stream.width, 3), shade, np.uint8)
            for _ in range(count):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(image)))
            container.mux(stream.encode())
        if sound:
            container.mux(sound.encode())
    return out.getvalue()


@pytest.mark.parametrize("form", ["mp4", "mov", "matroska"])
def test_video_track_is_the_default_one(form):
    for shades, shown in (({30: 1, 220: 0}, 30), ({30: 0, 220: 1}, 220), ({30: 0, 220: 0}, 30)):
        data = tracks(form, shades)
        info = probe_video(data)
        assert (info.frame_count, info.fps, info.height, info.width) == (12, 10.0, 32, 64)
        assert abs(video_frames(data, info, [0, 11]).float().mean() - shown) < 3


@pytest.mark.parametrize("form", ["mp4", "mov", "matroska"])
def test_audio_cover_is_not_a_video(form):
    data = tracks(form, {220: 1}, audio=1.2, cover=True)
    info = probe_video(data)
    assert (info.frame_count, info.fps, info.height) == (12, 10.0, 32)
    assert abs(video_frames(data, info, [3]).float().mean() - 220) < 3
    only_sound = tracks(form, {}, audio=1.2, cover=True)
    with pytest.raises(PixelError, match="no video track" + " but a cover" * (form != "mov")):
        probe_video(only_sound)
    with pytest.raises(UnusableError, match=r"a\.mp4: the file has no video track"):
        inspect_medium("video", "a.mp4", tracks(form, {}, audio=1.2), 1 << 20)


def test_video_that_changes_its_size_is_refused():
    """As of a call whose resolution drops: two MPEG-TS files, one after the other, are one."""
    for first, second in (((32, 64), (64, 128)), ((64, 64), (32, 64)), ((32, 64), (64, 32))):
        data = b"".join(clip("mpegts", height=size[0], width=size[1]) for size in (first, second))
        changed = rf"frame 12 has {second[1]} x {second[0]} pixels .width x height..*one size"
        with pytest.raises(PixelError, match=changed):
            probe_video(data)


FAST = {"movflags": "faststart"}  # the table of the frames comes first


def hole(data: bytes, share: float = 0.5, fill: bool = True) -> bytes:
    """A quarter of a file, from this share of it on, is zeros or missing."""
    start, quarter = int(len(data) * share), len(data) // 4
    return data[:start] + bytes(quarter * fill) + data[start + quarter :]


NOISE = np.random.default_rng(0).integers(0, 255, (60, 64, 64, 3), np.uint8)


def noisy(form: str, count: int = 60, **options: str) -> bytes:
    """Frames of noise, of about the same size in the file."""
    frames = (NOISE[i % 60] for i in range(count))
    return video_of(frames, form, "libx264", stream_options={"preset": "ultrafast", "qp": "30"}, **options)


WHOLE: dict[str, Callable[[], bytes]] = {
    "mp4": lambda: noisy("mp4", **FAST),
    "mov": lambda: noisy("mov", **FAST),
    "matroska": lambda: noisy("matroska"),
    "webm vp9": lambda: written("webm", "libvpx-vp9", 60),
    "webm vp8": lambda: written("webm", "libvpx", 60),
    "mpegts": lambda: noisy("mpegts"),
    "avi": lambda: written("avi", "mpeg4", 60),
    "flv": lambda: noisy("flv"),
    "gif": lambda: written("gif", "gif", 60),
    "matroska with sound": lambda: tracks("matroska", {30: 1}, audio=6, seconds=6),
    "gif and more": lambda: whole("gif") + b"\0 other bytes",
    "mp4 of a longer sound": lambda: tracks("mp4", {30: 1}, audio=9, seconds=6),
    "matroska of a longer sound": lambda: tracks("matroska", {30: 1}, audio=9, seconds=6),
    "live webm": lambda: noisy("matroska", live="1"),
    "fragmented mp4": lambda: noisy("mp4", movflags="frag_keyframe+empty_moov"),
}


@cache
def whole(name: str) -> bytes:
    return WHOLE[name]()


@pytest.mark.parametrize("name", WHOLE)
def test_complete_videos_are_taken(name):
    info = probe_video(whole(name))
    assert info.frame_count == 60 and info.fps == pytest.approx(10, rel=0.02) and not info.assumed_fps


CUT = [(name, share) for name in ("mp4", "mov", "matroska", "webm vp8", "flv") for share in (0.3, 0.5, 0.9)]
CUT += [("mpegts", 0.5), ("mpegts", 0.9), ("gif", 0.5), ("gif", 0.9), ("avi", 0.5), ("webm vp9", 0.5)]
CUT += [("matroska with sound", 0.5)]


@pytest.mark.parametrize(("name", "share"), CUT, ids=[f"{name} at {share:.0%}" for name, share in CUT])
def test_truncated_video_is_refused(name, share):
    cut = whole(name)[: int(len(whole(name)) * share)]
    with pytest.raises(PixelError, match="cut short|not a readable video|does not decode"):
        probe_video(cut)
    with pytest.raises(UnusableError, match=r"x\.mp4: ") as caught:
        inspect_medium("video", "x.mp4", cut, 1 << 20)
    assert caught.value.reason == "video does not decode"


@pytest.mark.parametrize(("count", "tolerated"), [(60, 3), (300, 6)])
def test_few_missing_frames_are_tolerated(count, tolerated):
    """Three frames, or 2 % of a longer video: where one more is missing in a Matroska file, it is refused."""
    data = noisy("matroska", count)
    taken = set()
    for length in range(len(data) * (count - 3 * tolerated) // count, len(data), len(data) // count // 2):
        try:
            taken.add(probe_video(data[:length]).frame_count)
        except PixelError as error:
            assert "frames are missing" in str(error)
    assert {*range(count - tolerated, count)} <= taken <= {*range(count - tolerated, count + 1)}


@pytest.mark.parametrize("name", ["mp4", "mov", "matroska", "webm vp8", "webm vp9", "mpegts", "avi", "flv"])
def test_video_with_a_hole_is_refused(name):
    """FFmpeg reads on after a hole in Matroska, WebM and MPEG-TS, and reports some of them only."""
    for share in (0.4, 0.5, 0.6):
        for fill in (True, False):
            with pytest.raises(PixelError, match="damaged or cut short|not a readable video|is cut short"):
                probe_video(hole(whole(name), share, fill))


@pytest.mark.parametrize("form", ["mp4", "matroska"])
def test_pauses_of_a_variable_rate_are_no_holes(form):
    """Of a screen that stands still once or twice, and of images that are shown for some seconds each."""
    twice = [*range(20), *range(40, 60), *range(90, 99)]
    for times in ([*range(40), *range(60, 100)], twice, [0, 10, 20, 30, 90]):
        data = written(form, "libx264", len(times), times=times)
        assert probe_video(data).frame_count == len(times)


def test_gif_may_show_a_frame_for_longer():
    first, *others = (Image.new("L", (32, 32), 10 * number) for number in range(20))
    durations = [1000, *[100] * 19]
    first.save(gif := io.BytesIO(), "GIF", save_all=True, append_images=others, duration=durations)
    assert probe_video(gif.getvalue()).frame_count == 20


def test_assumed_frame_rate_is_counted(tmp_path, capsys):
    """A raw stream has no times. Its first unit says 10 a second; without that, FFmpeg assumes 25.

    The eighth byte of that unit begins with 0 1: no cropping, and a description of the rate follows. 0 0 1
    and zeros end it without one.
    """
    raw = written("h264", "libx264", 60)
    assert probe_video(raw) == VideoInfo(60, 10.0, SIDE, SIDE)
    start = raw.index(b"\x00\x00\x00\x01\x67") + 4
    unit = raw[start : raw.index(b"\x00\x00\x00\x01", start)]
    assert unit[7] >> 6 == 0b01
    bare = raw.replace(unit, unit[:7] + b"\x20")
    assert probe_video(bare) == VideoInfo(60, 25.0, SIDE, SIDE, assumed_fps=True)
    assert inspect_medium("video", "x.h264", bare, 1 << 20).assumed_fps

    # The command counts these videos, and the images of which it takes the first of several.
    first, second = Image.new("RGB", (56, 56), "red"), Image.new("RGB", (56, 56), "blue")
    animated = saved(first, "GIF", save_all=True, append_images=[second])
    media = {"bare.h264": bare, "rate.h264": raw, "two.gif": animated, "three.gif": animated}
    media["one.gif"] = saved(first, "GIF")
    for name, data in media.items():
        write(tmp_path / "media" / name, data)
    records = []
    for name in media:
        kind = "video" if name.endswith("h264") else "image"
        records.append({"messages": [user(f"<{kind}>What?"), assistant("That.")], f"{kind}s": [name]})
    (tmp_path / "in.json").write_text(json.dumps(records))
    words = ["--input", tmp_path / "in.json", "--media-root", tmp_path / "media", "--out", tmp_path / "out"]
    assert main(["data", "convert", *map(str, words)]) == 0
    said = capsys.readouterr().out
    assert "5 of 5 records" in said and "\n  1 videos without a frame rate: 2 a second are assumed" in said
    assert "\n  2 images are animated or have several pages: only the first is used" in said
