"""Spreads the pictures of a step over ranks that all hold the vision tower.

Attention in the tower never leaves a frame, so the frames of all rows, in their order, can be cut anywhere
between two of them. Each rank gets one contiguous run: what is sent is a slice of what is there, and joining
what comes back restores the order. A rank's share exceeds the mean by less than one frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_vl.planning.flops import vision_forward_flops
from megatron_vl.spec.families import VisionSpec

Array = np.ndarray


@dataclass(frozen=True)
class TowerFrames:
    """All frames (of images and videos) of some rows, in the order in which the tower reads them."""

    patches_per_frame: Array
    """int64 [F]"""
    patches_per_window: Array
    """int64 [W]: patches of each window; windows never leave a frame."""
    row_of_frame: Array
    """int64 [F]: the row of each frame."""

    @property
    def first_patch(self) -> Array:
        """int64 [F + 1]: patches before each frame, and of all."""
        return cumulative_starts(self.patches_per_frame)

    @property
    def first_window(self) -> Array:
        """int64 [F + 1]: windows before each frame, and of all."""
        return np.searchsorted(cumulative_starts(self.patches_per_window), self.first_patch)


def cumulative_starts(part_sizes: Array, dtype: type = np.int64) -> Array:
    """[N + 1]: what precedes each part, and the total."""
    return np.concatenate((np.zeros(1, dtype), np.cumsum(part_sizes, dtype=dtype)))


def make_tower_frames(row_lengths: list[tuple[list[int], list[int]]]) -> TowerFrames:
    """The frames of rows that are given as (patches of each frame, patches of each window)."""
    frames_per_row = [len(full) for full, _ in row_lengths]

    def join_lists(length_lists: list[list[int]]) -> Array:
        return np.array([length for one in length_lists for length in one], dtype=np.int64)

    return TowerFrames(
        join_lists([full for full, _ in row_lengths]),
        join_lists([window for _, window in row_lengths]),
        np.repeat(np.arange(len(row_lengths)), frames_per_row),
    )


def frame_flops(vision: VisionSpec, frames: TowerFrames) -> Array:
    """float64 [F]: forward FLOPs of each frame."""
    merge_unit = vision.merge_unit
    unit_flops = vision_forward_flops(vision, [merge_unit], [merge_unit])
    num_full_layers = sum(vision.is_full_attention(layer) for layer in range(vision.num_layers))

    squared_window_starts = cumulative_starts(frames.patches_per_window**2)
    window_pairs = np.diff(squared_window_starts[frames.first_window])
    attended_pairs = (
        num_full_layers * frames.patches_per_frame**2 + (vision.num_layers - num_full_layers) * window_pairs
    )
    return (
        unit_flops.total - unit_flops.attention
    ) / merge_unit * frames.patches_per_frame + 4.0 * vision.hidden_size * attended_pairs


def split_by_cost(costs: Array, num_parts: int) -> Array:
    """int64 [parts + 1]: bounds of contiguous runs of about equal cost; runs may be empty."""
    cumulative_costs = cumulative_starts(costs, np.float64)
    target_costs = cumulative_costs[-1] * np.arange(1, num_parts) / num_parts
    index_above = np.searchsorted(cumulative_costs, target_costs)
    index_below = np.maximum(index_above - 1, 0)
    nearest_index = np.where(
        target_costs - cumulative_costs[index_below] < cumulative_costs[index_above] - target_costs,
        index_below,
        index_above,
    )
    return np.concatenate(([0], nearest_index, [len(costs)])).astype(np.int64)
