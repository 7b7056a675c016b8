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

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
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

    placeholder_grids = []
    for grid in media_grids:
        frame = dataclasses.replace(grid, t=1, timestamps=())
        placeholder_grids += [frame] * (grid.t if grid.kind == "video" else 1)
    return placeholder_grids


def placeholder_positions(token_ids: Tensor, media_grids: Sequence[GridTHW], spec: ModelSpec) -> list[int]:
    """The index in ``token_ids`` of the first placeholder of each grid, in the order of the text.

    Args:
        token_ids: int64 [S], with expanded placeholders.
        media_grids: what :func:`placeholder_runs` returns. Their token counts separate the runs, so two media
            may be adjacent.

    Raises:
        PositionError: the placeholders do not match the grids in kind, order or number.
    """
    is_media = (token_ids == spec.image_token_id) | (token_ids == spec.video_token_id)
    media_positions = is_media.nonzero().flatten()
    token_counts = [media_grid.num_tokens(spec.vision.spatial_merge_size) for media_grid in media_grids]
    if len(media_positions) != sum(token_counts):
        raise PositionError(
            f"the text holds {len(media_positions)} image and video placeholders; its media need"
            f" {sum(token_counts)}"
        )

    first_positions = []
    runs_by_medium = zip(media_grids, media_positions.split(token_counts), strict=False)
    for medium_number, (media_grid, placeholder_run) in enumerate(runs_by_medium, 1):
        placeholder_id = spec.image_token_id if media_grid.kind == "image" else spec.video_token_id
        if (
            len(placeholder_run) == 0
            or int(placeholder_run[-1] - placeholder_run[0]) != len(placeholder_run) - 1
            or not bool((token_ids[placeholder_run] == placeholder_id).all())
        ):
            raise PositionError(
                f"medium {medium_number} ({media_grid.kind}) needs {len(placeholder_run)} {media_grid.kind}"
                " placeholders in one run; the text does not have them there"
            )
        first_positions.append(int(placeholder_run[0]))
    return first_positions


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
    merge_size = spec.vision.spatial_merge_size
    position_parts: list[Tensor] = []
    next_token = next_position = 0
    run_grids = placeholder_runs(media_grids, spec)
    run_starts = placeholder_positions(token_ids, run_grids, spec)

    for run_grid, run_start in zip(run_grids, run_starts, strict=True):
        # The text before the medium.
        text_length = run_start - next_token
        position_parts.append((torch.arange(text_length) + next_position).expand(3, -1))
        next_position += text_length

        # The medium.
        medium_positions = _merge_unit_positions(run_grid, spec.vision)
        position_parts.append(medium_positions + next_position)
        next_position += int(medium_positions.max()) + 1
        next_token = run_start + run_grid.num_tokens(merge_size)

    # The text after the last medium.
    position_parts.append((torch.arange(len(token_ids) - next_token) + next_position).expand(3, -1))
    return torch.cat(position_parts, dim=1)


def _merge_unit_positions(media_grid: GridTHW, vision_spec: VisionSpec) -> Tensor:
    """int64 [3, tokens]: time, row and column of each merge unit, from 0.

    In Qwen2-VL, frame groups are 1 apart in time. In Qwen2.5-VL, group ``i`` is at ``int(i * second_per_grid
    * tokens_per_second)``. In Qwen3-VL, each group is a separate medium.
    """
    time_positions = torch.arange(media_grid.t)
    if media_grid.kind == "video" and vision_spec.tokens_per_second:
        seconds = media_grid.second_per_grid
        # Computed in float32, as in the references: a float64 product may be truncated to another number.
        group_seconds = time_positions * torch.tensor(seconds, dtype=torch.float32)
        time_positions = (group_seconds * vision_spec.tokens_per_second).long()

    row_positions = torch.arange(media_grid.h // vision_spec.spatial_merge_size)
    column_positions = torch.arange(media_grid.w // vision_spec.spatial_merge_size)
    axes = torch.meshgrid(time_positions, row_positions, column_positions, indexing="ij")
    return torch.stack(axes).reshape(3, -1)


def patch_positions(media_grid: GridTHW, merge_size: int) -> Tensor:
    """int64 [patches, 2]: row and column of each patch within its frame, in merge-unit order."""
    rows, columns = torch.meshgrid(torch.arange(media_grid.h), torch.arange(media_grid.w), indexing="ij")
    unit_shape = (media_grid.h // merge_size, merge_size, media_grid.w // merge_size, merge_size)
    unit_rows = rows.reshape(unit_shape).transpose(1, 2).flatten()
    unit_columns = columns.reshape(unit_shape).transpose(1, 2).flatten()
    return torch.stack((unit_rows, unit_columns), dim=1).repeat(media_grid.t, 1)


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
    merge_unit = vision_spec.merge_unit
    frame_lengths = [grid.h * grid.w for grid in media_grids for _ in range(grid.t)]
    cu_seqlens = _cumulative_lengths(torch.tensor(frame_lengths, dtype=torch.int32))
    if not vision_spec.window_size:
        return WindowOrder(torch.arange(sum(frame_lengths) // merge_unit), cu_seqlens, cu_seqlens)

    # Each merge unit gets the number of its window over all media. Sorting by it keeps the order within
    # windows.
    window_side = vision_spec.window_size // vision_spec.spatial_merge_size // vision_spec.patch_size
    window_numbers = []
    first_window = 0
    for grid in media_grids:
        rows, columns = (size // vision_spec.spatial_merge_size for size in (grid.h, grid.w))
        windows_across, windows_down = -(-columns // window_side), -(-rows // window_side)
        window_row = torch.arange(rows)[:, None] // window_side
        unit_windows = (window_row * windows_across + torch.arange(columns) // window_side).flatten()
        first_windows = torch.arange(grid.t)[:, None] * (windows_across * windows_down) + first_window
        window_numbers.append((first_windows + unit_windows).flatten())
        first_window += grid.t * windows_across * windows_down

    window_of_unit = torch.cat(window_numbers)
    unit_order = torch.argsort(window_of_unit, stable=True)
    units_per_window = torch.unique_consecutive(window_of_unit[unit_order], return_counts=True)[1]
    return WindowOrder(unit_order, cu_seqlens, _cumulative_lengths(units_per_window * merge_unit))


def _cumulative_lengths(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
