"""Measures videos and decodes their sampled frames into uint8 pixel planes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import batched
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.sample.deadline import check_time
from megatron_vl.data.sample.frame_archive import FrameArchive, PixelError, is_frame_archive, is_frame_rate
from megatron_vl.data.sample.grids import VideoInfo, frame_indices, pixels_text
from megatron_vl.data.sample.images import (
    DEFAULT_MAX_PIXELS,
    ImageTooLargeError,
    decode_image,
    pixel_errors,
    pixel_planes,
)
from megatron_vl.data.sample.pixel_settings import PixelSettings
from megatron_vl.data.sample.video_decoding import decode_frames_at, describe_video, upright_frame
from megatron_vl.spec.positions import GridTHW

FRAMES_PER_RESIZE = 8
"""Frames of a video that are decoded before they are resized together."""
VIDEO_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,gif,h264,hevc,m4v,apng"
)


def probe_video(video_bytes: bytes, max_pixels: int = DEFAULT_MAX_PIXELS) -> VideoInfo:
    """Finds the true number of frames, rate and size of a video file, as :func:`describe_video` does.

    Raises:
        ImageTooLargeError: a frame has more than ``max_pixels``.
        PixelError: the bytes are not a video, a frame does not decode, or frames are missing.
    """
    if is_frame_archive(video_bytes):
        return _probe_frame_archive(video_bytes, max_pixels)
    with pixel_errors("video"):
        info = describe_video(video_bytes, lambda: _open_video(video_bytes, max_pixels))
    if not is_frame_rate(info.fps):
        raise PixelError(f"a video of {info.frame_count} frames at {info.fps:g} frames a second is none")
    return info


def _probe_frame_archive(archive_bytes: bytes, max_pixels: int) -> VideoInfo:
    """Decodes all images of an archive of frames, which must have one size."""
    archive = FrameArchive(archive_bytes)
    if not len(archive):
        raise PixelError("a video of 0 frames is empty")
    shapes = [_decode_archive_frame(archive, i, max_pixels).shape[1:] for i in range(len(archive))]
    height, width = shapes[0]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise PixelError(
                f"{archive.image_name(i)} has {pixels_text(*shape)}, {archive.image_name(0)}"
                f" {width} x {height}; the frames of a video must have one size"
            )
    info = archive.archive_info
    return VideoInfo(len(archive), info.fps, height, width, info.sampling, info.assumed_fps)


def _decode_archive_frame(frame_archive: FrameArchive, frame_number: int, max_pixels: int) -> Tensor:
    """An image of an archive of frames, uint8 [3, height, width]."""
    image_bytes = frame_archive.read_image(frame_number)
    try:
        return decode_image(image_bytes, max_pixels)
    except PixelError as error:
        raise type(error)(f"{frame_archive.image_name(frame_number)}: {error}") from error


def video_planes(video_bytes: bytes, video_info: VideoInfo, grid: GridTHW, settings: PixelSettings) -> Tensor:
    """The planes, uint8 [frames, h * w, patch * patch * 3], of the sampled frames of a video file.

    Raises:
        PixelError: the file does not decode, or has fewer frames than ``video_info`` says.
    """
    frame_numbers = frame_indices(video_info, settings)
    planes = torch.empty((len(frame_numbers), grid.h * grid.w, 3 * settings.patch_size**2), dtype=torch.uint8)
    # Frames in their stored size are large: 768 of 1080p take 4.5 GiB. Only a few of them exist at a time.
    frames = iterate_frames(video_bytes, video_info, frame_numbers)
    for i, frame_batch in enumerate(batched(frames, FRAMES_PER_RESIZE)):
        if {frame.shape[1:] for frame in frame_batch} != {(video_info.height, video_info.width)}:
            raise PixelError("a frame of the video has another size than when it was converted")
        first = i * FRAMES_PER_RESIZE
        planes[first : first + len(frame_batch)] = pixel_planes(torch.stack(frame_batch), grid, settings)
    return planes


def iterate_frames(
    video_bytes: bytes, video_info: VideoInfo, frame_numbers: Sequence[int]
) -> Iterator[Tensor]:
    """Yields frames of a video file, each uint8 [3, height, width], in RGB, upright, in full size.

    Args:
        frame_numbers: ascending numbers of frames, counted from 0.

    Raises:
        PixelError: the file does not decode, or a frame of ``frame_numbers`` is missing.
    """
    if is_frame_archive(video_bytes):
        yield from _archive_frames(video_bytes, video_info, frame_numbers)
        return
    from av.video.reformatter import VideoReformatter

    # A separate converter without threads. PyAV 19 shares one in the whole process, and its threads do not
    # survive the fork of loader workers: if the parent has converted a frame before, a worker would hang.
    frame_converter = VideoReformatter()

    # Coded frames are larger than displayed ones, because sides are rounded up to whole blocks.
    max_pixels = (video_info.height + 256) * (video_info.width + 256)
    decoded_count = 0
    with pixel_errors("video"):
        for video_frame in decode_frames_at(
            lambda: _open_video(video_bytes, max_pixels), video_info.frame_count, frame_numbers
        ):
            rgb_array = frame_converter.reformat(video_frame, format="rgb24", threads=1).to_ndarray()
            decoded_count += 1
            yield upright_frame(torch.from_numpy(rgb_array).permute(2, 0, 1), video_frame)

    if decoded_count < len(frame_numbers):
        raise PixelError(f"frame {frame_numbers[decoded_count]} of the video is missing")


def _archive_frames(
    archive_bytes: bytes, video_info: VideoInfo, frame_numbers: Sequence[int]
) -> Iterator[Tensor]:
    frame_archive = FrameArchive(archive_bytes)
    max_pixels = video_info.height * video_info.width
    for frame_number in frame_numbers:
        check_time()
        if frame_number >= len(frame_archive):
            raise PixelError(f"frame {frame_number} of the video is missing")
        frame_pixels = _decode_archive_frame(frame_archive, frame_number, max_pixels)
        if frame_pixels.shape[1:] != (video_info.height, video_info.width):
            image_name = frame_archive.image_name(frame_number)
            raise PixelError(f"{image_name} has another size than when it was converted")
        yield frame_pixels


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
            raise ImageTooLargeError(
                f"frames of {pixels_text(codec_context.height, codec_context.width)}, more than the"
                f" {max_pixels} that are allowed"
            )
        codec_context.options = {"max_pixels": str(max_pixels)}  # later frames may be larger

    return video_container
