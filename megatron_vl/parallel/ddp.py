"""Data parallelism of a rank's chunk: Megatron-core's DDP (0.19.2), with four differences.

* Gradients are divided by the tokens of the batch in the own slice alone. With the distributed optimizer a
  rank reads no others, and core divides the whole buffers: 60 GB of memory traffic a step for a model of 7 B
  parameters, 14 ms on an H200.
* Reductions that overlap with the backward pass are started in the order of the buckets, the same on every
  rank. Core starts each when its last gradient is there, which is one order only while all ranks run one
  graph.
* A row without pictures skips the vision tower (:class:`AbsentTower`), so ranks do run different graphs. A
  tower that ran on a dummy picture instead cost 100 ms a row on H200 (Qwen2.5-VL-7B): its kernels are so
  small that launching them is the limit, 15 % of a step of text rows.
* Before a module runs, the gathers of its parameters are looked up by bucket, found once, and not by
  parameter: a layer of Qwen3-VL-30B-A3B has 256 and more of them on a GPU, and asking for each took a sixth
  of what the host does in a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


class ReplicaDDP(DistributedDataParallel):
    """Core's DDP with the differences above; see
    :class:`megatron.core.distributed.DistributedDataParallel`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._orders = []
        if self.ddp_config.overlap_grad_reduce:
            self._orders = [
                _InOrder(groups) for groups in (self.bucket_groups, self.expert_parallel_bucket_groups)
            ]

    def scale_gradients(self, scaling_factor: Tensor | float) -> None:
        """Multiplies this rank's reduced gradients; after the reduction only."""
        config = self.ddp_config
        buffers = self.buffers + self.expert_parallel_buffers
        simple = config.use_distributed_optimizer and config.num_distributed_optimizer_instances == 1
        if not simple or any(buffer.extra_main_grads for buffer in buffers):
            super().scale_gradients(scaling_factor)
            return
        for buffer in buffers:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                bucket.grad_data.chunk(size)[rank].mul_(scaling_factor)

    def gradients_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """What the hooks of these parameters say in the backward pass, for those that autograd does not come
        by."""
        if not self.ddp_config.overlap_grad_reduce:
            return
        for parameter in parameters:
            group = self.param_to_bucket_group[parameter]
            if not group.is_last_microbatch:
                return  # the same for all groups
            group.register_grad_ready(parameter, self.force_all_reduce)

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        """What core's hook does, for one module; core makes one for each."""
        groups: list[Any] | None = None

        def hook(module: nn.Module, *_: Any) -> None:
            nonlocal groups
            if groups is None:
                known = self.param_to_bucket_group
                groups = list(dict.fromkeys(known[p] for p in module.parameters(recurse=False) if p in known))
            for group in groups:
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    ahead = (
                        self.ddp_config.align_param_gather or self.overlap_param_gather_with_optimizer_step
                    )
                    group.finish_param_sync(skip_next_bucket_dispatch=ahead)

        return hook

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        for order in self._orders:
            order.begin()


class _InOrder:
    """Starts the gradient reductions of bucket groups in the order of the list; one that is ready early waits
    for its turn."""

    def __init__(self, groups: list[Any]) -> None:
        self.starts = [group.start_grad_sync for group in groups]
        for number, group in enumerate(groups):
            group.start_grad_sync = partial(self.start, number)
        self.begin()

    def begin(self) -> None:
        """For the next step."""
        self.turn, self.waiting = 0, dict[int, Callable[[], None]]()

    def start(self, number: int, *args: Any, **kwargs: Any) -> None:
        """In place of ``start_grad_sync`` of the group of this number."""
        self.waiting[number] = partial(self.starts[number], *args, **kwargs)
        while self.turn in self.waiting:
            self.waiting.pop(self.turn)()
            self.turn += 1


class AbsentTower:
    """What a rank owes the others of its data-parallel group for a row that does not run the vision tower.

    They gather the tower's parameters before their first row of a step and reduce its gradients behind the
    last one; this rank takes part in both at the same places in the order of collectives. Its own gradients
    of such a row are zero.
    """

    def __init__(self, ddp: ReplicaDDP, tower: nn.Module) -> None:
        self.ddp = ddp
        self.trained = [p for p in tower.parameters() if p in ddp.param_to_bucket_group]
        mine = {id(ddp.param_to_bucket_group[p]) for p in self.trained}
        self.groups = [group for group in reversed(ddp.bucket_groups) if id(group) in mine]
        # Gathered ahead, all at once, so that the order does not depend on the modules that run.
        warnings.filterwarnings(
            "ignore", message="The next bucket's parameter all-gather operation has already been"
        )

    @property
    def _gathers(self) -> bool:
        """Whether parameters are gathered as modules run; during validation they are all there."""
        return bool(self.ddp.ddp_config.overlap_param_gather and self.ddp.remove_forward_pre_hook_handles)

    def gather(self) -> None:
        """Before the tower runs or is skipped: starts gathering its parameters, where that was not done in
        this step."""
        if self._gathers:
            for group in self.groups:
                if not group.param_gather_dispatched:
                    group.start_param_sync()

    def skip(self, embedded: Tensor) -> Tensor:
        """``embedded`` itself, whose backward pass reports the tower's gradients, which stay as they are, as
        ready."""
        if self._gathers:
            for group in self.groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        return _InBackward.apply(embedded, partial(self.ddp.gradients_ready, self.trained))


class _InBackward(torch.autograd.Function):
    """The identity, whose backward pass calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def connect_tower(ddp: ReplicaDDP) -> None:
    """Lets the chunk in ``ddp`` skip its tower, when it has one, for rows without pictures."""
    chunk = ddp.module
    if chunk.vision_model is not None:
        chunk.absent_tower = AbsentTower(ddp, chunk.vision_model)
