"""Features of a step's rows in host memory, for a tower that every rank holds.

Such a tower encodes all images of a step ahead of the pipeline, so that the first stage holds the features of
all its rows, and later their gradients: 1 GiB for each row of 32,768 tokens of Qwen3-VL-30B-A3B. Only the
first rows keep them on the device. Those of the others are in pinned host memory, except while their row runs
through the first chunk. Copies run beside the passes, on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_vl.config import FEATURE_ROWS_ON_DEVICE
from megatron_vl.models.decoupled import DecoupledTower, RowFeatures
from megatron_vl.platform import Platform
from megatron_vl.training.offload.layer_inputs import HostInput, HostPieces


class HostRowFeatures(RowFeatures):
    """The features of one row, then their gradient, in host memory."""

    def __init__(
        self, features: Tensor, is_trained: bool, pieces: HostPieces, next_row: HostRowFeatures | None
    ) -> None:
        super().__init__(features[:0].clone(), is_trained)  # connects the pipeline's graph to the gradient
        self.pieces, self.next_row = pieces, next_row
        next_features = None if next_row is None else next_row.host_features
        self.host_features: HostInput | None = _to_host(features, pieces, next_features)
        self.host_gradient: HostInput | None = None

    def for_pipeline(self) -> Tensor:
        return _FromHost.apply(self.features, self)

    def gradient(self) -> Tensor:
        assert self.host_gradient is not None
        gradient = self.host_gradient.to_device()
        if self.next_row is not None and self.next_row.host_gradient is not None:
            self.next_row.host_gradient.fetch()
        return gradient


class _FromHost(torch.autograd.Function):
    """Fetches a row's features. The backward pass moves their gradient to the host."""

    @staticmethod
    def forward(ctx, anchor: Tensor, row_features: HostRowFeatures) -> Tensor:
        ctx.row_features = row_features
        assert row_features.host_features is not None
        return row_features.host_features.to_device()

    @staticmethod
    def backward(ctx, gradient: Tensor):
        row_features, gradient = ctx.row_features, gradient.contiguous()
        row_features.host_features = None  # the gradient takes its host memory
        row_features.host_gradient = _to_host(gradient, row_features.pieces)
        return None, None


def offload_row_features(decoupled_tower: DecoupledTower, platform: Platform) -> None:
    """Moves the features of all but the first rows of a step to host memory."""
    pieces = HostPieces(platform, "the features of vision.placement decoupled; use fewer rows a step")

    def keep(features_by_row: Sequence[Tensor], is_trained: bool) -> list[RowFeatures]:
        kept: list[RowFeatures] = []
        next_row: HostRowFeatures | None = None
        offloads = any(map(len, features_by_row[FEATURE_ROWS_ON_DEVICE:]))
        # From the last row on, because each fetch starts that of the row after it.
        for number, features in reversed(list(enumerate(features_by_row))):
            if number >= FEATURE_ROWS_ON_DEVICE and len(features):
                next_row = HostRowFeatures(features, is_trained, pieces, next_row)
                kept.append(next_row)
            else:
                # A slice, even an empty one, would keep the features of all rows.
                kept.append(RowFeatures(features.clone() if offloads else features, is_trained))
        return kept[::-1]

    decoupled_tower.keep_features = keep


def _to_host(tensor: Tensor, pieces: HostPieces, needed_next: HostInput | None = None) -> HostInput:
    """Starts the copy of a tensor. Its memory is free once it is dropped and the copy is made."""
    pieces.copy_stream.wait_stream(torch.cuda.current_stream())
    copy = HostInput(pieces, tensor, needed_next)
    if tensor.is_cuda:
        tensor.record_stream(pieces.copy_stream)
    return copy
