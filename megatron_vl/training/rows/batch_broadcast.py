"""Sends rows from the one loader of a data-parallel replica to the ranks that need them.

The rank at (stage 0, cp 0, tp 0) owns the loader. Once per step, one broadcast sends tokens, labels,
positions and segment bounds of all its rows to the whole replica. Pixels and their indices go only to the
ranks on stage 0. Sizes are sent first in a small message between hosts, so that no rank reads a number from
the device. Under context parallelism, each rank then keeps its part of the rows
(:mod:`megatron_vl.training.rows.row_shards`).
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

from megatron_vl.data.packing.training_row import TrainingRow, loss_index
from megatron_vl.models.batch import DeviceRow, Segments, VisionInput
from megatron_vl.parallel.process_grid import ProcessGrid
from megatron_vl.platform import Platform
from megatron_vl.spec.families import VisionSpec
from megatron_vl.system import progress
from megatron_vl.system.errors import UserError
from megatron_vl.training.out_of_memory import host_memory_message
from megatron_vl.training.rows.image_scatter import (
    PictureShares,
    frame_plane_bounds,
    pin_memory,
    scatter_pictures,
)
from megatron_vl.training.rows.row_shards import (
    RowSharding,
    complete_part,
    cut_feature_index,
    cut_pictures,
    cut_text,
)


@dataclass(frozen=True)
class _FlatBuffer:
    """A flat buffer in which several tensors of a row are sent together."""

    dtype: torch.dtype
    goes_to_whole_replica: bool
    """Whether all ranks of the replica get the buffer; otherwise only those on the first stage."""


_FLAT_BUFFERS = {
    "text": _FlatBuffer(torch.int32, goes_to_whole_replica=True),
    "ints": _FlatBuffer(torch.int32, goes_to_whole_replica=False),
    "planes": _FlatBuffer(torch.uint8, goes_to_whole_replica=False),
}


@dataclass(frozen=True)
class _RowTensor:
    """One tensor of a row: its name in messages, the buffer that carries it, and how its owner reads it."""

    tensor_name: str
    buffer_name: str
    read_tensor: Callable[[TrainingRow], Tensor]


def _vision_tensor(tensor_name: str, buffer_name: str = "ints") -> _RowTensor:
    return _RowTensor(tensor_name, buffer_name, lambda row: getattr(row.vision, tensor_name))


def _loss_index(row: TrainingRow) -> Tensor:
    """The tokens whose logits are computed; empty means all of them."""
    index = loss_index(row.loss_mask)
    return row.tokens.new_empty(0) if index is None else index


def _segment_sources(row: TrainingRow) -> Tensor:
    """The source of each segment, -1 for the padded tail; empty if the data set is no blend."""
    if not row.source_indices:
        return torch.tensor([], dtype=torch.int32)
    padding_segments = len(row.cu_seqlens) - 1 - row.num_samples
    return torch.tensor([*row.source_indices, *[-1] * padding_segments], dtype=torch.int32)


_SENT_TENSORS = (
    _RowTensor("tokens", "text", lambda row: row.tokens),
    _RowTensor("labels", "text", lambda row: row.labels),
    # Weights of the loss are sent as the bits of float32.
    _RowTensor("loss_mask", "text", lambda row: row.loss_mask.float().view(torch.int32)),
    _RowTensor("position_ids", "text", lambda row: row.position_ids),
    _RowTensor("cu_seqlens", "text", lambda row: row.cu_seqlens),
    _RowTensor("loss_index", "text", _loss_index),
    _RowTensor("sources", "text", _segment_sources),
    _vision_tensor("plane_index"),
    _vision_tensor("position_hw"),
    _vision_tensor("frame_hw"),
    _RowTensor("full_cu_seqlens", "ints", lambda row: row.vision.cu_seqlens),
    _RowTensor("window_cu_seqlens", "ints", lambda row: row.vision.cu_window_seqlens),
    _vision_tensor("feature_index"),
    # Only context parallelism sends features to other ranks than those that need them.
    _RowTensor("feature_order", "ints", lambda row: row.tokens.new_empty(0)),
    _vision_tensor("planes", "planes"),
)
"""All tensors of a row that are sent, in their order within each buffer. Packing and unpacking follow it."""
_TENSOR_NAMES = {
    buffer_name: [entry.tensor_name for entry in _SENT_TENSORS if entry.buffer_name == buffer_name]
    for buffer_name in _FLAT_BUFFERS
}
"""Names of the tensors in each buffer."""


class ReplicaLoaderError(UserError, RuntimeError):
    """The loader of a replica failed; raised on all of its ranks."""


@dataclass
class StepBatch:
    """The rows of one step on this rank, and their numbers for the log."""

    rows: list[DeviceRow]
    item_counts: dict[str, int] = field(default_factory=dict)
    """Numbers of samples, images, patches, and dropped samples by reason (``dropped/REASON``). They are equal
    on every rank of the replica."""
    segment_lengths: list[list[int]] = field(default_factory=list)
    """Document lengths in tokens of each row, without the padded tail, for FLOP counts."""
    vision_lengths: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(full-attention lengths, window lengths) in patches of each row; empty lists for a text-only row."""
    loss_tokens: list[int] = field(default_factory=list)
    """Number of loss tokens of each row."""
    sample_keys: list[list[str]] = field(default_factory=list)
    """Keys of each row's samples."""
    dropped_samples: list[dict[str, Any]] = field(default_factory=list)
    """Samples that could not be used, as the loader lists them (at most some hundreds per row)."""
    loader_wait_s: float = 0.0
    """Seconds that the loader's owner waited for its rows."""
    source_loss_tokens: list[list[tuple[int, int]]] = field(default_factory=list)
    """(source, loss tokens) of each row's samples; empty lists if the data set is no blend."""


