"""Grids of patches of images and videos, from their stored sizes: nothing is decoded.

The code follows ``Qwen2VLImageProcessor`` (torchvision backend) and ``Qwen2VLVideoProcessor`` of transformers
5.17.

Frames of a video are sampled as in ``Qwen2VLVideoProcessor.sample_frames`` with ``fps = video_fps`` and
``max_frames = video_max_frames``. Their number is ``n = seconds * fps``, at least the processor's
``min_frames`` (4), at most ``max_frames`` and the video's own number, rounded down to a multiple of
``temporal_patch_size``. Sampled frame ``i`` is frame ``int(i * total / n)`` of the video. A video with fewer
frames than ``temporal_patch_size`` (where HF fails) keeps all of them, and its last frame is repeated. A
frame group covers ``temporal_patch_size / (n / total * fps_of_the_file)`` seconds, as in
``Qwen2_5_VLProcessor``.

A list of images (``VideoInfo.sampling``) is taken whole, as in ``fetch_video`` of qwen-vl-utils 0.0.14,
if it has at most ``max_frames``. Image ``i`` is at ``i / fps`` in all families. If the last frame group is
not full, the last image is repeated, at the times that would have followed.

If the folder has Qwen3-VL's processor, ``Qwen3VLVideoProcessor`` is followed instead
(``PixelSettings.video_spread``): ``n`` is not rounded to a multiple of ``temporal_patch_size`` (the last
frame is repeated), the frames are spread evenly from the first to the last of the video, and the limits on
the area apply to all frames together. The time of a frame group is the mean of the times of its first and
last frame, as in ``Qwen3VLProcessor``.

A medium may have limits of its own (``VideoInfo.limits``, the keys of a content part). They are followed as
in ``fetch_image``, ``fetch_video`` and ``smart_nframes`` of qwen-vl-utils 0.0.14, with the run's settings in
place of its constants. A medium that would exceed the run's largest area or number of frames is refused. Of a
clip, times count from its first frame.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import batched
from typing import Any

import numpy as np
import torch

from megatron_vl.data.sample.frame_archive import PixelError, Sampling
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.spec.positions import GridTHW

MAX_ASPECT_RATIO = 200
CLIP_LIMITS = ("video_start", "video_end")
FRAME_LIMITS = ("fps", "nframes", "min_frames", "max_frames", *CLIP_LIMITS)
"""Limits of a medium that choose frames of a video file. Starts and ends are in seconds."""
AREA_LIMITS = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Limits of a medium that choose its size."""
TIMES_LIMIT = "timestamps"
"""Seconds of each image of a video that is a list of images."""
UTILS_MIN_TOKENS, UTILS_MAX_TOKENS = 4, 16384
"""Limits of a size that a content part gives, as in qwen-vl-utils."""


@dataclass(frozen=True)
class VideoInfo:
    """The facts of a video that determine its number of tokens."""

    frame_count: int
    fps: float
    height: int
    width: int
    sampling: Sampling = "as a file"
    assumed_fps: bool = False
    """Whether neither the file nor the record says the rate."""
    limits: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The video's own limits: values of :data:`FRAME_LIMITS`, :data:`AREA_LIMITS`, :data:`TIMES_LIMIT`."""

    def takes_all_frames(self, pixel_settings: PixelSettings) -> bool:
        """Whether all frames are taken because somebody has chosen them."""
        return self.sampling == "whole" and self.frame_count <= pixel_settings.video_max_frames


