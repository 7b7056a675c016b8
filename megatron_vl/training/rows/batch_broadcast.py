"""Sends rows from the one loader of a data-parallel replica to the ranks that need them.

The rank at (stage 0, cp 0, tp 0) owns the loader. Once per step, one broadcast sends tokens, labels,
positions and segment bounds of all its rows to the whole replica. Pixels and their indices go only to the
ranks on stage 0. Sizes are sent first in a small message between hosts, so that no rank reads a number from
the device. Under context parallelism, each rank then keeps its part of the rows
(:mod:`megatron_vl.training.rows.row_shards`).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_vl.data.packing.training_row import TrainingRow
from megatron_vl.models.batch import DeviceRow, WholeRow
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import ModelSpec
from megatron_vl.system import progress
from megatron_vl.system.errors import UserError
from megatron_vl.training.out_of_memory import host_memory_message
from megatron_vl.training.rows.row_message import (
    BUFFER_TYPES,
    RowHeader,
    buffer_numel,
    make_device_row,
    make_vision_input,
    serialize_row,
    unpack_tensors,
)
from megatron_vl.training.rows.row_shards import (
    ImageShares,
    RowSharding,
    complete_part,
    cut_feature_index,
    cut_images,
    cut_text,
    frame_plane_bounds,
    scatter_images,
)


class ReplicaLoaderError(UserError, RuntimeError):
    """The loader of a replica failed; raised on all of its ranks."""


@dataclass
class StepBatch:
    """The rows of one step on this rank, and their numbers for the log."""

    rows: list[DeviceRow]
    headers: list[RowHeader] = field(default_factory=list)
    """The headers of the rows (:func:`~megatron_vl.training.rows.row_message.serialize_row`), equal on every
    rank of the replica."""
    loader_wait_s: float = 0.0

    @property
    def vision_lengths(self) -> list[tuple[list[int], list[int]]]:
        """(full-attention lengths, window lengths) in patches of each row; empty for a text-only row."""
        return [header["vision_lengths"] for header in self.headers]


class BatchBroadcast:
    """Gives each rank of a replica its part of the next ``num_micro_batches`` rows.

    Args:
        data_loader: the rows, on the rank that owns the loader; None elsewhere.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        platform: Platform,
        data_loader: Iterator[TrainingRow] | None,
        num_micro_batches: int,
        *,
        spec: ModelSpec,
    ) -> None:
        self.grid, self.platform, self.data_loader = grid, platform, data_loader
        self.num_micro_batches = num_micro_batches
        self.vision_spec, self.needs_whole_rows = spec.vision, spec.language.needs_whole_rows
        self.tower_is_decoupled = grid.sharding.is_tower_replicated
        self.row_sharding: RowSharding | None = None
        if grid.cp > 1:
            self.row_sharding = RowSharding(grid.cp, grid.key_ranks, spec.vision, self.tower_is_decoupled)

    def next_batch(self) -> StepBatch:
        """The rows of the next step. Collective over the replica."""
        start = time.perf_counter()
        rows, loader_error = self._read_rows()
        progress.note_rows_read()
        step_batch = StepBatch([], loader_wait_s=time.perf_counter() - start)

        # The owner starts its copies to the device here, so that they run beside the broadcasts. The call
        # does not wait, because the buffers are in pinned memory.
        serialized = [serialize_row(row, self.row_sharding) for row in rows]
        headers = [header for header, _ in serialized]
        device_buffers = [
            {name: tensor.to(self.platform.device, non_blocking=True) for name, tensor in buffers.items()}
            for _, buffers in serialized
        ]
        host_tensors: list[dict[str, Tensor]] = []
        plane_bounds_by_row = []
        if self.tower_is_decoupled or self.row_sharding:  # a tower that is spread over ranks
            host_tensors = [unpack_tensors(*row) for row in serialized]
            for header, tensors in zip(headers, host_tensors, strict=True):
                frame_lengths, _ = header["vision_lengths"]
                plane_bounds_by_row.append(frame_plane_bounds(tensors["plane_index"].numpy(), frame_lengths))

        # The headers go first: they say how large the buffers are, or that the loader failed.
        loader_error, headers, plane_bounds_by_row = self.grid.from_loader_owner(
            (loader_error, headers, plane_bounds_by_row)
        )
        if loader_error:
            raise ReplicaLoaderError(loader_error)
        received = {
            name: self._broadcast_buffer(name, device_buffers, headers)
            for name in BUFFER_TYPES
            # Pixels for a tower on every rank are scattered later.
            if name == "text" or self.grid.has_vision and not (self.tower_is_decoupled and name == "planes")
        }

        for i, header in enumerate(headers):
            tensors = unpack_tensors(header, {name: buffers[i] for name, buffers in received.items()})
            row = self._make_row(header, tensors, plane_bounds_by_row[i] if self.row_sharding else [])
            if self.needs_whole_rows:
                first = self.grid.cp_rank * row.tokens.numel()
                row.whole_row = WholeRow(
                    tensors["labels"],
                    tensors["loss_mask"].contiguous().view(torch.float32),
                    tensors["cu_seqlens"],
                    slice(first, first + row.tokens.numel()),
                )
            step_batch.rows.append(row)
            step_batch.headers.append(header)

        # A tower that every rank holds encodes images of all rows, shared out by their cost.
        if self.tower_is_decoupled:
            self._scatter_images(step_batch.rows, headers, plane_bounds_by_row, host_tensors, device_buffers)
        return step_batch

    def _read_rows(self) -> tuple[list[TrainingRow], str]:
        """The rows of the next step, and the loader's error or an empty text. Other ranks have no rows."""
        if not self.grid.owns_loader:
            return [], ""
        error_prefix = f"data-parallel rank {self.grid.dp_rank}: the loader failed"
        try:
            return [self._next_row() for _ in range(self.num_micro_batches)], ""
        except StopIteration:
            return [], f"{error_prefix}: the data set ended; training needs a repeating loader"
        except Exception as error:
            # Every rank of the replica must learn of the error, or it would hang in the broadcast.
            return [], f"{error_prefix}: {host_memory_message(error) or f'{type(error).__name__}: {error}'}"

    def _next_row(self) -> TrainingRow:
        assert self.data_loader is not None
        row = next(self.data_loader)
        progress.note_progress()
        return row

    def _broadcast_buffer(
        self, buffer_name: str, device_buffers: list[dict[str, Tensor]], headers: list[RowHeader]
    ) -> list[Tensor]:
        """A flat buffer for each row. If other ranks need them too, the owner sends all in one broadcast."""
        own_buffers = [buffers[buffer_name] for buffers in device_buffers]
        # Every stage reads the text; pixels go only to the stage that has the tower.
        group = self.grid.replica_group if buffer_name == "text" else self.grid.stage_group
        if group.size() == 1:
            return own_buffers

        sizes = [buffer_numel(header, buffer_name) for header in headers]
        joined = (
            torch.cat(own_buffers)
            if own_buffers
            else torch.empty(sum(sizes), dtype=BUFFER_TYPES[buffer_name], device=self.platform.device)
        )
        dist.broadcast(joined, src=self.grid.replica_source_rank, group=group)
        return list(joined.split(sizes))

    def _make_row(
        self, header: RowHeader, tensors: dict[str, Tensor], plane_bounds: list[list[int]]
    ) -> DeviceRow:
        """This rank's row; under context parallelism, its part of the row."""
        sharding, rank = self.row_sharding, self.grid.cp_rank
        if sharding is None:
            row = make_device_row(header, tensors)
        else:
            row = complete_part(make_device_row(header, cut_text(header, tensors, rank)), header, rank)
        if not self.grid.has_vision:
            return row
        if not self.tower_is_decoupled:
            row.vision_input = make_vision_input(header, tensors)
        if sharding is None:
            row.feature_index = tensors["feature_index"].long()
            return row
        row.feature_index = cut_feature_index(header, tensors, rank)
        if row.vision_input is not None and plane_bounds:
            row.vision_input, row.feature_route = cut_images(
                sharding, header, plane_bounds, row.vision_input, tensors["feature_order"], rank
            )
        return row

    def _scatter_images(
        self,
        rows: list[DeviceRow],
        headers: list[RowHeader],
        plane_bounds_by_row: list[list[list[int]]],
        host_tensors: list[dict[str, Tensor]],
        device_buffers: list[dict[str, Tensor]],
    ) -> None:
        """Sends each rank its share of the images, and attaches it to the rows. Collective."""
        grid, device = self.grid, self.platform.device
        planes_by_row = [
            buffers["planes"].view(header["shapes"]["planes"])
            for header, buffers in zip(headers, device_buffers, strict=False)  # other ranks have no buffers
        ]
        vision_lengths = [header["vision_lengths"] for header in headers]
        image_shares = ImageShares(self.vision_spec, vision_lengths, plane_bounds_by_row, grid.replica_ranks)
        step_vision = scatter_images(
            image_shares, grid.replica_group, rows, host_tensors, planes_by_row, device
        )
        if self.row_sharding is not None:
            self.row_sharding.route_step(step_vision, headers, host_tensors, grid.cp_rank, device)
        for row in rows:
            row.step_vision = step_vision
