"""Process groups that are kept when the layout changes, so that the next layout can use them.

A training run makes its groups once. The parity table runs dozens of layouts in the same processes, and
Megatron-core (0.19.2) makes some thirty groups for each layout, which it never ends. Every gloo group has its
own threads and a connection to every other member, which added up to a thousand threads after 30 layouts. So
successive layouts share their groups. This saves these threads and the time to connect.

Sharing does not prevent crashes. Ranks of the parity table once died of a corrupted heap, but the cause was
two worker threads of one gloo group (see :mod:`megatron_vl.core_fixes.gloo_threads`).
"""

from __future__ import annotations

import gc
import pickle
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_vl.core_fixes.default_store import default_store
from megatron_vl.errors import UserError, is_fixable

_Kind = tuple[tuple[int, ...], str | None, str | None]
"""Members, backend and purpose."""


class _Groups:
    """The groups that were made under one default group."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.made: dict[tuple[_Kind, int], Any] = {}
        """The groups by kind and by number: how many of this kind the layout had requested before."""
        self.asked: Counter[_Kind] = Counter()
        self.layouts = 0
        self.alone: Any = None
        """The group with only this rank, once one was needed."""
        self.replica: Any = None
        """The group of this rank's replica in the current layout."""

    def begin_layout(self) -> None:
        """Waits until every rank begins this layout.

        A rank that left the last layout with an error could still be in one of its collectives. So the ranks
        wait for each other through the store and not in a collective.
        """
        self.asked.clear()
        self.layouts += 1
        if self.layouts == 1:
            return
        store, here = default_store(), f"megatron_vl/layout/{self.layouts}"
        all_here = f"{here}/all"
        if store.add(here, 1) == dist.get_world_size():
            store.set(all_here, "1")
        store.wait([all_here])

    def get(self, ranks: list[int], backend: str | None, purpose: str | None, **options: Any) -> Any:
        kind = (tuple(ranks), backend, purpose)
        key = (kind, self.asked[kind])
        self.asked[kind] += 1
        if key not in self.made:
            self.made[key] = dist.new_group(ranks, backend=backend, group_desc=purpose, **options)
        return self.made[key]


_groups: _Groups | None = None


def _of_this_world() -> _Groups:
    global _groups
    if _groups is None or _groups.world is not dist.group.WORLD:
        _groups = _Groups(dist.group.WORLD)
    return _groups


def kept_group(ranks: list[int], backend: str | None, purpose: str, timeout: timedelta | None = None) -> Any:
    """Makes a group as ``torch.distributed.new_group`` does, or reuses the group of an earlier layout.

    Collective over all ranks.
    """
    return _of_this_world().get(ranks, backend, purpose, timeout=timeout)


def keep_replica_group(group: Any) -> None:
    """Makes ``group`` the one that :func:`replica_group` returns until the next layout."""
    _of_this_world().replica = group


def replica_group() -> Any:
    """The group of all ranks of this rank's data-parallel replica, which a grid has made."""
    return _of_this_world().replica


@contextmanager
def core_keeps_groups() -> Iterator[None]:
    """A context that begins a new layout, in which core's groups are shared with earlier layouts.

    Collective over all ranks. Nothing of earlier layouts is freed, not even the buffers of NCCL's
    communicators.
    """
    from megatron.core import parallel_state as mpu

    groups, create = _of_this_world(), mpu.create_group
    groups.begin_layout()

    def get(
        ranks: list[int], *, backend: str | None = None, group_desc: str | None = None, **options: Any
    ) -> Any:
        return groups.get(ranks, backend, group_desc, **options)

    mpu.create_group = get
    try:
        yield
    finally:
        mpu.create_group = create


def from_first_rank[T](make: Callable[[], T]) -> T:
    """Calls ``make`` on rank 0 and returns its result on all ranks. Collective.

    Raises:
        Exception: on all ranks, the error of ``make`` on rank 0. On the other ranks, a bug is a RuntimeError
            with the traceback of rank 0, and an error that cannot be sent is a UserError.
    """
    result: Any = None
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result = make()
        except Exception as caught:  # of any type, because the other ranks wait for an answer
            error = caught

    answer = [result, _as_sent(error)]
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        dist.barrier()  # no rank ends before all have the message
        raise error or answer[1]
    return answer[0]


def _as_sent(error: Exception | None) -> Exception | None:
    """What other ranks raise for an error of rank 0."""
    if error is None:
        return None
    if not is_fixable(error):
        return RuntimeError("".join(traceback.format_exception(error)))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # a class of another package whose constructor takes other arguments
        return UserError(str(error))


def least_of_ranks(value: float, device: torch.device) -> float:
    """The smallest ``value`` of any rank. Collective."""
    least = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item()


def group_of_one() -> Any:
    """A group with only this rank, for modules that share nothing.

    Without context parallelism, it is core's group for that. Otherwise each rank makes its own: such a group
    has no other member, so no rank waits for another.
    """
    from megatron.core import parallel_state as mpu

    group = mpu.get_context_parallel_group()
    if group.size() == 1:
        return group

    groups = _of_this_world()
    if groups.alone is None:
        groups.alone = dist.new_group(
            [dist.get_rank()], use_local_synchronization=True, group_desc="GROUP_OF_ONE"
        )
    return groups.alone


def end_groups() -> None:
    """Ends all process groups of this process and drops all references to them.

    A gloo group that is still referenced when Python exits is never destroyed. Its threads then run until the
    process ends, which sometimes aborts it (SIGABRT, "terminate called without an active exception"). Without
    process groups, this function does nothing.
    """
    global _groups
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _groups = None
    _forget_core_groups()
    gc.collect()  # a model wrapped in DDP holds its groups in a cycle


def _forget_core_groups() -> None:
    """Drops core's references to groups.

    ``destroy_model_parallel`` keeps some of them, such as those of optimizer instances.
    """
    mpu: Any = sys.modules.get("megatron.core.parallel_state")
    if mpu is None:
        return
    mpu.destroy_model_parallel()
    for name, value in list(vars(mpu).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(mpu, name, None)
