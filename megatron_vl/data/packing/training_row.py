"""One packed row: the input of the model, as a loader worker makes it.

A row is ``seq_len`` tokens of whole samples, padded at the end. The padded tail is one more segment, so that
``cu_seqlens[-1] == seq_len`` always holds. Everything that depends on the data (segments, positions, window
order, positions of features) is computed in the worker, on the CPU, so that a training step never waits for
the GPU to learn a number.

Shape legend: S seq_len, P patches of the row, Q distinct pixel planes, N merged features (P / merge_unit).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.source.bad_samples import DroppedSample
from megatron_vl.kernels.sizes import LOSS_CHUNK_TOKENS


@dataclass
class VisionBatch:
    """All images and video frames of a row, in the order in which the vision tower processes them.

    Patches are already in window order (merge units grouped by window, see
    :func:`megatron_vl.spec.positions.window_order`), so the tower never permutes them. ``feature_index``
    undoes this order when features are placed.
    """

    planes: Tensor
    """uint8 [Q, patch * patch * channels]: each plane is one time slice of a patch, not normalised. A patch
    of an image uses one plane twice; a patch of a video uses two planes."""
    plane_index: Tensor
    """int32 [P, temporal_patch_size]: the planes of each patch."""
    position_hw: Tensor
    """int32 [P, 2]: row and column of each patch within its frame, for 2D RoPE."""
    frame_hw: Tensor
    """int32 [P, 2]: rows and columns of each patch's frame, for tables of learned positions."""
    cu_seqlens: Tensor
    """int32 [frames + 1]: full-attention segments (one per frame of each image or video)."""
    cu_window_seqlens: Tensor
    """int32 [windows + 1]: window segments; equal to ``cu_seqlens`` for a family without windows."""
    max_seqlen: int
    max_window_seqlen: int
    feature_index: Tensor
    """int64 [N]: token position in the row of each merged feature, in tower order. Empty for the dummy image
    of a text-only row, whose features are multiplied by zero."""


@dataclass
class TrainingRow:
    """One micro-batch: a packed row of ``seq_len`` tokens."""

    tokens: Tensor
    """int64 [S]"""
    labels: Tensor
    """int64 [S]: the next token of the same sample; 0 where ``loss_mask`` is 0."""
    loss_mask: Tensor
    """float32 [S]: the weight of the label's loss. If the label is text of an assistant turn, ``<|im_end|>``
    included, it is the turn's weight, which is 1 unless the sample gives another one. Otherwise it is 0.
    Losses are divided by the number of labels whose weight is not 0."""
    position_ids: Tensor
    """int64 [3, S]: M-RoPE time, height, width; each sample starts again at 0."""
    cu_seqlens: Tensor
    """int32 [samples + 1 (+ 1 for the padded tail)]"""
    max_seqlen: int
    vision: VisionBatch
    num_samples: int = 0
    num_images: int = 0
    """Number of images and videos in the row."""
    num_patches: int = 0
    """Number of real patches (0 for a text-only row, although its dummy image has some)."""
    dropped_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of samples since the last row that could not be used, by reason. If a medium does not decode,
    its sample is also in the row, grey and without loss, so that all ranks see the same row."""
    dropped_samples: list[DroppedSample] = dataclasses.field(default_factory=list)
    """The samples that ``dropped_counts`` counts, at most ``MAX_LISTED_PER_ROW`` of them."""
    sample_keys: list[str] = dataclasses.field(default_factory=list)
    source_indices: list[int] = dataclasses.field(default_factory=list)
    """The number in the blend of each sample's source. Empty if the data set is no blend."""

    @property
    def seq_len(self) -> int:
        return self.tokens.numel()


LOSS_INDEX_MULTIPLE = 128
"""On GPUs, the tiles of a matrix product are 128 rows high, so that less padding would save nothing. It also
limits rows of S tokens to S / 128 different numbers of logits, whose memory the allocator can reuse."""


def loss_index(loss_mask: Tensor) -> Tensor | None:
    """The tokens for which the output layer is computed, int64 [N], ascending. None stands for the whole row,
    which is no longer than :data:`LOSS_CHUNK_TOKENS`.

    These are the loss tokens, and as many other tokens as make N a multiple of :data:`LOSS_INDEX_MULTIPLE`.
    The loss mask gives the others no weight. A row without loss tokens gets some too, so that the gradients
    of the last layers are zero instead of missing.

    Args:
        loss_mask: [S], on the host.
    """
    is_chosen = loss_mask != 0
    loss_count = int(is_chosen.count_nonzero())
    index_count = max(1, -(-loss_count // LOSS_INDEX_MULTIPLE)) * LOSS_INDEX_MULTIPLE
    if index_count >= len(is_chosen) and len(is_chosen) <= LOSS_CHUNK_TOKENS:
        return None

    # The first other tokens fill the last tile.
    is_chosen[is_chosen.logical_not().nonzero().flatten()[: index_count - loss_count]] = True
    return is_chosen.nonzero().flatten()


def pin_row(row: TrainingRow) -> TrainingRow:
    """The same row in pinned memory if CUDA is available."""
    if not torch.cuda.is_available():
        return row

    def pinned(record: Any) -> Any:
        tensors = {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}
        return dataclasses.replace(record, **{name: value.pin_memory() for name, value in tensors.items()})

    return dataclasses.replace(pinned(row), vision=pinned(row.vision))
