"""Turns images and videos into grids (without decoding) and uint8 pixel planes (decoded last).

Sizes, resampling and normalisation are those of the checkpoint's own image processor. Pixels stay uint8 until
they are on the device. This takes an eighth of the memory and traffic of HF's ``pixel_values`` and gives the
same numbers after normalisation.

The code follows ``Qwen2VLImageProcessor`` (torchvision backend) and ``Qwen2VLVideoProcessor`` of transformers
5.17. Files are opened as in ``transformers.image_utils.load_image``:
EXIF orientation is applied, then ``convert("RGB")``.

Frames of a video are sampled as in ``Qwen2VLVideoProcessor.sample_frames`` with ``fps = video_fps`` and
``max_frames = video_max_frames``. Their number is ``n = seconds * fps``, at least the processor's
``min_frames`` (4), at most ``max_frames`` and the video's own number, rounded down to a multiple of
``temporal_patch_size``. Sampled frame ``i`` is frame ``int(i * total / n)`` of the video. A video with fewer
frames than ``temporal_patch_size`` (where HF fails) keeps all of them, and its last frame is repeated. A
frame group covers ``temporal_patch_size / (n / total * fps_of_the_file)`` seconds,
as in ``Qwen2_5_VLProcessor``.

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

import io
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.deadline import UNLIMITED, Deadline, OutOfTimeError
from megatron_vl.data.sample.frame_files import FrameFile, FrameFileError, Sampling, is_frame_file
from megatron_vl.data.sample.video_files import FrameTable, frame_table, frames_at
from megatron_vl.errors import UserError
from megatron_vl.spec.positions import GridTHW

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
MAX_ASPECT = 200
MAX_PIXELS = 128_000_000
"""Default limit on the pixels of a picture or video frame. It is checked in the header before decoding,
because a file of some kilobytes can claim to hold gigabytes."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "AVIF", "TGA")
"""Those of Pillow's formats that are pictures (JPEG's reader also reads MPO). EPS, for example, is a program
that Pillow passes to Ghostscript."""


class PixelError(UserError, ValueError):
    """Processor settings, an image or a video cannot be used. The message says why."""


class TooLargeError(PixelError):
    """A picture or video frame with more pixels than are allowed."""


@dataclass(frozen=True)
class PixelNorm:
    """Normalisation of the checkpoint: ``(pixel / 255 - mean) / std`` by channel, for uint8 pixels.

    A ``rescale_factor`` other than 1/255 is folded into both numbers.
    """

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def apply(self, planes: Tensor) -> Tensor:
        """float32 of the same shape; ``planes`` is uint8 [..., channels * patch * patch]."""
        channels = len(self.mean)
        mean, std = torch.tensor(self.mean) * 255.0, torch.tensor(self.std) * 255.0
        pixels = planes.unflatten(-1, (channels, -1)).float()
        return ((pixels - mean[:, None]) / std[:, None]).flatten(-2)


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
    """Choose frames and area of a video as ``Qwen3VLVideoProcessor`` does.
    Areas are then those of all frames together."""
    resample: int = 3
    """PIL's number of the resampling filter; 3 is bicubic."""
    norm: PixelNorm = PixelNorm()

    @property
    def factor(self) -> int:
        """Sides of a resized picture are multiples of this many pixels."""
        return self.patch_size * self.merge_size


@dataclass(frozen=True)
class VideoInfo:
    """The facts of a video that determine its number of tokens."""

    frames: int
    fps: float
    height: int
    width: int
    sampling: Sampling = "as a file"

    def is_whole(self, settings: PixelSettings) -> bool:
        """Whether all frames are taken because somebody has chosen them."""
        return self.sampling == "whole" and self.frames <= settings.video_max_frames


# --- Processor settings


