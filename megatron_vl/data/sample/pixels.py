"""Turns images and videos into grids (without decoding) and uint8 pixel planes (decoded last).

Sizes, resampling and normalisation are those of the checkpoint's own image processor. Pixels stay uint8 until
they are on the device. This takes an eighth of the memory and traffic of HF's ``pixel_values`` and gives the
same numbers after normalisation.

The code follows ``Qwen2VLImageProcessor`` (torchvision backend) and ``Qwen2VLVideoProcessor`` of transformers
5.17. :func:`decode_image` turns every image file into RGB: EXIF orientation is applied, transparency is laid
on white, and 16 bits are scaled to 8.

Frames of a video are sampled as in ``Qwen2VLVideoProcessor.sample_frames`` with ``fps = video_fps`` and
``max_frames = video_max_frames``. Their number is ``n = seconds * fps``, at least the processor's
``min_frames`` (4), at most ``max_frames`` and the video's own number, rounded down to a multiple of
``temporal_patch_size``. Sampled frame ``i`` is frame ``int(i * total / n)`` of the video. A video with fewer
frames than ``temporal_patch_size`` (where HF fails) keeps all of them, and its last frame is repeated. A
frame group covers ``temporal_patch_size / (n / total * fps_of_the_file)`` seconds, as in
``Qwen2_5_VLProcessor``.

A list of pictures (``VideoInfo.sampling``) is taken whole, as in ``fetch_video`` of qwen-vl-utils 0.0.14,
if it has at most ``max_frames``. Picture ``i`` is at ``i / fps`` in all families. If the last frame group is
not full, the last picture is repeated, at the times that would have followed.

If the folder has Qwen3-VL's processor, ``Qwen3VLVideoProcessor`` is followed instead
(``PixelSettings.video_spread``): ``n`` is not rounded to a multiple of ``temporal_patch_size`` (the last
frame is repeated), the frames are spread evenly from the first to the last of the video, and the limits on
the area apply to all frames together. The time of a frame group is the mean of the times of its first and
last frame, as in ``Qwen3VLProcessor``.
"""

from __future__ import annotations

import errno
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.deadline import NO_DEADLINE, SampleDeadline, SampleTimeoutError
from megatron_vl.data.sample.frame_archive import (
    FrameArchive,
    PixelError,
    Sampling,
    is_frame_archive,
    is_frame_rate,
)
from megatron_vl.data.sample.video_decoding import decode_frames_at, describe_video, upright_frame
from megatron_vl.spec.positions import GridTHW
from megatron_vl.system.errors import is_machine_fault

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT_RATIO = 200
DEFAULT_MAX_PIXELS = 128_000_000
"""Default limit on the pixels of a picture or video frame. It is checked in the header before decoding,
because a file of some kilobytes can claim to hold gigabytes."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "AVIF", "TGA")
"""The formats of Pillow that are allowed. JPEG's reader also reads MPO. EPS, for example, is not allowed: it
is a program that Pillow passes to Ghostscript."""


class PictureTooLargeError(PixelError):
    """A picture or video frame with more pixels than are allowed."""


JPEG_END_MARKER = b"\xff\xd9"


@dataclass(frozen=True)
class PixelNorm:
    """Normalisation of the checkpoint: ``(pixel / 255 - mean) / std`` by channel, for uint8 pixels.

    A ``rescale_factor`` other than 1/255 is folded into both numbers.
    """

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def normalize_planes(self, pixel_planes: Tensor) -> Tensor:
        """float32 of the same shape; ``pixel_planes`` is uint8 [..., channels * patch * patch]."""
        channel_count = len(self.mean)
        scaled_mean, scaled_std = torch.tensor(self.mean) * 255.0, torch.tensor(self.std) * 255.0
        float_pixels = pixel_planes.unflatten(-1, (channel_count, -1)).float()
        return ((float_pixels - scaled_mean[:, None]) / scaled_std[:, None]).flatten(-2)


@dataclass(frozen=True)
class PixelSettings:
    """How pictures of any size become grids of patches. Areas are in pixels."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    video_min_pixels: int = 128 * 28 * 28
    video_max_pixels: int = 28 * 28 * 768
    video_fps: float = 2.0
    video_min_frames: int = 4
    video_max_frames: int = 32
    video_spread: bool = False
    """Whether frames and area of a video are chosen as in ``Qwen3VLVideoProcessor``. The limits of the area
    then apply to all frames together."""
    resample: int = 3
    """PIL's number of the resampling filter; 3 is bicubic."""
    norm: PixelNorm = PixelNorm()

    @property
    def resize_factor(self) -> int:
        """Sides of a resized picture are multiples of this many pixels."""
        return self.patch_size * self.merge_size


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

    def takes_all_frames(self, pixel_settings: PixelSettings) -> bool:
        """Whether all frames are taken because somebody has chosen them."""
        return self.sampling == "whole" and self.frame_count <= pixel_settings.video_max_frames


