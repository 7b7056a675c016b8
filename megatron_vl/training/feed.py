"""Sends rows from the one loader of a data-parallel replica to the ranks that need them.

The rank at (stage 0, cp 0, tp 0) owns the loader. Once per step, one broadcast sends tokens, labels,
positions and segment bounds of all its rows to the whole replica. Pixels and their indices go only to the
ranks on stage 0. Sizes are sent first in a small message between hosts,
so that no rank reads a number from the device. Under context parallelism, each rank then keeps its part of
the rows (:mod:`megatron_vl.training.row_shards`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl import progress
from megatron_vl.data.packing.row import Row, loss_index
from megatron_vl.errors import UserError
from megatron_vl.models.batch import DeviceRow, Segments, VisionInput
from megatron_vl.parallel.grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import VisionSpec
from megatron_vl.training.out_of_memory import host_message
from megatron_vl.training.pictures import Shares, plane_bounds, send_pictures
from megatron_vl.training.row_shards import (
    Sharding,
    as_part,
    features_of_part,
    pictures_of_part,
    text_of_part,
)


@dataclass(frozen=True)
class _Buffer:
    """One flat buffer in which tensors of a row are sent together."""

    dtype: torch.dtype
    whole_replica: bool
    """Whether all ranks of the replica get the buffer; otherwise only those on the first stage."""


_BUFFERS = {
    "text": _Buffer(torch.int32, whole_replica=True),
    "ints": _Buffer(torch.int32, whole_replica=False),
    "planes": _Buffer(torch.uint8, whole_replica=False),
}


@dataclass(frozen=True)
class _Field:
    """One tensor of a row: its name in messages, the buffer that carries it, and how its owner reads it."""

    name: str
    buffer: str
    read: Callable[[Row], Tensor]


def _vision_field(name: str, buffer: str = "ints") -> _Field:
    return _Field(name, buffer, lambda row: getattr(row.vision, name))


def _loss_index(row: Row) -> Tensor:
    """The tokens whose logits are computed; empty means all of them."""
    index = loss_index(row.loss_mask)
    return row.tokens.new_empty(0) if index is None else index


def _sources(row: Row) -> Tensor:
    """The source of each segment, -1 for the padded tail; empty if the data set is no blend."""
    tail = len(row.cu_seqlens) - 1 - row.num_samples
    return torch.tensor([*row.sources, *[-1] * tail] if row.sources else [], dtype=torch.int32)


_WIRE = (
    _Field("tokens", "text", lambda row: row.tokens),
    _Field("labels", "text", lambda row: row.labels),
    _Field("loss_mask", "text", lambda row: row.loss_mask.float().view(torch.int32)),  # the bits of weights
    _Field("position_ids", "text", lambda row: row.position_ids),
    _Field("cu_seqlens", "text", lambda row: row.cu_seqlens),
    _Field("loss_index", "text", _loss_index),
    _Field("sources", "text", _sources),
    _vision_field("plane_index"),
    _vision_field("position_hw"),
    _vision_field("frame_hw"),
    _Field("full_cu_seqlens", "ints", lambda row: row.vision.cu_seqlens),
    _Field("window_cu_seqlens", "ints", lambda row: row.vision.cu_window_seqlens),
    _vision_field("feature_index"),
    # Only context parallelism sends features to other ranks than those that need them.
    _Field("feature_order", "ints", lambda row: row.tokens.new_empty(0)),
    _vision_field("planes", "planes"),
)
"""All tensors of a row that are sent, in their order within each buffer.
Packing, sizes and unpacking follow from it."""


class FeedError(UserError, RuntimeError):
    """The loader of a replica failed; raised on all of its ranks."""


@dataclass
class StepData:
    """The rows of one step on this rank, and their numbers for the log."""

    rows: list[DeviceRow]
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of samples, images, patches, and dropped samples by reason (``dropped/REASON``). They are equal
    on every rank of the replica."""
    segment_lengths: list[list[int]] = field(default_factory=list)
    """Document lengths in tokens of each row, without the padded tail, for FLOP counts."""
    vision_lengths: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(full-attention lengths, window lengths) in patches of each row; empty lists for a text-only row."""
    loss_tokens: list[int] = field(default_factory=list)
    """Number of loss tokens of each row."""
    keys: list[list[str]] = field(default_factory=list)
    """Keys of each row's samples."""
    dropped: list[dict[str, Any]] = field(default_factory=list)
    """Samples that could not be used, as the loader lists them (at most some hundreds per row)."""
    wait_s: float = 0.0
    """Seconds that the loader's owner waited for its rows."""
    learnt: list[list[tuple[int, int]]] = field(default_factory=list)
    """(source, loss tokens) of each row's samples; empty lists if the data set is no blend."""


