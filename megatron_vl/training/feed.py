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

from megatron_vl.data.row import Row, loss_index
from megatron_vl.models.attention import Segments
from megatron_vl.models.vision import VisionInput
from megatron_vl.models.vlm import DeviceRow
from megatron_vl.parallel.balance import balance
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
    loss_tokens: list[int] = field(default_factory=list)
    """Tokens that bear loss, of each row."""
    keys: list[list[str]] = field(default_factory=list)
    """Keys of the samples of each row."""
    dropped: list[dict[str, str]] = field(default_factory=list)
    """Samples that could not be used, as listed by the loader (at most some hundreds a row)."""
    wait_s: float = 0.0
    """Seconds the loader's owner waited for its rows."""


@dataclass
class _Buffers:
    """One row on its owner: what the others must know of it, and its tensors as three flat buffers."""

    described: dict[str, Any]
    text: Tensor
    ints: Tensor
    planes: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.text, self.ints, self.planes

    def to(self, device: torch.device) -> _Buffers:
        """On the device; does not wait when this is pinned memory."""
        return _Buffers(self.described, *(tensor.to(device, non_blocking=True) for tensor in self.tensors))


class Feed:
    """Gives each rank of a replica its part of the next ``micro_batches`` rows.

    Args:
        loader: an iterator of rows on the rank that owns the loader, None elsewhere.
        balanced: rows change owners where that evens out the patches of the data-parallel ranks.
    """

    def __init__(
        self, grid: Grid, platform: Platform, loader: Iterator[Row] | None, micro_batches: int, *, balanced: bool
    ) -> None:
        if grid.owns_loader and loader is None:
            raise ValueError("the rank at pipeline stage 0, tensor rank 0 needs a loader")
        if balanced and grid.dp > 1 and grid.owns_loader and grid.owners_gloo is None:
            raise ValueError("rows are to be exchanged between replicas: make the grid with owners=True")
        self.grid, self.platform, self.loader, self.micro_batches = grid, platform, loader, micro_batches
        self.balanced = balanced and grid.dp > 1

    def next_step(self) -> StepData:
        """Collective over the replica, with ``balanced`` over all replicas.

        Raises:
            RuntimeError: the loader failed; on every rank of the replica, with ``balanced`` on every rank.
        """
        start = time.perf_counter()
        rows, error = self._read()
        wait = time.perf_counter() - start
        own = [_flatten(row) for row in rows]
        if self.balanced and self.grid.owns_loader:
            own, error = self._exchange(own, error)
        uploaded = [row.to(self.platform.device) for row in own]
        header: list[Any] = [error or [row.described for row in uploaded]]
        if self.grid.tp * self.grid.pp > 1:
            dist.broadcast_object_list(header, src=self.grid.replica_source, group=self.grid.replica_gloo)
        if isinstance(header[0], str):
            raise RuntimeError(header[0])
        described: list[dict[str, Any]] = header[0]
        text = self._share([row.text for row in uploaded], [_text_size(d) for d in described], torch.int32, whole_replica=True)
        device_rows = [_device_row(d, part) for d, part in zip(described, text, strict=True)]
        if self.grid.has_vision:
            self._add_vision(device_rows, described, uploaded)
        counts: dict[str, int] = {}
        for d in described:
            for name, value in d["counts"].items():
                counts[name] = counts.get(name, 0) + value
        return StepData(
            device_rows,
            counts,
            [d["lengths"] for d in described],
            [d["vision_lengths"] for d in described],
            [d["loss_tokens"] for d in described],
            [d["keys"] for d in described],
            [sample for d in described for sample in d["dropped"]],
            wait,
        )

    def _read(self) -> tuple[list[Row], str]:
        if not self.grid.owns_loader:
            return [], ""
        assert self.loader is not None
        where = f"data-parallel rank {self.grid.dp_rank}: the loader failed"
        try:
            return [next(self.loader) for _ in range(self.micro_batches)], ""
        except StopIteration:
            return [], f"{where}: the data set ended; training needs a repeating loader"
        except Exception as error:  # every rank of the replica has to learn of it, or it hangs in the broadcast
            return [], f"{where}: {type(error).__name__}: {error}"

    def _exchange(self, own: list[_Buffers], error: str) -> tuple[list[_Buffers], str]:
        """Rows after balancing over the owners of all replicas, or what went wrong on any of them.

        They travel between hosts' memories, over a group of their own: gradients and weights have the network of the GPUs.
        """
        grid = self.grid
        patches: list[Any] = [None] * grid.dp
        dist.all_gather_object(patches, error or [row.described["counts"]["patches"] for row in own], group=grid.owners_gloo)
        errors = [offer for offer in patches if isinstance(offer, str)]
        if errors:
            return [], errors[0]
        places = balance(patches)
        moves = [(place, rank) for rank, row in enumerate(places) for place in row if place.rank != rank]
        if not moves:
            return own, ""
        leaving = {place.row for place, _ in moves if place.rank == grid.dp_rank}
        descriptions: list[Any] = [None] * grid.dp
        dist.all_gather_object(descriptions, {i: own[i].described for i in leaving}, group=grid.owners_gloo)
        owners = dist.get_process_group_ranks(grid.owners_gloo)
        kept, transfers = [], []
        for rank, row in enumerate(places):
            for place in row:
                if rank == grid.dp_rank and place.rank == rank:
                    kept.append(own[place.row])
                elif rank == grid.dp_rank:
                    kept.append(_empty(descriptions[place.rank][place.row]))
                    transfers += [dist.P2POp(dist.irecv, t, owners[place.rank], grid.owners_gloo) for t in kept[-1].tensors]
                elif place.rank == grid.dp_rank:
                    transfers += [dist.P2POp(dist.isend, t, owners[rank], grid.owners_gloo) for t in own[place.row].tensors]
        for work in dist.batch_isend_irecv(transfers) if transfers else []:
            work.wait()
        return kept, ""

    def _share(self, own: list[Tensor], sizes: list[int], dtype: torch.dtype, *, whole_replica: bool) -> list[Tensor]:
        """A flat buffer for each row; from the loader's owner in one broadcast when others need them too."""
        grid = self.grid
        if (grid.tp * grid.pp if whole_replica else grid.tp) == 1:
            return own
        buffer = torch.cat(own) if own else torch.empty(sum(sizes), dtype=dtype, device=self.platform.device)
        group = grid.replica_group if whole_replica else grid.tp_group
        dist.broadcast(buffer, src=grid.replica_source, group=group)
        return list(buffer.split(sizes))

    def _add_vision(self, device_rows: list[DeviceRow], described: list[dict[str, Any]], own: list[_Buffers]) -> None:
        ints = self._share([row.ints for row in own], [_ints_size(d) for d in described], torch.int32, whole_replica=False)
        planes = self._share([row.planes for row in own], [_planes_size(d) for d in described], torch.uint8, whole_replica=False)
        for row, d, part, pixels in zip(device_rows, described, ints, planes, strict=True):
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


