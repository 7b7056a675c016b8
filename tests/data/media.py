"""Drawn images and videos in many formats."""

import io
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from megatron_vl.data.sample.videos import iterate_frames


def image(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """uint8 [height, width, channels]: smooth colours with noise on top, so that resampling matters."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [127 + 100 * np.sin(x / (5 + 3 * c + seed) + y / (11 - 2 * c)) for c in range(channels)]
    return np.clip(np.stack(waves, -1) + rng.normal(0, 12, (height, width, channels)), 0, 255).astype(
        np.uint8
    )


def encoded(height: int, width: int, kind: str = "png", seed: int = 0) -> bytes:
    """An image file of one of the kinds below."""
    rgb = Image.fromarray(image(height, width, seed))
    out = io.BytesIO()
    if kind in ("png", "webp"):
        rgb.save(out, kind.upper(), **({"lossless": True} if kind == "webp" else {}))
    elif kind in ("jpeg", "jpeg420", "progressive"):
        rgb.save(
            out,
            "JPEG",
            quality=90,
            subsampling=2 if kind == "jpeg420" else 0,
            progressive=kind == "progressive",
        )
    elif kind == "grey":
        rgb.convert("L").save(out, "PNG")
    elif kind == "grey_jpeg":
        rgb.convert("L").save(out, "JPEG")
    elif kind == "rgba":
        Image.fromarray(image(height, width, seed, channels=4), "RGBA").save(out, "PNG")
    elif kind == "palette":
        rgb.quantize(64).save(out, "PNG")
    elif kind == "cmyk":
        rgb.convert("CMYK").save(out, "JPEG", quality=90)
    elif kind == "exif":
        exif = Image.Exif()
        exif[0x0112] = 6
        rgb.save(out, "JPEG", quality=90, exif=exif)
    elif kind == "grey16":
        Image.fromarray(image(height, width, seed, 1)[..., 0].astype(np.uint16) * 257).save(out, "PNG")
    elif kind == "bilevel":
        rgb.convert("1").save(out, "PNG")
    else:
        raise ValueError(kind)

    return out.getvalue()


def video(frames: int, height: int = 64, width: int = 96, fps: int = 10) -> bytes:
    """An MPEG-4 file whose frames all differ."""
    return video_of(image(height, width, seed=i) for i in range(frames))


def video_of(
    images: Iterable[np.ndarray],
    form: str = "mp4",
    codec: str = "mpeg4",
    *,
    rate: int = 10,
    pixels: str = "yuv420p",
    stream_options: dict[str, str] | None = None,
    **options: str,
) -> bytes:
    """A video file of images, uint8 [height, width, 3]; ``options`` are those of the container."""
    import av

    with tempfile.NamedTemporaryFile() as file:  # to put a table first, FFmpeg reads the file again
        with av.open(file.name, "w", format=form, options=options) as container:
            stream = container.add_stream(codec, rate=rate, options=stream_options or {})
            for number, frame in enumerate(images):
                if number == 0:
                    stream.height, stream.width, stream.pix_fmt = *frame.shape[:2], pixels
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        return file.read()


def reader_without_memory(num_reads: int) -> type[io.BytesIO]:
    """In place of ``io.BytesIO``: a decoder that has read so many times finds no more memory."""

    class Reader(io.BytesIO):
        def read(self, *size: int) -> bytes:
            nonlocal num_reads
            num_reads -= 1
            if num_reads < 0:
                raise MemoryError("no room for pixels")
            return super().read(*size)

    return Reader


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def video_frames(*video: object) -> torch.Tensor:
    """uint8 [n, 3, height, width]; the arguments are those of ``iterate_frames``."""
    return torch.stack(list(iterate_frames(*video)))