# --- Processor settings


def read_pixel_settings(hf_dir: str | Path, data_config: DataConfig | None = None) -> PixelSettings:
    """The settings of the image and video processor in an HF folder, with the overrides of ``data_config``.

    Raises:
        FileNotFoundError: the folder has no processor config.
        PixelError: a setting is not supported, or limits contradict each other.
    """
    image_config, video_config = _processor_configs(Path(hf_dir))
    data_config = data_config or DataConfig()
    min_image_pixels, max_image_pixels = _pixel_limits(image_config, (56 * 56, 28 * 28 * 1280), hf_dir)

    # If a folder has no video processor config, HF reads the image processor's file for videos too.
    uses_spread = _uses_spread_frames(video_config, image_config)
    default_limits = (128 * 32 * 32, 32 * 32 * 768) if uses_spread else (128 * 28 * 28, 28 * 28 * 768)
    min_video_pixels, max_video_pixels = _pixel_limits(video_config, default_limits, hf_dir)
    if not uses_spread:  # limits for one picture do not apply to all frames together
        min_video_pixels = data_config.min_pixels or min_video_pixels
        max_video_pixels = data_config.max_pixels or max_video_pixels

    pixel_settings = PixelSettings(
        patch_size=image_config.get("patch_size", 14),
        merge_size=image_config.get("merge_size", 2),
        temporal_patch_size=image_config.get("temporal_patch_size", 2),
        min_pixels=data_config.min_pixels or min_image_pixels,
        max_pixels=data_config.max_pixels or max_image_pixels,
        video_min_pixels=min_video_pixels,
        video_max_pixels=data_config.video_max_pixels or max_video_pixels,
        video_fps=data_config.video_fps,
        video_min_frames=video_config.get("min_frames", 4),
        video_max_frames=data_config.video_max_frames,
        video_spread=uses_spread,
        resample=image_config.get("resample", 3),
        norm=_read_norm(image_config, hf_dir),
    )

    _check_settings(pixel_settings, image_config, video_config, hf_dir)
    return pixel_settings


def read_pixel_norm(hf_dir: str | Path) -> PixelNorm:
    """Mean and standard deviation of the checkpoint's own image processor.

    It raises the errors of :func:`read_pixel_settings`.
    """
    return read_pixel_settings(hf_dir).norm


def media_limits_note(hf_dir: str | Path, trained_limits: Mapping[str, float]) -> str:
    """A note if a folder's processor config has other limits than training had; empty if it has none.

    Args:
        trained_limits: the limits of training by field of ``data``; fields that are not known are left out.

    Raises:
        The errors of :func:`read_pixel_settings`.
    """
    pixel_settings = read_pixel_settings(hf_dir)
    limits = {
        name: getattr(pixel_settings, name) for name in ("min_pixels", "max_pixels", "video_max_pixels")
    }
    # Released folders do not name the other two.
    video_config = _processor_configs(Path(hf_dir))[1]
    limits |= {f"video_{name}": video_config[name] for name in ("fps", "max_frames") if name in video_config}
    different = [
        f"{name} {trained_limits[name]:g} (processor config: {limit:g})"
        for name, limit in limits.items()
        if limit and trained_limits.get(name, limit) != limit
    ]
    if not different:
        return ""
    return (
        f"training saw media with {', '.join(different)}; the processor config in {hf_dir} is exported"
        " unchanged. Serve with the limits of training, which are in megatron_vl.json"
    )