@dataclass
class _SerializedRow:
    """One row on its owner: the header that the other ranks need, and its tensors as flat buffers by name."""

    row_header: dict[str, Any]
    flat_buffers: dict[str, Tensor]

    def copy_to(self, device: torch.device) -> _SerializedRow:
        """A copy on the device. The call does not wait if the buffers are in pinned memory."""
        return _SerializedRow(
            self.row_header,
            {name: tensor.to(device, non_blocking=True) for name, tensor in self.flat_buffers.items()},
        )


class BatchBroadcast:
    """Gives each rank of a replica its part of the next ``num_micro_batches`` rows.

    The constructor raises ValueError if this rank needs a loader or ``vision_spec`` and has none.

    Args:
        data_loader: an iterator of rows on the rank that owns the loader; None elsewhere.
        vision_spec: the tower, needed if every rank holds it, and under context parallelism.
    """

    def __init__(
        self,
        grid: ProcessGrid,
        platform: Platform,
        data_loader: Iterator[TrainingRow] | None,
        num_micro_batches: int,
        *,
        vision_spec: VisionSpec | None = None,
    ) -> None:
        if grid.owns_loader and data_loader is None:
            raise ValueError("the rank at pipeline stage 0, context rank 0, tensor rank 0 needs a loader")
        self.grid = grid
        self.platform = platform
        self.data_loader = data_loader
        self.num_micro_batches = num_micro_batches
        self.vision_spec = vision_spec
        self.tower_is_decoupled = grid.sharding.is_tower_replicated
        if (self.tower_is_decoupled or grid.cp > 1) and vision_spec is None:
            raise ValueError("a tower on several ranks needs its sizes, to spread the pictures")
        self.row_sharding: RowSharding | None = None
        if grid.cp > 1 and vision_spec is not None:
            self.row_sharding = RowSharding(grid.cp, grid.key_ranks, vision_spec, self.tower_is_decoupled)

    def next_batch(self) -> StepBatch:
        """The rows of the next step. Collective over the replica.

        Raises:
            ReplicaLoaderError: the loader failed. Every rank of the replica raises it.
        """
        start_time = time.perf_counter()
        rows, loader_error = self._read_rows()
        progress.note_rows_read()
        loader_wait_s = time.perf_counter() - start_time

        # The owner starts its copies to the device here, so that they run beside the broadcasts.
        serialized_rows = [_serialize_row(row, self.row_sharding) for row in rows]
        uploaded_rows = [row.copy_to(self.platform.device) for row in serialized_rows]
        host_tensors: list[dict[str, Tensor]] = []
        if self.tower_is_decoupled or self.row_sharding:
            host_tensors = [_unpack_tensors(row.row_header, row.flat_buffers) for row in serialized_rows]
        row_headers, plane_bounds_by_row = self._share_headers(loader_error, serialized_rows, host_tensors)
        tensors_by_row = self._share_tensors(uploaded_rows, row_headers)

        device_rows = []
        for row_number, (row_header, row_tensors) in enumerate(zip(row_headers, tensors_by_row, strict=True)):
            # Under context parallelism, this rank keeps its part of the row.
            if self.row_sharding is not None:
                device_rows.append(self._shard_row(row_header, row_tensors, plane_bounds_by_row[row_number]))
            else:
                device_rows.append(self._whole_row(row_header, row_tensors))

        # A tower that every rank holds encodes pictures of all rows, shared out by their cost.
        if self.tower_is_decoupled:
            self._scatter_pictures(device_rows, row_headers, plane_bounds_by_row, host_tensors, uploaded_rows)
        return _step_batch(device_rows, row_headers, loader_wait_s)

    def _share_tensors(
        self, uploaded_rows: list[_SerializedRow], row_headers: list[dict[str, Any]]
    ) -> list[dict[str, Tensor]]:
        """Sends the buffers. Returns those tensors of each row that this rank gets, by name."""
        received_buffers: dict[str, list[Tensor]] = {}
        for buffer_name in filter(self._receives_buffer, _FLAT_BUFFERS):
            received_buffers[buffer_name] = self._broadcast_buffer(buffer_name, uploaded_rows, row_headers)
        tensors_by_row = []
        for row_number, row_header in enumerate(row_headers):
            row_buffers = {name: buffers[row_number] for name, buffers in received_buffers.items()}
            tensors_by_row.append(_unpack_tensors(row_header, row_buffers))
        return tensors_by_row

    def _share_headers(
        self,
        loader_error: str,
        serialized_rows: list[_SerializedRow],
        host_tensors: list[dict[str, Tensor]],
    ) -> tuple[list[dict[str, Any]], list[list[list[int]]]]:
        """Sends the headers of the rows, and the planes of each picture if a tower is spread over ranks."""
        plane_bounds_by_row = []
        for serialized_row, row_tensors in zip(serialized_rows, host_tensors, strict=False):
            frame_lengths, _ = serialized_row.row_header["vision_lengths"]
            plane_bounds_by_row.append(frame_plane_bounds(row_tensors["plane_index"].numpy(), frame_lengths))

        # The header goes first: it says how large the buffers are, or that the loader failed.
        row_headers = [row.row_header for row in serialized_rows]
        loader_error, row_headers, plane_bounds_by_row = self.grid.from_loader_owner(
            (loader_error, row_headers, plane_bounds_by_row)
        )
        if loader_error:
            raise ReplicaLoaderError(loader_error)
        return row_headers, plane_bounds_by_row

    def _whole_row(self, row_header: dict[str, Any], row_tensors: dict[str, Tensor]) -> DeviceRow:
        row = _device_row(row_header, row_tensors)
        if self.tower_is_decoupled and self.grid.has_vision:
            row.feature_index = row_tensors["feature_index"].long()
        elif self.grid.has_vision:
            row.vision_input, row.feature_index = _vision_input(row_header, row_tensors)
        return row

    def _shard_row(
        self, row_header: dict[str, Any], row_tensors: dict[str, Tensor], plane_bounds: list[list[int]]
    ) -> DeviceRow:
        """This rank's part of a row under context parallelism.

        Args:
            row_header: the whole row's header (see :func:`_row_header`).
            row_tensors: the whole row's tensors by name.
            plane_bounds: result of :func:`frame_plane_bounds` for the row; empty for a row without pictures.
        """
        assert self.row_sharding is not None
        rank = self.grid.cp_rank
        row = complete_part(
            _device_row(row_header, cut_text(row_header, row_tensors, rank)), row_header, rank
        )
        if not self.grid.has_vision:
            return row

        row.feature_index = cut_feature_index(row_header, row_tensors, rank)
        if not self.tower_is_decoupled and plane_bounds:
            row.vision_input, row.feature_route = cut_pictures(
                self.row_sharding, row_header, plane_bounds, row_tensors, rank
            )
        elif not self.tower_is_decoupled:
            row.vision_input, _ = _vision_input(row_header, row_tensors)
        return row

    def _receives_buffer(self, buffer_name: str) -> bool:
        if self.tower_is_decoupled and buffer_name == "planes":
            return False
        return _FLAT_BUFFERS[buffer_name].goes_to_whole_replica or self.grid.has_vision

    def _scatter_pictures(
        self,
        rows: list[DeviceRow],
        row_headers: list[dict[str, Any]],
        plane_bounds_by_row: list[list[list[int]]],
        host_tensors: list[dict[str, Tensor]],
        uploaded_rows: list[_SerializedRow],
    ) -> None:
        """Sends each rank its share of the pictures, and attaches it to the rows. Collective."""
        grid, device = self.grid, self.platform.device
        assert self.vision_spec is not None
        vision_lengths = [row_header["vision_lengths"] for row_header in row_headers]
        planes_by_row = []
        for uploaded_row in uploaded_rows:
            planes_shape = uploaded_row.row_header["shapes"]["planes"]
            planes_by_row.append(uploaded_row.flat_buffers["planes"].view(planes_shape))
        step_vision = scatter_pictures(
            PictureShares(self.vision_spec, vision_lengths, plane_bounds_by_row, grid.replica_ranks),
            grid.replica_group,
            rows,
            host_tensors,
            planes_by_row,
            device,
        )
        if self.row_sharding is not None:
            self.row_sharding.route_step(step_vision, row_headers, host_tensors, grid.cp_rank, device)
        for row in rows:
            row.step_vision = step_vision

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
            error_text = host_memory_message(error) or f"{type(error).__name__}: {error}"
            return [], f"{error_prefix}: {error_text}"

    def _next_row(self) -> TrainingRow:
        assert self.data_loader is not None
        row = next(self.data_loader)
        progress.note_progress()
        return row

    def _broadcast_buffer(
        self, buffer_name: str, serialized_rows: list[_SerializedRow], row_headers: list[dict[str, Any]]
    ) -> list[Tensor]:
        """A flat buffer for each row. If other ranks need them too, the owner sends all in one broadcast."""
        grid = self.grid
        flat_buffer = _FLAT_BUFFERS[buffer_name]
        local_buffers = [row.flat_buffers[buffer_name] for row in serialized_rows]
        if (grid.replica_ranks if flat_buffer.goes_to_whole_replica else grid.tp * grid.cp) == 1:
            return local_buffers

        buffer_sizes = [_buffer_numel(row_header, buffer_name) for row_header in row_headers]
        joined_buffer = (
            torch.cat(local_buffers)
            if local_buffers
            else torch.empty(sum(buffer_sizes), dtype=flat_buffer.dtype, device=self.platform.device)
        )
        process_group = grid.replica_group if flat_buffer.goes_to_whole_replica else grid.stage_group
        dist.broadcast(joined_buffer, src=grid.replica_source_rank, group=process_group)
        return list(joined_buffer.split(buffer_sizes))


