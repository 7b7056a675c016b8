"""Positions: M-RoPE of the language model, 2D positions and attention segments of the vision tower.

The loader computes them with torch on the CPU, so that a training step never derives a position or a segment
on the device. The reference for M-RoPE is ``get_rope_index_2``, ``_25`` and ``_3`` of Qwen's own fine-tuning
code. They give the same positions as vLLM, and as ``get_rope_index`` in the versions of transformers with
which the models were released (4.45 for Qwen2-VL, 4.49 for Qwen2.5-VL, 4.57 for Qwen3-VL). The reference for
the tower is ``get_vision_position_ids``, ``get_vision_window_index`` and ``get_vision_cu_seqlens`` of
``transformers.vision_utils`` (5.17).

A *merge unit* is the ``merge x merge`` block of patches that becomes one token of the language model. Patches
are always in merge-unit order (frame, unit row, unit column, row in unit, column in unit), which is the order
of HF's processors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_vl.spec.families import ModelSpec, VisionSpec


class PositionError(ValueError):
    """Tokens and grids do not match. The message names the medium and both counts."""


@dataclass(frozen=True)
class GridTHW:
    """The patches of one image or video: ``t`` frame groups of ``h`` rows by ``w`` columns."""

    t: int
    h: int
    w: int
    kind: Literal["image", "video"] = "image"
    second_per_grid: float = 1.0
    """Seconds of video that one frame group covers; ignored for images."""
    timestamps: tuple[float, ...] = ()
    """Seconds from the start of the video to each frame group, for families that write them into the text."""

    @property
    def num_patches(self) -> int:
        return self.t * self.h * self.w

    def num_tokens(self, merge_size: int) -> int:
        """Number of placeholders of this medium in the text, for a spatial merge size of ``merge_size``."""
        return self.num_patches // merge_size**2


def placeholder_runs(media_grids: Sequence[GridTHW], spec: ModelSpec) -> list[GridTHW]:
    """The media as the text contains them.

    If the family writes a timestamp before each frame group of a video, each group is a separate entry.
    """
    if not spec.vision.video_timestamps:
        return list(media_grids)

    return [
        frame
        for grid in media_grids
        for frame in [replace(grid, t=1, timestamps=())] * (grid.t if grid.kind == "video" else 1)
    ]


def placeholder_positions(token_ids: Tensor, media_grids: Sequence[GridTHW], spec: ModelSpec) -> list[int]:
    """The index in ``token_ids`` of the first placeholder of each grid, in the order of the text.

    Args:
        token_ids: int64 [S], with expanded placeholders.
        media_grids: what :func:`placeholder_runs` returns. Their token counts separate the runs, so two media
            may be adjacent.

    Raises:
        PositionError: the placeholders do not match the grids in kind, order or number.
    """
    ids = token_ids.numpy()
    positions = ((ids == spec.image_token_id) | (ids == spec.video_token_id)).nonzero()[0]
    token_counts = np.array([grid.num_tokens(spec.vision.spatial_merge_size) for grid in media_grids], int)
    if len(positions) != token_counts.sum():
        raise PositionError(
            f"the text holds {len(positions)} image and video placeholders; its media need"
            f" {token_counts.sum()}"
        )
    starts = token_counts.cumsum() - token_counts
    kind_ids = [spec.image_token_id if grid.kind == "image" else spec.video_token_id for grid in media_grids]
    wanted_positions = (positions[starts] - starts).repeat(token_counts) + np.arange(len(positions))
    is_right = (positions == wanted_positions) & (ids[positions] == np.repeat(kind_ids, token_counts))
    if not is_right.all():
        medium_number = int(np.searchsorted(starts, is_right.argmin(), side="right"))
        kind, count = media_grids[medium_number - 1].kind, token_counts[medium_number - 1]
        raise PositionError(
            f"medium {medium_number} ({kind}) needs {count} {kind} placeholders in one run; the text does not"
            " have them there"
        )
    return positions[starts].tolist()


def mrope_positions(token_ids: Tensor, media_grids: Sequence[GridTHW], spec: ModelSpec) -> Tensor:
    """M-RoPE positions int64 [3, S] (time, height, width) of one sample, starting at 0.

    For text, all three positions are equal and increase by 1 per token. A medium at position ``p`` spans
    ``p + (time, row, column)`` in merge units (see :func:`_merge_unit_positions`). The text after it
    continues after the largest of these positions, as in the released models' own code and in vLLM. (In
    transformers 5.3 to 5.24 it continues at ``p + max(rows, columns)``, which may lie within a video.)

    Args:
        token_ids: int64 [S], with expanded placeholders.
        media_grids: the media of the sample in the order of the text.

    Raises:
        PositionError: the placeholders do not match the grids.
    """
    run_grids = placeholder_runs(media_grids, spec)
    run_starts = placeholder_positions(token_ids, run_grids, spec)
    positions = np.empty((3, len(token_ids)), np.int64)
    next_token = next_position = 0
    for run_grid, run_start in zip(run_grids, run_starts, strict=True):
        # The text before the medium, and the medium.
        medium_position = next_position + run_start - next_token
        positions[:, next_token:run_start] = np.arange(next_position, medium_position)
        medium_positions = _merge_unit_positions(run_grid, spec.vision)
        next_token = run_start + medium_positions.shape[1]
        positions[:, run_start:next_token] = medium_positions + medium_position
        next_position = medium_position + int(medium_positions.max()) + 1

    # The text after the last medium.
    positions[:, next_token:] = np.arange(len(token_ids) - next_token) + next_position
    return torch.from_numpy(positions)


def _merge_unit_positions(media_grid: GridTHW, vision_spec: VisionSpec) -> NDArray[np.int64]:
    """int64 [3, tokens]: time, row and column of each merge unit, from 0.

    In Qwen2-VL, frame groups are 1 apart in time. In Qwen2.5-VL, group ``i`` is at ``int(i * second_per_grid
    * tokens_per_second)``. In Qwen3-VL, each group is a separate medium.
    """
    merge_size = vision_spec.spatial_merge_size
    axes = np.indices((media_grid.t, media_grid.h // merge_size, media_grid.w // merge_size)).reshape(3, -1)
    if media_grid.kind == "video" and vision_spec.tokens_per_second:
        # Computed in float32, as in the references: a float64 product may be truncated to another number.
        group_seconds = axes[0].astype(np.float32) * np.float32(media_grid.second_per_grid)
        axes[0] = group_seconds * np.float32(vision_spec.tokens_per_second)
    return axes


def patch_positions(media_grid: GridTHW, merge_size: int) -> Tensor:
    """int64 [patches, 2]: row and column of each patch within its frame, in merge-unit order."""
    rows, columns = np.arange(media_grid.h), np.arange(media_grid.w)
    shape = (media_grid.t, media_grid.h // merge_size, media_grid.w // merge_size, merge_size, merge_size, 2)
    positions = np.empty(shape, np.int64)
    positions[..., 0] = rows.reshape(-1, 1, merge_size, 1)
    positions[..., 1] = columns.reshape(-1, 1, merge_size)
    return torch.from_numpy(positions.reshape(-1, 2))


@dataclass
class WindowOrder:
    """The order in which the vision tower processes the merge units of a list of media."""

    unit_order: Tensor
    """int64 [N]: for each merge unit in the tower's order, its index in HF order over all media."""
    cu_seqlens: Tensor
    """int32 [frames + 1]: cumulative numbers of patches of whole frames."""
    cu_window_seqlens: Tensor
    """int32 [windows + 1]: cumulative numbers of patches of windows. Equal to ``cu_seqlens`` for a family
    without windows."""

    def patch_order(self, merge_unit: int) -> Tensor:
        """int64 [N * merge_unit]: the same permutation for patches."""
        return (self.unit_order[:, None] * merge_unit + torch.arange(merge_unit)).flatten()


