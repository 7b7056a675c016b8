"""The vision tower on every rank (``vision.placement: decoupled``).

Ahead of the pipeline, the tp x cp x pp ranks of a data-parallel replica encode the pictures of the whole step
together, without keeping activations, and send the features to the first stage. There they are autograd
leaves. After the pipeline's backward pass, their gradients go back to the ranks that encoded them. Each rank
runs its pictures forward once more (except for ``vision.keep_patches`` patches, whose activations it kept)
and then backward. The gradients of the weights are summed over all ranks of the run. Kimi K2.5 was trained in
this way.

Pictures stay within their replica: its loader holds their pixels, and and planned batches even out replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron_vl.config import VisionConfig
from megatron_vl.models.batch import DeviceRow, Segments, VisionInput
from megatron_vl.models.frame_shares import Array, Frames, cut_evenly
from megatron_vl.models.vision_language import TowerEverywhere
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.parallel.groups import group_of_one, replica_group
from megatron_vl.spec.families import VisionSpec


@dataclass
class StepVision:
    """The pictures of a step, as one rank needs them: its own share, and the sizes of all shares.

    ``planes``, ``plane_index``, ``position_hw`` and ``frame_hw`` are those of a
    :class:`~megatron_vl.models.batch.VisionInput`, for the whole share.
    """

    rows: list[DeviceRow]
    """The rows of the step on this rank."""
    features_of_rank: list[int]
    """Number of features that each rank of the replica computes, by rank in the replica's group."""
    features_of_row: list[int]
    """Number of features of each row; under context parallelism, of this rank's part of it."""
    frames: Frames
    """The frames of this rank's share."""
    plane_bounds: Array
    """int64 [F, 2]: for each frame of the share, its first plane and the one after its last."""
    planes: Tensor
    plane_index: Tensor
    position_hw: Tensor
    frame_hw: Tensor
    full: Tensor
    """int32 [F + 1] on the device: bounds of the share's frames."""
    window: Tensor
    """int32 [W + 1] on the device: bounds of the share's windows."""
    features_of_part: list[int] = field(default_factory=list)
    """Under context parallelism, the number of features that each context-parallel rank needs."""
    part_order: Tensor | None = None
    """Under context parallelism, on the first rank of the replica: int64 [N] on the device, all features
    sorted by the rank that needs them."""

    @property
    def has_pictures(self) -> bool:
        """Whether any rank of the replica has a picture."""
        return any(self.features_of_rank)

    def frames_within(self, patches: int) -> int:
        """How many of the share's first frames together have at most ``patches`` patches."""
        return int(np.searchsorted(self.frames.first_patch, patches, side="right")) - 1

    def calls(
        self, patches: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[VisionInput, slice]]:
        """Cuts frames of the share into tower inputs of about ``patches`` patches.

        Args:
            start, stop: the frames of the share; by default all.

        Yields:
            An input, and its slice of the share's patches.
        """
        sizes = self.frames.patches[start:stop]
        first_patch, first_window = self.frames.first_patch, self.frames.first_window
        bounds = start + cut_evenly(sizes, max(1, -(-int(sizes.sum()) // patches)))
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            if begin == end:
                continue

            here = slice(int(first_patch[begin]), int(first_patch[end]))
            windows = slice(int(first_window[begin]), int(first_window[end]))
            low = int(self.plane_bounds[begin:end, 0].min())
            high = int(self.plane_bounds[begin:end, 1].max())

            full, window = self.full[begin : end + 1], self.window[windows.start : windows.stop + 1]
            index = self.plane_index[here]
            if begin:
                full, window, index = full - here.start, window - here.start, index - low

            given = VisionInput(
                planes=self.planes[low:high],
                plane_index=index,
                position_hw=self.position_hw[here],
                frame_hw=self.frame_hw[here],
                full=Segments(full, int(self.frames.patches[begin:end].max())),
                window=Segments(window, int(self.frames.windows[windows].max())),
            )
            yield given, here


class DecoupledTower:
    """Runs this rank's tower on the pictures of a step.

    Each method is one part of a step, which ``megatron-vl bench`` times.

    Args:
        module: the tower, equal on all ranks.
    """

    def __init__(self, module: TowerEverywhere, vision: VisionSpec, config: VisionConfig) -> None:
        self.module, self.vision, self.config = module, vision, config
        self.group = replica_group()
        self.cp_group = mpu.get_context_parallel_group()
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.on_first_stage = mpu.get_pipeline_model_parallel_rank() == 0
        self.ddp: ReplicaDDP | None = None
        """Reduces the gradients over all ranks of the run; None if no weight of the tower is trained."""
        self.tokens: Tensor | None = None
        """Number of loss tokens in the global batch, known once the pipeline's gradients are complete."""
        self._step: StepVision | None = None
        self._kept: list[tuple[list[Tensor], slice]] = []
        """Features whose autograd graph was kept, so that their patches do not run forward twice. Each entry
        also has its slice of the share's patches."""

    def wrap(self, ddp_config: DistributedDataParallelConfig) -> None:
        """From now on, reduces the gradients of the trained weights over all ranks of the run."""
        if any(p.requires_grad for p in self.module.parameters()):
            self.ddp = ReplicaDDP(
                self.module.config, ddp_config, self.module, pg_collection=groups_of_tower()
            )

    @property
    def _trained(self) -> bool:
        return self.ddp is not None

    def encode(self, rows: Sequence[Any], train: bool) -> None:
        """Computes the features of a step and attaches them to the rows of the first stage.

        Collective over the replica.

        Args:
            rows: the rows of a step, or objects whose attribute ``row`` is a row.
            train: whether :meth:`backward` will follow.
        """
        step = getattr(rows[0], "row", rows[0]).step_vision
        if train and self.ddp is not None:
            self.ddp.zero_grad_buffer()
        if step is None:
            return

        keep = self.kept_patches if train and self._trained else 0
        features = self._none(step)
        if step.has_pictures:
            features = self.to_first(self.forward(step, keep), step)

        if self.on_first_stage:
            for row, own in zip(step.rows, features.split(step.features_of_row), strict=True):
                row.features = own.detach().requires_grad_(train and self._trained)
        self._step = step if train else None

    @property
    def kept_patches(self) -> int:
        """How many patches of a share keep their activations.

        If the blocks are frozen, only the mergers have activations, and those of all patches are kept.
        """
        return sys.maxsize if self.module.vision_model.frozen else self.config.keep_patches

    def forward(self, step: StepVision, keep: int) -> Tensor:
        """The features of this rank's share, [n, 1 + levels, H].

        Args:
            keep: number of patches whose activations are kept for the backward pass.
        """
        frames = step.frames_within(keep)
        for given, patches in step.calls(self.config.backward_patches, stop=frames):
            self._kept.append((self.module.vision_model(given), patches))

        parts = [torch.stack([level.detach() for level in levels], 1) for levels, _ in self._kept]
        with torch.no_grad():
            for given, _ in step.calls(self.config.encode_patches, start=frames):
                parts.append(torch.stack(self.module.vision_model(given), 1))

        if not parts:
            return self._none(step)
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _none(self, step: StepVision) -> Tensor:
        """No features, [0, 1 + levels, H]."""
        v = self.vision
        dtype = self.module.config.params_dtype
        return torch.empty(
            0, 1 + len(v.deepstack_layers), v.out_hidden_size, dtype=dtype, device=step.planes.device
        )

    def to_first(self, mine: Tensor, step: StepVision) -> Tensor:
        """The features of all ranks of the replica, in rank order, on its first stage; empty elsewhere.

        Under context parallelism, each rank of that stage gets those of its part of each row.
        """
        features = exchange_with_first(mine, step.features_of_rank, self.group, gather=True)
        if self._exchanges_parts:
            if step.part_order is not None:
                features = features.index_select(0, step.part_order)
            features = exchange_with_first(features, step.features_of_part, self.cp_group, gather=False)
        if self.on_first_stage and self.tp_group.size() > 1:
            if self.tp_group.rank():
                features = mine.new_empty(sum(step.features_of_row), *mine.shape[1:])
            dist.broadcast(features, src=dist.get_global_rank(self.tp_group, 0), group=self.tp_group)
        return features

    def backward(self) -> None:
        """Computes the gradients of the tower's weights and reduces them (:meth:`reduce`).

        Collective over the run. Call it after the pipeline's backward pass.
        """
        step, self._step = self._step, None
        if self.ddp is None:
            return
        if step is not None and step.has_pictures:
            gradient = self.to_owners(self._collected(step), step)
            kept = self._kept[-1][1].stop if self._kept else 0
            while self._kept:  # each entry's memory is freed before the next call
                self.backward_call(*self._kept.pop(), gradient)
            for given, patches in step.calls(self.config.backward_patches, start=step.frames_within(kept)):
                self.backward_call(self.again(given), patches, gradient)
        self.reduce()

    def reduce(self) -> None:
        """Sums the gradients over the run and divides them by the global number of loss tokens."""
        assert self.ddp is not None and self.tokens is not None
        self.ddp.finish_grad_sync()
        self.ddp.scale_gradients(1.0 / self.tokens.clamp(min=1))
        self.tokens = None

    def again(self, given: VisionInput) -> list[Tensor]:
        """Runs one input forward again, with an autograd graph for its backward pass."""
        return self.module.vision_model(given)

    def backward_call(self, features: list[Tensor], patches: slice, gradient: Tensor) -> None:
        """Runs the backward pass of one input.

        Args:
            features: the input's features, one tensor for each level.
            patches: the input's slice of the share's patches.
            gradient: the gradient of all features of this rank, [n, 1 + levels, H].
        """
        unit = self.vision.merge_unit
        levels = gradient[patches.start // unit : patches.stop // unit].unbind(1)
        torch.autograd.backward(features, list(levels))

    def _collected(self, step: StepVision) -> Tensor:
        """The gradients of all features, on the rank that owns the loader; empty elsewhere.

        Rows no longer hold their features or gradients afterwards.
        """
        none = self._none(step)
        parts = []
        for row in step.rows:
            features, row.features = row.features, None
            if features is not None:
                parts.append(torch.zeros_like(features) if features.grad is None else features.grad)
        collected = torch.cat(parts) if parts and self.on_first_stage and not self.tp_group.rank() else none
        if self._exchanges_parts:
            collected = exchange_with_first(collected, step.features_of_part, self.cp_group, gather=True)
            if step.part_order is not None:
                collected = torch.empty_like(collected).index_copy_(0, step.part_order, collected)
        return collected if self.group.rank() == 0 else none

    @property
    def _exchanges_parts(self) -> bool:
        """Whether this rank passes features to other parts of its rows, or their gradients back."""
        return self.cp_group.size() > 1 and self.on_first_stage and not self.tp_group.rank()

    def to_owners(self, gradient: Tensor, step: StepVision) -> Tensor:
        """The gradients of this rank's features, [n, 1 + levels, H]."""
        return exchange_with_first(gradient, step.features_of_rank, self.group, gather=False)


def groups_of_tower() -> ProcessGroupCollection:
    """The process groups of a tower that every rank holds whole: all ranks are data-parallel ranks."""
    pg, world, alone = ProcessGroupCollection(), dist.group.WORLD, group_of_one()
    pg.dp = pg.dp_cp = world
    pg.tp = pg.pp = pg.cp = pg.mp = alone
    pg.ep = pg.expt_tp = pg.expt_dp = pg.tp_ep_pp = alone
    # With the distributed optimizer, the gradient norm is summed over the slices of all ranks, as for the
    # language model.
    pg.intra_dist_opt = mpu.get_intra_distributed_optimizer_instance_group()
    return pg


def exchange_with_first(
    mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, *, gather: bool
) -> Tensor:
    """Gathers the ranks' parts on the first rank of a group, or scatters them from there.

    Args:
        mine: to gather, this rank's part; to scatter, all parts on the first rank, and nothing elsewhere.
        sizes: length of each rank's part in dim 0.
        gather: whether to gather.

    Returns:
        If gathered, all parts on the first rank, and nothing elsewhere. If scattered, this rank's part.
    """
    if group.size() == 1:
        return mine
    rank = group.rank()
    at_first = list(sizes) if rank == 0 else [0] * len(sizes)
    own = [sizes[rank], *[0] * (len(sizes) - 1)]
    given, got = (own, at_first) if gather else (at_first, own)
    out = mine.new_empty(sum(got), *mine.shape[1:])
    dist.all_to_all_single(out, mine.contiguous(), got, given, group=group)
    return out
