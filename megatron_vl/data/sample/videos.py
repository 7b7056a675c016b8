"""Measures videos, and decodes their sampled frames into uint8 pixel planes.

Of a file, the track that a player shows is chosen and described, and as few frames as possible are decoded.
Frame ``i`` is the frame that comes ``i``-th when the whole file is decoded. If the chosen frames are close
together, the file is decoded from its start. Otherwise the packets are listed without decoding, and decoding
starts again at the last key frame before each chosen frame. That gives the same pixels, because no frame
after a key frame depends on one before it. Frames are identified by their times. If anything does not fit
(packets without times, another number of frames, a damaged frame), the file is decoded from its start.
"""

import io
import operator
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import batched
from typing import Any

import numpy as np
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
from megatron_vl.spec.positions import GridTHW

FRAMES_PER_RESIZE = 8
"""Frames of a video that are decoded before they are resized together."""
VIDEO_FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,asf,ogg,gif,h264,hevc,m4v,apng"
)
SEEK_DISTANCE = 8
"""If two chosen frames are further apart than this number of frames, it is faster to list the packets, which
takes 2 to 4 % of the time of decoding all frames."""
MAX_DECODED_GAP = 4
"""Largest number of frames that are decoded instead of being skipped by a seek."""
SEEKABLE_CODECS = {"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg"}
"""Codecs whose key frames depend on no other frame. A frame of a GIF is painted over the one before it."""
LONG_VIDEO_FRAMES = 18_000
"""Number of frames above which :func:`describe_video` decodes only key frames; ten minutes at 30 frames a
second."""
HOLE_FORMATS = ("matroska", "flv")
"""Formats in which FFmpeg reads on after a hole. MP4 and GIF say how long each frame is shown."""
MATROSKA_PARENTS = (0x18538067, 0x1F43B675)
"""Ids of the segment and of its clusters, which hold the other elements."""
MATROSKA_IDS = {
    *b"\xe7\xa3\xa0\xa7\xab\xec\xbf\xaf",
    *(0x1A45DFA3, 0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367),
}
"""Ids of the elements in a file, a segment and a cluster."""
RAW_FORMATS = ("h264", "hevc", "m4v", "mpegvideo")
"""Formats without times. Their rate is the codec's; if that has none, FFmpeg assumes 25 frames a second."""
BROADCAST_FORMATS = ("mpegts", "mpeg")
"""Formats whose times may jump, for instance where two recordings were joined."""
HEADER_FORMATS = ("mov", "matroska", "avi", "flv", "asf")
"""Formats whose header says how long the video is. FFmpeg estimates that of others from what is there."""
MISSING_FRAMES, MISSING_SHARE = 3, 0.02
"""A video is refused if it lacks more than this number of frames and more than this share of its frames."""
TS_PACKET_BYTES = 188


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
    for frame_number in frame_numbers:
        check_time()
        if frame_number >= len(frame_archive):
            raise PixelError(f"frame {frame_number} of the video is missing")
        frame_pixels = _decode_archive_frame(
            frame_archive, frame_number, video_info.height * video_info.width
        )
        if frame_pixels.shape[1:] != (video_info.height, video_info.width):
            raise PixelError(
                f"{frame_archive.image_name(frame_number)} has another size than when it was converted"
            )
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


# --- Tracks and frames of a file ----------------------------------------------------------------------------


class _SeekMismatchError(Exception):
    """What was decoded after a seek is not what the packets announced."""


type FrameTable = tuple[list[int], list[int]]
"""The frames that a file's packets announce, in the order in which they are shown: the time of each in the
stream's own unit, and the numbers of the key frames, ascending."""


def choose_track(video_container: Any) -> Any:
    """The video stream that a player shows: the first default one, or the first of all.

    Raises:
        PixelError: there is none. The cover of an audio file is an image.
    """
    tracks = [s for s in video_container.streams.video if not s.disposition & s.disposition.attached_pic]
    if not tracks:
        raise PixelError("the file has no video track" + " but a cover" * bool(video_container.streams.video))
    return max(tracks, key=lambda stream: bool(stream.disposition & stream.disposition.default))