@dataclass
class _Packed:
    """One row on its owner: the description that the other ranks need,
    and its tensors as flat buffers by name."""

    described: dict[str, Any]
    buffers: dict[str, Tensor]

    def to(self, device: torch.device) -> _Packed:
        """A copy on the device. The call does not wait if the buffers are in pinned memory."""
        moved = {name: tensor.to(device, non_blocking=True) for name, tensor in self.buffers.items()}
        return _Packed(self.described, moved)


class Feed:
    """Gives each rank of a replica its part of the next ``micro_batches`` rows.

    Args:
        loader: an iterator of rows on the rank that owns the loader; None elsewhere.
        vision: the tower, needed if every rank holds it, and under context parallelism.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        platform: Platform,
        loader: Iterator[Row] | None,
        micro_batches: int,
        *,
        vision: VisionSpec | None = None,
    ) -> None:
        if grid.owns_loader and loader is None:
            raise ValueError("the rank at pipeline stage 0, context rank 0, tensor rank 0 needs a loader")
        self.grid, self.platform, self.loader, self.micro_batches = grid, platform, loader, micro_batches
        self.decoupled, self.vision = grid.cut.whole_vision, vision
        if (self.decoupled or grid.cp > 1) and vision is None:
            raise ValueError("a tower on several ranks needs its sizes, to spread the pictures")
        self.sharding = Sharding(grid.cp, vision, self.decoupled) if grid.cp > 1 and vision else None

    def next_step(self) -> StepData:
        """The rows of the next step. Collective over the replica.

        Raises:
            FeedError: the loader failed. Every rank of the replica raises it.
        """
        start = time.perf_counter()
        rows, error = self._read()
        progress.rows_are_read()
        wait = time.perf_counter() - start

        own = [_pack(row, self.sharding) for row in rows]
        uploaded = [row.to(self.platform.device) for row in own]
        header: list[Any] = [error or [row.described for row in uploaded], None]
        on_host: list[dict[str, Tensor]] = []
        if (self.decoupled or self.sharding) and not error:
            on_host = [_unpack(row.described, row.buffers) for row in own]
            header[1] = [
                plane_bounds(fields["plane_index"].numpy(), row.described["vision_lengths"][0])
                for row, fields in zip(own, on_host, strict=True)
            ]
        if self.grid.replica_ranks > 1:
            dist.broadcast_object_list(header, src=self.grid.replica_source, group=self.grid.replica_gloo)
        if isinstance(header[0], str):
            raise FeedError(header[0])
        described: list[dict[str, Any]] = header[0]

        device_rows = []
        received = {name: self._share(name, uploaded, described) for name in _BUFFERS if self._gets(name)}
        for number, d in enumerate(described):
            fields = _unpack(d, {name: rows[number] for name, rows in received.items()})
            if self.sharding is not None:
                device_rows.append(self._part(d, fields, header[1][number]))
                continue
            row = _device_row(d, fields)
            if self.decoupled and self.grid.has_vision:
                row.feature_index = fields["feature_index"].long()
            elif self.grid.has_vision:
                row.vision, row.feature_index = _vision(d, fields)
            device_rows.append(row)
        if self.decoupled:
            self._spread_pictures(device_rows, described, header[1], on_host, uploaded)
        return _step_data(device_rows, described, wait)

    def _part(
        self, described: dict[str, Any], fields: dict[str, Tensor], bounds: list[list[int]]
    ) -> DeviceRow:
        """This rank's part of a row under context parallelism.

        Args:
            bounds: result of :func:`plane_bounds` for the row.
        """
        assert self.sharding is not None
        rank = self.grid.cp_rank
        row = as_part(_device_row(described, text_of_part(described, fields, rank)), described, rank)
        if not self.grid.has_vision:
            return row

        row.feature_index = features_of_part(described, fields, rank)
        if not self.decoupled and bounds:
            row.vision, row.feature_route = pictures_of_part(self.sharding, described, bounds, fields, rank)
        elif not self.decoupled:
            row.vision, _ = _vision(described, fields)
        return row

    def _gets(self, buffer: str) -> bool:
        if self.decoupled and buffer == "planes":
            return False
        return _BUFFERS[buffer].whole_replica or self.grid.has_vision

    def _spread_pictures(
        self,
        rows: list[DeviceRow],
        described: list[dict[str, Any]],
        bounds: list[list[list[int]]],
        on_host: list[dict[str, Tensor]],
        uploaded: list[_Packed],
    ) -> None:
        """Sends each rank its share of the pictures, and hangs it onto the rows."""
        grid = self.grid
        assert self.vision is not None
        shares = Shares(self.vision, [d["vision_lengths"] for d in described], bounds, grid.replica_ranks)
        planes = [row.buffers["planes"].view(row.described["shapes"]["planes"]) for row in uploaded]
        step = send_pictures(
            shares, grid.replica_group, rows, on_host, planes, self.platform.device, self.vision
        )
        if self.sharding is not None:
            self.sharding.route_step(step, described, on_host, grid.cp_rank, self.platform.device)
        for row in rows:
            row.step_vision = step

    def _read(self) -> tuple[list[Row], str]:
        if not self.grid.owns_loader:
            return [], ""
        where = f"data-parallel rank {self.grid.dp_rank}: the loader failed"
        try:
            return [self._next_row() for _ in range(self.micro_batches)], ""
        except StopIteration:
            return [], f"{where}: the data set ended; training needs a repeating loader"
        except Exception as error:
            # Every rank of the replica must learn of the error, or it would hang in the broadcast.
            said = host_message(error) or f"{type(error).__name__}: {error}"
            return [], f"{where}: {said}"

    def _next_row(self) -> Row:
        assert self.loader is not None
        row = next(self.loader)
        progress.tick()
        return row

    def _share(self, name: str, own: list[_Packed], described: list[dict[str, Any]]) -> list[Tensor]:
        """A flat buffer for each row.
        If other ranks need them too, the loader's owner sends all in one broadcast."""
        grid, buffer = self.grid, _BUFFERS[name]
        mine = [row.buffers[name] for row in own]
        if (grid.replica_ranks if buffer.whole_replica else grid.tp * grid.cp) == 1:
            return mine

        sizes = [_size(d, name) for d in described]
        device = self.platform.device
        joined = torch.cat(mine) if mine else torch.empty(sum(sizes), dtype=buffer.dtype, device=device)
        group = grid.replica_group if buffer.whole_replica else grid.stage_group
        dist.broadcast(joined, src=grid.replica_source, group=group)
        return list(joined.split(sizes))


