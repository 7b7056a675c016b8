"""Takes frames out of a video file and decodes little else.

Frame ``i`` is the frame that comes ``i``-th when the whole file is decoded. Where the wanted frames lie close
together, the file is decoded from its start. Otherwise the packets are listed without decoding, and decoding
starts anew at the last key frame before each wanted frame. That gives the same pixels, because no frame after
a key frame depends on one before it. Each frame is known by its time: if anything does not fit (packets
without times, other numbers of frames, a damaged frame), the file is decoded from its start.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_vl.data.sample.deadline import UNLIMITED, Deadline

FAR = 60
"""Frames between two wanted ones from which on it pays to list the packets."""
SKIP = 12
"""Frames that are decoded rather than sought past."""
STARTS_ANEW = {"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mpeg1video", "mpeg2video", "mjpeg"}
"""Codecs whose key frames stand alone. A frame of a GIF is painted over the one before it."""


class _UnsureError(Exception):
    """What was decoded after a seek is not what the packets announced."""


@dataclass(frozen=True)
class FrameTable:
    """The frames that a file's packets announce, in the order in which they are shown."""

    times: list[int]
    """Time of each frame, in the stream's own unit."""
    keys: list[int]
    """Numbers of the key frames, ascending."""


def frame_table(container: Any, deadline: Deadline = UNLIMITED) -> FrameTable | None:
    """Lists the packets of the first video stream; None if they do not say which frames there are.

    The container is at its end afterwards.
    """
    stream = container.streams.video[0]
    if stream.codec_context.name not in STARTS_ANEW:
        return None
    packets = []
    for packet in container.demux(stream):
        deadline.check()
        if not packet.size:  # the flush at the end
            continue
        if packet.pts is None or packet.is_discard or packet.is_corrupt:
            return None
        packets.append((packet.pts, packet.is_keyframe))

    packets.sort()
    times = [time for time, _ in packets]
    keys = [number for number, (_, is_key) in enumerate(packets) if is_key]
    if len(set(times)) < len(times) or not keys or keys[0] != 0:
        return None
    return FrameTable(times, keys)


def frames_at(
    opened: Callable[[], Any], number: int, wanted: Sequence[int], deadline: Deadline
) -> Iterator[Any]:
    """PyAV's frames of the first video stream, in order.

    Args:
        opened: opens the file as PyAV's container.
        number: frames that the file had when it was decoded as a whole.
        wanted: ascending numbers of frames, counted from 0.

    Yields:
        The wanted frames; fewer if the file ends before.

    Raises:
        OutOfTimeError: the deadline has passed.
        av.FFmpegError, OSError, ValueError: as PyAV raises them.
    """
    done = 0
    if max(now - before for before, now in zip([-1, *wanted[:-1]], wanted, strict=True)) > FAR:
        with opened() as container:
            table = frame_table(container, deadline)
        if table is not None and len(table.times) == number:
            with opened() as container:
                try:
                    for frame in _sought(container, table, wanted, deadline):
                        done += 1
                        yield frame
                    return
                except (_UnsureError, OSError, ValueError):  # PyAV's errors are of these kinds
                    deadline.check()

    with opened() as container:
        rest = iter(wanted[done:])
        want = next(rest)
        for at, frame in enumerate(container.decode(video=0)):
            deadline.check()
            if at == want:
                yield frame
                want = next(rest, -1)
                if want < 0:
                    return


def _sought(container: Any, table: FrameTable, wanted: Sequence[int], deadline: Deadline) -> Iterator[Any]:
    """The wanted frames, each decoded from a key frame before it."""
    stream = container.streams.video[0]
    frames: Iterator[Any] | None = None
    at = -1

    for want in wanted:
        key = table.keys[bisect_right(table.keys, want) - 1]
        if frames is None or key > at + SKIP:
            container.seek(table.times[key], stream=stream, backward=True)
            frames = container.decode(stream)

        for frame in frames:
            deadline.check()
            if frame.pts is None or frame.is_corrupt:
                raise _UnsureError
            if frame.pts >= table.times[want]:
                break
        else:
            raise _UnsureError

        if frame.pts != table.times[want]:
            raise _UnsureError
        at = want
        yield frame