def upright_frame(frame_pixels: Tensor, video_frame: Any) -> Tensor:
    """Turns and mirrors a frame, [..., height, width], as the track's display matrix says."""
    is_transposed, mirrored_dims = _frame_turn(video_frame)
    if is_transposed:
        frame_pixels = frame_pixels.transpose(-1, -2)
    return frame_pixels.flip(mirrored_dims) if mirrored_dims else frame_pixels


def _frame_turn(video_frame: Any) -> tuple[bool, list[int]]:
    """Whether height and width change places, and which dimensions are mirrored afterwards."""
    if (matrix_data := video_frame.side_data.get("DISPLAYMATRIX")) is None:
        return False, []
    # x' = a x + c y and y' = b x + d y. PyAV's ``rotation`` is the same for half a turn and for a mirror.
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix_data)[:20])
    a, b, c, d = (number * (abs(number) > 255) for number in (a, b, c, d))  # sines of quarter turns, rounded
    if (a or d) and (b or c):
        raise PixelError("the display matrix of the video has other than quarter turns")
    is_transposed = bool(b or c)
    x_factor, y_factor = (c, b) if is_transposed else (a, d)
    return is_transposed, [-1] * (x_factor < 0) + [-2] * (y_factor < 0)


def describe_video(video_bytes: bytes, open_container: Callable[[], Any]) -> VideoInfo:
    """What a player shows of a video file, found by decoding all of it, or the key frames of a long one.

    The rate is the header's, or the mean if the frames' times say otherwise.

    Raises:
        PixelError: there is no video track, its frames differ in size, or frames are missing.
    """
    with open_container() as video_container:
        track = choose_track(video_container)
        format_name = video_container.format.name.partition(",")[0]
        is_raw = format_name in RAW_FORMATS
        stated_rate = float(
            (not is_raw and track.average_rate) or track.guessed_rate or track.average_rate or 0
        )
        frame_size, frame_times, last_duration, damaged_count = _decode_track(
            video_container, track, open_container
        )
        if not frame_times or not stated_rate:
            raise PixelError(
                f"a video of {len(frame_times)} frames at {stated_rate} frames a second is empty"
            )

        first_time, seconds, hole_count = 0.0, len(frame_times) / stated_rate, 0
        known_times = [time for time in frame_times if time is not None]
        if len(known_times) == len(frame_times) and format_name not in (*RAW_FORMATS, *BROADCAST_FORMATS):
            first_time = float(min(known_times) * track.time_base)
            seconds = float(max(known_times) * track.time_base) - first_time
            seconds += float(last_duration * track.time_base) or 1 / stated_rate
            if format_name in HOLE_FORMATS:
                hole_count = _frames_in_hole(known_times, float(stated_rate * track.time_base))
            if hole_count and format_name == "matroska" and _is_whole_matroska(video_bytes):
                hole_count = 0
        unseen_seconds = 0.0
        if format_name in HEADER_FORMATS:
            unseen_seconds = _unseen_seconds(
                video_container, track, max(seconds, first_time + seconds), open_container
            )
        has_no_rate = is_raw and not track.codec_context.framerate

    mean_rate = len(frame_times) / seconds
    # Times tell a variable rate from missing frames, unless something is known to be damaged.
    expected_count = round((seconds + unseen_seconds) * (stated_rate if damaged_count else mean_rate))
    missing_count = max(expected_count - len(frame_times), hole_count) + damaged_count
    if missing_count > max(MISSING_FRAMES, MISSING_SHARE * expected_count):
        raise PixelError(
            f"the file is damaged or cut short: {missing_count} of {expected_count} frames are missing"
        )
    _check_file_end(video_bytes, format_name)

    # Containers round the times of a constant rate, so only a larger difference is one of a variable rate.
    is_constant = abs(len(frame_times) / stated_rate - seconds) <= max(2 / stated_rate, 0.02 * seconds)
    return VideoInfo(
        *(len(frame_times), stated_rate if is_constant else mean_rate, *frame_size), assumed_fps=has_no_rate
    )


