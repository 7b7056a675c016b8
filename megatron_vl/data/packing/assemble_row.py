"""Packs samples into one :class:`~megatron_vl.data.packing.training_row.TrainingRow`.

Everything that depends on the data is computed here, on the CPU. Nothing is decoded here: samples come with
their pixel planes (see :mod:`megatron_vl.data.sample.images`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow, VisionBatch
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.base import text_config
from megatron_vl.spec.positions import GridTHW, mrope_positions, patch_positions, window_order
from megatron_vl.system.errors import UserError


class PackingError(UserError, ValueError):
    """The samples do not make a row. The message says which number does not fit."""


@dataclass
class MediaItem:
    """One image or video: its grid of patches and its pixels."""

    grid_thw: GridTHW
    planes: Tensor
    """uint8 [F, h * w, patch * patch * channels]: the frames, with patches in merge-unit order. An image has
    one frame. Time slice ``i`` of the grid is frame ``min(i, F - 1)``, because HF's processors repeat the
    last frame."""


@dataclass
class TokenizedSample:
    """One tokenized conversation with expanded placeholders."""

    token_ids: Tensor
    """int64 [n]"""
    loss_mask: Tensor
    """bool [n]: the tokens to train on, not shifted. It is float32 if they have weights."""
    media_items: list[MediaItem] = field(default_factory=list)
    """In the order of the text."""

    def __len__(self) -> int:
        return self.token_ids.numel()


def padding_token(spec: ModelSpec) -> int:
    """The token that fills the end of a row.

    It is the config's ``pad_token_id``, else its ``bos_token_id`` (Qwen's ``<|endoftext|>``), else 0. It is
    never trained on, and no sample attends to it.
    """
    fields = {**spec.hf_config, **text_config(spec.hf_config)}
    for name in ("pad_token_id", "bos_token_id"):
        value = fields.get(name)
        if isinstance(value, int) and 0 <= value < spec.language.vocab_size:
            return value
    return 0


def pack_row(
    samples: Sequence[TokenizedSample], spec: ModelSpec, seq_len: int, pad_token_id: int | None = None
) -> TrainingRow:
    """Concatenates whole samples into a row of ``seq_len`` tokens. The padded tail is one more segment.

    Args:
        seq_len: number of tokens of the row.
        pad_token_id: token that fills the tail; None: that of the model.

    Raises:
        PackingError: there is no sample, or there are more tokens than ``seq_len``.
        PositionError: placeholders and media of a sample do not match.
    """
    sample_lengths = [len(sample) for sample in samples]
    token_count = sum(sample_lengths)
    if not sample_lengths or token_count > seq_len or not all(sample_lengths):
        raise PackingError(
            f"{len(samples)} samples of {sample_lengths} tokens do not make a row of {seq_len} tokens"
        )

    # The row has a fixed length, so that messages between pipeline stages have one size.
    token_ids = torch.full((seq_len,), padding_token(spec) if pad_token_id is None else pad_token_id)
    torch.cat([sample.token_ids for sample in samples], out=token_ids[:token_count])

    # The tail is one more segment, because the attention kernels need a segment for every token.
    segment_ends = list(accumulate(sample_lengths))
    padding_length = seq_len - token_count
    segment_lengths = sample_lengths + [padding_length] * bool(padding_length)
    labels, loss_mask = _labels_and_mask(samples, token_ids, [end - 1 for end in segment_ends])

    # Positions start again at 0 in each sample, and in the padded tail.
    position_ids = [
        mrope_positions(sample.token_ids, [item.grid_thw for item in sample.media_items], spec)
        for sample in samples
    ]
    position_ids.append(torch.arange(padding_length).expand(3, -1))

    # A row without images still gets one, so that the tower can run on every rank.
    media_items = [item for sample in samples for item in sample.media_items]
    return TrainingRow(
        tokens=token_ids,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=torch.cat(position_ids, dim=1),
        cu_seqlens=torch.tensor([0, *accumulate(segment_lengths)], dtype=torch.int32),
        max_seqlen=max(segment_lengths),
        vision=_pack_vision(media_items, token_ids, spec) if media_items else dummy_vision_batch(spec),
        num_samples=len(samples),
        num_images=len(media_items),
        num_patches=sum(item.grid_thw.num_patches for item in media_items),
    )


def _labels_and_mask(
    samples: Sequence[TokenizedSample], token_ids: Tensor, last_tokens: list[int]
) -> tuple[Tensor, Tensor]:
    """Labels int64 [S] and loss mask float32 [S].

    A label is the next token of the same sample if it is trained on. The mask holds the weight of its loss.
    """
    loss_mask = torch.zeros(len(token_ids))
    weights = torch.cat([sample.loss_mask for sample in samples])
    loss_mask[: len(weights) - 1] = weights[1:]
    loss_mask[last_tokens] = 0
    return token_ids.roll(-1) * (loss_mask != 0), loss_mask


def _pack_vision(media_items: Sequence[MediaItem], token_ids: Tensor, spec: ModelSpec) -> VisionBatch:
    vision_spec = spec.vision
    media_grids = [media_item.grid_thw for media_item in media_items]
    patch_order = window_order(media_grids, vision_spec)
    patch_indices = patch_order.patch_order(vision_spec.merge_unit)
    placeholders = (token_ids == spec.image_token_id) | (token_ids == spec.video_token_id)

    plane_indices = []
    first_plane = 0
    for media_item in media_items:
        plane_indices.append(_item_plane_index(media_item, vision_spec.temporal_patch_size, first_plane))
        first_plane += media_item.planes.shape[0] * media_item.planes.shape[1]

    position_hw = torch.cat([patch_positions(grid, vision_spec.spatial_merge_size) for grid in media_grids])
    frame_hw = np.array([(grid.h, grid.w) for grid in media_grids], np.int32).repeat(
        [grid.num_patches for grid in media_grids], axis=0
    )
    return VisionBatch(
        planes=torch.cat([media_item.planes.flatten(0, 1) for media_item in media_items]),
        plane_index=torch.from_numpy(np.concatenate(plane_indices))[patch_indices],
        position_hw=position_hw.int()[patch_indices],
        frame_hw=torch.from_numpy(frame_hw)[patch_indices],
        cu_seqlens=patch_order.cu_seqlens,
        cu_window_seqlens=patch_order.cu_window_seqlens,
        max_seqlen=int(patch_order.cu_seqlens.diff().max()),
        max_window_seqlen=int(patch_order.cu_window_seqlens.diff().max()),
        feature_index=placeholders.nonzero().flatten()[patch_order.unit_order],
    )


def _item_plane_index(media_item: MediaItem, temporal_patch_size: int, first_plane: int) -> np.ndarray:
    """int32 [patches, temporal]: the planes of each patch in the row, in merge-unit order."""
    grid = media_item.grid_thw
    num_frames, planes_per_frame, _ = media_item.planes.shape
    patches_per_frame = grid.h * grid.w
    if planes_per_frame != patches_per_frame:
        raise PackingError(
            f"a {grid.kind} of {grid.h} x {grid.w} patches came with {planes_per_frame} planes a frame"
        )
    frame_numbers = np.arange(grid.t * temporal_patch_size, dtype=np.int32).clip(max=num_frames - 1)
    first_planes = first_plane + frame_numbers.reshape(grid.t, 1, temporal_patch_size) * patches_per_frame
    return (first_planes + np.arange(patches_per_frame, dtype=np.int32)[:, None]).reshape(
        -1, temporal_patch_size
    )


def dummy_vision_batch(spec: ModelSpec) -> VisionBatch:
    """One black merge unit that has no place in the text.

    It keeps the vision tower's backward pass running in text-only rows.
    """
    vision_spec = spec.vision
    dummy_grid = GridTHW(1, vision_spec.spatial_merge_size, vision_spec.spatial_merge_size)
    segment_bounds = torch.tensor([0, dummy_grid.num_patches], dtype=torch.int32)
    return VisionBatch(
        planes=torch.zeros(1, vision_spec.in_channels * vision_spec.patch_size**2, dtype=torch.uint8),
        plane_index=torch.zeros(dummy_grid.num_patches, vision_spec.temporal_patch_size, dtype=torch.int32),
        position_hw=patch_positions(dummy_grid, vision_spec.spatial_merge_size).int(),
        frame_hw=torch.full((dummy_grid.num_patches, 2), vision_spec.spatial_merge_size, dtype=torch.int32),
        cu_seqlens=segment_bounds,
        cu_window_seqlens=segment_bounds.clone(),
        max_seqlen=dummy_grid.num_patches,
        max_window_seqlen=dummy_grid.num_patches,
        feature_index=torch.zeros(0, dtype=torch.int64),
    )
