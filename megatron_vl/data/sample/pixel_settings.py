"""The settings of the checkpoint's image and video processor, with the overrides of ``data``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_vl.config import DataConfig
from megatron_vl.data.sample.frame_archive import PixelError

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class PixelNorm:
    """Normalisation of the checkpoint: ``(pixel / 255 - mean) / std`` by channel, for uint8 pixels.

    A ``rescale_factor`` other than 1/255 is folded into both numbers.
    """

    mean: tuple[float, ...] = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    def normalize_planes(self, pixel_planes: Tensor) -> Tensor:
        """uint8 [..., patch * patch * channels] -> float32 [..., channels * patch * patch], as HF has it."""
        scaled_mean, scaled_std = torch.tensor(self.mean) * 255.0, torch.tensor(self.std) * 255.0
        float_pixels = pixel_planes.unflatten(-1, (-1, len(self.mean))).float()
        return ((float_pixels - scaled_mean) / scaled_std).transpose(-1, -2).flatten(-2)


@dataclass(frozen=True)
class PixelSettings:
    """How images of any size become grids of patches. Areas are in pixels."""

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
        """Sides of a resized image are multiples of this many pixels."""
        return self.patch_size * self.merge_size


def read_pixel_settings(hf_dir: str | Path, data_config: DataConfig | None = None) -> PixelSettings:
    """The settings of the image and video processor in an HF folder, with the overrides of ``data_config``.

    Raises:
        FileNotFoundError: the folder has no processor config.
        PixelError: a setting is not supported, or limits contradict each other.
    """
    image_config, video_config = _processor_configs(Path(hf_dir))
    data_config = data_config or DataConfig()
    min_pixels, max_pixels = _pixel_limits(image_config, (56 * 56, 28 * 28 * 1280))

    # If a folder has no video processor config, HF reads the image processor's file for videos too.
    # The type of the video processor decides on the rule for videos, or else the class of the processor.
    processor_classes = (
        video_config.get("video_processor_type"),
        video_config.get("processor_class"),
        image_config.get("processor_class"),
    )
    uses_spread = next(filter(None, processor_classes), "").startswith("Qwen3VL")
    default_limits = (128 * 32 * 32, 32 * 32 * 768) if uses_spread else (128 * 28 * 28, 28 * 28 * 768)
    min_video_pixels, max_video_pixels = _pixel_limits(video_config, default_limits)
    if not uses_spread:  # limits for one image do not apply to all frames together
        min_video_pixels = data_config.min_pixels or min_video_pixels
        max_video_pixels = data_config.max_pixels or max_video_pixels

    pixel_settings = PixelSettings(
        patch_size=image_config.get("patch_size", 14),
        merge_size=image_config.get("merge_size", 2),
        temporal_patch_size=image_config.get("temporal_patch_size", 2),
        min_pixels=data_config.min_pixels or min_pixels,
        max_pixels=data_config.max_pixels or max_pixels,
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
    """Normalisation of the checkpoint's image processor; errors as of :func:`read_pixel_settings`."""
    return read_pixel_settings(hf_dir).norm


def media_limits_note(hf_dir: str | Path, trained_limits: Mapping[str, float]) -> str:
    """A note if a folder's processor config has other limits than training had; empty if it has none.

    Args:
        trained_limits: the limits of training by field of ``data``; fields that are not known are left out.

    Raises:
        The errors of :func:`read_pixel_settings`.
    """
    settings = read_pixel_settings(hf_dir)
    limits = {name: getattr(settings, name) for name in ("min_pixels", "max_pixels", "video_max_pixels")}
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
    files = (hf_path / f"{kind}_config.json" for kind in ("processor", "preprocessor", "video_preprocessor"))
    processor_config, image_file_config, video_file_config = (
        json.loads(file.read_text()) if file.is_file() else {} for file in files
    )

    if not (image_config := processor_config.get("image_processor") or image_file_config):
        raise FileNotFoundError(
            f"{hf_path} has no preprocessor_config.json or processor_config.json with an image_processor"
        )
    return (
        image_config,
        processor_config.get("video_processor") or video_file_config or image_file_config or image_config,
    )


def _pixel_limits(config: dict[str, Any], defaults: tuple[int, int]) -> list[int]:
    """Smallest and largest area in pixels, from ``min_pixels`` / ``max_pixels`` or ``size``."""
    size = config["size"] if isinstance(config.get("size"), dict) else {}
    names = zip(("min_pixels", "max_pixels"), ("shortest_edge", "longest_edge"), defaults, strict=True)
    return [int(config.get(n) or size.get(edge) or size.get(n) or default) for n, edge, default in names]


def _read_norm(processor_config: dict[str, Any], hf_dir: str | Path) -> PixelNorm:
    channel_means = processor_config.get("image_mean", CLIP_MEAN)
    channel_stds = processor_config.get("image_std", CLIP_STD)
    if processor_config.get("do_normalize", True) is False:
        channel_means, channel_stds = (0.0,) * 3, (1.0,) * 3
    rescale_factor = (
        processor_config.get("rescale_factor", 1 / 255) if processor_config.get("do_rescale", True) else 1.0
    )

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
                f"the smallest {media_kind} area {min_area} is above the largest {max_area}: set"
                f" data.min_pixels and data.max_pixels to fit the processor of {hf_dir}"
            )

    if pixel_settings.video_fps <= 0 or pixel_settings.video_max_frames < 1:
        raise PixelError(
            f"data: video_fps {pixel_settings.video_fps} and video_max_frames"
            f" {pixel_settings.video_max_frames} must be positive"
        )