def resized_image_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width in pixels after resizing, as in HF's ``smart_resize``.

    Both are multiples of ``factor``, and the area is within the limits.

    Raises:
        PixelError: the image is empty or more than 200 times as long as wide.
    """
    _check_shape(height, width)
    return _fit_area(height, width, factor, (min_pixels, max_pixels))


def _limited_size(
    height: int, width: int, factor: int, limits: Mapping[str, Any], area_limits: tuple[float, float]
) -> tuple[int, int]:
    """Height and width in pixels of a medium with limits of its own, after resizing."""
    run_min, run_max = area_limits
    if "resized_height" in limits:
        height, width = limits["resized_height"], limits["resized_width"]
        smallest, largest = UTILS_MIN_TOKENS * factor**2, UTILS_MAX_TOKENS * factor**2
    else:
        largest = min(limits.get("max_pixels", run_max), run_max)
        smallest = limits.get("min_pixels", min(run_min, largest))
    _check_shape(height, width)
    new_height, new_width = _fit_area(height, width, factor, (smallest, largest), shortest_side=factor)
    if smallest > run_max or "resized_height" in limits and new_height * new_width > run_max:
        wanted = f"min_pixels {smallest}" if smallest > run_max else pixels_text(new_height, new_width)
        raise PixelError(
            f"{wanted} of a medium's own limits is above the largest area of the run, {run_max:.0f} pixels;"
            " raise data.max_pixels (of a video data.video_max_pixels)"
        )
    return new_height, new_width


def pixels_text(height: int, width: int) -> str:
    """A size in a message."""
    return f"{width} x {height} pixels (width x height)"


def _check_shape(height: int, width: int) -> None:
    if min(height, width) < 1:
        raise PixelError(f"an image of {pixels_text(height, width)} is empty")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise PixelError(
            f"an image of {pixels_text(height, width)} is more than {MAX_ASPECT_RATIO} times as long as wide"
        )


def _fit_area(
    height: int,
    width: int,
    factor: int,
    area_limits: tuple[float, float],
    frame_count: int = 1,
    counted_frames: int = 1,
    shortest_side: int = 0,
) -> tuple[int, int]:
    """Multiples of ``factor`` near to ``height`` and ``width``, so that the area is within the limits.

    Args:
        area_limits: smallest and largest number of pixels of all frames together.
        frame_count, counted_frames: number of frames, and the number that is compared with the limits.
        shortest_side: the least that a side is rounded to before the area is compared.
    """
    min_pixels, max_pixels = area_limits
    new_height, new_width = (max(shortest_side, round(side / factor) * factor) for side in (height, width))
    if counted_frames * new_height * new_width > max_pixels:
        divisor = math.sqrt(frame_count * height * width / max_pixels)
        new_height = max(factor, math.floor(height / divisor / factor) * factor)
        new_width = max(factor, math.floor(width / divisor / factor) * factor)
    elif counted_frames * new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (frame_count * height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


def _resized_video_size(frame_count: int, video_info: VideoInfo, settings: PixelSettings) -> tuple[int, int]:
    """Height and width in pixels of a video's frames after resizing, if so many are sampled."""
    factor = settings.resize_factor
    height, width, limits = video_info.height, video_info.width, video_info.limits
    area_limits = (settings.video_min_pixels, settings.video_max_pixels)
    if not limits.keys().isdisjoint(AREA_LIMITS):
        run_min, run_max = (area / (frame_count if settings.video_spread else 1) for area in area_limits)
        return _limited_size(height, width, factor, limits, (run_min, run_max))
    if not settings.video_spread:
        return resized_image_size(height, width, factor, *area_limits)
    if 1 <= min(height, width) < factor:
        enlargement = max(factor / height, factor / width)
        height, width = int(height * enlargement), int(width * enlargement)
    _check_shape(height, width)
    counted_frames = round(frame_count / settings.temporal_patch_size) * settings.temporal_patch_size
    return _fit_area(height, width, factor, area_limits, frame_count, counted_frames)


