"""Decodes images into RGB, and resizes them into uint8 pixel planes.

Resampling is that of the checkpoint's own processor. Pixels stay uint8 until they are on the device, where
:class:`megatron_vl.models.vision.PatchEmbed` normalises them. This takes an eighth of the memory and traffic
of HF's ``pixel_values`` and gives the same numbers after normalisation.
"""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps
from torch import Tensor

from megatron_vl.data.sample.deadline import SampleTimeoutError
from megatron_vl.data.sample.frame_archive import PixelError
from megatron_vl.data.sample.grids import pixels_text
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.spec.positions import GridTHW
from megatron_vl.system.errors import is_machine_fault

DEFAULT_MAX_PIXELS = 128_000_000
"""Default limit on the pixels of an image or video frame. It is checked in the header before decoding,
because a file of some kilobytes can claim to hold gigabytes."""
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "PPM", "AVIF", "TGA")
"""The formats of Pillow that are allowed. JPEG's reader also reads MPO. EPS, for example, is not allowed: it
is a program that Pillow passes to Ghostscript."""


class ImageTooLargeError(PixelError):
    """An image or video frame with more pixels than are allowed."""


PNG_EXIF_MARKS = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")
"""One of them stands in a PNG that says how it is turned."""
JPEG_MAGIC = b"\xff\xd8"
PLAIN_JPEG_MARKERS = {
    bytes((0xFF, i)) for i in b"\xc0\xc1\xc2\xc4\xdb\xdd\xe0\xfe" + bytes(range(0xE2, 0xF0))
}
"""What may stand before the scan of a JPEG, without 0xE1, which begins Exif and XMP."""
JPEG_SCAN_MARKER = b"\xff\xda"
JPEG_END_MARKER = b"\xff\xd9"


@contextmanager
def pixel_errors(media_kind: str) -> Iterator[None]:
    """Raises PixelError for errors of Pillow, PyAV and others, whose readers of formats raise all kinds."""
    try:
        yield
    except (PixelError, SampleTimeoutError):
        raise
    except Exception as error:
        # FFmpeg's errors have numbers, but its bytes are in memory.
        if is_machine_fault(error) and not type(error).__module__.startswith("av."):
            raise
        # Most decoders do not say whether memory was too small, and a damaged header may claim any size. Only
        # if this raises MemoryError as well, which takes no memory otherwise, was memory too small.
        np.empty(1 << 30, np.uint8)
        raise PixelError(f"not a readable {media_kind} ({type(error).__name__}: {error})") from error


