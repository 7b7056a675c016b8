"""The vision tower on every rank (``vision.placement: decoupled``).

Ahead of the pipeline, the tp x pp ranks of a data-parallel replica encode the pictures of the whole step
together, without keeping activations, and send the features to the first stage. There they are leaves of
autograd. After the pipeline's backward pass, their gradients go back to the ranks that encoded them. Each
rank runs its pictures forward once more (except ``vision.keep_patches`` of them) and then backward, and the
gradients of the weights are summed over all ranks of the run. Kimi K2.5 was trained in this way.

Pictures stay within their replica: its loader holds their pixels, and ``data.balance`` evens out replicas.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from megatron_vl.models.vision_language import TowerEverywhere
from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.parallel.groups import group_of_one
from megatron_vl.planning.shares import Array, Frames, cut_evenly
from megatron_vl.spec.families import VisionSpec


@dataclass
class StepVision:
    """What a rank needs of the pictures of a step: its own share of them, and the sizes of all shares."""

    rows: list[DeviceRow]
    """The rows of the step on this rank."""
    features_of_rank: list[int]
    """Features that each rank of the replica computes, in the order of its group."""
    features_of_row: list[int]
    frames: Frames
    """This rank's share."""
    plane_bounds: Array
    """int64 [F, 2]: first plane of each frame of the share, and the one after its last."""
    planes: Tensor
    plane_index: Tensor
    position_hw: Tensor
    frame_hw: Tensor
    full: Tensor
    """int32 [F + 1] on the device: bounds of the share's frames."""
    window: Tensor
    """int32 [W + 1] on the device: bounds of the share's windows."""

    @property
    def has_pictures(self) -> bool:
        """Whether any rank of the replica has one."""
        return any(self.features_of_rank)

    def frames_within(self, patches: int) -> int:
        """How many of the share's first frames have at most so many patches together."""
        return int(np.searchsorted(self.frames.first_patch, patches, side="right")) - 1

    def calls(
        self, patches: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[VisionInput, slice]]:
        """Some frames of the share (all of them by default) in inputs of about ``patches`` patches, each with
        its place in the share in patches."""
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
    """Runs the tower of this rank for the pictures of a step.

    ``megatron-vl bench`` times the methods, each of which is one part of a step.

    Args:
        module: the tower, equal on all ranks.
    """

    def __init__(self, module: TowerEverywhere, vision: VisionSpec, config: VisionConfig) -> None:
        self.module, self.vision, self.config = module, vision, config
        self.group = mpu.get_model_parallel_group()
        self.tp_group = mpu.get_tensor_model_parallel_group()
        self.on_first_stage = mpu.get_pipeline_model_parallel_rank() == 0
        self.ddp: ReplicaDDP | None = None
        """Reduces the gradients over all ranks of the run; None if nothing of the tower is trained."""
        self.tokens: Tensor | None = None
        """Loss tokens of the global batch, known once the pipeline's gradients are complete."""
        self._step: StepVision | None = None
        self._kept: list[tuple[list[Tensor], slice]] = []
        """Features with their graph, and their places, of the patches that do not run forward twice."""

    def wrap(self, ddp_config: DistributedDataParallelConfig) -> None:
        """Reduces the gradients of the trained weights over all ranks of the run from now on."""
        if any(p.requires_grad for p in self.module.parameters()):
            self.ddp = ReplicaDDP(
                self.module.config, ddp_config, self.module, pg_collection=groups_of_tower()
            )

    @property
    def _trained(self) -> bool:
        return self.ddp is not None

    def encode(self, rows: Sequence[Any], train: bool) -> None:
        """Gives the rows of the first stage their features. Collective over the replica.

        Args:
            rows: the rows of a step, or what holds them as ``row``.
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
        """How many patches of a share keep their activations. Without a gradient in the blocks, only the
        mergers have any, and all are kept."""
        return sys.maxsize if self.module.vision_model.frozen else self.config.keep_patches

    def forward(self, step: StepVision, keep: int) -> Tensor:
        """The features of this rank's share, [n, 1 + levels, H].

        Args:
            keep: of how many patches the activations are kept for the backward pass.
        """
        frames = step.frames_within(keep)
        for given, place in step.calls(self.config.backward_patches, stop=frames):
            self._kept.append((self.module.vision_model(given), place))
        parts = [torch.stack([level.detach() for level in levels], 1) for levels, _ in self._kept]
        with torch.no_grad():
            for given, _ in step.calls(self.config.encode_patches, start=frames):
                parts.append(torch.stack(self.module.vision_model(given), 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0] if parts else self._none(step)

    def _none(self, step: StepVision) -> Tensor:
        v = self.vision
        dtype = self.module.config.params_dtype
        return torch.empty(
            0, 1 + len(v.deepstack_layers), v.out_hidden_size, dtype=dtype, device=step.planes.device
        )

    def to_first(self, mine: Tensor, step: StepVision) -> Tensor:
        """The features of all ranks of the replica in order, on its first stage; empty elsewhere."""
        features = exchange_with_first(mine, step.features_of_rank, self.group, gather=True)
        if self.on_first_stage and self.tp_group.size() > 1:
            if self.tp_group.rank():
                features = mine.new_empty(sum(step.features_of_rank), *mine.shape[1:])
            dist.broadcast(features, src=dist.get_global_rank(self.tp_group, 0), group=self.tp_group)
        return features

    def backward(self) -> None:
        """Computes the gradients of the tower's weights, sums them over the run and divides them by
        its loss tokens. Collective over the run; call it after the pipeline's backward pass."""
        step, self._step = self._step, None
        if self.ddp is None:
            return
        if step is not None and step.has_pictures:
            gradient = self.to_owners(self._collected(step), step)
            kept = self._kept[-1][1].stop if self._kept else 0
            while self._kept:  # the memory of each is free before the next call
                self.backward_call(*self._kept.pop(), gradient)
            for given, patches in step.calls(self.config.backward_patches, start=step.frames_within(kept)):
                self.backward_call(self.again(given), patches, gradient)
        self.reduce()

    def reduce(self) -> None:
        """Sums the gradients over the run and divides them by its loss tokens."""
        assert self.ddp is not None and self.tokens is not None
        self.ddp.finish_grad_sync()
        self.ddp.scale_gradients(1.0 / self.tokens.clamp(min=1))
        self.tokens = None

    def again(self, given: VisionInput) -> list[Tensor]:
        """The features of one call, with what their backward pass needs."""
        return self.module.vision_model(given)

    def backward_call(self, features: list[Tensor], patches: slice, gradient: Tensor) -> None:
        """The backward pass of one call.

        Args:
            patches: the call's place in the rank's share.
            gradient: of all features of this rank.
        """
        unit = self.vision.merge_unit
        levels = gradient[patches.start // unit : patches.stop // unit].unbind(1)
        torch.autograd.backward(features, list(levels))

    def _collected(self, step: StepVision) -> Tensor:
        """The gradients of all features, on the rank that owns the loader; empty elsewhere. Frees both."""
        none = self._none(step)
        parts = []
        for row in step.rows:
            features, row.features = row.features, None
            if features is not None:
                parts.append(torch.zeros_like(features) if features.grad is None else features.grad)
        return torch.cat(parts) if parts and self.group.rank() == 0 else none

    def to_owners(self, gradient: Tensor, step: StepVision) -> Tensor:
        """The gradients of this rank's features, [n, 1 + levels, H]."""
        return exchange_with_first(gradient, step.features_of_rank, self.group, gather=False)


def groups_of_tower() -> ProcessGroupCollection:
    """The groups of a tower that every rank of the run holds whole: all ranks are its data-parallel ranks."""
    pg, world, alone = ProcessGroupCollection(), dist.group.WORLD, group_of_one()
    pg.dp = pg.dp_cp = world
    pg.tp = pg.pp = pg.cp = pg.mp = alone
    pg.ep = pg.expt_tp = pg.expt_dp = pg.tp_ep_pp = alone
    # With the distributed optimizer, the norm is summed over the slices of all ranks, as that of the
    # language model is.
    pg.intra_dist_opt = mpu.get_intra_distributed_optimizer_instance_group()
    return pg


def exchange_with_first(
    mine: Tensor, sizes: Sequence[int], group: dist.ProcessGroup, *, gather: bool
) -> Tensor:
    """Gathers parts on the first rank of a group, or sends the parts that it holds to their ranks.

    Args:
        mine: this rank's part; to send, all parts on the first rank and nothing elsewhere.
        sizes: length of each rank's part in dim 0.

    Returns:
        All parts on the first rank and nothing elsewhere; if they were sent, this rank's part.
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