def _decode_track(
    video_container: Any, track: Any, open_container: Callable[[], Any]
) -> tuple[tuple[int, int], list[int | None], int, int]:
    """Decodes all frames of a track, or the key frames of a long one whose packets tell the others.

    Returns:
        Height and width, upright; the time of each frame; the duration of the last one; and the number of
        packets and frames that FFmpeg calls corrupt.
    """
    listed_frames = None
    if track.frames > LONG_VIDEO_FRAMES:
        with open_container() as listed_container:
            listed_frames = list_frames(listed_container)
        if listed_frames is not None:
            track.codec_context.skip_frame = "NONKEY"

    size, times, last_duration, damaged_count = (0, 0), list[int | None](), 0, 0
    for packet in video_container.demux(track):
        damaged_count += packet.is_corrupt
        for video_frame in packet.decode():
            frame_size = (video_frame.height, video_frame.width)
            frame_size = frame_size[::-1] if _frame_turn(video_frame)[0] else frame_size
            if times and frame_size != size:
                raise PixelError(
                    f"frame {len(times)} has {pixels_text(*frame_size)}, those before it"
                    f" {size[1]} x {size[0]}; the frames of a video must have one size"
                )
            size = frame_size
            times.append(video_frame.pts)
            last_duration = video_frame.duration
            damaged_count += video_frame.is_corrupt

    if listed_frames is not None:
        if len(times) < len(listed_frames[1]):
            raise PixelError("a key frame of the video does not decode")
        times = [*listed_frames[0]]
    return size, times, last_duration, damaged_count


def _unseen_seconds(
    video_container: Any, track: Any, last_end: float, open_container: Callable[[], Any]
) -> float:
    """How much longer the video should be than what the file has of it, by its header."""
    if track.duration:
        promised_seconds = float(track.duration * track.time_base)
    elif tag := track.metadata.get("DURATION"):  # of Matroska, as 00:01:02.345
        promised_seconds = sum(float(part) * 60**i for i, part in enumerate(reversed(tag.split(":"))))
    elif video_container.duration:  # of the longest track, which need not be this one
        promised_seconds = video_container.duration / 1e6
        with open_container() as other_container:
            for packet in other_container.demux():
                if packet.pts is not None:
                    last_end = max(last_end, float((packet.pts + packet.duration) * packet.time_base))
    else:
        return 0.0
    return max(0.0, promised_seconds - last_end)


def _frames_in_hole(frame_times: list[int], unit_rate: float) -> int:
    """How many frames are missing where frames of a constant rate have one interval that is longer.

    Args:
        unit_rate: frames in a unit of the times.
    """
    intervals = np.diff(np.sort(frame_times)) * unit_rate
    is_long = intervals > 1.5
    has_hole = len(intervals) > 8 and is_long.sum() == 1 and (intervals[~is_long] > 0.5).all()
    return round(intervals.max()) - 1 if has_hole else 0


def _is_whole_matroska(video_bytes: bytes) -> bool:
    """Whether the elements of a Matroska file follow each other up to its end."""
    position = 0
    while position < len(video_bytes):
        id_bytes = 9 - video_bytes[position].bit_length()
        element_id = int.from_bytes(video_bytes[position : position + id_bytes])
        position += id_bytes
        if position >= len(video_bytes):
            return False
        size_bytes = 9 - video_bytes[position].bit_length()
        size = int.from_bytes(video_bytes[position : position + size_bytes]) - (1 << 7 * size_bytes)
        position += size_bytes
        if element_id in MATROSKA_PARENTS:
            continue
        if element_id not in MATROSKA_IDS:
            return False
        position += size
    return position == len(video_bytes)


def _check_file_end(video_bytes: bytes, format_name: str) -> None:
    """Raises PixelError if a file without a header of its length ends where none may end."""
    is_cut = format_name == "gif" and not _has_gif_end(video_bytes)
    if format_name == "mpegts" and video_bytes[0] == video_bytes[TS_PACKET_BYTES] == 0x47:
        marks = video_bytes[::TS_PACKET_BYTES]
        is_cut = len(video_bytes) % TS_PACKET_BYTES != 0
        is_cut |= marks.count(0x47) < (1 - MISSING_SHARE) * len(marks)
    if is_cut:
        raise PixelError("the file is cut short: it ends within a frame or packet")


