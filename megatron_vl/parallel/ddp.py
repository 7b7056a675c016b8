"""Data parallelism of a rank's chunk: Megatron-core's DDP (0.19.2) with three differences.

* Reductions that overlap with the backward pass start in the order of the buckets, which is the same on every
  rank. Core starts each one when its last gradient is ready, so the orders are the same only if all ranks run
  the same graph.
* A row without images skips the vision tower (:class:`AbsentTower`), so ranks run different graphs. Running
  the tower on a dummy image took 100 ms per row on H200 (Qwen2.5-VL-7B), or 15 % of a step of text rows,
  because the tower's kernels are so small then that launching them takes most of the time.
* Before a module runs, it waits for the gathers of its parameters. The buckets of these gathers are looked up
  once per module, not once per parameter and call. A layer of Qwen3-VL-30B-A3B has 256 or more parameters on
  a GPU, and checking each took a sixth of the host's time in a step. The hooks that wait are removed as soon
  as a step has gathered all parameters, which saves up to 12 us of the host at every later call of a module.

Reduced gradients stay sums over tokens: :func:`megatron_vl.training.optimizer.clip_and_update` divides them.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


class ReplicaDDP(DistributedDataParallel):
    """Core's DDP with the three differences above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups_by_module: dict[nn.Module, list[Any]] = {}
        self.on_bucket_ready: Callable[[], None] = lambda: None
        """Called in the last backward pass of a step whenever the gradients of a bucket are complete."""

        # Dense and expert parameters are reduced over different groups, so each list has an order of its own.
        group_lists = (self.bucket_groups, self.expert_parallel_bucket_groups)
        self._ordered_syncs = [
            _OrderedGradSync(groups, lambda: self.on_bucket_ready())
            for groups in (group_lists if self.ddp_config.overlap_grad_reduce else ())
        ]

    def report_gradients_ready(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reports gradients as ready, as DDP's hooks do, for parameters that autograd does not reach."""
        if not self.ddp_config.overlap_grad_reduce:
            return
        for parameter in parameters:
            group = self.param_to_bucket_group[parameter]
            if not group.is_last_microbatch:
                return  # this flag is the same for all groups
            group.register_grad_ready(parameter, self.force_all_reduce)

    def _make_forward_pre_hook(self) -> Callable[..., None]:
        """The hook of every module, with the effect of core's hook."""
        return self._wait_for_parameters

    def _wait_for_parameters(self, module: nn.Module, *_: Any) -> None:
        if (groups := self._groups_by_module.get(module)) is None:
            group_by_param = self.param_to_bucket_group
            own_groups = [group_by_param[p] for p in module.parameters(recurse=False) if p in group_by_param]
            groups = self._groups_by_module[module] = list(dict.fromkeys(own_groups))

        for group in groups:
            if not _is_gathered(group):
                group.finish_param_sync(
                    skip_next_bucket_dispatch=self.ddp_config.align_param_gather
                    or self.overlap_param_gather_with_optimizer_step
                )
                if all(map(_is_gathered, self.bucket_groups + self.expert_parallel_bucket_groups)):
                    self.disable_forward_pre_hook(param_sync=False)

    def enable_forward_pre_hook(self) -> None:
        if not self.remove_forward_pre_hook_handles:
            super().enable_forward_pre_hook()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        self.enable_forward_pre_hook()  # core expects every module to have its hook
        super().disable_forward_pre_hook(param_sync)

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        super().finish_grad_sync(*args, **kwargs)
        if self.use_forward_hook:
            self.enable_forward_pre_hook()  # the update comes next: the passes after it gather again

    def zero_grad_buffer(self) -> None:
        super().zero_grad_buffer()
        for ordered_sync in self._ordered_syncs:
            ordered_sync.begin_step()


def _is_gathered(group: Any) -> bool:
    return group.param_gather_dispatched and group.param_gather_handle is None


class _OrderedGradSync:
    """Starts the gradient reductions of bucket groups in the order of the list.

    A group that is ready early waits for its turn.
    """

    def __init__(self, bucket_groups: list[Any], on_bucket_ready: Callable[[], None]) -> None:
        self.on_bucket_ready = on_bucket_ready
        self.start_functions = [group.start_grad_sync for group in bucket_groups]
        for number, group in enumerate(bucket_groups):
            group.start_grad_sync = partial(self.start_in_order, number)
        self.begin_step()

    def begin_step(self) -> None:
        self.next_group, self.waiting_starts = 0, dict[int, Callable[[], None]]()

    def start_in_order(self, group_number: int, *args: Any, **kwargs: Any) -> None:
        """Replaces ``start_grad_sync`` of the group with this number."""
        self.waiting_starts[group_number] = partial(self.start_functions[group_number], *args, **kwargs)
        while self.next_group in self.waiting_starts:
            self.waiting_starts.pop(self.next_group)()
            self.next_group += 1
        self.on_bucket_ready()


class AbsentTower:
    """Takes part in the tower's collectives for a row that does not run the vision tower.

    The other ranks of the data-parallel group gather the tower's parameters before their first row of a step
    and reduce its gradients after the last one. This rank takes part in both, at the same points in the order
    of collectives. Its own gradients for such a row are zero.
    """

    def __init__(self, ddp_chunk: ReplicaDDP, vision_tower: nn.Module) -> None:
        self.ddp_chunk = ddp_chunk
        self.trained_params = [p for p in vision_tower.parameters() if p in ddp_chunk.param_to_bucket_group]
        own_ids = {id(ddp_chunk.param_to_bucket_group[p]) for p in self.trained_params}
        self.bucket_groups = [group for group in reversed(ddp_chunk.bucket_groups) if id(group) in own_ids]
        # All buckets are gathered ahead at once, so that their order does not depend on the modules that run.
        warnings.filterwarnings(
            "ignore", message="The next bucket's parameter all-gather operation has already been"
        )

    @property
    def _gathers_params(self) -> bool:
        """Whether parameters are gathered as modules run. During validation they are already complete."""
        return bool(
            self.ddp_chunk.ddp_config.overlap_param_gather and self.ddp_chunk.remove_forward_pre_hook_handles
        )

    def gather_params(self) -> None:
        """Starts to gather the tower's parameters, unless this step has done so. Call it before each row."""
        if self._gathers_params:
            for group in self.bucket_groups:
                if not group.param_gather_dispatched:
                    group.start_param_sync()

    def skip_tower(self, hidden_states: Tensor) -> Tensor:
        """Returns ``hidden_states`` unchanged. In the backward pass, the tower's gradients are reported as
        ready; they stay as they are."""
        if self._gathers_params:
            for group in self.bucket_groups:
                group.finish_param_sync()  # which starts the language model's gather, as the tower does
        return _CallInBackward.apply(
            hidden_states, partial(self.ddp_chunk.report_gradients_ready, self.trained_params)
        )


class _CallInBackward(torch.autograd.Function):
    """The identity function. Its backward pass calls ``call``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, on_backward: Callable[[], None]) -> Tensor:
        ctx.call = on_backward
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grad, None


def connect_absent_tower(ddp_chunk: ReplicaDDP) -> None:
    """Lets the model chunk in ``ddp_chunk`` skip its tower for rows without images, if it has a tower."""
    chunk = ddp_chunk.module
    if chunk.vision_model is not None:
        chunk.absent_tower = AbsentTower(ddp_chunk, chunk.vision_model)
