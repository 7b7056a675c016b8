"""Rows from the one loader of a data-parallel replica to the ranks that need them.

The rank at (stage 0, tp 0) owns the loader. Once a step, tokens, labels, positions and segment bounds of all its rows
go to the whole replica in one broadcast; pixels and what belongs to them only to the tensor-parallel peers on stage 0.
Sizes travel first as a small host-side message, so that no rank reads a number off the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.row import Row, pin
from megatron_vl.models.attention import Segments
from megatron_vl.models.vision import VisionInput
from megatron_vl.models.vlm import DeviceRow
from megatron_vl.parallel.grid import Grid
from megatron_vl.platform import Platform

_VISION_INTS = ("plane_index", "position_hw", "frame_hw", "cu_seqlens", "cu_window_seqlens", "feature_index")


@dataclass
class StepData:
    """The rows of one step on this rank, and what the log says of them."""

    rows: list[DeviceRow]
    counts: dict[str, int] = field(default_factory=dict)
    """samples, images, patches, dropped samples by reason (``dropped/REASON``); the same on every rank of the replica."""
    segment_lengths: list[list[int]] = field(default_factory=list)
    """Document lengths in tokens of each row, without the padded tail, for FLOP counts."""
    vision_lengths: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(full-attention lengths, window lengths) in patches of each row; empty lists for a text-only row."""
    keys: list[list[str]] = field(default_factory=list)
    """Keys of the samples of each row."""
    dropped: list[dict[str, str]] = field(default_factory=list)
    """Samples that could not be used, as listed by the loader (at most some hundreds a row)."""
    wait_s: float = 0.0
    """Seconds the loader's owner waited for its rows."""


class Feed:
    """Gives each rank of a replica its part of the next ``micro_batches`` rows.

    Args:
        loader: an iterator of rows on the rank that owns the loader, None elsewhere.
    """

    def __init__(self, grid: Grid, platform: Platform, loader: Iterator[Row] | None, micro_batches: int) -> None:
        if grid.owns_loader and loader is None:
            raise ValueError("the rank at pipeline stage 0, tensor rank 0 needs a loader")
        self.grid, self.platform, self.loader, self.micro_batches = grid, platform, loader, micro_batches

    def next_step(self) -> StepData:
        """Collective over the replica. Raises RuntimeError on every rank when the loader of the replica failed."""
        start = time.perf_counter()
        rows, error = self._read()
        wait = time.perf_counter() - start
        header: list[Any] = [error or [_describe(row) for row in rows]]
        if self.grid.tp * self.grid.pp > 1:
            dist.broadcast_object_list(header, src=self.grid.replica_source, group=self.grid.replica_gloo)
        if isinstance(header[0], str):
            raise RuntimeError(f"data-parallel rank {self.grid.dp_rank}: the loader failed: {header[0]}")
        described: list[dict[str, Any]] = header[0]
        text = self._share(_text_buffer(rows), sum(_text_size(d) for d in described), torch.int32, whole_replica=True)
        device_rows = [
            _device_row(d, part) for d, part in zip(described, text.split([_text_size(d) for d in described]), strict=True)
        ]
        if self.grid.has_vision:
            self._add_vision(device_rows, described, rows)
        counts: dict[str, int] = {}
        for d in described:
            for name, value in d["counts"].items():
                counts[name] = counts.get(name, 0) + value
        return StepData(
            device_rows,
            counts,
            [d["lengths"] for d in described],
            [d["vision_lengths"] for d in described],
            [d["keys"] for d in described],
            [sample for d in described for sample in d["dropped"]],
            wait,
        )

    def _read(self) -> tuple[list[Row], str]:
        if not self.grid.owns_loader:
            return [], ""
        assert self.loader is not None
        try:
            return [pin(next(self.loader)) for _ in range(self.micro_batches)], ""
        except StopIteration:
            return [], "the data set ended; training needs a repeating loader"
        except Exception as error:  # every rank of the replica has to learn of it, or it hangs in the broadcast
            return [], f"{type(error).__name__}: {error}"

    def _share(self, local: Tensor | None, size: int, dtype: torch.dtype, *, whole_replica: bool) -> Tensor:
        """One broadcast of a flat buffer from the loader's owner; the owner hands in its host buffer."""
        device = self.platform.device
        owner = self.grid.owns_loader
        buffer = (
            local.to(device, non_blocking=True) if owner and local is not None else torch.empty(size, dtype=dtype, device=device)
        )
        if whole_replica and self.grid.tp * self.grid.pp > 1:
            dist.broadcast(buffer, src=self.grid.replica_source, group=self.grid.replica_group)
        elif not whole_replica and self.grid.tp > 1:
            dist.broadcast(buffer, src=self.grid.replica_source, group=self.grid.tp_group)
        return buffer

    def _add_vision(self, device_rows: list[DeviceRow], described: list[dict[str, Any]], rows: list[Row]) -> None:
        int_sizes = [sum(_numel(d["vision"][n]) for n in _VISION_INTS) for d in described]
        plane_sizes = [_numel(d["vision"]["planes"]) for d in described]
        ints = self._share(_vision_buffer(rows), sum(int_sizes), torch.int32, whole_replica=False)
        planes = self._share(
            torch.cat([r.vision.planes.flatten() for r in rows]) if rows else None,
            sum(plane_sizes),
            torch.uint8,
            whole_replica=False,
        )
        for row, d, part, pixels in zip(device_rows, described, ints.split(int_sizes), planes.split(plane_sizes), strict=True):
            shapes = d["vision"]
            fields = {
                n: t.view(shapes[n])
                for n, t in zip(_VISION_INTS, part.split([_numel(shapes[n]) for n in _VISION_INTS]), strict=True)
            }
            row.vision = VisionInput(
                planes=pixels.view(shapes["planes"]),
                plane_index=fields["plane_index"],
                position_hw=fields["position_hw"],
                frame_hw=fields["frame_hw"],
                full=Segments(fields["cu_seqlens"], d["max_seqlens"][0]),
                window=Segments(fields["cu_window_seqlens"], d["max_seqlens"][1]),
            )
            row.feature_index = fields["feature_index"].long()