def window_order(media_grids: Sequence[GridTHW], vision_spec: VisionSpec) -> WindowOrder:
    """The window order of all media of a row.

    Frames stay together. Within a frame, windows are in row-major order. There are no empty windows.
    """
    frame_lengths = [grid.h * grid.w for grid in media_grids for _ in range(grid.t)]
    cu_seqlens = _cumulative_lengths(torch.tensor(frame_lengths, dtype=torch.int32))
    if not vision_spec.window_size:
        return WindowOrder(torch.arange(sum(frame_lengths) // vision_spec.merge_unit), cu_seqlens, cu_seqlens)

    # Each merge unit gets the number of its window over all media. Sorting by it keeps the order within
    # windows.
    window_side = vision_spec.window_size // vision_spec.spatial_merge_size // vision_spec.patch_size
    window_numbers = []
    first_window = 0
    for grid in media_grids:
        rows, columns = (size // vision_spec.spatial_merge_size for size in (grid.h, grid.w))
        windows_across, windows_down = -(-columns // window_side), -(-rows // window_side)
        window_row = np.arange(rows)[:, None] // window_side
        unit_windows = (window_row * windows_across + np.arange(columns) // window_side).ravel()
        first_windows = np.arange(grid.t)[:, None] * (windows_across * windows_down) + first_window
        window_numbers.append((first_windows + unit_windows).ravel())
        first_window += grid.t * windows_across * windows_down

    window_of_unit = np.concatenate(window_numbers)
    unit_order = torch.from_numpy(window_of_unit.argsort(kind="stable"))
    units_per_window = torch.from_numpy(np.bincount(window_of_unit))
    return WindowOrder(unit_order, cu_seqlens, _cumulative_lengths(units_per_window * vision_spec.merge_unit))


def _cumulative_lengths(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
