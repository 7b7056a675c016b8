"""Sends the images of a step to the ranks that encode them, if every rank holds the vision tower.

The frames of all rows are cut into one contiguous share for each rank of the replica
(:mod:`megatron_vl.models.frame_shares`). All ranks compute the same cuts from the sizes of the frames. The
owner sends each rank one message of pixels and one of indices.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.models.batch import DeviceRow, Segments, VisionInput
from megatron_vl.models.decoupled import StepVision, exchange_with_first
from megatron_vl.models.frame_shares import (
    Array,
    TowerFrames,
    cumulative_starts,
    frame_flops,
    make_tower_frames,
    split_by_cost,
)
from megatron_vl.spec.families import VisionSpec

PATCH_INT_FIELDS = ("plane_index", "position_hw", "frame_hw")
"""The integers that a rank needs for each patch, in addition to its planes."""


def frame_plane_bounds(plane_index: Array, patches_per_frame: list[int]) -> list[list[int]]:
    """For each frame of a row, its first plane and the one after its last.

    Args:
        plane_index: int [P, temporal_patch_size], the planes of each patch of the row.
    """
    if not patches_per_frame:
        return []
    # One pass over the flat index: a minimum over its short second axis would take a hundred times as long.
    first_entries = cumulative_starts(np.array(patches_per_frame))[:-1] * plane_index.shape[1]
    flat_index = plane_index.reshape(-1)
    first_planes, last_planes = (
        each.reduceat(flat_index, first_entries) for each in (np.minimum, np.maximum)
    )
    return np.stack((first_planes, last_planes + 1), 1).tolist()


class ImageShares:
    """How the frames of a step are divided among the ranks of a replica. All ranks compute the same division.

    Args:
        vision_lengths: for each row, the numbers of patches of its frames and of its windows.
        plane_bounds_by_row: for each row, the result of :func:`frame_plane_bounds`.
    """

    def __init__(
        self,
        vision_spec: VisionSpec,
        vision_lengths: list[tuple[list[int], list[int]]],
        plane_bounds_by_row: list[list[list[int]]],
        num_ranks: int,
    ) -> None:
        self.vision_spec = vision_spec
        self.frames = make_tower_frames(vision_lengths)
        self.plane_bounds = np.array(
            [pair for row in plane_bounds_by_row for pair in row], dtype=np.int64
        ).reshape(-1, 2)
        self.frame_cuts = split_by_cost(frame_flops(vision_spec, self.frames), num_ranks)
        self.features_of_rank = self._merged_features(self.frame_cuts)
        self.row_cuts = np.searchsorted(self.frames.row_of_frame, np.arange(len(vision_lengths) + 1))
        self.features_of_row = self._merged_features(self.row_cuts)

    def _merged_features(self, frame_cuts: Array) -> list[int]:
        return (np.diff(self.frames.first_patch[frame_cuts]) // self.vision_spec.merge_unit).tolist()

    def frame_runs(self, rank: int) -> list[tuple[int, int, int]]:
        """A rank's frames by row: (row, first frame, one after the last frame), numbered over all rows."""
        share_start, share_end = self.frame_cuts[rank], self.frame_cuts[rank + 1]
        runs = (
            (row, int(max(share_start, start)), int(min(share_end, end)))
            for row, (start, end) in enumerate(itertools.pairwise(self.row_cuts))
        )
        return [(row, start, end) for row, start, end in runs if start < end]

    def plane_range(self, frame_run: tuple[int, int, int]) -> tuple[int, int]:
        """The planes of the row that a run needs: (first, one after the last)."""
        run_bounds = self.plane_bounds[frame_run[1] : frame_run[2]]
        return int(run_bounds[:, 0].min()), int(run_bounds[:, 1].max())

    def patch_slice(self, frame_run: tuple[int, int, int]) -> slice:
        first_patch = self.frames.first_patch
        row_start = first_patch[self.row_cuts[frame_run[0]]]
        return slice(int(first_patch[frame_run[1]] - row_start), int(first_patch[frame_run[2]] - row_start))

    def share_of_rank(self, rank: int) -> tuple[TowerFrames, Array, int]:
        """A rank's frames, their bounds among the planes that it receives, and the number of these planes."""
        share_start, share_end = self.frame_cuts[rank], self.frame_cuts[rank + 1]
        first_window = self.frames.first_window
        rank_frames = TowerFrames(
            self.frames.patches_per_frame[share_start:share_end],
            self.frames.patches_per_window[first_window[share_start] : first_window[share_end]],
            self.frames.row_of_frame[share_start:share_end],
        )

        bounds_by_run, plane_count = [np.zeros((0, 2), dtype=np.int64)], 0
        for frame_run in self.frame_runs(rank):
            first_plane, plane_end = self.plane_range(frame_run)
            bounds_by_run.append(self.plane_bounds[frame_run[1] : frame_run[2]] - first_plane + plane_count)
            plane_count += plane_end - first_plane
        return rank_frames, np.concatenate(bounds_by_run), plane_count


