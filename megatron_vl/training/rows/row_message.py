"""The message of a row: what the owner of the loader sends to the other ranks of its replica.

A row is sent as a header, which is small and goes first, and as flat buffers, in which its tensors lie one
after another. :data:`_SENT_TENSORS` lists all tensors.
"""

import dataclasses
import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow, loss_index
from megatron_vl.models.batch import DeviceRow, Segments, VisionInput
from megatron_vl.training.rows.row_shards import RowSharding, pin_memory

RowHeader = dict[str, Any]
"""What the other ranks need of a row before its tensors arrive (see :func:`serialize_row`)."""

BUFFER_TYPES = {"text": torch.int32, "ints": torch.int32, "planes": torch.uint8}
"""The flat buffers in which tensors of a row are sent together. All ranks of the replica get ``text``; only
those on the first stage get the others."""


def _loss_index(row: TrainingRow) -> Tensor:
    """The tokens whose logits are computed; empty means all of them."""
    index = loss_index(row.loss_mask)
    return row.tokens.new_empty(0) if index is None else index


def _segment_sources(row: TrainingRow) -> Tensor:
    """The source of each segment, -1 for the padded tail; empty if the data set is no blend."""
    if not row.source_indices:
        return torch.tensor([], dtype=torch.int32)
    padding = [-1] * (len(row.cu_seqlens) - 1 - row.num_samples)
    return torch.tensor([*row.source_indices, *padding], dtype=torch.int32)


_SENT_TENSORS: dict[str, dict[str, Callable[[TrainingRow], Tensor]]] = {
    "text": {
        "tokens": attrgetter("tokens"),
        "labels": attrgetter("labels"),
        # Weights of the loss are sent as the bits of float32.
        "loss_mask": lambda row: row.loss_mask.float().view(torch.int32),
        "position_ids": attrgetter("position_ids"),
        "cu_seqlens": attrgetter("cu_seqlens"),
        "loss_index": _loss_index,
        "sources": _segment_sources,
    },
    "ints": {
        "plane_index": attrgetter("vision.plane_index"),
        "position_hw": attrgetter("vision.position_hw"),
        "frame_hw": attrgetter("vision.frame_hw"),
        "full_cu_seqlens": attrgetter("vision.cu_seqlens"),
        "window_cu_seqlens": attrgetter("vision.cu_window_seqlens"),
        "feature_index": attrgetter("vision.feature_index"),
        # Only context parallelism sends features to other ranks than those that need them.
        "feature_order": lambda row: row.tokens.new_empty(0),
    },
    "planes": {"planes": attrgetter("vision.planes")},
}
"""All tensors of a row that are sent, by buffer and name, and how their owner reads them. Packing and
unpacking follow their order."""


def serialize_row(
    row: TrainingRow, row_sharding: RowSharding | None = None
) -> tuple[RowHeader, dict[str, Tensor]]:
    """The header of a row, and its tensors as flat buffers by name, in host memory (pinned with a GPU)."""
    tensors = {name: read(row) for sent in _SENT_TENSORS.values() for name, read in sent.items()}
    parts = row_sharding.describe_parts(row, tensors) if row_sharding is not None else {}
    flat_buffers = {}
    for buffer_name, dtype in BUFFER_TYPES.items():
        flat = [tensors[name].to(dtype).flatten() for name in _SENT_TENSORS[buffer_name]]
        # Pixels are one tensor, which is not copied.
        flat_buffers[buffer_name] = pin_memory(torch.cat(flat) if len(flat) > 1 else flat[0])

    vision_lengths: tuple[list[int], list[int]] = ([], [])
    if row.num_patches > 0:
        vision_lengths = (row.vision.cu_seqlens.diff().tolist(), row.vision.cu_window_seqlens.diff().tolist())
    return {
        "shapes": {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        "loss_tokens": int(row.loss_mask.count_nonzero()),
        "max_seqlen": int(row.max_seqlen),
        "lengths": row.cu_seqlens.diff().tolist()[: row.num_samples],  # of documents, without the tail
        "max_seqlens": (int(row.vision.max_seqlen), int(row.vision.max_window_seqlen)),
        "vision_lengths": vision_lengths,
        # Dropped samples by reason; as the loader lists them, they are at most some hundreds a row.
        "counts": {
            # A row of padding has none.
            "samples": row.num_samples if row.sample_keys or row.loss_mask.any() else 0,
            "images": row.num_images,
            "patches": row.num_patches,
            **{f"dropped/{reason}": count for reason, count in row.dropped_counts.items()},
        },
        "keys": row.sample_keys,
        "source_loss_tokens": source_loss_tokens(row),
        "dropped": [dataclasses.asdict(sample) for sample in row.dropped_samples],
        **parts,
    }, flat_buffers


def source_loss_tokens(row: TrainingRow) -> list[tuple[int, int]]:
    """(source, loss tokens) of each sample; empty if the data set is no blend, or for a row of padding."""
    if not row.source_indices or not row.sample_keys:
        return []
    masks = row.loss_mask.split(row.cu_seqlens.diff().tolist())[: row.num_samples]
    return [
        (source, int(mask.count_nonzero())) for source, mask in zip(row.source_indices, masks, strict=True)
    ]


def buffer_numel(header: RowHeader, buffer_name: str) -> int:
    return sum(math.prod(header["shapes"][name]) for name in _SENT_TENSORS[buffer_name])


def unpack_tensors(header: RowHeader, flat_buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a row by name, in their shapes, as views of the buffers that this rank has."""
    tensors: dict[str, Tensor] = {}
    for buffer_name, flat_buffer in flat_buffers.items():
        shapes = {name: header["shapes"][name] for name in _SENT_TENSORS[buffer_name]}
        parts = flat_buffer.split([math.prod(shape) for shape in shapes.values()])
        tensors |= {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    return tensors


def make_device_row(header: RowHeader, tensors: dict[str, Tensor]) -> DeviceRow:
    """The row without its images, in the types that the model expects."""
    return DeviceRow(
        tokens=tensors["tokens"].long(),
        labels=tensors["labels"].long(),
        loss_mask=tensors["loss_mask"].contiguous().view(torch.float32),
        num_real_tokens=sum(header["lengths"]),
        position_ids=tensors["position_ids"].long(),
        segments=Segments(tensors["cu_seqlens"].contiguous(), header["max_seqlen"]),
        vision_input=None,
        feature_index=None,
        loss_index=tensors["loss_index"].long() if len(tensors["loss_index"]) else None,
        segment_sources=tensors["sources"] if len(tensors["sources"]) else None,
    )


def make_vision_input(header: RowHeader, tensors: dict[str, Tensor]) -> VisionInput:
    max_seqlen, max_window_seqlen = header["max_seqlens"]
    return VisionInput(
        planes=tensors["planes"],
        plane_index=tensors["plane_index"],
        position_hw=tensors["position_hw"],
        frame_hw=tensors["frame_hw"],
        full_segments=Segments(tensors["full_cu_seqlens"], max_seqlen),
        window_segments=Segments(tensors["window_cu_seqlens"], max_window_seqlen),
    )
