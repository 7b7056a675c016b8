"""Cuts a row for the ranks that share it (:mod:`megatron_vl.models.context_parallel`).

The owner of the loader describes the parts of each row on the CPU, where the whole row is known. Every rank
gets the whole row's small tensors in the broadcast of the step and keeps its part; only indices of loss
tokens and features are computed for each part before they are sent.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow, loss_index
from megatron_vl.kernels.shard_exchange import shard_route
from megatron_vl.models.batch import DeviceRow, RowShard, Segments, VisionInput
from megatron_vl.models.context_parallel import FeatureRoute
from megatron_vl.models.decoupled import StepVision
from megatron_vl.models.frame_shares import Array, cumulative_starts
from megatron_vl.spec.families import VisionSpec
from megatron_vl.training.picture_scatter import PictureShares, cumulative


@dataclass(frozen=True)
class Sharding:
    """How rows are shared by the context-parallel ranks of a replica.

    Args:
        cp: number of ranks that share a row.
        decoupled: whether every rank holds the tower. Then the first rank of the replica has all features;
            otherwise, each rank of the first stage encodes a share of the row's frames.
    """

    cp: int
    vision: VisionSpec
    decoupled: bool

    def describe(self, row: TrainingRow, tensors: dict[str, Tensor]) -> dict[str, Any]:
        """Describes the parts of a row, and replaces tensors by those that are sent for its parts.

        ``loss_index`` and ``feature_index`` become the indices of all parts, one after another, each counted
        from the first token of its part. ``feature_order`` becomes the order in which each rank sends the
        features that it has.

        Args:
            tensors: the tensors of the row by field.
        """
        length = row.seq_len // self.cp
        bounds = row.cu_seqlens.tolist()
        parts = [self._segments(bounds, rank) for rank in range(self.cp)]

        selected = [loss_index(mask) for mask in row.loss_mask.split(length)]
        for part, index in zip(parts, selected, strict=True):
            part["loss_tokens"] = 0 if index is None else len(index)
        known = [index for index in selected if index is not None]
        tensors["loss_index"] = torch.cat(known) if known else row.tokens.new_empty(0)

        placeholders = row.vision.feature_index.numpy()
        shard = placeholders // length
        encoded = self._encoded(row)
        encoder = np.repeat(np.arange(self.cp), np.diff(encoded))
        table = np.bincount(encoder * self.cp + shard, minlength=self.cp**2).reshape(self.cp, self.cp)

        orders = [
            np.argsort(shard[first:end], kind="stable")
            for first, end in zip(encoded[:-1], encoded[1:], strict=True)
        ]
        tensors["feature_order"] = torch.from_numpy(np.concatenate(orders))
        by_shard = placeholders[np.argsort(shard, kind="stable")] % length
        tensors["feature_index"] = torch.from_numpy(by_shard)
        return {"parts": parts, "features": table.tolist()}

    def _segments(self, bounds: list[int], rank: int) -> dict[str, Any]:
        """The segments that a part holds tokens of, and how they cross its edges.

        Args:
            bounds: bounds of the row's segments.
        """
        route = shard_route(bounds, self.cp, rank)
        start, stop = rank * route.length, (rank + 1) * route.length
        first, last = bisect_right(bounds, start) - 1, bisect_left(bounds, stop)
        longest = int(np.diff(np.clip(bounds[first : last + 1], start, stop)).max())
        return {"segments": (first, last), "longest": longest, "route": route}

    def _encoded(self, row: TrainingRow) -> Array:
        """int64 [cp + 1]: bounds of the features that each rank has before they are exchanged."""
        count = row.vision.feature_index.numel()
        if self.decoupled or not count:
            return np.array([0, *[count] * self.cp])
        lengths = (row.vision.cu_seqlens.diff().tolist(), row.vision.cu_window_seqlens.diff().tolist())
        return cumulative_starts(np.array(self.shares(lengths).features_of_rank))

    def route_step(
        self,
        step: StepVision,
        described: list[dict[str, Any]],
        fields: list[dict[str, Tensor]],
        rank: int,
        device: torch.device,
    ) -> None:
        """Completes the pictures of a step with the way of their features from the first rank to all parts.

        Args:
            described: what :meth:`describe` gave for each row.
            fields: on the first rank of the replica, the tensors of each row on the host.
            rank: this rank's number in its context-parallel group.
        """
        counts = np.array([d["features"][0] for d in described], dtype=np.int64)  # [rows, cp]
        step.features_of_part = counts.sum(0).tolist()
        first = cumulative_starts(np.array(step.features_per_row))
        step.features_per_row = counts[:, rank].tolist()
        if not fields:
            return

        orders = [row["feature_order"].numpy() for row in fields]
        cuts = [cumulative_starts(row) for row in counts]
        parts = [
            order[cut[part] : cut[part + 1]] + before
            for part in range(self.cp)
            for order, cut, before in zip(orders, cuts, first[:-1], strict=True)
        ]
        order = torch.from_numpy(np.concatenate(parts))
        order = order.pin_memory() if torch.cuda.is_available() else order
        step.part_order = order.to(device, non_blocking=True)

    def shares(
        self, lengths: tuple[list[int], list[int]], bounds: list[list[int]] | None = None
    ) -> PictureShares:
        """The frames of one row that each context-parallel rank encodes.

        Args:
            lengths: the numbers of patches of the row's frames and windows.
            bounds: result of :func:`~megatron_vl.training.picture_scatter.frame_plane_bounds`; None: planes
                are not asked for.
        """
        return PictureShares(self.vision, [lengths], [bounds or []], self.cp)


def text_of_part(described: dict[str, Any], fields: dict[str, Tensor], rank: int) -> dict[str, Tensor]:
    """The text fields of a context-parallel rank's part of a row, in place of those of the whole row."""
    parts = described["parts"]
    length = len(fields["tokens"]) // len(parts)
    tokens = slice(rank * length, (rank + 1) * length)
    first, last = parts[rank]["segments"]
    before = sum(part["loss_tokens"] for part in parts[:rank])

    changed = {name: fields[name][tokens] for name in ("tokens", "labels", "loss_mask")}
    changed["position_ids"] = fields["position_ids"][:, tokens]
    changed["loss_index"] = fields["loss_index"][before : before + parts[rank]["loss_tokens"]]
    changed["sources"] = fields["sources"][first:last]
    return fields | changed