def _step_data(rows: list[DeviceRow], described: list[dict[str, Any]], wait_s: float) -> StepData:
    counts: dict[str, int] = {}
    for d in described:
        for name, value in d["counts"].items():
            counts[name] = counts.get(name, 0) + value
    return StepData(
        rows=rows,
        counts=counts,
        segment_lengths=[d["lengths"] for d in described],
        vision_lengths=[d["vision_lengths"] for d in described],
        loss_tokens=[d["loss_tokens"] for d in described],
        keys=[d["keys"] for d in described],
        learnt=[d["learnt"] for d in described],
        dropped=[sample for d in described for sample in d["dropped"]],
        wait_s=wait_s,
    )


def _describe(row: Row, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """What the other ranks must know of a row before its tensors arrive.

    Args:
        shapes: shape of each tensor by field.
    """
    vision = row.vision
    counts = {"samples": row.num_samples, "images": row.num_images, "patches": row.num_patches}
    counts |= {f"dropped/{reason}": n for reason, n in row.dropped.items()}
    vision_lengths: tuple[list[int], list[int]] = ([], [])
    if row.num_patches > 0:
        vision_lengths = (vision.cu_seqlens.diff().tolist(), vision.cu_window_seqlens.diff().tolist())

    return {
        "shapes": shapes,
        "loss_tokens": int(row.loss_mask.count_nonzero()),
        "max_seqlen": int(row.max_seqlen),
        "lengths": row.cu_seqlens.diff().tolist()[: row.num_samples],
        "max_seqlens": (int(vision.max_seqlen), int(vision.max_window_seqlen)),
        "vision_lengths": vision_lengths,
        "counts": counts,
        "keys": row.keys,
        "learnt": _learnt(row),
        "dropped": [sample.as_json() for sample in row.dropped_samples],
    }


def _learnt(row: Row) -> list[tuple[int, int]]:
    """(source, loss tokens) of each sample; empty if the data set is no blend, or for a row of padding."""
    if not row.sources or not row.keys:
        return []
    bounds = row.cu_seqlens.tolist()
    counts = [
        int(row.loss_mask[first:end].count_nonzero())
        for first, end in zip(bounds, bounds[1 : row.num_samples + 1], strict=False)
    ]
    return list(zip(row.sources, counts, strict=True))


def _pack(row: Row, sharding: Sharding | None = None) -> _Packed:
    """The row in host memory (pinned if there is a GPU):
    one buffer of pixels and two small ones for the rest.

    Args:
        sharding: how the row is shared under context parallelism; None: one rank holds it whole.
    """
    tensors = {entry.name: entry.read(row) for entry in _WIRE}
    parts = sharding.describe(row, tensors) if sharding is not None else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    buffers = {}
    for name, buffer in _BUFFERS.items():
        flat = [tensors[entry.name].to(buffer.dtype).flatten() for entry in _WIRE if entry.buffer == name]
        buffers[name] = _pinned(torch.cat(flat) if len(flat) > 1 else flat[0])
    return _Packed(_describe(row, shapes) | parts, buffers)


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _size(described: dict[str, Any], buffer: str) -> int:
    """Elements of a row's buffer."""
    return sum(math.prod(described["shapes"][entry.name]) for entry in _WIRE if entry.buffer == buffer)


def _unpack(described: dict[str, Any], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a row by field, as views of the buffers that this rank has, in their shapes."""
    found: dict[str, Tensor] = {}
    for name, buffer in buffers.items():
        names = [entry.name for entry in _WIRE if entry.buffer == name]
        shapes = [described["shapes"][field_name] for field_name in names]
        parts = buffer.split([math.prod(shape) for shape in shapes])
        found |= {
            field_name: part.view(shape) for field_name, part, shape in zip(names, parts, shapes, strict=True)
        }
    return found


def _device_row(described: dict[str, Any], fields: dict[str, Tensor]) -> DeviceRow:
    """The row without its pictures, in the types that the model expects."""
    selected, sources = fields["loss_index"], fields["sources"]
    return DeviceRow(
        tokens=fields["tokens"].long(),
        labels=fields["labels"].long(),
        loss_mask=fields["loss_mask"].contiguous().view(torch.float32),
        real_tokens=sum(described["lengths"]),
        position_ids=fields["position_ids"].long(),
        segments=Segments(fields["cu_seqlens"].contiguous(), described["max_seqlen"]),
        vision=None,
        feature_index=None,
        loss_index=selected.long() if len(selected) else None,
        sources=sources if len(sources) else None,
    )


def _vision(described: dict[str, Any], fields: dict[str, Tensor]) -> tuple[VisionInput, Tensor]:
    """The pictures of a row, and the token positions of their features."""
    full, window = described["max_seqlens"]
    vision = VisionInput(
        planes=fields["planes"],
        plane_index=fields["plane_index"],
        position_hw=fields["position_hw"],
        frame_hw=fields["frame_hw"],
        full=Segments(fields["full_cu_seqlens"], full),
        window=Segments(fields["window_cu_seqlens"], window),
    )
    return vision, fields["feature_index"].long()
