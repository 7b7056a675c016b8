"""A row arrives as it was on its owner, whatever buffers it travelled in."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_vl.data.packing.assemble_row import pack_row
from megatron_vl.data.packing.training_row import loss_index
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import UNSHARDED
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, ReplicaLoaderError
from megatron_vl.training.rows.row_message import (
    buffer_numel,
    make_device_row,
    make_vision_input,
    serialize_row,
    unpack_tensors,
)
from tests.support.ranks import in_ranks
from tests.tiny import tiny_checkpoint
from toolkit.parity.random_samples import make_sample


@pytest.mark.parametrize("kinds", [["image", "text", "video"], ["text"]], ids=str)
def test_row_arrives_as_it_left(kinds: list[str]) -> None:
    """Images and text, and a row of text alone with its stand-in for an image."""
    spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
    row = pack_row([make_sample(kind, spec, 0) for kind in kinds], spec, 512)
    row.loss_mask *= 0.3  # weights travel with every bit
    header, buffers = serialize_row(row)
    tensors = unpack_tensors(header, buffers)
    found, vision = make_device_row(header, tensors), make_vision_input(header, tensors)

    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert torch.equal(getattr(found, name), getattr(row, name)), name
        assert getattr(found, name).dtype == getattr(row, name).dtype, name
    for name in ("planes", "plane_index", "position_hw", "frame_hw"):
        assert torch.equal(getattr(vision, name), getattr(row.vision, name)), name
    assert torch.equal(tensors["feature_index"].long(), row.vision.feature_index.long())
    assert torch.equal(found.segments.cu_seqlens, row.cu_seqlens)
    assert torch.equal(vision.full_segments.cu_seqlens, row.vision.cu_seqlens)
    assert torch.equal(vision.window_segments.cu_seqlens, row.vision.cu_window_seqlens)
    assert torch.equal(found.loss_index, loss_index(row.loss_mask))
    assert vision.full_segments.max_seqlen == row.vision.max_seqlen
    assert vision.window_segments.max_seqlen == row.vision.max_window_seqlen
    assert all(buffer.numel() == buffer_numel(header, name) for name, buffer in buffers.items())


@in_ranks()
def test_loader_that_ends_or_fails_is_named_by_its_replica() -> None:
    def broken() -> Iterator[Any]:
        raise OSError("train-000007.tar: Input/output error")
        yield

    grid: Any = SimpleNamespace(owns_loader=True, dp=1, dp_rank=3, replica_ranks=1, cp=1, sharding=UNSHARDED)
    grid.from_loader_owner = lambda value: value
    prefix = "data-parallel rank 3: the loader failed: "
    for loader, message in (
        (iter(()), "the data set ended; training needs a repeating loader"),
        (broken(), "OSError: train-000007.tar: Input/output error"),
    ):
        with pytest.raises(ReplicaLoaderError, match=f"^{prefix}{message}$"):
            BatchBroadcast(grid, get_platform("cpu"), loader, 2).next_batch()