def scatter_images(
    image_shares: ImageShares,
    replica_group: dist.ProcessGroup,
    rows: list[DeviceRow],
    host_tensors: list[dict[str, Tensor]],
    planes_by_row: list[Tensor],
    device: torch.device,
) -> StepVision:
    """Sends each rank of a replica its share of the first rank's images. Collective."""
    spec, rank, num_ranks = image_shares.vision_spec, replica_group.rank(), replica_group.size()
    pixels = torch.empty(0, spec.in_channels * spec.patch_size**2, dtype=torch.uint8, device=device)
    ints = torch.empty(0, dtype=torch.int32)
    if rank == 0 and len(image_shares.frames.patches_per_frame):
        pixels, ints = _concatenated_shares(image_shares, num_ranks, host_tensors, planes_by_row)
    ints = ints.to(device, non_blocking=True)

    rank_shares = [image_shares.share_of_rank(each) for each in range(num_ranks)]
    int_widths = (spec.temporal_patch_size, 2, 2)  # of PATCH_INT_FIELDS
    patch_counts = [int(frames.patches_per_frame.sum()) for frames, _, _ in rank_shares]
    if sum(patch_counts):  # all ranks know it, so all of them skip the collectives of a step without images
        plane_counts = [num_planes for _, _, num_planes in rank_shares]
        pixels = exchange_with_first(pixels, plane_counts, replica_group, should_gather=False)
        # All integers of a patch are in one message, because its latency costs more than its bytes.
        int_counts = [sum(int_widths) * count for count in patch_counts]
        ints = exchange_with_first(ints, int_counts, replica_group, should_gather=False)

    frames, plane_bounds, _ = rank_shares[rank]
    parts = ints.split([patch_counts[rank] * width for width in int_widths])
    patch_fields = (part.view(-1, width) for part, width in zip(parts, int_widths, strict=True))
    segments = (
        Segments(cumulative(sizes, device), 0)
        for sizes in (frames.patches_per_frame, frames.patches_per_window)
    )
    return StepVision(
        device_rows=rows,
        features_per_rank=image_shares.features_of_rank,
        features_per_row=image_shares.features_of_row,
        local_frames=frames,
        plane_bounds=plane_bounds,
        share=VisionInput(pixels, *patch_fields, *segments),
    )


def cumulative(sizes: Array, device: torch.device) -> Tensor:
    """int32 [N + 1] on the device: the bounds of segments of the given sizes."""
    bounds = torch.from_numpy(cumulative_starts(sizes).astype(np.int32))
    return pin_memory(bounds).to(device, non_blocking=True)


def pin_memory(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, from which copies to the GPU wait for nothing; itself without a GPU."""
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _concatenated_shares(
    image_shares: ImageShares,
    num_ranks: int,
    host_tensors: list[dict[str, Tensor]],
    planes_by_row: list[Tensor],
) -> tuple[Tensor, Tensor]:
    """The shares of all ranks, one after another: pixels, and :data:`PATCH_INT_FIELDS` of each patch."""
    pixels: list[Tensor] = []
    ints: list[Tensor] = []
    for rank in range(num_ranks):
        rank_ints: dict[str, list[Tensor]] = {name: [] for name in PATCH_INT_FIELDS}
        plane_count = 0
        for run in image_shares.frame_runs(rank):
            first_plane, plane_end = image_shares.plane_range(run)
            for name in PATCH_INT_FIELDS:
                rank_ints[name].append(host_tensors[run[0]][name][image_shares.patch_slice(run)])
            # Planes are numbered among those that the rank receives.
            rank_ints["plane_index"][-1] = rank_ints["plane_index"][-1] - first_plane + plane_count
            pixels.append(planes_by_row[run[0]][first_plane:plane_end])
            plane_count += plane_end - first_plane
        ints += [part.flatten() for name in PATCH_INT_FIELDS for part in rank_ints[name]]
    return torch.cat(pixels) if len(pixels) > 1 else pixels[0], pin_memory(torch.cat(ints))