def read_pixel_settings(hf_dir: str | Path, data: DataConfig | None = None) -> PixelSettings:
    """The settings of the image and video processor in an HF folder, with the overrides of ``data``.

    Raises:
        FileNotFoundError: the folder has no processor config.
        PixelError: a setting is not supported, or limits contradict each other.
    """
    image, video = _processor_configs(Path(hf_dir))
    data = data or DataConfig()
    low, high = _limits(image, (56 * 56, 28 * 28 * 1280), hf_dir)
    # If a folder has no video processor config, HF reads the image processor's file for videos too.
    spread = _is_spread(video, image)
    video_low, video_high = _limits(
        video, (128 * 32 * 32, 32 * 32 * 768) if spread else (128 * 28 * 28, 28 * 28 * 768), hf_dir
    )
    if not spread:  # limits for one picture do not apply to all frames together
        video_low, video_high = data.min_pixels or video_low, data.max_pixels or video_high
    settings = PixelSettings(
        patch_size=image.get("patch_size", 14),
        merge_size=image.get("merge_size", 2),
        temporal_patch_size=image.get("temporal_patch_size", 2),
        min_pixels=data.min_pixels or low,
        max_pixels=data.max_pixels or high,
        video_min_pixels=video_low,
        video_max_pixels=data.video_max_pixels or video_high,
        video_fps=data.video_fps,
        video_min_frames=video.get("min_frames", 4),
        video_max_frames=data.video_max_frames,
        video_spread=spread,
        resample=image.get("resample", 3),
        norm=_norm(image, hf_dir),
    )

    _check(settings, image, video, hf_dir)
    return settings


def read_pixel_norm(hf_dir: str | Path) -> PixelNorm:
    """Mean and standard deviation of the checkpoint's own image processor.

    It raises the errors of :func:`read_pixel_settings`.
    """
    return read_pixel_settings(hf_dir).norm


