"""Cuts a row for the ranks that share it (:mod:`megatron_vl.models.context_parallel`).

The owner of the loader describes the parts of each row on the CPU, where the whole row is known. Every rank
gets the small tensors of the whole row in the broadcast of the step, and keeps its part of them. Only the
indices of loss tokens and features are computed for each part before they are sent.
"""

from __future__ import annotations

import dataclasses
import itertools
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow, loss_index
from megatron_vl.kernels.linear_attention.shard_exchange import shard_route
from megatron_vl.models.batch import DeviceRow, KeySegments, RowShard, Segments, VisionInput
from megatron_vl.models.context_parallel import FeatureRoute
from megatron_vl.models.decoupled import StepVision
from megatron_vl.models.frame_shares import Array, cumulative_starts
from megatron_vl.spec.families import VisionSpec
from megatron_vl.training.rows.image_scatter import ImageShares, cumulative, pin_memory


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
            plane_bounds: result of :func:`~megatron_vl.training.rows.image_scatter.frame_plane_bounds`;
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

    part_tensors = {name: row_tensors[name][token_slice] for name in ("tokens", "labels", "loss_mask")}
    part_tensors["position_ids"] = row_tensors["position_ids"][:, token_slice]
    part_tensors["loss_index"] = row_tensors["loss_index"][
        index_start : index_start + parts[rank]["loss_tokens"]
    ]
    part_tensors["sources"] = row_tensors["sources"][first:last]
    return row_tensors | part_tensors


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
    frame_runs = image_shares.frame_runs(rank)
    if frame_runs:
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
    route = FeatureRoute(
        encodes=bool(frame_runs),
        send_order=feature_order[order_start : order_start + sum(sent)].long(),
        sent=sent,
        received=features_by_pair[:, rank].tolist(),
    )
    return vision_input, route