def image_grid(
    height: int, width: int, settings: PixelSettings, limits: Mapping[str, Any] | None = None
) -> GridTHW:
    """The grid of an image of this size in pixels, with limits of its own (:data:`AREA_LIMITS`).

    Its number of placeholders is ``grid.num_tokens(settings.merge_size)``.
    """
    area_limits = (settings.min_pixels, settings.max_pixels)
    if limits:
        new_height, new_width = _limited_size(height, width, settings.resize_factor, limits, area_limits)
    else:
        new_height, new_width = resized_image_size(height, width, settings.resize_factor, *area_limits)
    return GridTHW(1, new_height // settings.patch_size, new_width // settings.patch_size)


def video_grid(video_info: VideoInfo, settings: PixelSettings) -> GridTHW:
    """The grid of a video, with frames sampled as this module's docstring describes."""
    frames = frame_indices(video_info, settings)
    group_size = settings.temporal_patch_size
    group_count = -(-len(frames) // group_size)

    # qwen-vl-utils repeats the last image of a list before it resizes. HF repeats that of a file afterwards.
    if video_info.takes_all_frames(settings):
        counted_frames = group_count * group_size
        timed_frames = [*range(counted_frames)]
    else:
        counted_frames = max(len(frames), group_size)
        timed_frames = frames + frames[-1:] * (group_count * group_size - len(frames))
    height, width = _resized_video_size(counted_frames, video_info, settings)

    # HF passes this number on as a float32 tensor: round it in the same way.
    first_frame, last_frame = clip_frames(video_info)
    sampled_fps = len(frames) / (last_frame - first_frame + 1) * video_info.fps
    seconds_per_group = torch.tensor(group_size / sampled_fps, dtype=torch.float32).item()
    if known_times := video_info.limits.get(TIMES_LIMIT):
        times = [known_times[min(frame, len(known_times) - 1)] for frame in timed_frames]
    else:
        times = [(frame - first_frame) / video_info.fps for frame in timed_frames]
    timestamps = tuple((group[0] + group[-1]) / 2 for group in batched(times, group_size))
    rows, columns = height // settings.patch_size, width // settings.patch_size
    return GridTHW(group_count, rows, columns, "video", seconds_per_group, timestamps)


def frame_indices(video_info: VideoInfo, settings: PixelSettings) -> list[int]:
    """The frames of a video that are sampled: ascending numbers, counted from 0.

    Raises:
        PixelError: the video is empty.
    """
    total, group_size = video_info.frame_count, settings.temporal_patch_size
    if total < 1 or video_info.fps <= 0:
        raise PixelError(f"a video of {total} frames at {video_info.fps} frames a second is empty")
    if not video_info.limits.keys().isdisjoint(FRAME_LIMITS):
        return _limited_frames(video_info, settings)
    if total < group_size or video_info.takes_all_frames(settings):
        return list(range(total))

    # The rules of Qwen3-VL and of the earlier families, as the module's docstring describes them.
    frames_at_fps = total / video_info.fps * settings.video_fps
    max_frames = min(settings.video_max_frames, total)
    if settings.video_spread:
        sampled_count = min(max(int(frames_at_fps), settings.video_min_frames), max_frames)
        return np.linspace(0, total - 1, sampled_count).round().astype(int).tolist()

    max_frames = max(max_frames // group_size * group_size, group_size)
    wanted_count = min(max(frames_at_fps, settings.video_min_frames), max_frames)
    sampled_count = max(math.floor(wanted_count / group_size) * group_size, group_size)
    return torch.arange(0, total, total / sampled_count).int().tolist()


def clip_frames(video_info: VideoInfo) -> tuple[int, int]:
    """The first and the last frame of a video's clip, as ``calculate_video_frame_range`` has them.

    Raises:
        PixelError: the clip has less than two frames.
    """
    limits, fps, last_frame = video_info.limits, video_info.fps, video_info.frame_count - 1
    if limits.keys().isdisjoint(CLIP_LIMITS):
        return 0, last_frame
    seconds = video_info.frame_count / fps
    start, end = limits.get("video_start", 0.0), limits.get("video_end", seconds)
    first_frame = math.ceil(min(start, seconds) * fps)
    last_frame = min(math.floor(min(end, seconds) * fps), last_frame)
    if first_frame >= last_frame:
        raise PixelError(
            f"the clip from {start:g} to {end:g} s holds less than two frames of a video of {seconds:g} s"
        )
    return first_frame, last_frame


def _limited_frames(video_info: VideoInfo, settings: PixelSettings) -> list[int]:
    """The frames of a video with :data:`FRAME_LIMITS` of its own, as ``smart_nframes`` counts them."""
    limits, factor = video_info.limits, settings.temporal_patch_size
    first_frame, last_frame = clip_frames(video_info)
    total = last_frame - first_frame + 1
    if "nframes" in limits:
        if (count := round(limits["nframes"] / factor) * factor) > settings.video_max_frames:
            raise PixelError(
                f"{count} frames of a medium's own limits are above data.video_max_frames"
                f" {settings.video_max_frames}; raise that"
            )
    else:
        max_frames = min(limits.get("max_frames", settings.video_max_frames), settings.video_max_frames)
        min_frames = math.ceil(limits.get("min_frames", settings.video_min_frames) / factor) * factor
        wanted_frames = total / video_info.fps * limits.get("fps", settings.video_fps)
        wanted_frames = min(max(wanted_frames, min_frames), max_frames // factor * factor, total)
        count = math.floor(wanted_frames / factor) * factor
    if not factor <= count <= total:
        raise PixelError(f"{count} frames are asked for of a video or clip of {total}")
    return torch.linspace(first_frame, last_frame, count).round().long().tolist()
