"""Decodes chosen frames of a video file, and as few others as possible.

Frame ``i`` is the frame that comes ``i``-th when the whole file is decoded. If the chosen frames are close
together, the file is decoded from its start. Otherwise the packets are listed without decoding, and decoding
starts again at the last key frame before each chosen frame. That gives the same pixels, because no frame
after a key frame depends on one before it. Frames are identified by their times. If anything does not fit
(packets without times, another number of frames, a damaged frame), the file is decoded from its start.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.sample.deadline import NO_DEADLINE, SampleDeadline

SEEK_DISTANCE = 60
"""If two chosen frames are further apart than this number of frames, it is faster to list the packets."""
MAX_DECODED_GAP = 12
"""Largest number of frames that are decoded instead of being skipped by a seek."""
SEEKABLE_CODECS = {"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg"}
"""Codecs whose key frames depend on no other frame. A frame of a GIF is painted over the one before it."""


class _SeekMismatchError(Exception):
    """What was decoded after a seek is not what the packets announced."""


@dataclass(frozen=True)
class FrameTable:
    """The frames that a file's packets announce, in the order in which they are shown."""

    frame_times: list[int]
    """Time of each frame, in the stream's own unit."""
    key_frames: list[int]
    """Numbers of the key frames, ascending."""


def list_frames(video_container: Any, deadline: SampleDeadline = NO_DEADLINE) -> FrameTable | None:
    """Lists the packets of the first video stream. Returns None if they do not say which frames there are.

    The container is at its end afterwards.
    """
    video_stream = video_container.streams.video[0]
    if video_stream.codec_context.name not in SEEKABLE_CODECS:
        return None
    packet_times = []
    for video_packet in video_container.demux(video_stream):
        deadline.check_time()
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
    return FrameTable(frame_times, key_frames)


def decode_frames_at(
    open_container: Callable[[], Any],
    frame_count: int,
    frame_numbers: Sequence[int],
    deadline: SampleDeadline,
) -> Iterator[Any]:
    """PyAV's frames of the first video stream, in order.

    Args:
        open_container: opens the file as PyAV's container.
        frame_count: number of frames that the whole file had when it was converted.
        frame_numbers: the chosen frames: ascending numbers, counted from 0.

    Yields:
        The chosen frames; fewer if the file ends earlier.

    Raises:
        SampleTimeoutError: the deadline has passed.
        av.FFmpegError, OSError, ValueError: as PyAV raises them.
    """
    yielded_frames = 0
    previous_numbers = [-1, *frame_numbers[:-1]]
    largest_gap = max(map(operator.sub, frame_numbers, previous_numbers))
    if largest_gap > SEEK_DISTANCE:
        with open_container() as video_container:
            listed_frames = list_frames(video_container, deadline)
        if listed_frames is not None and len(listed_frames.frame_times) == frame_count:
            with open_container() as video_container:
                try:
                    for video_frame in _seek_frames(video_container, listed_frames, frame_numbers, deadline):
                        yielded_frames += 1
                        yield video_frame
                    return
                except (_SeekMismatchError, OSError, ValueError):  # PyAV's errors are of these kinds
                    deadline.check_time()

    with open_container() as video_container:
        remaining_numbers = iter(frame_numbers[yielded_frames:])
        next_number = next(remaining_numbers)
        for current_number, video_frame in enumerate(video_container.decode(video=0)):
            deadline.check_time()
            if current_number == next_number:
                yield video_frame
                next_number = next(remaining_numbers, -1)
                if next_number < 0:
                    return


def _seek_frames(
    video_container: Any, listed_frames: FrameTable, frame_numbers: Sequence[int], deadline: SampleDeadline
) -> Iterator[Any]:
    """Yields the chosen frames, each decoded from a key frame before it."""
    video_stream = video_container.streams.video[0]
    decoded_frames: Iterator[Any] | None = None
    current_number = -1

    for frame_number in frame_numbers:
        key_frame = listed_frames.key_frames[bisect_right(listed_frames.key_frames, frame_number) - 1]
        if decoded_frames is None or key_frame > current_number + MAX_DECODED_GAP:
            video_container.seek(listed_frames.frame_times[key_frame], stream=video_stream, backward=True)
            decoded_frames = video_container.decode(video_stream)

        for video_frame in decoded_frames:
            deadline.check_time()
            if video_frame.pts is None or video_frame.is_corrupt:
                raise _SeekMismatchError
            if video_frame.pts >= listed_frames.frame_times[frame_number]:
                break
        else:
            raise _SeekMismatchError

        if video_frame.pts != listed_frames.frame_times[frame_number]:
            raise _SeekMismatchError
        current_number = frame_number
        yield video_frame
