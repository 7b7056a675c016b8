"""Process groups that are kept when the layout changes, so that the next layout can use them.

A training run makes its groups once. The parity table runs dozens of layouts in the same processes, and
Megatron-core (0.19.2) makes some thirty groups for each layout, which it never ends. Every gloo group has its
own threads and a connection to every other member, which added up to a thousand threads after 30 layouts. So
successive layouts share their groups. This saves these threads and the time to connect.

Sharing does not prevent crashes. Ranks of the parity table once died of a corrupted heap, but the cause was
two worker threads of one gloo group (see :mod:`megatron_vl.core_fixes.gloo_threads`).
"""

import gc
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.system.errors import UserError, is_user_fixable

_GroupKind = tuple[tuple[int, ...], str | None, str | None]


class _GroupCache:
    """The groups that were made under one default group."""

    def __init__(self, world_group: Any) -> None:
        self.world_group = world_group
        self.cached_groups: dict[tuple[_GroupKind, int], Any] = {}
        """The groups by (kind, number of groups of this kind that the layout had requested before)."""
        self.request_counts: Counter[_GroupKind] = Counter()
        self.num_layouts = 0
        self.single_rank_group: Any = None
        self.replica_group: Any = None
        """All ranks of this rank's data-parallel replica in the current layout."""
        self.nested_context_groups: list[Any] | None = None
        """This rank's groups that exchange heads and gather keys, in this order. None if the heads divide
        among all context-parallel ranks of the current layout."""

    def begin_layout(self) -> None:
        """Waits until every rank begins this layout.

        A rank that left the last layout with an error could still be in one of its collectives. So the ranks
        wait for each other through the store and not in a collective.
        """
        self.request_counts.clear()
        self.num_layouts += 1
        if self.num_layouts == 1:
            return

        store, arrivals_key = default_store(), f"megatron_vl/layout/{self.num_layouts}"
        all_arrived_key = f"{arrivals_key}/all"
        if store.add(arrivals_key, 1) == dist.get_world_size():
            store.set(all_arrived_key, "1")
        store.wait([all_arrived_key])

    def get_group(
        self, ranks: list[int], *, backend: str | None = None, group_desc: str | None = None, **options: Any
    ) -> Any:
        """Makes a group as ``torch.distributed.new_group`` does, or reuses the group of an earlier layout.

        Collective over all ranks.
        """
        kind = (tuple(ranks), backend, group_desc)
        key = (kind, self.request_counts[kind])
        self.request_counts[kind] += 1
        if key not in self.cached_groups:
            self.cached_groups[key] = dist.new_group(ranks, backend=backend, group_desc=group_desc, **options)
        return self.cached_groups[key]


_group_cache: _GroupCache | None = None


def current_groups() -> _GroupCache:
    """The groups of this process, among them those of the current layout's grid."""
    global _group_cache
    if _group_cache is None or _group_cache.world_group is not dist.group.WORLD:
        _group_cache = _GroupCache(dist.group.WORLD)
    return _group_cache


@contextmanager
def cache_core_groups() -> Iterator[None]:
    """A context that begins a new layout, in which core's groups are shared with earlier layouts.

    Collective over all ranks. Nothing of earlier layouts is freed, not even the buffers of NCCL's
    communicators.
    """
    from megatron.core import parallel_state as mpu

    group_cache, core_create_group = current_groups(), mpu.create_group
    group_cache.begin_layout()
    mpu.create_group = group_cache.get_group
    try:
        yield
    finally:
        mpu.create_group = core_create_group


def broadcast_from_rank_0[T](make_result: Callable[[], T]) -> T:
    """Calls ``make_result`` on rank 0 and returns its result on all ranks. Collective.

    Raises:
        Exception: on all ranks, the error of ``make_result`` on rank 0. On the other ranks, a bug is a
            RuntimeError with the traceback of rank 0, and an error that cannot be sent is a UserError.
    """
    result: Any = None
    rank_0_error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result = make_result()
        except Exception as caught_error:  # of any type, because the other ranks wait for an answer
            rank_0_error = caught_error

    sent_values = [result, _sendable_error(rank_0_error)]
    dist.broadcast_object_list(sent_values)  # with the error, or the other ranks would wait forever
    if sent_values[1] is not None:
        dist.barrier()  # no rank ends before all have the message
        raise rank_0_error or sent_values[1]
    return sent_values[0]


def _sendable_error(error: Exception | None) -> Exception | None:
    if error is None:
        return None
    if not is_user_fixable(error):
        return RuntimeError("".join(traceback.format_exception(error)))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # a class of another package whose constructor takes other arguments
        return UserError(str(error))


def min_over_ranks(local_value: float, device: torch.device) -> float:
    """The smallest ``local_value`` of any rank. Collective."""
    smallest = torch.tensor(local_value, dtype=torch.float64, device=device)
    dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    return smallest.item()  # a sync; called outside of steps


def group_of_this_rank() -> Any:
    """A group with only this rank, for modules that share nothing.

    Without context parallelism, it is core's context-parallel group. Otherwise each rank makes its own, and
    waits for no other rank, because the group has no other member.
    """
    from megatron.core import parallel_state as mpu

    context_group = mpu.get_context_parallel_group()
    if context_group.size() == 1:
        return context_group

    group_cache = current_groups()
    if group_cache.single_rank_group is None:
        group_cache.single_rank_group = dist.new_group(
            [dist.get_rank()], use_local_synchronization=True, group_desc="GROUP_OF_ONE"
        )
    return group_cache.single_rank_group


def destroy_groups() -> None:
    """Ends all process groups of this process and drops all references to them.

    A gloo group that is still referenced when Python exits is never destroyed. Its threads then run until the
    process ends, which sometimes aborts it (SIGABRT, "terminate called without an active exception"). Without
    process groups, this function does nothing.
    """
    global _group_cache
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _group_cache = None
    if (mpu := sys.modules.get("megatron.core.parallel_state")) is not None:
        mpu.destroy_model_parallel()
        # Core keeps some references to groups, such as those of optimizer instances.
        for name in [name for name, value in vars(mpu).items() if isinstance(value, dist.ProcessGroup)]:
            setattr(mpu, name, None)
    gc.collect()  # a model wrapped in DDP holds its groups in a cycle