def _describe(row: Row) -> dict[str, Any]:
    """What the other ranks must know of a row before its tensors arrive."""
    vision = row.vision
    counts = {"samples": row.num_samples, "images": row.num_images, "patches": row.num_patches}
    counts |= {f"dropped/{reason}": n for reason, n in row.dropped.items()}
    lengths = row.cu_seqlens.diff().tolist()[: row.num_samples]
    real = row.num_patches > 0
    return {
        "seq_len": row.seq_len,
        "segments": row.cu_seqlens.numel(),
        "max_seqlen": int(row.max_seqlen),
        "lengths": lengths,
        "vision": {n: tuple(getattr(vision, n).shape) for n in ("planes", *_VISION_INTS)},
        "max_seqlens": (int(vision.max_seqlen), int(vision.max_window_seqlen)),
        "vision_lengths": (vision.cu_seqlens.diff().tolist(), vision.cu_window_seqlens.diff().tolist()) if real else ([], []),
        "counts": counts,
        "keys": row.keys,
        "dropped": [sample.as_json() for sample in row.dropped_samples],
    }


def _text_size(described: dict[str, Any]) -> int:
    return 6 * described["seq_len"] + described["segments"]


def _text_buffer(rows: list[Row]) -> Tensor | None:
    """Tokens, labels, mask, positions (3) and segment bounds of all rows as one int32 buffer."""
    if not rows:
        return None
    parts = [
        part.to(torch.int32).flatten()
        for row in rows
        for part in (row.tokens, row.labels, row.loss_mask, row.position_ids, row.cu_seqlens)
    ]
    return torch.cat(parts)


def _device_row(described: dict[str, Any], buffer: Tensor) -> DeviceRow:
    s = described["seq_len"]
    tokens, labels, mask, positions, cu_seqlens = buffer.split([s, s, s, 3 * s, described["segments"]])
    return DeviceRow(
        tokens=tokens.long(),
        labels=labels.long(),
        loss_mask=mask.float(),
        real_tokens=sum(described["lengths"]),
        position_ids=positions.view(3, s).long(),
        segments=Segments(cu_seqlens.contiguous(), described["max_seqlen"]),
        vision=None,
        feature_index=None,
    )


def _vision_buffer(rows: list[Row]) -> Tensor | None:
    if not rows:
        return None
    return torch.cat([getattr(row.vision, n).to(torch.int32).flatten() for row in rows for n in _VISION_INTS])


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
