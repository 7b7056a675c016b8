"""Packs samples into one :class:`~megatron_vl.data.packing.row.Row`.

Everything that depends on the data is computed here, on the CPU. Nothing is decoded here: samples come with
their pixel planes (see :mod:`megatron_vl.data.sample.pixels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_vl.config import VideoPositions
from megatron_vl.data.packing.row import Row, VisionBatch
from megatron_vl.errors import UserError
from megatron_vl.spec.families import ModelSpec
from megatron_vl.spec.families.base import text_config
from megatron_vl.spec.positions import (
    GridTHW,
    mrope_positions,
    patch_positions,
    placeholder_positions,
    placeholder_runs,
    window_order,
)


class PackError(UserError, ValueError):
    """The samples do not make a row. The message says which number does not fit."""


@dataclass
class MediaItem:
    """One image or video: its grid of patches and its pixels."""

    grid: GridTHW
    planes: Tensor
    """uint8 [F, h * w, channels * patch * patch]: the frames, with patches in merge-unit order. An image has
    one frame. Time slice ``i`` of the grid is frame ``min(i, F - 1)``:
    the last frame is repeated, as in HF's processors."""


@dataclass
class Sample:
    """One tokenized conversation with expanded placeholders."""

    token_ids: Tensor
    """int64 [n]"""
    loss_mask: Tensor
    """[n]: the tokens to learn (not shifted), bool; or float32 if they have weights."""
    media: list[MediaItem] = field(default_factory=list)
    """In the order of the text."""

    def __len__(self) -> int:
        return self.token_ids.numel()


def pad_token(spec: ModelSpec) -> int:
    """The token that fills the end of a row.

    It is the config's ``pad_token_id``, else its ``bos_token_id`` (Qwen's ``<|endoftext|>``), else 0. It is
    never learnt, and no sample attends to it.
    """
    fields = {**spec.hf_config, **text_config(spec.hf_config)}
    for name in ("pad_token_id", "bos_token_id"):
        value = fields.get(name)
        if isinstance(value, int) and 0 <= value < spec.language.vocab_size:
            return value
    return 0


def pack_row(
    samples: Sequence[Sample],
    spec: ModelSpec,
    seq_len: int,
    pad_token_id: int | None = None,
    video_positions: VideoPositions = "released",
) -> Row:
    """Concatenates whole samples into a row of ``seq_len`` tokens. The padded tail is one more segment.

    Args:
        pad_token_id: token that fills the tail; None: that of the model.
        video_positions: as in :func:`~megatron_vl.spec.positions.mrope_positions`.

    Raises:
        PackError: there is no sample, or there are more tokens than ``seq_len``.
        PositionError: placeholders and media of a sample do not match.
    """
    lengths = torch.tensor([len(sample) for sample in samples], dtype=torch.int64)
    used = int(lengths.sum())
    if not len(samples) or used > seq_len or bool((lengths == 0).any()):
        raise PackError(
            f"{len(samples)} samples of {lengths.tolist()} tokens do not make a row of {seq_len} tokens"
        )

    filler = pad_token(spec) if pad_token_id is None else pad_token_id
    tail = seq_len - used
    tokens = pad(torch.cat([sample.token_ids for sample in samples]), (0, tail), value=filler)
    labels, loss_mask = _targets(samples, seq_len)

    grids = [[item.grid for item in sample.media] for sample in samples]
    positions = [
        mrope_positions(sample.token_ids, own, spec, video_positions)
        for sample, own in zip(samples, grids, strict=True)
    ]

    segments = lengths if not tail else torch.cat([lengths, torch.tensor([tail])])
    media = [item for sample in samples for item in sample.media]
    return Row(
        tokens=tokens,
        labels=labels,
        loss_mask=loss_mask,
        position_ids=torch.cat([*positions, torch.arange(tail).expand(3, -1)], dim=1),
        cu_seqlens=pad(segments.cumsum(0), (1, 0)).int(),
        max_seqlen=int(segments.max()),
        vision=_vision(media, _placeholders(samples, lengths, spec), spec) if media else dummy_vision(spec),
        num_samples=len(samples),
        num_images=len(media),
        num_patches=sum(item.grid.patches for item in media),
    )