def _describe(row: Row, selected: int) -> dict[str, Any]:
    """What the other ranks must know of a row before its tensors arrive; ``selected``: length of its :func:`loss_index`."""
    vision = row.vision
    counts = {"samples": row.num_samples, "images": row.num_images, "patches": row.num_patches}
    counts |= {f"dropped/{reason}": n for reason, n in row.dropped.items()}
    lengths = row.cu_seqlens.diff().tolist()[: row.num_samples]
    real = row.num_patches > 0
    return {
        "seq_len": row.seq_len,
        "segments": row.cu_seqlens.numel(),
        "selected": selected,
        "loss_tokens": int(row.loss_mask.sum()),
        "max_seqlen": int(row.max_seqlen),
        "lengths": lengths,
        "vision": {n: tuple(getattr(vision, n).shape) for n in ("planes", *_VISION_INTS)},
        "max_seqlens": (int(vision.max_seqlen), int(vision.max_window_seqlen)),
        "vision_lengths": (vision.cu_seqlens.diff().tolist(), vision.cu_window_seqlens.diff().tolist()) if real else ([], []),
        "counts": counts,
        "keys": row.keys,
        "dropped": [sample.as_json() for sample in row.dropped_samples],
    }


def _flatten(row: Row) -> _Buffers:
    """The row in host memory (pinned when there is a GPU): pixels as they are, the small rest as two buffers."""
    selected = loss_index(row.loss_mask)
    selected = row.tokens.new_empty(0) if selected is None else selected
    text = [row.tokens, row.labels, row.loss_mask, row.position_ids, row.cu_seqlens, selected]
    ints = [getattr(row.vision, n) for n in _VISION_INTS]
    return _Buffers(_describe(row, len(selected)), _joined(text), _joined(ints), _pinned(row.vision.planes.flatten()))


def _joined(tensors: list[Tensor]) -> Tensor:
    return _pinned(torch.cat([t.to(torch.int32).flatten() for t in tensors]))


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if torch.cuda.is_available() else tensor


def _empty(described: dict[str, Any]) -> _Buffers:
    """Room for a row that comes from another owner."""
    sizes = _text_size(described), _ints_size(described), _planes_size(described)
    pinned = torch.cuda.is_available()
    buffers = [
        torch.empty(size, dtype=dtype, pin_memory=pinned)
        for size, dtype in zip(sizes, (torch.int32, torch.int32, torch.uint8), strict=True)
    ]
    return _Buffers(described, *buffers)


def _text_size(described: dict[str, Any]) -> int:
    """Tokens, labels, mask, positions (3), segment bounds and the tokens whose logits are computed."""
    return 6 * described["seq_len"] + described["segments"] + described["selected"]


def _ints_size(described: dict[str, Any]) -> int:
    return sum(_numel(described["vision"][n]) for n in _VISION_INTS)


def _planes_size(described: dict[str, Any]) -> int:
    return _numel(described["vision"]["planes"])


def _device_row(described: dict[str, Any], buffer: Tensor) -> DeviceRow:
    s = described["seq_len"]
    sizes = [s, s, s, 3 * s, described["segments"], described["selected"]]
    tokens, labels, mask, positions, cu_seqlens, selected = buffer.split(sizes)
    return DeviceRow(
        tokens=tokens.long(),
        labels=labels.long(),
        loss_mask=mask.float(),
        real_tokens=sum(described["lengths"]),
        position_ids=positions.view(3, s).long(),
        segments=Segments(cu_seqlens.contiguous(), described["max_seqlen"]),
        vision=None,
        feature_index=None,
        loss_index=selected.long() if len(selected) else None,
    )


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
