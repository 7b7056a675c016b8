"""Data parallelism of a rank's chunk: Megatron-core's DDP (0.19.2) with four differences.

* A rank divides gradients by the number of loss tokens only in its own slice. With the distributed optimizer,
  it reads no other slices, but core divides the whole buffers. For a model of 7 B parameters, that is 60 GB
  of memory traffic per step, or 14 ms on an H200.
* Reductions that overlap with the backward pass start in the order of the buckets, which is the same on every
  rank. Core starts each one when its last gradient is ready, so the orders are the same only if all ranks run
  the same graph.
* A row without pictures skips the vision tower (:class:`AbsentTower`), so ranks run different graphs. Running
  the tower on a dummy picture took 100 ms per row on H200 (Qwen2.5-VL-7B), or 15 % of a step of text rows,
  because the tower's kernels are so small then that launching them takes most of the time.
* Before a module runs, it waits for the gathers of its parameters. The buckets of these gathers are looked up
  once per module, not once per parameter and call. A layer of Qwen3-VL-30B-A3B has 256 or more parameters on
  a GPU, and checking each took a sixth of the host's time in a step.
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
    """Core's DDP with the four differences above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.when_bucket_is_ready: Callable[[], None] = lambda: None
        """Called in the last backward pass of a step whenever the gradients of a bucket are complete."""
        self._orders = []
        if self.ddp_config.overlap_grad_reduce:
            self._orders = [
                _InOrder(groups, lambda: self.when_bucket_is_ready())
                for groups in (self.bucket_groups, self.expert_parallel_bucket_groups)
            ]

    def scale_gradients(self, scaling_factor: Tensor | float) -> None:
        """Multiplies this rank's reduced gradients. Call it only after the reduction."""
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
        """Reports gradients as ready, as DDP's hooks do, for parameters that autograd does not reach."""
        if not self.ddp_config.overlap_grad_reduce:
            return
        for parameter in parameters:
            group = self.param_to_bucket_group[parameter]
            if not group.is_last_microbatch:
                return  # this flag is the same for all groups
            group.register_grad_ready(parameter, self.force_all_reduce)

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        """Makes a hook with the effect of core's hook. Core calls this method once for each module."""
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
    """Starts the gradient reductions of bucket groups in the order of the list.

    A group that is ready early waits for its turn.
    """

    def __init__(self, groups: list[Any], is_ready: Callable[[], None]) -> None:
        self.is_ready = is_ready
        self.starts = [group.start_grad_sync for group in groups]
        for number, group in enumerate(groups):
            group.start_grad_sync = partial(self.start, number)
        self.begin()

    def begin(self) -> None:
        """Prepares for the next step."""
        self.turn, self.waiting = 0, dict[int, Callable[[], None]]()

    def start(self, number: int, *args: Any, **kwargs: Any) -> None:
        """Replaces ``start_grad_sync`` of the group with this number."""
        self.waiting[number] = partial(self.starts[number], *args, **kwargs)
        while self.turn in self.waiting:
            self.waiting.pop(self.turn)()
            self.turn += 1
        self.is_ready()


class AbsentTower:
    """Takes part in the tower's collectives for a row that does not run the vision tower.

    The other ranks of the data-parallel group gather the tower's parameters before their first row of a step
    and reduce its gradients after the last one. This rank takes part in both, at the same points in the order
    of collectives. Its own gradients for such a row are zero.
    """

    def __init__(self, ddp: ReplicaDDP, tower: nn.Module) -> None:
        self.ddp = ddp
        self.trained = [p for p in tower.parameters() if p in ddp.param_to_bucket_group]
        mine = {id(ddp.param_to_bucket_group[p]) for p in self.trained}
        self.groups = [group for group in reversed(ddp.bucket_groups) if id(group) in mine]
        # All buckets are gathered ahead at once, so that their order does not depend on the modules that run.
        warnings.filterwarnings(
            "ignore", message="The next bucket's parameter all-gather operation has already been"
        )

    @property
    def _gathers(self) -> bool:
        """Whether parameters are gathered as modules run. During validation they are already complete."""
        return bool(self.ddp.ddp_config.overlap_param_gather and self.ddp.remove_forward_pre_hook_handles)

    def gather(self) -> None:
        """Starts to gather the tower's parameters, unless this step has done so. Call it before each row."""
        if self._gathers:
            for group in self.groups:
                if not group.param_gather_dispatched:
                    group.start_param_sync()

    def skip(self, embedded: Tensor) -> Tensor:
        """Returns ``embedded``. Its backward pass reports the tower's unchanged gradients as ready."""
        if self._gathers:
            for group in self.groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)
        return _InBackward.apply(embedded, partial(self.ddp.gradients_ready, self.trained))


class _InBackward(torch.autograd.Function):
    """The identity function. Its backward pass calls ``call``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def connect_tower(ddp: ReplicaDDP) -> None:
    """Lets the chunk in ``ddp`` skip its tower, if it has one, for rows without pictures."""
    chunk = ddp.module
    if chunk.vision_model is not None:
        chunk.absent_tower = AbsentTower(ddp, chunk.vision_model)
