"""What a row is on its owner is what arrives, whatever buffers it travelled in."""

from __future__ import annotations

import torch

from tests.training.process import run_single

WIRE = """
import dataclasses
import torch
from megatron_vl.platform import get_platform
get_platform("cpu")
from megatron_vl.data.assemble import pack_row
from megatron_vl.models.families import read_spec
from megatron_vl.models.vision import VisionInput
from megatron_vl.training import feed
from toolkit.parity.batches import make_sample

spec = read_spec(HF)
RESULT = []
for names in (["image", "text", "video"], ["text"]):
    row = pack_row([make_sample(name, spec, 0) for name in names], spec, 512)
    packed = feed._pack(row)
    empty = feed._empty(packed.described)
    fields = feed._unpack(packed.described, packed.buffers)
    found = feed._device_row(packed.described, fields)
    vision, feature_index = feed._vision(packed.described, fields)
    equal = {}
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        ours, theirs = getattr(found, name), getattr(row, name)
        equal[name] = torch.equal(ours, theirs) and ours.dtype == theirs.dtype
    for name in ("planes", "plane_index", "position_hw", "frame_hw"):
        equal[name] = torch.equal(getattr(vision, name), getattr(row.vision, name))
    equal["feature_index"] = torch.equal(feature_index, row.vision.feature_index.long())
    equal["cu_seqlens"] = torch.equal(found.segments.cu_seqlens, row.cu_seqlens)
    equal["full"] = torch.equal(vision.full.cu_seqlens, row.vision.cu_seqlens)
    equal["window"] = torch.equal(vision.window.cu_seqlens, row.vision.cu_window_seqlens)
    equal["loss_index"] = torch.equal(found.loss_index, feed.loss_index(row.loss_mask))
    equal["max_seqlen"] = vision.full.max_seqlen == row.vision.max_seqlen
    equal["max_window_seqlen"] = vision.window.max_seqlen == row.vision.max_window_seqlen
    sizes = []
    for name in ("text", "ints", "planes"):
        given, room = packed.buffers[name], empty.buffers[name]
        sizes.append((given.numel(), given.dtype) == (room.numel(), room.dtype))
    RESULT.append([[name for name, same in equal.items() if not same], all(sizes)])
"""


def test_a_row_arrives_as_it_left(tiny_checkpoint) -> None:
    """Pictures and text, and a row of text alone with its stand-in for a picture."""
    different = run_single(WIRE, HF=str(tiny_checkpoint("qwen2_5_vl", tied=True, dtype=torch.float32)))
    assert different == [[[], True], [[], True]]


ENDS = """
from types import SimpleNamespace
from megatron_vl.platform import get_platform
platform = get_platform("cpu")
from megatron_vl.training.feed import Feed

def rows():
    yield from ()

def broken():
    raise OSError("train-000007.tar: Input/output error")
    yield

grid = SimpleNamespace(owns_loader=True, dp=1, dp_rank=3, tp=1, pp=1)
RESULT = []
for loader in (rows(), broken()):
    try:
        Feed(grid, platform, loader, 2, balanced=False).next_step()
    except RuntimeError as error:
        RESULT.append(str(error))
"""


def test_a_loader_that_ends_or_fails_is_named_by_its_replica() -> None:
    ended, failed = run_single(ENDS)
    assert (
        ended
        == "data-parallel rank 3: the loader failed: the data set ended; training needs a repeating loader"
    )
    assert failed == "data-parallel rank 3: the loader failed: OSError: train-000007.tar: Input/output error"