def _processor_configs(hf_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Image and video processor configs, looked up in the same order as in transformers 5.17."""
    configs = []
    for name in ("processor_config", "preprocessor_config", "video_preprocessor_config"):
        config_file = hf_path / f"{name}.json"
        configs.append(json.loads(config_file.read_text()) if config_file.is_file() else {})
    processor_config, image_file_config, video_file_config = configs

    image_config = processor_config.get("image_processor") or image_file_config
    if not image_config:
        raise FileNotFoundError(
            f"{hf_path} has no preprocessor_config.json or processor_config.json with an image_processor"
        )
    video_config = processor_config.get("video_processor") or video_file_config
    return image_config, video_config or image_file_config or image_config


def _uses_spread_frames(video_config: dict[str, Any], image_config: dict[str, Any]) -> bool:
    """Whether videos follow Qwen3-VL's rule.

    The type of the video processor decides. Without one, the class of the folder's processor decides.
    """
    processor_class = (
        video_config.get("video_processor_type")
        or video_config.get("processor_class")
        or image_config.get("processor_class")
        or ""
    )
    return processor_class.startswith("Qwen3VL")


def _pixel_limits(
    processor_config: dict[str, Any], default_limits: tuple[int, int], hf_dir: str | Path
) -> tuple[int, int]:
    """Smallest and largest area in pixels, from ``min_pixels`` / ``max_pixels`` or ``size``."""
    size = processor_config.get("size")
    size = size if isinstance(size, dict) else {}
    min_pixels = (
        processor_config.get("min_pixels")
        or size.get("shortest_edge")
        or size.get("min_pixels")
        or default_limits[0]
    )
    max_pixels = (
        processor_config.get("max_pixels")
        or size.get("longest_edge")
        or size.get("max_pixels")
        or default_limits[1]
    )
    if min_pixels > max_pixels:
        raise PixelError(
            f"{hf_dir}: the processor's smallest area {min_pixels} is above its largest {max_pixels}"
        )
    return int(min_pixels), int(max_pixels)


def _read_norm(processor_config: dict[str, Any], hf_dir: str | Path) -> PixelNorm:
    channel_means = processor_config.get("image_mean", CLIP_MEAN)
    channel_stds = processor_config.get("image_std", CLIP_STD)
    if processor_config.get("do_normalize", True) is False:
        channel_means, channel_stds = (0.0,) * 3, (1.0,) * 3
    rescale_factor = 1.0
    if processor_config.get("do_rescale", True):
        rescale_factor = processor_config.get("rescale_factor", 1 / 255)

    if len(channel_means) != 3 or len(channel_stds) != 3 or not all(channel_stds) or not rescale_factor:
        raise PixelError(
            f"{hf_dir}: image_mean {channel_means}, image_std {channel_stds} and rescale_factor"
            f" {rescale_factor} must be 3, 3 and 1 non-zero numbers"
        )
    norm_scale = 1.0 if rescale_factor == 1 / 255 else 1.0 / rescale_factor / 255.0
    return PixelNorm(
        tuple(float(m) * norm_scale for m in channel_means),
        tuple(float(s) * norm_scale for s in channel_stds),
    )


def _check_settings(
    pixel_settings: PixelSettings,
    image_config: dict[str, Any],
    video_config: dict[str, Any],
    hf_dir: str | Path,
) -> None:
    if image_config.get("do_resize", True) is False or image_config.get("do_convert_rgb", True) is False:
        raise PixelError(
            f"{hf_dir}: an image processor with do_resize or do_convert_rgb off is not supported"
        )
    if pixel_settings.resample not in (0, 2, 3):
        raise PixelError(
            f"{hf_dir}: resample {pixel_settings.resample} is not supported; valid: 0 (nearest), 2"
            " (bilinear), 3 (bicubic)"
        )
    if video_config is not image_config and _read_norm(video_config, hf_dir) != pixel_settings.norm:
        raise PixelError(f"{hf_dir}: image and video processor normalise differently")
    if video_config.get("cap_pixels_per_frame"):
        raise PixelError(
            f"{hf_dir}: a video processor with cap_pixels_per_frame is not supported; set it to false"
        )

    for min_area, max_area, media_kind in (
        (pixel_settings.min_pixels, pixel_settings.max_pixels, "image"),
        (pixel_settings.video_min_pixels, pixel_settings.video_max_pixels, "video"),
    ):
        if min_area > max_area:
            raise PixelError(
                f"data: the smallest {media_kind} area {min_area} is above the largest {max_area}; set"
                " min_pixels and max_pixels to fit"
            )

    if pixel_settings.video_fps <= 0 or pixel_settings.video_max_frames < 1:
        raise PixelError(
            f"data: video_fps {pixel_settings.video_fps} and video_max_frames"
            f" {pixel_settings.video_max_frames} must be positive"
        )


# --- Sizes and counts


def resized_image_size(
    image_height: int, image_width: int, size_factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Height and width in pixels after resizing, as in HF's ``smart_resize``.

    Both are multiples of ``size_factor``, and the area is within the limits.

    Raises:
        PixelError: the picture is empty or more than 200 times as long as wide.
    """
    if min(image_height, image_width) < 1:
        raise PixelError(f"a picture of {image_height} x {image_width} pixels is empty")
    if max(image_height, image_width) / min(image_height, image_width) > MAX_ASPECT_RATIO:
        raise PixelError(
            f"a picture of {image_height} x {image_width} pixels is more than {MAX_ASPECT_RATIO} times as"
            " long as wide"
        )

    return _fit_area(image_height, image_width, size_factor, (min_pixels, max_pixels))


def _fit_area(
    height: int,
    width: int,
    size_factor: int,
    area_limits: tuple[int, int],
    frame_count: int = 1,
    counted_frames: int = 1,
) -> tuple[int, int]:
    """Multiples of ``size_factor`` near to ``height`` and ``width``, so that the area is within the limits.

    Args:
        area_limits: smallest and largest number of pixels of all frames together.
        frame_count, counted_frames: number of frames, and the number that is compared with the limits.
    """
    min_pixels, max_pixels = area_limits
    new_height = round(height / size_factor) * size_factor
    new_width = round(width / size_factor) * size_factor
    if counted_frames * new_height * new_width > max_pixels:
        scale_divisor = math.sqrt(frame_count * height * width / max_pixels)
        new_height = max(size_factor, math.floor(height / scale_divisor / size_factor) * size_factor)
        new_width = max(size_factor, math.floor(width / scale_divisor / size_factor) * size_factor)
    elif counted_frames * new_height * new_width < min_pixels:
        scale_factor = math.sqrt(min_pixels / (frame_count * height * width))
        new_height = math.ceil(height * scale_factor / size_factor) * size_factor
        new_width = math.ceil(width * scale_factor / size_factor) * size_factor
    return new_height, new_width


def resized_video_size(
    frame_count: int, frame_height: int, frame_width: int, pixel_settings: PixelSettings
) -> tuple[int, int]:
    """Height and width of a video's frames in pixels after resizing, if ``frame_count`` of them are sampled.

    Raises:
        PixelError: as :func:`resized_image_size`.
    """
    size_factor = pixel_settings.resize_factor
    min_pixels = pixel_settings.video_min_pixels
    max_pixels = pixel_settings.video_max_pixels
    if not pixel_settings.video_spread:
        return resized_image_size(frame_height, frame_width, size_factor, min_pixels, max_pixels)
    if min(frame_height, frame_width) < 1:
        raise PixelError(f"a video of {frame_height} x {frame_width} pixels is empty")
    if min(frame_height, frame_width) < size_factor:
        enlargement = max(size_factor / frame_height, size_factor / frame_width)
        frame_height, frame_width = int(frame_height * enlargement), int(frame_width * enlargement)
    if max(frame_height, frame_width) / min(frame_height, frame_width) > MAX_ASPECT_RATIO:
        raise PixelError(
            f"a video of {frame_height} x {frame_width} pixels is more than {MAX_ASPECT_RATIO} times as long"
            " as wide"
        )

    temporal_patch_size = pixel_settings.temporal_patch_size
    counted_frames = round(frame_count / temporal_patch_size) * temporal_patch_size
    return _fit_area(
        frame_height, frame_width, size_factor, (min_pixels, max_pixels), frame_count, counted_frames
    )


def image_grid(image_height: int, image_width: int, pixel_settings: PixelSettings) -> GridTHW:
    """The grid of an image of this size.

    Its number of placeholders is ``grid.num_tokens(pixel_settings.merge_size)``.
    """
    new_height, new_width = resized_image_size(
        image_height,
        image_width,
        pixel_settings.resize_factor,
        pixel_settings.min_pixels,
        pixel_settings.max_pixels,
    )
    return GridTHW(1, new_height // pixel_settings.patch_size, new_width // pixel_settings.patch_size)


def video_grid(video_info: VideoInfo, pixel_settings: PixelSettings) -> GridTHW:
    """The grid of a video, with frames sampled as this module's docstring describes."""
    frame_numbers = frame_indices(video_info, pixel_settings)
    temporal_patch_size = pixel_settings.temporal_patch_size
    frame_count = len(frame_numbers)
    group_count = -(-frame_count // temporal_patch_size)
    missing_frames = group_count * temporal_patch_size - frame_count

    # qwen-vl-utils repeats the last picture of a list before it resizes. HF repeats that of a file
    # afterwards.
    if video_info.takes_all_frames(pixel_settings):
        counted_frames = group_count * temporal_patch_size
        timed_frames = [*frame_numbers, *range(frame_count, frame_count + missing_frames)]
    else:
        counted_frames = max(frame_count, temporal_patch_size)
        timed_frames = frame_numbers + frame_numbers[-1:] * missing_frames
    new_height, new_width = resized_video_size(
        counted_frames, video_info.height, video_info.width, pixel_settings
    )

    # HF passes this number on as a float32 tensor: round it in the same way.
    sampled_fps = frame_count / video_info.frame_count * video_info.fps
    seconds_per_group = torch.tensor(temporal_patch_size / sampled_fps, dtype=torch.float32).item()
    timestamps = []
    for first_frame in range(0, len(timed_frames), temporal_patch_size):
        first_time = timed_frames[first_frame] / video_info.fps
        last_time = timed_frames[first_frame + temporal_patch_size - 1] / video_info.fps
        timestamps.append((first_time + last_time) / 2)
    return GridTHW(
        group_count,
        new_height // pixel_settings.patch_size,
        new_width // pixel_settings.patch_size,
        "video",
        seconds_per_group,
        tuple(timestamps),
    )


def frame_indices(video_info: VideoInfo, pixel_settings: PixelSettings) -> list[int]:
    """The frames of a video that are sampled: ascending numbers, counted from 0.

    Raises:
        PixelError: the video is empty.
    """
    if video_info.frame_count < 1 or video_info.fps <= 0:
        raise PixelError(
            f"a video of {video_info.frame_count} frames at {video_info.fps} frames a second is empty"
        )

    temporal_patch_size = pixel_settings.temporal_patch_size
    if video_info.frame_count < temporal_patch_size or video_info.takes_all_frames(pixel_settings):
        return list(range(video_info.frame_count))

    # The rules of Qwen3-VL and of the earlier families, as the module's docstring describes them.
    frames_at_fps = video_info.frame_count / video_info.fps * pixel_settings.video_fps
    max_frames = min(pixel_settings.video_max_frames, video_info.frame_count)
    if pixel_settings.video_spread:
        sampled_count = min(max(int(frames_at_fps), pixel_settings.video_min_frames), max_frames)
        return np.linspace(0, video_info.frame_count - 1, sampled_count).round().astype(int).tolist()

    max_frames = max(max_frames // temporal_patch_size * temporal_patch_size, temporal_patch_size)
    frame_count = min(max(frames_at_fps, pixel_settings.video_min_frames), max_frames)
    whole_groups = math.floor(frame_count / temporal_patch_size)
    sampled_count = max(whole_groups * temporal_patch_size, temporal_patch_size)
    return torch.arange(0, video_info.frame_count, video_info.frame_count / sampled_count).int().tolist()


# --- Pixels


@contextmanager
def _pixel_errors(media_kind: str) -> Iterator[None]:
    """Raises PixelError for errors of Pillow, PyAV and others, whose readers of formats raise all kinds."""
    try:
        yield
    except (PixelError, SampleTimeoutError):
        raise
    except Exception as error:
        if type(error).__module__.startswith("av."):
            # FFmpeg's errors have numbers, but its bytes are in memory, and a damaged header may claim any
            # size. Only if this raises MemoryError as well, memory is too small.
            if getattr(error, "errno", None) == errno.ENOMEM:
                bytearray(1 << 30)
        elif is_machine_fault(error):
            raise
        raise PixelError(f"not a readable {media_kind} ({type(error).__name__}: {error})") from error


def decode_image(image_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> Tensor:
    """Decodes an image file into uint8 [3, height, width], in RGB and upright.

    Of a file with several images (an animation, pages) it is the first. Transparency is laid on white as in
    qwen-vl-utils and vLLM, rounded to the nearest (transformers 5.24 differs by 1 in some pixels). 16-bit
    values are ``v >> 8``.

    Raises:
        PictureTooLargeError: the header says more than ``max_pixels``.
        PixelError: the bytes are not an image of :data:`IMAGE_FORMATS`, the image is damaged, or its values
            have 32 bits, whose range no file says.
    """
    from torchvision.transforms.v2.functional import pil_to_tensor

    with _pixel_errors("image"), open_image(image_bytes, max_pixels) as opened_image:
        if opened_image.format in ("JPEG", "MPO"):
            jpeg_pixels = _decode_jpeg(image_bytes, opened_image)
            if jpeg_pixels is not None:
                return jpeg_pixels
        elif opened_image.format == "PNG":
            opened_image.verify()  # Pillow's decoder skips the checksums
            opened_image = open_image(image_bytes, max_pixels)
        return pil_to_tensor(_upright_rgb(opened_image))


def _upright_rgb(opened_image: Any) -> Any:
    """The upright RGB image of one that Pillow has just opened. It raises PixelError."""
    from PIL import Image, ImageOps

    raw_mode = opened_image.tile[0].args if opened_image.format == "PNG" else ""
    # Pillow scales the twelve bits of other formats to 16, and a PPM's values, which it calls 32-bit.
    shift = 4 if getattr(opened_image, "tag_v2", {}).get(258) == (12,) else 8
    if opened_image.mode == "I" and opened_image.format == "PPM":
        opened_image = opened_image.convert("I;16")
    if opened_image.mode in ("I", "F"):
        value_kind = "float" if opened_image.mode == "F" else "integer"
        raise PixelError(f"an image of 32-bit {value_kind} values; scale it to 8 or 16 bits")

    image = ImageOps.exif_transpose(opened_image)
    # The transparent colour has the file's depth; pixels of fewer or more bits come out of Pillow with 8.
    color = image.info.get("transparency")
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        alpha = 255 * (values != (-1 if color is None else color))
        image = Image.fromarray(np.stack([values >> shift, alpha], -1).astype(np.uint8), "LA")
    elif color is not None and raw_mode in ("L;2", "L;4"):
        image.info["transparency"] = color * {"L;2": 85, "L;4": 17}[raw_mode]
    elif color is not None and raw_mode == "RGB;16B":
        image.info["transparency"] = tuple(value >> 8 for value in color)

    if not image.has_transparency_data:
        return image.convert("RGB")
    rgba_image = image.convert("RGBA")
    if rgba_image.getchannel("A").getextrema() == (255, 255):  # as of screenshots
        return rgba_image.convert("RGB")
    rgb_image = Image.new("RGB", rgba_image.size, "white")
    rgb_image.paste(rgba_image, mask=rgba_image.getchannel("A"))
    return rgb_image


def open_image(image_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> Any:
    """Opens an image in Pillow without decoding it. It raises the errors of :func:`decode_image`."""
    from PIL import Image

    # Pillow warns at a limit of its own and raises at twice that. Only ``max_pixels`` should decide.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)
    with _pixel_errors("image"), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            opened_image = Image.open(io.BytesIO(image_bytes), formats=_image_formats())
        except Image.DecompressionBombError as error:
            raise PictureTooLargeError(
                f"more than the {max_pixels} pixels that are allowed: {error}"
            ) from error
    if opened_image.width * opened_image.height > max_pixels:
        raise PictureTooLargeError(
            f"{opened_image.height} x {opened_image.width} pixels, more than the {max_pixels} that are"
            " allowed"
        )
    return opened_image


@cache
def _image_formats() -> list[str]:
    """The formats of :data:`IMAGE_FORMATS` that Pillow was built with (12.0 raises a KeyError for others)."""
    from PIL import Image

    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


def image_size(image_bytes: bytes) -> tuple[int, int]:
    """Height and width that :func:`decode_image` will give, read from the header of an image file.

    Raises:
        PixelError: the image cannot be read.
    """
    with _pixel_errors("image"), open_image(image_bytes) as opened_image:
        width, height = opened_image.size
        # Orientations 5 to 8 turn the picture by 90 degrees. Pillow has already turned the size of a TIFF.
        orientation = opened_image.getexif().get(0x0112, 1)
        is_turned = orientation in (5, 6, 7, 8) and opened_image.format != "TIFF"
        return (width, height) if is_turned else (height, width)


def _strict_rgb(image_bytes: bytes, colorspace: str, is_progressive: bool) -> np.ndarray:
    """uint8 [height, width, 3]. Raises ValueError for libjpeg's warnings.

    A sequential JPEG may lack its end marker, as some cameras write it: all pixels stand before it.
    """
    import simplejpeg

    try:
        return simplejpeg.decode_jpeg(image_bytes, colorspace)
    except ValueError:
        if is_progressive:  # a later scan may be missing
            raise
        return simplejpeg.decode_jpeg(image_bytes + JPEG_END_MARKER, colorspace)


def _decode_jpeg(image_bytes: bytes, opened_image: Any) -> Tensor | None:
    """Decodes a JPEG with simplejpeg. Returns None if Pillow must decode it, for instance one of CMYK.

    simplejpeg gives the same pixels and is 1.4 times as fast as Pillow. Unlike Pillow it reports libjpeg's
    warnings, which say that data are missing and that what is shown in their place is made up.
    """
    import simplejpeg
    from PIL import Image, ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    colorspace = "CMYK" if opened_image.mode == "CMYK" else "RGB"
    try:
        stored_colorspace = simplejpeg.decode_jpeg_header(image_bytes)[2]
        rgb_array = _strict_rgb(image_bytes, colorspace, is_progressive="progressive" in opened_image.info)
    except ValueError as error:
        try:
            simplejpeg.decode_jpeg(image_bytes, colorspace, strict=False)
        except ValueError:
            return None  # a kind of JPEG that only Pillow reads
        raise PixelError(f"not a readable image ({error})") from error

    if stored_colorspace not in ("YCbCr", "Gray"):
        return None
    orientation = opened_image.getexif().get(0x0112, 1)
    if orientation == 1:
        return torch.from_numpy(rgb_array).permute(2, 0, 1)
    rgb_image = Image.fromarray(rgb_array)
    rgb_image.getexif()[0x0112] = orientation
    return pil_to_tensor(ImageOps.exif_transpose(rgb_image))


def image_planes(
    image_bytes: bytes,
    image_grid_thw: GridTHW,
    pixel_settings: PixelSettings,
    max_pixels: int = DEFAULT_MAX_PIXELS,
) -> Tensor:
    """The planes, uint8 [1, h * w, 3 * patch * patch], of an image file that is resized to its grid."""
    return _pixel_planes(decode_image(image_bytes, max_pixels)[None], image_grid_thw, pixel_settings)


def _pixel_planes(frame_pixels: Tensor, media_grid: GridTHW, pixel_settings: PixelSettings) -> Tensor:
    """uint8 [F, 3, H, W] -> [F, h * w, 3 * patch * patch], patches in merge-unit order."""
    # The same function as in HF's torchvision backend: antialiased, on uint8.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    resize_filters = {
        0: InterpolationMode.NEAREST,
        2: InterpolationMode.BILINEAR,
        3: InterpolationMode.BICUBIC,
    }
    patch_size = pixel_settings.patch_size
    merge_size = pixel_settings.merge_size
    frame_pixels = resize(
        frame_pixels,
        [media_grid.h * patch_size, media_grid.w * patch_size],
        interpolation=resize_filters[pixel_settings.resample],
        antialias=True,
    )

    # In memory, a pixel's colours lie side by side. NumPy copies a line of a patch as one item, then sorts
    # its colours. One permutation in torch, byte by byte, takes twice as long.
    channels_last = frame_pixels.permute(0, 2, 3, 1).contiguous().numpy()
    pixel_lines = channels_last.reshape(-1).view(np.dtype((np.void, 3 * patch_size)))
    pixel_lines = pixel_lines.reshape(
        -1, media_grid.h // merge_size, merge_size, patch_size, media_grid.w // merge_size, merge_size
    )
    # From (frame, unit row, row in unit, line, unit column, column in unit) to merge-unit order, lines last.
    patch_lines = np.ascontiguousarray(pixel_lines.transpose(0, 1, 4, 2, 5, 3))
    patch_bytes = patch_lines.reshape(-1).view(np.uint8)

    # Within a patch, from the pixels' colours to three colour planes, as in HF's ``pixel_values``.
    num_patches = media_grid.h * media_grid.w
    patch_pixels = patch_bytes.reshape(len(frame_pixels), num_patches, patch_size * patch_size, 3)
    pixel_planes = patch_pixels.transpose(0, 1, 3, 2).reshape(len(frame_pixels), num_patches, -1)
    return torch.from_numpy(pixel_planes)


def probe_video(video_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> VideoInfo:
    """Finds the true number of frames, rate and size of a video file, as :func:`describe_video` does.

    Raises:
        PictureTooLargeError: a frame has more than ``max_pixels``.
        PixelError: the bytes are not a video, a frame does not decode, or frames are missing.
    """
    if is_frame_archive(video_bytes):
        return _probe_frame_archive(video_bytes, max_pixels)
    with _pixel_errors("video"):
        track = describe_video(video_bytes, lambda: _open_video(video_bytes, max_pixels))
    if not is_frame_rate(track.fps):
        raise PixelError(f"a video of {track.frame_count} frames at {track.fps:g} frames a second is none")
    return VideoInfo(track.frame_count, track.fps, track.height, track.width, assumed_fps=track.assumed_fps)


def _probe_frame_archive(archive_bytes: bytes, max_pixels: int) -> VideoInfo:
    """Decodes all pictures of an archive of frames, which must have one size."""
    frame_archive = FrameArchive(archive_bytes)
    if not len(frame_archive):
        raise PixelError("a video of 0 frames is empty")
    frame_height, frame_width = _decode_archive_frame(frame_archive, 0, max_pixels).shape[1:]
    for frame_number in range(1, len(frame_archive)):
        height, width = _decode_archive_frame(frame_archive, frame_number, max_pixels).shape[1:]
        if (height, width) != (frame_height, frame_width):
            raise PixelError(
                f"{frame_archive.picture_name(frame_number)} has {height} x {width} pixels,"
                f" {frame_archive.picture_name(0)} {frame_height} x {frame_width}; the frames of a video must"
                " have one size"
            )
    return VideoInfo(
        len(frame_archive),
        frame_archive.archive_info.fps,
        frame_height,
        frame_width,
        frame_archive.archive_info.sampling,
        frame_archive.archive_info.assumed_fps,
    )


def _decode_archive_frame(frame_archive: FrameArchive, frame_number: int, max_pixels: int) -> Tensor:
    """A picture of an archive of frames, uint8 [3, height, width]."""
    picture_bytes = frame_archive.read_picture(frame_number)
    try:
        return decode_image(picture_bytes, max_pixels)
    except PixelError as error:
        raise type(error)(f"{frame_archive.picture_name(frame_number)}: {error}") from error


def video_planes(
    video_bytes: bytes,
    video_info: VideoInfo,
    video_grid_thw: GridTHW,
    pixel_settings: PixelSettings,
    deadline: SampleDeadline = NO_DEADLINE,
) -> Tensor:
    """The planes, uint8 [frames, h * w, 3 * patch * patch], of the sampled frames of a video file.

    Raises:
        PixelError: the file does not decode, or has fewer frames than ``video_info`` says.
        SampleTimeoutError: the deadline has passed.
    """
    frame_numbers = frame_indices(video_info, pixel_settings)
    patch_bytes = 3 * pixel_settings.patch_size**2
    pixel_planes = torch.empty(
        (len(frame_numbers), video_grid_thw.h * video_grid_thw.w, patch_bytes), dtype=torch.uint8
    )

    # Frames in their stored size are large: 768 of 1080p take 4.5 GiB. Only a few of them exist at a time.
    first_frame = 0
    decoded_frames = _decode_frames(video_bytes, video_info, frame_numbers, deadline)
    for frame_batch in batched(decoded_frames, FRAMES_PER_RESIZE):
        if {frame.shape[1:] for frame in frame_batch} != {(video_info.height, video_info.width)}:
            raise PixelError("a frame of the video has another size than when it was converted")
        next_frame = first_frame + len(frame_batch)
        pixel_planes[first_frame:next_frame] = _pixel_planes(
            torch.stack(frame_batch), video_grid_thw, pixel_settings
        )
        first_frame = next_frame
    return pixel_planes


def video_frames(
    video_bytes: bytes,
    video_info: VideoInfo,
    frame_numbers: Sequence[int],
    deadline: SampleDeadline = NO_DEADLINE,
) -> Tensor:
    """Frames of a video file, uint8 [len(frame_numbers), 3, height, width], in RGB, upright, in full size.

    Args:
        frame_numbers: ascending numbers of frames, counted from 0.

    Raises:
        PixelError: the file does not decode, or a frame of ``frame_numbers`` is missing.
        SampleTimeoutError: the deadline has passed.
    """
    return torch.stack(list(_decode_frames(video_bytes, video_info, frame_numbers, deadline)))


def _decode_frames(
    video_bytes: bytes, video_info: VideoInfo, frame_numbers: Sequence[int], deadline: SampleDeadline
) -> Iterator[Tensor]:
    """Yields the frames of :func:`video_frames`, each uint8 [3, height, width]."""
    if is_frame_archive(video_bytes):
        yield from _archive_frames(video_bytes, video_info, frame_numbers, deadline)
        return
    from av.video.reformatter import VideoReformatter

    # A separate converter without threads. PyAV 19 shares one in the whole process, and its threads do not
    # survive the fork of loader workers: if the parent has converted a frame before, a worker would hang.
    frame_converter = VideoReformatter()

    # Coded frames are larger than displayed ones, because sides are rounded up to whole blocks.
    max_pixels = (video_info.height + 256) * (video_info.width + 256)
    decoded_count = 0
    with _pixel_errors("video"):
        for video_frame in decode_frames_at(
            lambda: _open_video(video_bytes, max_pixels), video_info.frame_count, frame_numbers, deadline
        ):
            rgb_array = frame_converter.reformat(video_frame, format="rgb24", threads=1).to_ndarray()
            decoded_count += 1
            yield upright_frame(torch.from_numpy(rgb_array).permute(2, 0, 1), video_frame)

    if decoded_count < len(frame_numbers):
        raise PixelError(f"frame {frame_numbers[decoded_count]} of the video is missing")


def _archive_frames(
    archive_bytes: bytes, video_info: VideoInfo, frame_numbers: Sequence[int], deadline: SampleDeadline
) -> Iterator[Tensor]:
    """:func:`_decode_frames` of an archive of frames."""
    frame_archive = FrameArchive(archive_bytes)
    max_pixels = video_info.height * video_info.width
    for frame_number in frame_numbers:
        deadline.check_time()
        if frame_number >= len(frame_archive):
            raise PixelError(f"frame {frame_number} of the video is missing")
        frame_pixels = _decode_archive_frame(frame_archive, frame_number, max_pixels)
        if frame_pixels.shape[1:] != (video_info.height, video_info.width):
            picture_name = frame_archive.picture_name(frame_number)
            raise PixelError(f"{picture_name} has another size than when it was converted")
        yield frame_pixels


FRAMES_PER_RESIZE = 8
"""Frames of a video that are decoded before they are resized together."""
VIDEO_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,gif,h264,hevc,m4v,apng"
)


def _open_video(video_bytes: bytes, max_pixels: int) -> Any:
    import av

    # Playlists and other formats that name further files are not allowed, nor is any protocol to follow a
    # name.
    video_container = av.open(
        io.BytesIO(video_bytes), options={"format_whitelist": VIDEO_FORMATS, "protocol_whitelist": "none"}
    )
    for video_stream in video_container.streams.video:
        codec_context = video_stream.codec_context
        codec_context.thread_count = 1  # there is already one process per core
        if codec_context.width * codec_context.height > max_pixels:
            video_container.close()
            raise PictureTooLargeError(
                f"frames of {codec_context.height} x {codec_context.width} pixels, more than the {max_pixels}"
                " that are allowed"
            )
        codec_context.options = {"max_pixels": str(max_pixels)}  # later frames may be larger

    return video_container