def _targets(samples: Sequence[Sample], seq_len: int) -> tuple[Tensor, Tensor]:
    """Labels int64 [S] and loss mask float32 [S].

    A label is the next token of the same sample if it is to be learnt. The mask holds the weight of its loss.
    """
    labels = torch.zeros(seq_len, dtype=torch.int64)
    mask = torch.zeros(seq_len, dtype=torch.float32)
    start = 0
    for sample in samples:
        span = slice(start, start + len(sample) - 1)
        learnt = sample.loss_mask[1:]
        mask[span] = learnt.float()
        labels[span] = sample.token_ids[1:] * (learnt != 0)
        start += len(sample)
    return labels, mask


def _placeholders(samples: Sequence[Sample], lengths: Tensor, spec: ModelSpec) -> Tensor:
    """int64 [N]: the position in the row of each placeholder, with media in the order of the text."""
    offsets = pad(lengths.cumsum(0), (1, 0)).tolist()
    indices = []
    for sample, offset in zip(samples, offsets[:-1], strict=True):
        grids = [item.grid for item in sample.media]
        runs = placeholder_runs(grids, spec)
        for run, start in zip(runs, placeholder_positions(sample.token_ids, runs, spec), strict=True):
            indices.append(torch.arange(run.tokens(spec.vision.spatial_merge_size)) + offset + start)
    return torch.cat(indices)


def _vision(media: Sequence[MediaItem], placeholders: Tensor, spec: ModelSpec) -> VisionBatch:
    vision = spec.vision
    grids = [item.grid for item in media]
    order = window_order(grids, vision)
    patches = order.patches(vision.merge_unit)

    indices = []
    first = 0
    for item in media:
        indices.append(_plane_index(item, vision.temporal_patch_size) + first)
        first += item.planes.shape[0] * item.planes.shape[1]

    position_hw = torch.cat([patch_positions(grid, vision.spatial_merge_size) for grid in grids])
    frame_hw = torch.cat([torch.tensor([[grid.h, grid.w]]).expand(grid.patches, 2) for grid in grids])
    return VisionBatch(
        planes=torch.cat([item.planes.flatten(0, 1) for item in media]),
        plane_index=torch.cat(indices)[patches].int(),
        position_hw=position_hw[patches].int(),
        frame_hw=frame_hw[patches].int(),
        cu_seqlens=order.cu_seqlens,
        cu_window_seqlens=order.cu_window_seqlens,
        max_seqlen=int(order.cu_seqlens.diff().max()),
        max_window_seqlen=int(order.cu_window_seqlens.diff().max()),
        feature_index=placeholders[order.units],
    )


def _plane_index(item: MediaItem, temporal: int) -> Tensor:
    """int64 [patches, temporal]: the planes of each patch in merge-unit order,
    counted from the item's first plane."""
    grid = item.grid
    frames = item.planes.shape[0]
    per_frame = item.grid.h * item.grid.w
    if item.planes.shape[1] != per_frame:
        raise PackError(
            f"a {grid.kind} of {grid.h} x {grid.w} patches came with {item.planes.shape[1]} planes a frame"
        )
    slices = torch.arange(grid.t * temporal).clamp(max=frames - 1).view(grid.t, 1, temporal)
    return (slices * per_frame + torch.arange(per_frame)[:, None]).reshape(-1, temporal)


def dummy_vision(spec: ModelSpec) -> VisionBatch:
    """One black merge unit that has no place in the text.

    It keeps the vision tower's backward pass running in text-only rows.
    """
    vision = spec.vision
    grid = GridTHW(1, vision.spatial_merge_size, vision.spatial_merge_size)
    segment = torch.tensor([0, grid.patches], dtype=torch.int32)
    return VisionBatch(
        planes=torch.zeros(1, vision.in_channels * vision.patch_size**2, dtype=torch.uint8),
        plane_index=torch.zeros(grid.patches, vision.temporal_patch_size, dtype=torch.int32),
        position_hw=patch_positions(grid, vision.spatial_merge_size).int(),
        frame_hw=torch.full((grid.patches, 2), vision.spatial_merge_size, dtype=torch.int32),
        cu_seqlens=segment,
        cu_window_seqlens=segment.clone(),
        max_seqlen=grid.patches,
        max_window_seqlen=grid.patches,
        feature_index=torch.zeros(0, dtype=torch.int64),
    )