def _step_batch(
    device_rows: list[DeviceRow], row_headers: list[dict[str, Any]], loader_wait_s: float
) -> StepBatch:
    """The rows of a step with their numbers, from the headers of the rows."""
    step_batch = StepBatch(device_rows, loader_wait_s=loader_wait_s)
    for row_header in row_headers:
        step_batch.segment_lengths.append(row_header["lengths"])
        step_batch.vision_lengths.append(row_header["vision_lengths"])
        step_batch.loss_tokens.append(row_header["loss_tokens"])
        step_batch.sample_keys.append(row_header["keys"])
        step_batch.source_loss_tokens.append(row_header["learnt"])
        step_batch.dropped_samples += row_header["dropped"]
        for item_name, item_count in row_header["counts"].items():
            step_batch.item_counts[item_name] = step_batch.item_counts.get(item_name, 0) + item_count
    return step_batch


def _row_header(row: TrainingRow, tensor_shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The header of a row, which the other ranks need before its tensors arrive.

    Args:
        tensor_shapes: shape of each tensor by name.
    """
    row_vision = row.vision
    item_counts = {
        "samples": row.num_samples,
        "images": row.num_images,
        "patches": row.num_patches,
        **{f"dropped/{reason}": dropped_count for reason, dropped_count in row.dropped_counts.items()},
    }
    vision_lengths: tuple[list[int], list[int]] = ([], [])
    if row.num_patches > 0:
        vision_lengths = (row_vision.cu_seqlens.diff().tolist(), row_vision.cu_window_seqlens.diff().tolist())

    return {
        "shapes": tensor_shapes,
        "loss_tokens": int(row.loss_mask.count_nonzero()),
        "max_seqlen": int(row.max_seqlen),
        "lengths": row.cu_seqlens.diff().tolist()[: row.num_samples],
        "max_seqlens": (int(row_vision.max_seqlen), int(row_vision.max_window_seqlen)),
        "vision_lengths": vision_lengths,
        "counts": item_counts,
        "keys": row.sample_keys,
        "learnt": _source_loss_tokens(row),
        "dropped": [sample.as_json() for sample in row.dropped_samples],
    }


def _source_loss_tokens(row: TrainingRow) -> list[tuple[int, int]]:
    """(source, loss tokens) of each sample; empty if the data set is no blend, or for a row of padding."""
    if not row.source_indices or not row.sample_keys:
        return []
    segment_lengths = row.cu_seqlens.diff().tolist()
    segment_masks = row.loss_mask.split(segment_lengths)[: row.num_samples]
    loss_token_counts = [int(segment_mask.count_nonzero()) for segment_mask in segment_masks]
    return list(zip(row.source_indices, loss_token_counts, strict=True))


def _serialize_row(row: TrainingRow, row_sharding: RowSharding | None = None) -> _SerializedRow:
    """The row in host memory (pinned if there is a GPU): one buffer of pixels, and two small ones.

    Args:
        row_sharding: how the row is shared under context parallelism; None: one rank holds it whole.
    """
    row_tensors = {entry.tensor_name: entry.read_tensor(row) for entry in _SENT_TENSORS}
    part_descriptions = row_sharding.describe_parts(row, row_tensors) if row_sharding is not None else {}
    tensor_shapes = {name: tuple(tensor.shape) for name, tensor in row_tensors.items()}
    flat_buffers = {}
    for buffer_name, flat_buffer in _FLAT_BUFFERS.items():
        flat_tensors = []
        for tensor_name in _TENSOR_NAMES[buffer_name]:
            flat_tensors.append(row_tensors[tensor_name].to(flat_buffer.dtype).flatten())
        flat_buffers[buffer_name] = pin_memory(
            torch.cat(flat_tensors) if len(flat_tensors) > 1 else flat_tensors[0]
        )
    return _SerializedRow(_row_header(row, tensor_shapes) | part_descriptions, flat_buffers)


def _buffer_numel(row_header: dict[str, Any], buffer_name: str) -> int:
    """Number of elements in a row's buffer."""
    return sum(math.prod(row_header["shapes"][name]) for name in _TENSOR_NAMES[buffer_name])


def _unpack_tensors(row_header: dict[str, Any], flat_buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a row by name, in their shapes, as views of the buffers that this rank has."""
    tensors_by_name: dict[str, Tensor] = {}
    for buffer_name, flat_buffer in flat_buffers.items():
        tensor_names = _TENSOR_NAMES[buffer_name]
        shapes = [row_header["shapes"][tensor_name] for tensor_name in tensor_names]
        flat_tensors = flat_buffer.split(list(map(math.prod, shapes)))
        for tensor_name, flat_tensor, shape in zip(tensor_names, flat_tensors, shapes, strict=True):
            tensors_by_name[tensor_name] = flat_tensor.view(shape)
    return tensors_by_name


def _device_row(row_header: dict[str, Any], row_tensors: dict[str, Tensor]) -> DeviceRow:
    """The row without its pictures, in the types that the model expects."""
    loss_token_index = row_tensors["loss_index"]
    segment_sources = row_tensors["sources"]
    return DeviceRow(
        tokens=row_tensors["tokens"].long(),
        labels=row_tensors["labels"].long(),
        loss_mask=row_tensors["loss_mask"].contiguous().view(torch.float32),
        num_real_tokens=sum(row_header["lengths"]),
        position_ids=row_tensors["position_ids"].long(),
        segments=Segments(row_tensors["cu_seqlens"].contiguous(), row_header["max_seqlen"]),
        vision_input=None,
        feature_index=None,
        loss_index=loss_token_index.long() if len(loss_token_index) else None,
        segment_sources=segment_sources if len(segment_sources) else None,
    )


def _vision_input(row_header: dict[str, Any], row_tensors: dict[str, Tensor]) -> tuple[VisionInput, Tensor]:
    """The pictures of a row, and the token positions of their features."""
    max_seqlen, max_window_seqlen = row_header["max_seqlens"]
    vision_input = VisionInput(
        planes=row_tensors["planes"],
        plane_index=row_tensors["plane_index"],
        position_hw=row_tensors["position_hw"],
        frame_hw=row_tensors["frame_hw"],
        full_segments=Segments(row_tensors["full_cu_seqlens"], max_seqlen),
        window_segments=Segments(row_tensors["window_cu_seqlens"], max_window_seqlen),
    )
    return vision_input, row_tensors["feature_index"].long()
