"""The input of a forward pass: one packed row on the device of this rank.

The loader's :class:`megatron_vl.data.packing.training_row.TrainingRow` holds the same data on the host;
:mod:`megatron_vl.training.rows.batch_broadcast` moves it to the device.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vl.kernels.linear_attention.shard_exchange import ShardRoute
from megatron_vl.models.context_parallel import FeatureRoute


@dataclass
class KeySegments:
    """The bounds of sequences among keys that ranks gather, if these are more tokens than the queries."""

    cu_seqlens: Tensor
    """int32 [segments + 1], ascending from 0 to the number of keys, on the device. Each sequence ends with
    the last of its queries."""
    max_seqlen: int
    row_tokens: slice
    """The tokens of the row whose keys these are, known on the host."""


@dataclass
class Segments:
    """The bounds of the sequences in a packed row."""

    cu_seqlens: Tensor
    """int32 [segments + 1], ascending from 0 to S, on the device."""
    max_seqlen: int
    """Length of the longest segment, known on the host."""
    gathered_keys: KeySegments | None = None
    """The bounds among the keys if these are gathered; None if queries and keys are the same tokens."""

    @property
    def keys(self) -> Segments | KeySegments:
        """The bounds of the sequences among the keys."""
        return self.gathered_keys or self

    @property
    def varlen_arguments(self) -> tuple[Tensor, Tensor, int, int]:
        """cu_seqlens of queries and keys, and the longest sequence of each, in FlashAttention's order."""
        return self.cu_seqlens, self.keys.cu_seqlens, self.max_seqlen, self.keys.max_seqlen


@dataclass
class RowShard:
    """A context-parallel rank's part of a row."""

    segments: Segments
    """The bounds of the row's sequences within the shard, from 0 to S / cp; those outside it are left out."""
    route: ShardRoute


@dataclass
class WholeRow:
    """What multi-token prediction needs of a row before ranks cut it; rows of other models have none."""

    labels: Tensor
    """int32 [row length]"""
    loss_mask: Tensor
    """float32 [row length]"""
    cu_seqlens: Tensor
    """int32 [segments + 1]"""
    part: slice = slice(None)
    two_ahead_scale: Tensor | float = 1.0
    """The factor of the sum of the losses two ahead in the loss of the row."""

    @functools.cached_property
    def two_ahead(self) -> tuple[Tensor, Tensor]:
        """Of this rank's tokens: the token two ahead, int64 [S], which is the label of the next one, and the
        weight of its loss, float32 [S]. It is 0 in another sequence."""
        has_next = torch.ones_like(self.labels, dtype=torch.bool)
        has_next.index_fill_(0, self.cu_seqlens[1:].long() - 1, False)
        labels, loss_mask = self.labels.roll(-1), self.loss_mask.roll(-1) * has_next
        return labels[self.part].long(), loss_mask[self.part]


@dataclass
class VisionInput:
    """A :class:`~megatron_vl.data.packing.training_row.VisionBatch` on the device, with the same shapes."""

    planes: Tensor
    plane_index: Tensor
    position_hw: Tensor
    frame_hw: Tensor
    full_segments: Segments
    window_segments: Segments

    def cut(
        self, planes: slice, patches: slice, full_segments: Segments, window_segments: Segments
    ) -> VisionInput:
        """Some of the patches, whose planes are ``planes``, with their own segments."""
        plane_index = self.plane_index[patches]
        return VisionInput(
            planes=self.planes[planes],
            plane_index=plane_index - planes.start if planes.start else plane_index,
            position_hw=self.position_hw[patches],
            frame_hw=self.frame_hw[patches],
            full_segments=full_segments,
            window_segments=window_segments,
        )


@dataclass
class DeviceRow:
    """A row on the device of this rank.

    Shapes are those of :class:`megatron_vl.data.packing.training_row.TrainingRow`. Under context parallelism,
    it is this rank's part of the row (``shard``): S is the row's length divided by ``cp``, and positions of
    tokens count from the part's first token. Only ``segments`` are those of the tokens whose attention this
    rank computes for some heads: the whole row or, if ranks gather keys, a larger part of it.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    num_real_tokens: int
    """Number of tokens before the padded tail, known on the host."""
    position_ids: Tensor
    segments: Segments
    vision_input: VisionInput | None
    """None on ranks without the vision tower."""
    feature_index: Tensor | None
    vision_features: Any = None
    """On the first stage, what a decoupled tower computed ahead of the pipeline
    (:class:`megatron_vl.models.decoupled.RowFeatures`)."""
    step_vision: Any = None
    """The images of the whole step (:class:`megatron_vl.models.decoupled.StepVision`). All rows of a step
    share this object. It is None if the tower is on the first stage."""
    loss_index: Tensor | None = None
    """int64 [N], ascending: the tokens for which logits and losses are computed; None: all."""
    segment_sources: Tensor | None = None
    """int32 [segments]: the number in the blend of each segment's source, -1 for the padded tail; None if the
    data set is no blend. Under context parallelism, those of the shard's segments."""
    shard: RowShard | None = None
    feature_route: FeatureRoute | None = None
    """The way of features from the tower to placeholders, on the first stage under context parallelism, if
    the row has images and the tower is on the first stage; otherwise None."""
    whole_row: WholeRow | None = None

    @property
    def local_segments(self) -> Segments:
        """The bounds of the sequences among this rank's tokens."""
        return self.segments if self.shard is None else self.shard.segments
