"""Process groups that stay when the layout changes, and serve the next one.

A training makes its groups once. The parity table runs dozens of layouts in the same processes, and
Megatron-core (0.19.2) makes some thirty groups for each, which it forgets and never ends. Every gloo group
has threads of its own and a connection to every other member: a thousand threads were there after 30 layouts.
Layouts that follow each other therefore share their groups, which saves these threads and the time that it
takes to connect them.

Sharing is not what keeps a rank alive: ranks of the parity table once died of a damaged heap, which came from
two worker threads of one gloo group (see :mod:`megatron_vl.core_fixes.gloo_threads`), not from ending groups.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megatron_vl.core_fixes.default_store import default_store

_Kind = tuple[tuple[int, ...], str | None, str | None]
"""Members, backend and purpose."""


class _Groups:
    """The groups of one default group."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.made: dict[tuple[_Kind, int], Any] = {}
        """By kind, and how many of the kind the layout had asked for before."""
        self.asked: Counter[_Kind] = Counter()
        self.layouts = 0

    def begin_layout(self) -> None:
        """Waits until every rank is here: one that left the last layout by an error would take part in what
        is not its own.

        Through the store, as a collective would be such a one.
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


def kept_group(ranks: list[int], backend: str, purpose: str) -> Any:
    """As ``torch.distributed.new_group``, or the group that an earlier layout had for the same. Collective
    over all ranks."""
    return _of_this_world().get(ranks, backend, purpose)


@contextmanager
def core_keeps_groups() -> Iterator[None]:
    """A new layout begins: within, ``initialize_model_parallel`` takes the groups of earlier layouts where
    they fit.

    Collective over all ranks. What earlier layouts used stays, buffers of NCCL's communicators included.
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


def end_groups() -> None:
    """Ends all process groups of this process, and drops whatever holds one. Does nothing where there are
    none.

    A gloo group that is still held when Python exits is destroyed by nobody: its threads run into the end of
    the process, which then aborts now and then (SIGABRT, "terminate called without an active exception").
    """
    global _groups
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    _groups = None
    _forget_core_groups()
    gc.collect()  # a model wrapped in DDP holds its groups in a cycle


def _forget_core_groups() -> None:
    """Core's own ``destroy_model_parallel`` leaves some groups where they are, as those of optimizer
    instances."""
    mpu: Any = sys.modules.get("megatron.core.parallel_state")
    if mpu is None:
        return
    mpu.destroy_model_parallel()
    for name, value in list(vars(mpu).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(mpu, name, None)
