"""Sends the pictures of a step to the ranks that encode them, if every rank holds the vision tower.

The frames of all rows are cut into one contiguous share for each rank of the replica
(:mod:`megatron_vl.models.frame_shares`). All ranks compute the same cuts from the sizes of the frames. The
owner sends each rank one message of pixels and one of indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.models.batch import DeviceRow
from megatron_vl.models.decoupled import StepVision, exchange_with_first
from megatron_vl.models.frame_shares import Array, Frames, cut_evenly, frame_flops, frames_of, starts
from megatron_vl.spec.families import VisionSpec

PATCH_INTS = ("plane_index", "position_hw", "frame_hw")
"""The integers that a rank needs for each patch, in addition to its planes."""


def plane_bounds(plane_index: Array, frames: list[int]) -> list[list[int]]:
    """For each frame of a row, its first plane and the one after its last.

    Args:
        plane_index: int [P, temporal_patch_size], the planes of each patch of the row.
        frames: number of patches of each frame.
    """
    if not frames:
        return []
    first = starts(np.array(frames))[:-1]
    low = np.minimum.reduceat(plane_index.min(1), first)
    high = np.maximum.reduceat(plane_index.max(1), first) + 1
    return np.stack((low, high), 1).tolist()


class Shares:
    """How the frames of a step are divided among the ranks of a replica. It is the same on all of them.

    Args:
        lengths: for each row, the numbers of patches of its frames and of its windows.
        bounds: for each row, the result of :func:`plane_bounds`.
        ranks: number of ranks.
    """

    def __init__(
        self,
        vision: VisionSpec,
        lengths: list[tuple[list[int], list[int]]],
        bounds: list[list[list[int]]],
        ranks: int,
    ) -> None:
        self.frames = frames_of(lengths)
        self.bounds = np.array([pair for row in bounds for pair in row], dtype=np.int64).reshape(-1, 2)
        self.cuts = cut_evenly(frame_flops(vision, self.frames), ranks)
        self.features_of_rank = self._units(self.cuts, vision)
        self.row_cuts = np.searchsorted(self.frames.row, np.arange(len(lengths) + 1))
        self.features_of_row = self._units(self.row_cuts, vision)

    def _units(self, cuts: Array, vision: VisionSpec) -> list[int]:
        return (np.diff(self.frames.first_patch[cuts]) // vision.merge_unit).tolist()

    def runs(self, rank: int) -> list[tuple[int, int, int]]:
        """A rank's frames by row: (row, first frame, one after the last frame), numbered over all rows."""
        begin, end = self.cuts[rank], self.cuts[rank + 1]
        found = []
        for row in range(len(self.row_cuts) - 1):
            low, high = max(begin, self.row_cuts[row]), min(end, self.row_cuts[row + 1])
            if low < high:
                found.append((row, int(low), int(high)))
        return found

    def planes_of_run(self, run: tuple[int, int, int]) -> tuple[int, int]:
        """The planes of the row that a run needs: (first, one after the last)."""
        own = self.bounds[run[1] : run[2]]
        return int(own[:, 0].min()), int(own[:, 1].max())

    def patches_of_run(self, run: tuple[int, int, int]) -> slice:
        """The patches of the run, counted within the row."""
        first = self.frames.first_patch
        at = first[self.row_cuts[run[0]]]
        return slice(int(first[run[1]] - at), int(first[run[2]] - at))

    def of_rank(self, rank: int) -> tuple[Frames, Array, int]:
        """A rank's frames, their bounds among the planes that it receives, and the number of these planes."""
        begin, end = self.cuts[rank], self.cuts[rank + 1]
        windows = self.frames.first_window
        frames = Frames(
            self.frames.patches[begin:end],
            self.frames.windows[windows[begin] : windows[end]],
            self.frames.row[begin:end],
        )

        parts, count = [np.zeros((0, 2), dtype=np.int64)], 0
        for run in self.runs(rank):
            low, high = self.planes_of_run(run)
            parts.append(self.bounds[run[1] : run[2]] - low + count)
            count += high - low
        return frames, np.concatenate(parts), count


def send_pictures(
    shares: Shares,
    group: dist.ProcessGroup,
    rows: list[DeviceRow],
    fields: list[dict[str, Tensor]],
    planes: list[Tensor],
    device: torch.device,
    vision: VisionSpec,
) -> StepVision:
    """Sends each rank of a replica its share of the pictures. Collective over the group.

    Args:
        group: the replica; its first rank has the pictures.
        rows: the rows of the step on this rank.
        fields: on the first rank, the tensors of each row on the host.
        planes: on the first rank, the planes of each row on the device.
    """
    ranks, rank = group.size(), group.rank()
    parts = [shares.of_rank(r) for r in range(ranks)]
    frames, bounds, _ = parts[rank]
    width = vision.in_channels * vision.patch_size**2
    ints = vision.temporal_patch_size + 4

    pixels = torch.empty(0, width, dtype=torch.uint8, device=device)
    patches = torch.empty(0, dtype=torch.int32)
    if rank == 0 and len(shares.frames.patches):
        pixels, patches = _all_parts(shares, ranks, fields, planes)

    per_rank = [int(part.patches.sum()) for part, _, _ in parts]
    if sum(per_rank):
        pixels = exchange_with_first(pixels, [count for _, _, count in parts], group, gather=False)
        # All integers of a patch are in one message, because its latency costs more than its bytes.
        patches = exchange_with_first(
            patches.to(device, non_blocking=True), [ints * n for n in per_rank], group, gather=False
        )

    sizes = [vision.temporal_patch_size, 2, 2]
    own = patches.to(device).split([per_rank[rank] * size for size in sizes])
    index, position_hw, frame_hw = (part.view(-1, size) for part, size in zip(own, sizes, strict=True))
    return StepVision(
        rows=rows,
        features_of_rank=shares.features_of_rank,
        features_of_row=shares.features_of_row,
        frames=frames,
        plane_bounds=bounds,
        planes=pixels,
        plane_index=index,
        position_hw=position_hw,
        frame_hw=frame_hw,
        full=cumulative(frames.patches, device),
        window=cumulative(frames.windows, device),
    )


def cumulative(sizes: Array, device: torch.device) -> Tensor:
    """int32 [N + 1] on the device: the bounds of segments of the given sizes."""
    bounds = torch.from_numpy(starts(sizes).astype(np.int32))
    return _pinned(bounds).to(device, non_blocking=True)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _all_parts(
    shares: Shares, ranks: int, fields: list[dict[str, Tensor]], planes: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """The parts of all ranks, one after another: pixels, and :data:`PATCH_INTS` of each rank's patches."""
    pixels: list[Tensor] = []
    ints: list[Tensor] = []

    for rank in range(ranks):
        own: dict[str, list[Tensor]] = {name: [] for name in PATCH_INTS}
        count = 0
        for run in shares.runs(rank):
            low, high = shares.planes_of_run(run)
            here = shares.patches_of_run(run)
            row: dict[str, Any] = fields[run[0]]
            own["plane_index"].append(row["plane_index"][here] - low + count)
            own["position_hw"].append(row["position_hw"][here])
            own["frame_hw"].append(row["frame_hw"][here])
            pixels.append(planes[run[0]][low:high])
            count += high - low
        ints += [part.flatten() for name in PATCH_INTS for part in own[name]]

    return torch.cat(pixels) if len(pixels) > 1 else pixels[0], _pinned(torch.cat(ints))
