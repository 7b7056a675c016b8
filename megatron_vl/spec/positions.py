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

from megatron_vl.config import VideoPositions
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
    def patches(self) -> int:
        return self.t * self.h * self.w

    def tokens(self, merge: int) -> int:
        """Number of placeholders of this medium in the text, for a spatial merge size of ``merge``."""
        return self.patches // merge**2


def placeholder_runs(grids: Sequence[GridTHW], spec: ModelSpec) -> list[GridTHW]:
    """The media as the text contains them.

    If the family writes a timestamp before each frame group of a video, each group is a separate entry.
    """
    if not spec.vision.video_timestamps:
        return list(grids)

    runs = []
    for grid in grids:
        frame = dataclasses.replace(grid, t=1, timestamps=())
        runs += [frame] * (grid.t if grid.kind == "video" else 1)
    return runs


def placeholder_positions(token_ids: Tensor, grids: Sequence[GridTHW], spec: ModelSpec) -> list[int]:
    """The index in ``token_ids`` (int64 [S]) of the first placeholder of each grid, in the order of the text.

    ``grids`` come from :func:`placeholder_runs`. Their token counts separate the runs, so two media may be
    adjacent.

    Raises:
        PositionError: the placeholders do not match the grids in kind, order or number.
    """
    merge = spec.vision.spatial_merge_size
    is_media = (token_ids == spec.image_token_id) | (token_ids == spec.video_token_id)
    where = is_media.nonzero().flatten()
    wanted = [grid.tokens(merge) for grid in grids]
    if len(where) != sum(wanted):
        raise PositionError(
            f"the text holds {len(where)} image and video placeholders; its media need {sum(wanted)}"
        )

    starts = []
    seen = 0
    for number, (grid, count) in enumerate(zip(grids, wanted, strict=True)):
        run = where[seen : seen + count]
        token = spec.image_token_id if grid.kind == "image" else spec.video_token_id
        if count == 0 or int(run[-1] - run[0]) != count - 1 or not bool((token_ids[run] == token).all()):
            what = f"medium {number + 1} ({grid.kind}) needs {count} {grid.kind} placeholders in one run"
            raise PositionError(f"{what}; the text does not have them there")
        starts.append(int(run[0]))
        seen += count
    return starts


def mrope_positions(
    token_ids: Tensor, grids: Sequence[GridTHW], spec: ModelSpec, video_positions: VideoPositions = "released"
) -> Tensor:
    """M-RoPE positions int64 [3, S] (time, height, width) of one sample, starting at 0.

    For text, all three positions are equal and increase by 1 per token. A medium at position ``p`` spans
    ``p + (time, row, column)`` in merge units, and the text after it continues after the largest of these
    positions. In Qwen2-VL, frame groups are 1 apart in time. In Qwen2.5-VL, group ``i`` is at ``int(i *
    second_per_grid * tokens_per_second)``. In Qwen3-VL, each group is a separate medium, with text between
    them.

    With the rule ``transformers_5_3``, text continues at ``p + max(rows, columns)``, which may lie within the
    video. ``second_per_grid`` is first truncated to whole seconds. If a group covers less than a second, all
    groups of a clip therefore have the same time.

    Args:
        token_ids: int64 [S], with expanded placeholders.
        grids: the media of the sample in the order of the text.
        spec: the model.
        video_positions: the rule. It makes no difference for images or for Qwen3-VL.

    Raises:
        PositionError: the placeholders do not match the grids.
    """
    merge = spec.vision.spatial_merge_size
    parts: list[Tensor] = []
    here = position = 0
    runs = placeholder_runs(grids, spec)

    for grid, start in zip(runs, placeholder_positions(token_ids, runs, spec), strict=True):
        parts.append((torch.arange(start - here) + position).expand(3, -1))
        position += start - here

        medium = _medium_positions(grid, spec.vision, video_positions)
        parts.append(medium + position)
        position += int(medium.max()) + 1 if video_positions == "released" else max(grid.h, grid.w) // merge
        here = start + grid.tokens(merge)

    parts.append((torch.arange(len(token_ids) - here) + position).expand(3, -1))
    return torch.cat(parts, dim=1)


def _medium_positions(grid: GridTHW, vision: VisionSpec, video_positions: VideoPositions) -> Tensor:
    """int64 [3, tokens]: time, row and column of each merge unit, from 0."""
    times = torch.arange(grid.t)
    if grid.kind == "video" and vision.tokens_per_second:
        seconds = grid.second_per_grid if video_positions == "released" else int(grid.second_per_grid)
        # Computed in float32, as in the references: a float64 product may be truncated to another number.
        times = (times * torch.tensor(seconds, dtype=torch.float32) * vision.tokens_per_second).long()

    merge = vision.spatial_merge_size
    axes = (times, torch.arange(grid.h // merge), torch.arange(grid.w // merge))
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1)


def patch_positions(grid: GridTHW, merge: int) -> Tensor:
    """int64 [patches, 2]: row and column of each patch within its frame, in merge-unit order."""
    rows, columns = torch.meshgrid(torch.arange(grid.h), torch.arange(grid.w), indexing="ij")
    blocks = (grid.h // merge, merge, grid.w // merge, merge)
    frame = torch.stack([a.reshape(blocks).transpose(1, 2).flatten() for a in (rows, columns)], dim=1)
    return frame.repeat(grid.t, 1)


@dataclass
class WindowOrder:
    """The order in which the vision tower processes the merge units of a list of media."""

    units: Tensor
    """int64 [N]: for each merge unit in the tower's order, its index in HF order over all media."""
    cu_seqlens: Tensor
    """int32 [frames + 1]: cumulative numbers of patches of whole frames."""
    cu_window_seqlens: Tensor
    """int32 [windows + 1]: cumulative numbers of patches of windows. Equal to ``cu_seqlens`` for a family
    without windows."""

    def patches(self, merge_unit: int) -> Tensor:
        """int64 [N * merge_unit]: the same permutation for patches."""
        return (self.units[:, None] * merge_unit + torch.arange(merge_unit)).flatten()


def window_order(grids: Sequence[GridTHW], vision: VisionSpec) -> WindowOrder:
    """The window order of all media of a row.

    Frames stay together. Within a frame, windows are in row-major order. There are no empty windows.
    """
    unit = vision.merge_unit
    frames = torch.tensor([grid.h * grid.w for grid in grids for _ in range(grid.t)], dtype=torch.int32)
    cu_seqlens = _cumulative(frames)
    if not vision.window_size:
        return WindowOrder(torch.arange(int(frames.sum()) // unit), cu_seqlens, cu_seqlens)

    side = vision.window_size // vision.spatial_merge_size // vision.patch_size
    keys = []
    first = 0
    for grid in grids:
        window, per_frame = _window_of_unit(
            grid.h // vision.spatial_merge_size, grid.w // vision.spatial_merge_size, side
        )
        keys.append((torch.arange(grid.t)[:, None] * per_frame + window + first).flatten())
        first += grid.t * per_frame

    key = torch.cat(keys)
    units = torch.argsort(key, stable=True)
    sizes = torch.unique_consecutive(key[units], return_counts=True)[1]
    return WindowOrder(units, cu_seqlens, _cumulative(sizes * unit))


def _window_of_unit(rows: int, columns: int, side: int) -> tuple[Tensor, int]:
    """The window of each merge unit of a frame (int64 [rows * columns]) and the number of windows."""
    across = -(-columns // side)
    window = (torch.arange(rows) // side)[:, None] * across + torch.arange(columns) // side
    return window.flatten(), across * -(-rows // side)


def _cumulative(sizes: Tensor) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
