"""Spreads the pictures of a step over ranks that all hold the vision tower.

Attention in the tower never leaves a frame, so the frames of all rows, in their order, can be cut anywhere
between two of them. Each rank gets one contiguous run: what is sent is a slice of what is there, and joining
what comes back restores the order. A rank's share exceeds the mean by less than one frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_vl.planning.flops import vision_parts
from megatron_vl.spec.families import VisionSpec

Array = np.ndarray


@dataclass(frozen=True)
class Frames:
    """All frames (of images and videos) of some rows, in the order in which the tower reads them."""

    patches: Array
    """int64 [F]"""
    windows: Array
    """int64 [W]: patches of each window; windows never leave a frame."""
    row: Array
    """int64 [F]: the row of each frame."""

    @property
    def first_patch(self) -> Array:
        """int64 [F + 1]: patches before each frame, and of all."""
        return starts(self.patches)

    @property
    def first_window(self) -> Array:
        """int64 [F + 1]: windows before each frame, and of all."""
        return np.searchsorted(starts(self.windows), self.first_patch)


def starts(sizes: Array, dtype: type = np.int64) -> Array:
    """[N + 1]: what precedes each part, and the total."""
    return np.concatenate((np.zeros(1, dtype), np.cumsum(sizes, dtype=dtype)))


def frames_of(rows: list[tuple[list[int], list[int]]]) -> Frames:
    """The frames of rows that are given as (patches of each frame, patches of each window)."""
    counts = [len(full) for full, _ in rows]

    def joined(lists: list[list[int]]) -> Array:
        return np.array([n for one in lists for n in one], dtype=np.int64)

    return Frames(
        joined([full for full, _ in rows]),
        joined([window for _, window in rows]),
        np.repeat(np.arange(len(rows)), counts),
    )


def frame_flops(vision: VisionSpec, frames: Frames) -> Array:
    """float64 [F]: forward FLOPs of each frame."""
    unit = vision.merge_unit
    one = vision_parts(vision, [unit], [unit])
    full_layers = sum(vision.is_full_attention(layer) for layer in range(vision.num_layers))

    squares = starts(frames.windows**2)
    window_pairs = np.diff(squares[frames.first_window])
    pairs = full_layers * frames.patches**2 + (vision.num_layers - full_layers) * window_pairs
    return (one.total - one.attention) / unit * frames.patches + 4.0 * vision.hidden_size * pairs


def cut_evenly(costs: Array, parts: int) -> Array:
    """int64 [parts + 1]: bounds of contiguous runs of about equal cost; runs may be empty."""
    before = starts(costs, np.float64)
    wanted = before[-1] * np.arange(1, parts) / parts
    above = np.searchsorted(before, wanted)
    below = np.maximum(above - 1, 0)
    nearest = np.where(wanted - before[below] < before[above] - wanted, below, above)
    return np.concatenate(([0], nearest, [len(costs)])).astype(np.int64)
