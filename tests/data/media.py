"""Drawn images and videos in many formats."""

import io
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image

from megatron_vl.data.sample.videos import iterate_frames


def image(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """uint8 [height, width, channels]: smooth colours with noise on top, so that resampling matters."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = [127 + 100 * np.sin(x / (5 + 3 * c + seed) + y / (11 - 2 * c)) for c in range(channels)]
    noisy = np.stack(waves, -1) + rng.normal(0, 12, (height, width, channels))
    return np.clip(noisy, 0, 255).astype(np.uint8)


JPEG = {"format": "JPEG", "quality": 90}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "png": ("RGB", {"format": "PNG"}),
    "webp": ("RGB", {"format": "WEBP", "lossless": True}),
    "jpeg": ("RGB", JPEG | {"subsampling": 0}),
    "jpeg420": ("RGB", JPEG | {"subsampling": 2}),
    "progressive": ("RGB", JPEG | {"subsampling": 0, "progressive": True}),
    "exif": ("RGB", JPEG | {"exif": Image.Exif()}),
    "cmyk": ("CMYK", JPEG),
    "grey_jpeg": ("L", {"format": "JPEG"}),
    **{kind: (mode, {"format": "PNG"}) for kind, mode in (("grey", "L"), ("palette", "P"), ("bilevel", "1"))},
    **{kind: ("", {"format": "PNG"}) for kind in ("rgba", "grey16")},
}
"""The mode of each kind of file, and how it is saved."""
FORMS["exif"][1]["exif"][0x0112] = 6


def encoded(height: int, width: int, kind: str = "png", seed: int = 0) -> bytes:
    mode, options = FORMS[kind]
    channels = {"rgba": 4, "grey16": 1}.get(kind, 3)
    values, out = image(height, width, seed, channels), io.BytesIO()
    shown = Image.fromarray(values[..., 0].astype(np.uint16) * 257 if kind == "grey16" else values)
    if mode:
        shown = shown.quantize(64) if mode == "P" else shown.convert(mode)
    shown.save(out, **options)
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
    with tempfile.NamedTemporaryFile() as file:  # to put a table first, FFmpeg reads the file again
        with av.open(file.name, "w", format=form, options=options) as container:
            stream = container.add_stream(codec, rate=rate, options=stream_options or {})
            for number, frame in enumerate(images):
                if number == 0:
                    stream.height, stream.width, stream.pix_fmt = *frame.shape[:2], pixels
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        return file.read()


def all_frames(data: bytes) -> Iterator[torch.Tensor]:
    """uint8 [3, height, width] each"""
    with av.open(io.BytesIO(data)) as container:
        for frame in container.decode(video=0):
            yield torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)


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
