"""Spreads the images of a step over ranks that all hold the vision tower.

Attention in the tower never leaves a frame, so the frames of all rows, in their order, can be cut anywhere
between two of them. Each rank gets one contiguous run of frames, so the pixels to send are a slice, and
concatenated features are in order again. A rank's share exceeds the mean by less than one frame.
"""

from dataclasses import dataclass

import numpy as np

from megatron_vl.estimate.flops import RowSizes, tower_forward_flops
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
        """int64 [F + 1]: number of patches before each frame; the last entry is the total."""
        return cumulative_starts(self.patches_per_frame)

    @property
    def first_window(self) -> Array:
        """int64 [F + 1]: number of windows before each frame; the last entry is the total."""
        return np.searchsorted(cumulative_starts(self.patches_per_window), self.first_patch)


def cumulative_starts(part_sizes: Array, dtype: type = np.int64) -> Array:
    """[N + 1]: the sum of the sizes before each part; the last entry is the total."""
    return np.concatenate((np.zeros(1, dtype), np.cumsum(part_sizes, dtype=dtype)))


def make_tower_frames(row_lengths: list[tuple[list[int], list[int]]]) -> TowerFrames:
    """The frames of rows that are given as (patches of each frame, patches of each window)."""
    frames = [length for frame_lengths, _ in row_lengths for length in frame_lengths]
    windows = [length for _, window_lengths in row_lengths for length in window_lengths]
    frames_per_row = [len(frame_lengths) for frame_lengths, _ in row_lengths]
    row_of_frame = np.repeat(np.arange(len(row_lengths)), frames_per_row)
    return TowerFrames(*(np.array(values, dtype=np.int64) for values in (frames, windows, row_of_frame)))


def frame_flops(vision: VisionSpec, frames: TowerFrames) -> Array:
    """float64 [F]: forward FLOPs of each frame."""
    unit_sizes = RowSizes(tokens=0, token_pairs=0, loss_tokens=0, patches=vision.merge_unit)
    num_full_layers = sum(vision.is_full_attention(layer) for layer in range(vision.num_layers))

    squared_window_starts = cumulative_starts(frames.patches_per_window**2)
    attended_pairs = num_full_layers * frames.patches_per_frame**2 + (
        vision.num_layers - num_full_layers
    ) * np.diff(squared_window_starts[frames.first_window])
    linear_flops_per_patch = sum(tower_forward_flops(vision, unit_sizes)) / vision.merge_unit
    return linear_flops_per_patch * frames.patches_per_frame + 4.0 * vision.hidden_size * attended_pairs


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