def decode_image(image_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> Tensor:
    """Decodes an image file into uint8 [3, height, width], in RGB and upright.

    Of a file with several images (an animation, pages) it is the first. Transparency is laid on white as in
    qwen-vl-utils and vLLM, rounded to the nearest (transformers 5.24 differs by 1 in some pixels). 16-bit
    values are ``v >> 8``.

    Raises:
        ImageTooLargeError: the header says more than ``max_pixels``.
        PixelError: the bytes are not an image of :data:`IMAGE_FORMATS`, the image is damaged, or its values
            have 32 bits, whose range no file says.
    """
    from torchvision.transforms.v2.functional import pil_to_tensor

    if (size := _plain_jpeg_size(image_bytes)) and size[0] * size[1] <= max_pixels:
        with suppress(ValueError):  # the code below says what is wrong
            return torch.from_numpy(simplejpeg.decode_jpeg(image_bytes, "RGB")).permute(2, 0, 1)
    with pixel_errors("image"), open_image(image_bytes, max_pixels) as opened_image:
        if opened_image.format in ("JPEG", "MPO"):
            if (jpeg_pixels := _decode_jpeg(image_bytes, opened_image)) is not None:
                return jpeg_pixels
        elif opened_image.format == "PNG":
            opened_image.verify()  # Pillow's decoder skips the checksums
            opened_image = open_image(image_bytes, max_pixels)
        return pil_to_tensor(_upright_rgb(opened_image))


def _upright_rgb(opened_image: Any) -> Any:
    """The upright RGB image of one that Pillow has just opened. It raises PixelError."""
    raw_mode = opened_image.tile[0].args if opened_image.format == "PNG" else ""
    # Pillow scales the twelve bits of other formats to 16, and a PPM's values, which it calls 32-bit.
    shift = 4 if getattr(opened_image, "tag_v2", {}).get(258) == (12,) else 8
    if opened_image.mode == "I" and opened_image.format == "PPM":
        opened_image = opened_image.convert("I;16")
    if opened_image.mode in ("I", "F"):
        raise PixelError(
            f"an image of 32-bit {'float' if opened_image.mode == 'F' else 'integer'} values;"
            " scale it to 8 or 16 bits"
        )

    opened_image.load()
    # exif_transpose copies even an upright image.
    is_upright = opened_image.getexif().get(0x0112, 1) == 1
    image = opened_image if is_upright else ImageOps.exif_transpose(opened_image)
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
        return image if image.mode == "RGB" else image.convert("RGB")
    rgba_image = image if image.mode == "RGBA" else image.convert("RGBA")
    alpha_channel = rgba_image.getchannel("A")
    if alpha_channel.getextrema() == (255, 255):  # e.g. screenshots
        return rgba_image.convert("RGB")
    rgb_image = Image.new("RGB", rgba_image.size, "white")
    rgb_image.paste(rgba_image, mask=alpha_channel)
    return rgb_image


def open_image(image_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> Any:
    """Opens an image in Pillow without decoding it. It raises the errors of :func:`decode_image`."""
    # Pillow warns at a limit of its own and raises at twice that. Only ``max_pixels`` should decide.
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_pixels)
    Image.init()
    # Pillow 12.0 raises a KeyError for a format that it was built without.
    formats = [name for name in IMAGE_FORMATS if name in Image.OPEN]
    with pixel_errors("image"), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            opened_image = Image.open(io.BytesIO(image_bytes), formats=formats)
        except Image.DecompressionBombError as error:
            raise ImageTooLargeError(f"more than the {max_pixels} pixels allowed: {error}") from error
    if opened_image.width * opened_image.height > max_pixels:
        raise ImageTooLargeError(
            f"{pixels_text(opened_image.height, opened_image.width)}, more than the {max_pixels} that are"
            " allowed"
        )
    return opened_image


def image_size(image_bytes: bytes) -> tuple[int, int]:
    """Height and width that :func:`decode_image` will give, read from the header of an image file.

    Raises:
        PixelError: the image cannot be read.
    """
    if (plain_size := _plain_jpeg_size(image_bytes)) and plain_size[0] * plain_size[1] <= DEFAULT_MAX_PIXELS:
        return plain_size
    with pixel_errors("image"), open_image(image_bytes) as opened_image:
        width, height = opened_image.size
        # Pillow would decode a PNG to look for EXIF after its pixels.
        if opened_image.format == "PNG" and not any(mark in image_bytes for mark in PNG_EXIF_MARKS):
            return height, width
        # Orientations 5 to 8 turn the image by 90 degrees. Pillow has already turned the size of a TIFF.
        is_turned = opened_image.getexif().get(0x0112, 1) in (5, 6, 7, 8) and opened_image.format != "TIFF"
        return (width, height) if is_turned else (height, width)


def _plain_jpeg_size(image_bytes: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG in YCbCr or grey without Exif or XMP, which may turn it; None for all else.

    Pillow's header takes a tenth of the time of a small picture.
    """
    position = 2
    if not image_bytes.startswith(JPEG_MAGIC):
        return None
    while (marker := image_bytes[position : position + 2]) != JPEG_SCAN_MARKER:
        if marker not in PLAIN_JPEG_MARKERS:
            return None
        position += 2 + int.from_bytes(image_bytes[position + 2 : position + 4])
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(image_bytes)
    except ValueError:
        return None
    return (height, width) if colorspace in ("YCbCr", "Gray") else None


def _strict_rgb(image_bytes: bytes, colorspace: str, is_progressive: bool) -> np.ndarray:
    """uint8 [height, width, 3]. Raises ValueError for libjpeg's warnings.

    A sequential JPEG may lack its end marker, as some cameras write it: all pixels stand before it.
    """
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
    if (orientation := opened_image.getexif().get(0x0112, 1)) == 1:
        return torch.from_numpy(rgb_array).permute(2, 0, 1)
    rgb_image = Image.fromarray(rgb_array)
    rgb_image.getexif()[0x0112] = orientation
    return pil_to_tensor(ImageOps.exif_transpose(rgb_image))


def pixel_planes(frame_pixels: Tensor, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """uint8 [F, 3, H, W] -> [F, h * w, patch * patch * 3], patches in merge-unit order, colours last."""
    # The same function as in HF's torchvision backend: antialiased, on uint8.
    from torchvision.transforms.v2 import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    filters = {0: InterpolationMode.NEAREST, 2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}
    patch, merge = settings.patch_size, settings.merge_size
    frame_pixels = resize(
        frame_pixels,
        [grid.h * patch, grid.w * patch],
        interpolation=filters[settings.resample],
        antialias=True,
    )

    # In memory, a pixel's colours lie side by side, and NumPy copies a line of a patch as one item. A
    # permutation in torch, byte by byte, takes three times as long. The device sorts the colours.
    channels_last = frame_pixels.permute(0, 2, 3, 1).contiguous().numpy()
    lines = channels_last.reshape(-1).view(np.dtype((np.void, 3 * patch)))
    lines = lines.reshape(-1, grid.h // merge, merge, patch, grid.w // merge, merge)
    # From (frame, unit row, row in unit, line, unit column, column in unit) to merge-unit order, lines last.
    patch_bytes = np.ascontiguousarray(lines.transpose(0, 1, 4, 2, 5, 3)).reshape(-1).view(np.uint8)
    return torch.from_numpy(patch_bytes).view(len(frame_pixels), grid.h * grid.w, -1)