def as_part(row: DeviceRow, described: dict[str, Any], rank: int) -> DeviceRow:
    """Completes a row that was made of the fields of a part (:func:`text_of_part`)."""
    part = described["parts"][rank]
    length = row.tokens.numel()
    start = rank * length
    first, last = part["segments"]

    bounds = row.segments.cu_seqlens[first : last + 1].clamp(start, start + length) - start
    shard = RowShard(Segments(bounds, part["longest"]), part["route"])
    real_tokens = min(max(row.num_real_tokens - start, 0), length)
    return dataclasses.replace(row, shard=shard, num_real_tokens=real_tokens)


def features_of_part(described: dict[str, Any], fields: dict[str, Tensor], rank: int) -> Tensor:
    """int64 [m]: the tokens of a part that are placeholders, in the order of the tower."""
    counts = np.array(described["features"]).sum(0)
    first = int(counts[:rank].sum())
    return fields["feature_index"][first : first + int(counts[rank])].long()


def pictures_of_part(
    sharding: Sharding,
    described: dict[str, Any],
    bounds: list[list[int]],
    fields: dict[str, Tensor],
    rank: int,
) -> tuple[VisionInput, FeatureRoute]:
    """The frames of a row that a context-parallel rank encodes, and the way of their features.

    A rank without frames gets the first merge unit of the row's pictures, for a tower that must always run.

    Args:
        bounds: result of :func:`~megatron_vl.training.picture_scatter.frame_plane_bounds` for the row.
    """
    shares = sharding.shares(described["vision_lengths"], bounds)
    frames, _, _ = shares.share_of_rank(rank)
    table = np.array(described["features"])
    before = int(table[:rank].sum())
    own = int(table[rank].sum())

    runs = shares.frame_runs(rank)
    if runs:
        low, high = shares.plane_range(runs[0])
        patches = shares.patch_slice(runs[0])
        frame_sizes, window_sizes = frames.patches_per_frame, frames.patches_per_window
    else:
        unit = sharding.vision.merge_unit
        low, high, patches = 0, bounds[0][1], slice(0, unit)
        frame_sizes = window_sizes = np.array([unit])

    index = fields["plane_index"][patches]
    device = index.device
    vision = VisionInput(
        planes=fields["planes"][low:high],
        plane_index=index - low if low else index,
        position_hw=fields["position_hw"][patches],
        frame_hw=fields["frame_hw"][patches],
        full_segments=Segments(cumulative(frame_sizes, device), int(frame_sizes.max())),
        window_segments=Segments(cumulative(window_sizes, device), int(window_sizes.max())),
    )

    route = FeatureRoute(
        encodes=bool(runs),
        send_order=fields["feature_order"][before : before + own].long(),
        sent=table[rank].tolist(),
        received=table[:, rank].tolist(),
    )
    return vision, route
