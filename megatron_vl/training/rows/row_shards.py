"""Cuts rows and their images for the ranks that share them.

Under context parallelism (:mod:`megatron_vl.models.context_parallel`), the owner of the loader describes the
parts of each row on the CPU, where the whole row is known. Every rank gets the small tensors of the whole row
in the broadcast of the step, and keeps its part of them. Only the indices of loss tokens and features are
computed for each part before they are sent.

If every rank holds the vision tower, the frames of all rows are cut into one contiguous share for each rank
of the replica (:mod:`megatron_vl.models.frame_shares`). All ranks compute the same cuts from the sizes of the
frames. The owner sends each rank one message of pixels and one of indices.
"""

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow, loss_index
from megatron_vl.kernels.linear_attention.shard_exchange import shard_route
from megatron_vl.models.batch import DeviceRow, KeySegments, RowShard, Segments, VisionInput
from megatron_vl.models.context_parallel import FeatureRoute
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


@dataclass(frozen=True)
class RowSharding:
    """How rows are shared by the context-parallel ranks of a replica.

    Args:
        key_ranks: number of parts of the row whose queries belong to different ranks. If there are several,
            their ranks gather keys.
        tower_is_decoupled: whether every rank holds the tower. Then the first rank of the replica has all
            features; otherwise, each rank of the first stage encodes a share of the row's frames.
    """

    context_size: int
    key_ranks: int
    vision_spec: VisionSpec
    tower_is_decoupled: bool

    def describe_parts(self, row: TrainingRow, row_tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Describes the parts of a row for its header, and replaces tensors by those of its parts.

        ``loss_index`` and ``feature_index`` become the indices of all parts, counted from the first token of
        their part. ``feature_order`` becomes the order in which each rank sends the features that it has.
        """
        part_length = row.seq_len // self.context_size
        segment_bounds = row.cu_seqlens.tolist()  # no sync: the loader's rows are on the host
        parts = _part_segments(segment_bounds, self.context_size)

        # A part without an index has logits for all of its tokens.
        known_indices = [row.tokens.new_empty(0)]
        for part, part_mask in zip(parts, row.loss_mask.split(part_length), strict=True):
            part_index = loss_index(part_mask)
            part["loss_tokens"] = 0 if part_index is None else len(part_index)
            known_indices += [] if part_index is None else [part_index]
        row_tensors["loss_index"] = torch.cat(known_indices)

        # features_by_pair[i, j]: how many features rank i has for the tokens of part j.
        placeholders = row.vision.feature_index.numpy()
        # NumPy sorts short integers by radix.
        part_of_feature = (placeholders // part_length).astype(np.int16)
        feature_bounds = self._feature_bounds(row)
        rank_of_feature = np.repeat(np.arange(self.context_size), np.diff(feature_bounds))
        features_by_pair = np.zeros((self.context_size, self.context_size), dtype=np.int64)
        np.add.at(features_by_pair, (rank_of_feature, part_of_feature), 1)

        # Each rank sends its features in the order of the parts that they go to.
        send_orders = [
            np.argsort(part_of_feature[first:end], kind="stable")
            for first, end in itertools.pairwise(feature_bounds)
        ]
        row_tensors["feature_order"] = torch.from_numpy(np.concatenate(send_orders))
        index_in_part = placeholders[np.argsort(part_of_feature, kind="stable")] % part_length
        row_tensors["feature_index"] = torch.from_numpy(index_in_part)
        return {
            "parts": parts,
            "query_parts": _part_segments(segment_bounds, self.key_ranks),
            "features": features_by_pair.tolist(),
        }

    def _feature_bounds(self, row: TrainingRow) -> Array:
        """int64 [ranks + 1]: bounds of the features that each rank has before they are exchanged."""
        feature_count = row.vision.feature_index.numel()
        if self.tower_is_decoupled or not feature_count:
            return np.array([0, *[feature_count] * self.context_size])
        vision_lengths = (row.vision.cu_seqlens.diff().tolist(), row.vision.cu_window_seqlens.diff().tolist())
        return cumulative_starts(np.array(self.image_shares(vision_lengths).features_of_rank))

    def route_step(
        self,
        step_vision: StepVision,
        row_headers: list[dict[str, Any]],
        host_tensors: list[dict[str, Tensor]],
        rank: int,
        device: torch.device,
    ) -> None:
        """Adds to the images of a step how their features go from the first rank to all parts.

        Args:
            row_headers: headers with the result of :meth:`describe_parts` for each row.
        """
        feature_counts = np.array([header["features"][0] for header in row_headers], dtype=np.int64)
        step_vision.features_of_part = feature_counts.sum(0).tolist()  # the counts are [rows, ranks]
        row_starts = cumulative_starts(np.array(step_vision.features_per_row))
        step_vision.features_per_row = feature_counts[:, rank].tolist()
        if not host_tensors:
            return

        # The features of a step are ordered by row. Here they are ordered by part, and within it by row.
        row_orders = [row_tensors["feature_order"].numpy() for row_tensors in host_tensors]
        row_cuts = [cumulative_starts(part_counts) for part_counts in feature_counts]
        ordered_features = [
            order[cuts[part] : cuts[part + 1]] + row_start
            for part in range(self.context_size)
            for order, cuts, row_start in zip(row_orders, row_cuts, row_starts[:-1], strict=True)
        ]
        part_order = torch.from_numpy(np.concatenate(ordered_features))
        step_vision.part_order = pin_memory(part_order).to(device, non_blocking=True)

    def image_shares(
        self, vision_lengths: tuple[list[int], list[int]], plane_bounds: list[list[int]] | None = None
    ) -> ImageShares:
        """The frames of one row that each context-parallel rank encodes.

        Args:
            vision_lengths: the numbers of patches of the row's frames and windows.
            plane_bounds: result of :func:`frame_plane_bounds`;
                None if the planes of a rank are not needed.
        """
        return ImageShares(self.vision_spec, [vision_lengths], [plane_bounds or []], self.context_size)


def cut_text(row_header: dict[str, Any], row_tensors: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The row's tensors, with the text of a context-parallel rank's part in place of the whole text."""
    parts = row_header["parts"]
    part_length = len(row_tensors["tokens"]) // len(parts)
    token_slice = slice(rank * part_length, (rank + 1) * part_length)
    first, last = parts[rank]["segments"]
    index_start = sum(part["loss_tokens"] for part in parts[:rank])

    return {
        **row_tensors,
        **{name: row_tensors[name][token_slice] for name in ("tokens", "labels", "loss_mask")},
        "position_ids": row_tensors["position_ids"][:, token_slice],
        "loss_index": row_tensors["loss_index"][index_start : index_start + parts[rank]["loss_tokens"]],
        "sources": row_tensors["sources"][first:last],
    }


def _part_segments(segment_bounds: list[int], part_count: int) -> list[dict[str, Any]]:
    """For each of the equal parts of a row, the segments with tokens of it, and how they cross its edges."""
    parts = []
    for part_number in range(part_count):
        route = shard_route(segment_bounds, part_count, part_number)
        start, stop = part_number * route.length, (part_number + 1) * route.length
        first, last = bisect_right(segment_bounds, start) - 1, bisect_left(segment_bounds, stop)
        longest = int(np.diff(np.clip(segment_bounds[first : last + 1], start, stop)).max())
        parts.append({"segments": (first, last), "longest": longest, "route": route})
    return parts


def complete_part(row: DeviceRow, row_header: dict[str, Any], rank: int) -> DeviceRow:
    """Adds bounds and routes to a row that was made from the tensors of a part (:func:`cut_text`)."""
    parts, query_parts = row_header["parts"], row_header["query_parts"]
    part_length = row.tokens.numel()
    attention_segments = row.segments
    if len(query_parts) > 1:
        query_part = query_parts[rank * len(query_parts) // len(parts)]
        attention_segments = dataclasses.replace(
            _segments_of_part(row.segments, query_part), gathered_keys=_keys_of_part(row.segments, query_part)
        )

    return dataclasses.replace(
        row,
        segments=attention_segments,
        shard=RowShard(_segments_of_part(row.segments, parts[rank]), parts[rank]["route"]),
        num_real_tokens=min(max(row.num_real_tokens - rank * part_length, 0), part_length),
    )


def _segments_of_part(row_segments: Segments, part_header: dict[str, Any]) -> Segments:
    """The bounds of a row's segments within a part, from its first token."""
    (first, last), route = part_header["segments"], part_header["route"]
    start = route.rank * route.length
    segment_bounds = row_segments.cu_seqlens[first : last + 1].clamp(start, start + route.length) - start
    return Segments(segment_bounds, part_header["longest"])


def _keys_of_part(row_segments: Segments, part_header: dict[str, Any]) -> KeySegments:
    """The bounds of the keys that the queries of a part attend to.

    They are the part's own tokens, and before them those of its first segment that lie on earlier ranks.
    """
    (first, last), route = part_header["segments"], part_header["route"]
    stop = (route.rank + 1) * route.length
    first_key = route.rank * route.length - route.tokens_before
    key_bounds = row_segments.cu_seqlens[first : last + 1].clamp(max=stop) - first_key
    most_keys = max(part_header["longest"], route.tokens_before + route.first_end)
    return KeySegments(key_bounds, most_keys, slice(first_key, stop))


def cut_feature_index(row_header: dict[str, Any], row_tensors: dict[str, Tensor], rank: int) -> Tensor:
    """int64 [features]: the tokens of a part that are placeholders, in the order of the tower."""
    feature_counts = np.array(row_header["features"]).sum(0)
    first = int(feature_counts[:rank].sum())
    return row_tensors["feature_index"][first : first + int(feature_counts[rank])].long()


def cut_images(
    row_sharding: RowSharding,
    row_header: dict[str, Any],
    plane_bounds: list[list[int]],
    row_images: VisionInput,
    feature_order: Tensor,
    rank: int,
) -> tuple[VisionInput, FeatureRoute]:
    """The frames of a row that a context-parallel rank encodes, and the route of their features.

    A rank without frames gets the first merge unit of the row's images, for a tower that must always run.
    """
    image_shares = row_sharding.image_shares(row_header["vision_lengths"], plane_bounds)
    rank_frames, _, _ = image_shares.share_of_rank(rank)
    if frame_runs := image_shares.frame_runs(rank):
        first_plane, plane_end = image_shares.plane_range(frame_runs[0])
        patch_slice = image_shares.patch_slice(frame_runs[0])
        frame_sizes, window_sizes = rank_frames.patches_per_frame, rank_frames.patches_per_window
    else:
        merge_unit = row_sharding.vision_spec.merge_unit
        first_plane, plane_end, patch_slice = 0, plane_bounds[0][1], slice(0, merge_unit)
        frame_sizes = window_sizes = np.array([merge_unit])

    device = row_images.planes.device
    vision_input = row_images.cut(
        slice(first_plane, plane_end),
        patch_slice,
        *(Segments(cumulative(sizes, device), int(sizes.max())) for sizes in (frame_sizes, window_sizes)),
    )
    features_by_pair = np.array(row_header["features"])
    sent = features_by_pair[rank].tolist()
    order_start = int(features_by_pair[:rank].sum())
    return vision_input, FeatureRoute(
        encodes=bool(frame_runs),
        send_order=feature_order[order_start : order_start + sum(sent)].long(),
        sent=sent,
        received=features_by_pair[:, rank].tolist(),
    )