def _processor_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Image and video processor configs, looked up in the same order as in transformers 5.17."""
    nested, image, video = (
        json.loads((folder / f"{name}.json").read_text()) if (folder / f"{name}.json").is_file() else {}
        for name in ("processor_config", "preprocessor_config", "video_preprocessor_config")
    )
    found = nested.get("image_processor") or image
    if not found:
        raise FileNotFoundError(
            f"{folder} has no preprocessor_config.json or processor_config.json with an image_processor"
        )
    return found, nested.get("video_processor") or video or image or found


def _is_spread(video: dict[str, Any], image: dict[str, Any]) -> bool:
    """Whether videos follow Qwen3-VL's rule.

    The type of the video processor decides, else the class of the folder's processor.
    """
    kind = (
        video.get("video_processor_type")
        or video.get("processor_class")
        or image.get("processor_class")
        or ""
    )
    return kind.startswith("Qwen3VL")


def _limits(config: dict[str, Any], default: tuple[int, int], where: str | Path) -> tuple[int, int]:
    """Smallest and largest area in pixels, from ``min_pixels`` / ``max_pixels`` or ``size``."""
    size = config.get("size")
    size = size if isinstance(size, dict) else {}
    low = config.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
    high = config.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
    if low > high:
        raise PixelError(f"{where}: the processor's smallest area {low} is above its largest {high}")
    return int(low), int(high)


def _norm(config: dict[str, Any], where: str | Path) -> PixelNorm:
    mean, std = config.get("image_mean", CLIP_MEAN), config.get("image_std", CLIP_STD)
    if config.get("do_normalize", True) is False:
        mean, std = (0.0,) * 3, (1.0,) * 3
    factor = config.get("rescale_factor", 1 / 255) if config.get("do_rescale", True) else 1.0
    if len(mean) != 3 or len(std) != 3 or not all(std) or not factor:
        raise PixelError(
            f"{where}: image_mean {mean}, image_std {std} and rescale_factor {factor} must be 3, 3 and 1"
            " non-zero numbers"
        )
    scale = 1.0 if factor == 1 / 255 else 1.0 / factor / 255.0
    return PixelNorm(tuple(float(m) * scale for m in mean), tuple(float(s) * scale for s in std))


def _check(settings: PixelSettings, image: dict[str, Any], video: dict[str, Any], where: str | Path) -> None:
    if image.get("do_resize", True) is False or image.get("do_convert_rgb", True) is False:
        raise PixelError(f"{where}: an image processor with do_resize or do_convert_rgb off is not supported")
    if settings.resample not in (0, 2, 3):
        raise PixelError(
            f"{where}: resample {settings.resample} is not supported; valid: 0 (nearest), 2 (bilinear), 3"
            " (bicubic)"
        )
    if video is not image and _norm(video, where) != settings.norm:
        raise PixelError(f"{where}: image and video processor normalise differently")
    if video.get("cap_pixels_per_frame"):
        raise PixelError(
            f"{where}: a video processor with cap_pixels_per_frame is not supported; set it to false"
        )

    for low, high, kind in (
        (settings.min_pixels, settings.max_pixels, "image"),
        (settings.video_min_pixels, settings.video_max_pixels, "video"),
    ):
        if low > high:
            raise PixelError(
                f"data: the smallest {kind} area {low} is above the largest {high}; set min_pixels and"
                " max_pixels to fit"
            )

    if settings.video_fps <= 0 or settings.video_max_frames < 1:
        raise PixelError(
            f"data: video_fps {settings.video_fps} and video_max_frames {settings.video_max_frames} must be"
            " positive"
        )


# --- Sizes and counts


def resized_size(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width after resizing, as in HF's ``smart_resize``.

    Both are multiples of ``factor``, and the area is within the limits.

    Raises:
        PixelError: the picture is empty or more than 200 times as long as wide.
    """
    if min(height, width) < 1:
        raise PixelError(f"a picture of {height} x {width} pixels is empty")
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise PixelError(
            f"a picture of {height} x {width} pixels is more than {MAX_ASPECT} times as long as wide"
        )

    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def resized_video_size(frames: int, height: int, width: int, settings: PixelSettings) -> tuple[int, int]:
    """Height and width of a video's frames after resizing, if ``frames`` of them are sampled.

    Raises:
        PixelError: as :func:`resized_size`.
    """
    factor, low, high = settings.factor, settings.video_min_pixels, settings.video_max_pixels
    if not settings.video_spread:
        return resized_size(height, width, factor, low, high)
    if min(height, width) < 1:
        raise PixelError(f"a video of {height} x {width} pixels is empty")
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) / min(height, width) > MAX_ASPECT:
        raise PixelError(
            f"a video of {height} x {width} pixels is more than {MAX_ASPECT} times as long as wide"
        )

    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    step = settings.temporal_patch_size
    volume = round(frames / step) * step * new_height * new_width
    if volume > high:
        beta = math.sqrt(frames * height * width / high)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif volume < low:
        beta = math.sqrt(low / (frames * height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def image_grid(height: int, width: int, settings: PixelSettings) -> GridTHW:
    """The grid of an image of this size.

    Its number of placeholders is ``grid.tokens(settings.merge_size)``.
    """
    size = resized_size(height, width, settings.factor, settings.min_pixels, settings.max_pixels)
    return GridTHW(1, size[0] // settings.patch_size, size[1] // settings.patch_size)


def video_grid(video: VideoInfo, settings: PixelSettings) -> GridTHW:
    """The grid of a video, with frames sampled as this module's docstring describes."""
    indices = frame_indices(video, settings)
    step = settings.temporal_patch_size
    frames = len(indices)
    # qwen-vl-utils repeats the last picture of a list before it resizes, HF that of a file afterwards.
    counted = -(-frames // step) * step if video.is_whole(settings) else max(frames, step)
    size = resized_video_size(counted, video.height, video.width, settings)
    # HF passes this number on as a float32 tensor: round it in the same way.
    seconds = torch.tensor(step / (frames / video.frames * video.fps), dtype=torch.float32).item()

    groups = -(-frames // step)
    missing = groups * step - frames
    repeated = range(frames, frames + missing) if video.is_whole(settings) else indices[-1:] * missing
    times = [index / video.fps for index in [*indices, *repeated]]
    timestamps = tuple((times[i] + times[i + step - 1]) / 2 for i in range(0, len(times), step))
    return GridTHW(
        groups, size[0] // settings.patch_size, size[1] // settings.patch_size, "video", seconds, timestamps
    )


def frame_indices(video: VideoInfo, settings: PixelSettings) -> list[int]:
    """The frames of a video to take (ascending, counted from 0)."""
    if video.frames < 1 or video.fps <= 0:
        raise PixelError(f"a video of {video.frames} frames at {video.fps} frames a second is empty")

    step = settings.temporal_patch_size
    if video.frames < step or video.is_whole(settings):
        return list(range(video.frames))
    if settings.video_spread:
        wanted = int(video.frames / video.fps * settings.video_fps)
        taken = min(max(wanted, settings.video_min_frames), settings.video_max_frames, video.frames)
        return np.linspace(0, video.frames - 1, taken).round().astype(int).tolist()

    most = max(min(settings.video_max_frames, video.frames) // step * step, step)
    count = min(max(video.frames / video.fps * settings.video_fps, settings.video_min_frames), most)
    count = max(math.floor(count / step) * step, step)
    return torch.arange(0, video.frames, video.frames / count).int().tolist()


# --- Pixels


def decode_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decodes an image file into uint8 [3, height, width], in RGB and upright.

    Raises:
        TooLargeError: the header says more than ``max_pixels``.
        PixelError: the bytes are not an image of :data:`IMAGE_FORMATS`, or the image is damaged.
    """
    from PIL import ImageOps
    from torchvision.transforms.v2.functional import pil_to_tensor

    try:
        with open_image(data, max_pixels) as image:
            fast = _decode_plain_jpeg(data, image)
            if fast is not None:
                return fast
            return pil_to_tensor(ImageOps.exif_transpose(image).convert("RGB"))
    except PixelError:
        raise
    except Exception as error:  # Pillow's format readers raise all kinds of errors
        raise PixelError(f"not a readable image ({type(error).__name__}: {error})") from error


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Any:
    """Opens an image in Pillow without decoding it. It raises the errors of :func:`decode_image`."""
    from PIL import Image

    # Pillow warns at its own limit and raises at twice the limit. Only our limit should decide.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=_image_formats())
    except Image.DecompressionBombError as error:
        raise TooLargeError(f"more than the {max_pixels} pixels that are allowed: {error}") from error
    except Exception as error:
        raise PixelError(f"not a readable image ({type(error).__name__}: {error})") from error
    if image.width * image.height > max_pixels:
        raise TooLargeError(
            f"{image.height} x {image.width} pixels, more than the {max_pixels} that are allowed"
        )
    return image


@cache
def _image_formats() -> list[str]:
    """The formats of :data:`IMAGE_FORMATS` that Pillow was built with (12.0 raises a KeyError for others)."""
    from PIL import Image

    Image.init()
    return [name for name in IMAGE_FORMATS if name in Image.OPEN]


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width that :func:`decode_image` will give, read from the header of an image file.

    Raises:
        PixelError: the image cannot be read.
    """
    try:
        with open_image(data) as image:
            width, height = image.size
            # Orientations 5 to 8 turn the picture by 90 degrees.
            return (width, height) if image.getexif().get(0x0112, 1) in (5, 6, 7, 8) else (height, width)
    except PixelError:
        raise
    except Exception as error:
        raise PixelError(f"not a readable image ({type(error).__name__}: {error})") from error


def _decode_plain_jpeg(data: bytes, image: Any) -> Tensor | None:
    """Decodes an upright RGB JPEG with simplejpeg; None for all other images.

    simplejpeg gives the same pixels and is 1.4 times as fast as Pillow.
    """
    if image.format != "JPEG" or image.mode != "RGB" or image.getexif().get(0x0112, 1) != 1:
        return None
    import simplejpeg

    try:
        if simplejpeg.decode_jpeg_header(data)[2] != "YCbCr":
            return None
        return torch.from_numpy(simplejpeg.decode_jpeg(data, "RGB")).permute(2, 0, 1)
    except ValueError:
        return None  # Pillow decides whether the file is damaged


def image_planes(data: bytes, grid: GridTHW, settings: PixelSettings, max_pixels: int = MAX_PIXELS) -> Tensor:
    """The planes, uint8 [1, h * w, 3 * patch * patch], of an image file that is resized to its grid."""
    return _planes(decode_image(data, max_pixels)[None], grid, settings)


def _planes(frames: Tensor, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """uint8 [F, 3, H, W] -> [F, h * w, 3 * patch * patch], patches in merge-unit order."""
    # The same function as in HF's torchvision backend: antialiased, on uint8.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    filters = {0: InterpolationMode.NEAREST, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
    p, m = settings.patch_size, settings.merge_size
    frames = resize(
        frames, [grid.h * p, grid.w * p], interpolation=filters[settings.resample], antialias=True
    )
    # In memory, a pixel's colours lie side by side. NumPy copies a line of a patch as one item, then sorts
    # its colours. One permutation in torch, byte by byte, takes twice as long.
    lines = frames.permute(0, 2, 3, 1).contiguous().numpy().reshape(-1).view(np.dtype((np.void, 3 * p)))
    lines = lines.reshape(-1, grid.h // m, m, p, grid.w // m, m)
    patches = np.ascontiguousarray(lines.transpose(0, 1, 4, 2, 5, 3)).reshape(-1).view(np.uint8)
    planes = patches.reshape(len(frames), grid.h * grid.w, p * p, 3).transpose(0, 1, 3, 2)
    return torch.from_numpy(planes.reshape(len(frames), grid.h * grid.w, 3 * p * p))


def probe_video(data: bytes, max_pixels: int = MAX_PIXELS) -> VideoInfo:
    """Finds the true number of frames, rate and size of a video file, by decoding all of it.

    Of a file with more than :data:`LONG_VIDEO` frames, only the key frames are decoded if its packets say how
    many frames there are.

    Raises:
        TooLargeError: a frame has more than ``max_pixels``.
        PixelError: the bytes are not a video, or a frame does not decode.
    """
    if is_frame_file(data):
        return _probe_frame_file(data, max_pixels)
    try:
        with _open_video(data, max_pixels) as container:
            stream = container.streams.video[0]
            table = None
            if stream.frames > LONG_VIDEO:
                with _open_video(data, max_pixels) as listed:
                    table = frame_table(listed)
            frames = _count_frames(container, table)
            rate = stream.average_rate or stream.guessed_rate
            info = VideoInfo(frames, float(rate or 0), stream.height, stream.width)
    except PixelError:
        raise
    except Exception as error:
        raise PixelError(f"not a readable video ({type(error).__name__}: {error})") from error

    if not frames or not info.fps:
        raise PixelError(f"a video of {frames} frames at {info.fps} frames a second is empty")
    return info


def _count_frames(container: Any, table: FrameTable | None) -> int:
    """Decodes all frames; if a table lists them, only the key frames."""
    if table is None:
        return sum(1 for _ in container.decode(video=0))
    container.streams.video[0].codec_context.skip_frame = "NONKEY"
    if sum(1 for _ in container.decode(video=0)) < len(table.keys):
        raise PixelError("a key frame of the video does not decode")
    return len(table.times)


def _probe_frame_file(data: bytes, max_pixels: int) -> VideoInfo:
    """Decodes all pictures of an archive of frames, which must have one size."""
    file = _frame_file(data)
    if not len(file):
        raise PixelError("a video of 0 frames is empty")
    sizes = [_frame(file, number, max_pixels).shape[1:] for number in range(len(file))]
    height, width = sizes[0]
    for number, size in enumerate(sizes):
        if size != sizes[0]:
            raise PixelError(
                f"{file.name(number)} has {size[0]} x {size[1]} pixels, {file.name(0)} {height} x {width};"
                " the frames of a video must have one size"
            )
    return VideoInfo(len(file), file.info.fps, height, width, file.info.sampling)


def _frame_file(data: bytes) -> FrameFile:
    try:
        return FrameFile(data)
    except FrameFileError as error:
        raise PixelError(str(error)) from error


def _frame(file: FrameFile, number: int, max_pixels: int) -> Tensor:
    """A picture of an archive of frames, uint8 [3, height, width]."""
    try:
        return decode_image(file.read(number), max_pixels)
    except FrameFileError as error:
        raise PixelError(str(error)) from error
    except PixelError as error:
        raise type(error)(f"{file.name(number)}: {error}") from error


def video_planes(
    data: bytes, video: VideoInfo, grid: GridTHW, settings: PixelSettings, deadline: Deadline = UNLIMITED
) -> Tensor:
    """The planes, uint8 [frames, h * w, 3 * patch * patch], of the sampled frames of a video file.

    Raises:
        PixelError: the file does not decode, or has fewer frames than ``video`` says.
        OutOfTimeError: the deadline has passed.
    """
    return _planes(video_frames(data, video, frame_indices(video, settings), deadline), grid, settings)


def video_frames(
    data: bytes, video: VideoInfo, wanted: Sequence[int], deadline: Deadline = UNLIMITED
) -> Tensor:
    """Frames of a video file, uint8 [len(wanted), 3, height, width], in RGB and in their stored size.

    Args:
        wanted: ascending numbers of frames, counted from 0.

    Raises:
        PixelError: the file does not decode, or has fewer frames than are wanted.
        OutOfTimeError: the deadline has passed.
    """
    if is_frame_file(data):
        return _pictures_at(data, video, wanted, deadline)
    from av.video.reformatter import VideoReformatter

    chosen: list[Tensor] = []

    # A separate converter without threads. PyAV 19 shares one in the whole process, and its threads do not
    # survive the fork of loader workers: if the parent has converted a frame before, a worker would hang.
    converter = VideoReformatter()

    try:
        # Coded frames are larger than displayed ones, because sides are rounded up to whole blocks.
        most = (video.height + 256) * (video.width + 256)
        for frame in frames_at(lambda: _open_video(data, most), video.frames, wanted, deadline):
            rgb = converter.reformat(frame, format="rgb24", threads=1).to_ndarray()
            chosen.append(torch.from_numpy(rgb).permute(2, 0, 1))
    except (PixelError, OutOfTimeError):
        raise
    except Exception as error:
        raise PixelError(f"not a readable video ({type(error).__name__}: {error})") from error

    if len(chosen) < len(wanted):
        raise PixelError(f"frame {wanted[len(chosen)]} of the video is missing")
    return torch.stack(chosen)


def _pictures_at(data: bytes, video: VideoInfo, wanted: Sequence[int], deadline: Deadline) -> Tensor:
    """:func:`video_frames` of an archive of frames."""
    file = _frame_file(data)
    chosen: list[Tensor] = []
    for number in wanted:
        deadline.check()
        if number >= len(file):
            raise PixelError(f"frame {number} of the video is missing")
        chosen.append(_frame(file, number, video.height * video.width))
        if chosen[-1].shape[1:] != (video.height, video.width):
            raise PixelError(f"{file.name(number)} has another size than when it was converted")
    return torch.stack(chosen)


LONG_VIDEO = 18_000
"""Frames; ten minutes at 30 frames a second."""
VIDEO_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,gif,h264,hevc,m4v,apng"
)


def _open_video(data: bytes, max_pixels: int) -> Any:
    import av

    # Playlists and other formats that name further files are not allowed,
    # nor is any protocol to follow a name.
    container = av.open(
        io.BytesIO(data), options={"format_whitelist": VIDEO_FORMATS, "protocol_whitelist": "none"}
    )
    for stream in container.streams.video:
        codec = stream.codec_context
        codec.thread_count = 1  # there is already one process per core
        if codec.width * codec.height > max_pixels:
            container.close()
            raise TooLargeError(
                f"frames of {codec.height} x {codec.width} pixels, more than the {max_pixels} that are"
                " allowed"
            )
        codec.options = {"max_pixels": str(max_pixels)}  # later frames may be larger

    return container