def _has_gif_end(gif_bytes: bytes) -> bool:
    """Whether the blocks of a GIF lead to its trailer, after which there may be anything."""

    def palette_bytes(flags: int) -> int:
        return 3 << (flags & 7) + 1 if flags & 0x80 else 0

    def byte_at(position: int) -> int:
        return int.from_bytes(gif_bytes[position : position + 1])

    position = 13 + palette_bytes(byte_at(10))
    while (block := gif_bytes[position : position + 1]) in (b"!", b","):
        position += 2 if block == b"!" else 11 + palette_bytes(byte_at(position + 9))
        while size := byte_at(position):  # pieces of data
            position += 1 + size
        position += 1
    return block == b";"


def list_frames(video_container: Any) -> FrameTable | None:
    """Lists the packets of the video track. Returns None if they do not say which frames there are.

    The container is at its end afterwards.
    """
    video_stream = choose_track(video_container)
    if video_stream.codec_context.name not in SEEKABLE_CODECS:
        return None
    packet_times = []
    for video_packet in video_container.demux(video_stream):
        check_time()
        if not video_packet.size:  # the flush at the end
            continue
        if video_packet.pts is None or video_packet.is_discard or video_packet.is_corrupt:
            return None
        packet_times.append((video_packet.pts, video_packet.is_keyframe))

    packet_times.sort()
    frame_times = [time for time, _ in packet_times]
    key_frames = [number for number, (_, is_key) in enumerate(packet_times) if is_key]
    if len(set(frame_times)) < len(frame_times) or not key_frames or key_frames[0] != 0:
        return None
    return frame_times, key_frames


def decode_frames_at(
    open_container: Callable[[], Any], frame_count: int, frame_numbers: Sequence[int]
) -> Iterator[Any]:
    """PyAV's frames of the video track, in order.

    Args:
        open_container: opens the file as PyAV's container.
        frame_count: number of frames that the whole file had when it was converted.
        frame_numbers: the chosen frames: ascending numbers, counted from 0.

    Yields:
        The chosen frames; fewer if the file ends earlier.

    Raises:
        av.FFmpegError, OSError, ValueError: as PyAV raises them.
    """
    yielded_frames = 0
    if max(map(operator.sub, frame_numbers, [-1, *frame_numbers[:-1]])) > SEEK_DISTANCE:
        with open_container() as video_container:
            listed_frames = list_frames(video_container)
        if listed_frames is not None and len(listed_frames[0]) == frame_count:
            with open_container() as video_container:
                with suppress(_SeekMismatchError, OSError, ValueError):  # PyAV's errors are of these kinds
                    for video_frame in _seek_frames(video_container, listed_frames, frame_numbers):
                        yielded_frames += 1
                        yield video_frame
                    return

    with open_container() as video_container:
        remaining_numbers = iter(frame_numbers[yielded_frames:])
        next_number = next(remaining_numbers)
        for current_number, video_frame in enumerate(video_container.decode(choose_track(video_container))):
            check_time()
            if current_number == next_number:
                yield video_frame
                if (next_number := next(remaining_numbers, -1)) < 0:
                    return


def _seek_frames(
    video_container: Any, listed_frames: FrameTable, frame_numbers: Sequence[int]
) -> Iterator[Any]:
    """Yields the chosen frames, each decoded from a key frame before it."""
    video_stream, (frame_times, key_frames) = choose_track(video_container), listed_frames
    decoded_frames: Iterator[Any] | None = None
    current_number = -1

    for frame_number in frame_numbers:
        key_frame = key_frames[bisect_right(key_frames, frame_number) - 1]
        if decoded_frames is None or key_frame > current_number + MAX_DECODED_GAP:
            video_container.seek(frame_times[key_frame], stream=video_stream, backward=True)
            decoded_frames = video_container.decode(video_stream)

        for video_frame in decoded_frames:
            check_time()
            if video_frame.pts is None or video_frame.is_corrupt:
                raise _SeekMismatchError
            if video_frame.pts >= frame_times[frame_number]:
                break
        else:
            raise _SeekMismatchError

        if video_frame.pts != frame_times[frame_number]:
            raise _SeekMismatchError
        current_number = frame_number
        yield video_frame
