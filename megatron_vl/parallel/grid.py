"""The process grid: who is who among tensor, pipeline and data parallel ranks.

Ranks are laid out as Megatron-core does (``tp`` fastest, then ``dp``, then ``pp``), so that tensor-parallel
peers share a node. To the experts the same ``tp * dp`` ranks of a stage are ``etp`` fastest, then ``ep``,
then expert-data-parallel. Core's global groups are the only ones used for training; this module adds what the
loader needs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_vl.parallel import failures, tp_overlap
from megatron_vl.parallel.groups import core_keeps_groups, end_groups, kept_group
from megatron_vl.parallel.open_files import raise_open_files
from megatron_vl.platform import Platform
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import Cut, TensorInfo


@dataclass(frozen=True)
class ProcessGrid:
    """This rank's coordinates and the groups that rows travel over."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    tp: int
    pp: int
    dp: int
    vpp: int
    cut: Cut
    """Into how many parts tensors are cut."""
    ep_rank: int
    etp_rank: int
    edp_rank: int
    """Among the ranks that hold the same experts."""
    rank: int
    world_size: int
    replica_group: dist.ProcessGroup
    """All tp x pp ranks of this data-parallel replica."""
    replica_source: int
    """Global rank (stage 0, tp 0) of this replica that owns the loader."""
    replica_gloo: dist.ProcessGroup
    """The same ranks over gloo, for small host-side messages."""
    tp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup
    owners_gloo: dist.ProcessGroup | None
    """The loaders' owners of all replicas, in data-parallel order, where rows are exchanged between them;
    None on other ranks, where there is one replica, and where the grid was made without it."""

    def part(self, info: TensorInfo) -> int:
        """Which part of a tensor this rank holds (see :meth:`Cut.part`)."""
        return self.cut.part(info, tp_rank=self.tp_rank, ep_rank=self.ep_rank, etp_rank=self.etp_rank)

    def is_first_copy(self, info: TensorInfo) -> bool:
        """Whether this rank is the first of those that hold the same part of a tensor for different data."""
        return (self.edp_rank if info.experts else self.dp_rank) == 0

    @property
    def owns_loader(self) -> bool:
        return self.rank == self.replica_source

    @property
    def has_vision(self) -> bool:
        """Whether the vision tower lives on this rank."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


def init_distributed(platform: Platform, timeout_minutes: int = 30) -> None:
    """Joins the process group described by torchrun's environment; a single process when there is none."""
    if dist.is_initialized():
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    raise_open_files()
    if platform.name == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(
        platform.backend, rank=rank, world_size=world, timeout=timedelta(minutes=timeout_minutes)
    )


def end_distributed() -> None:
    """Ends all process groups; collective. Nobody leaves while another still talks: with gloo that aborts the
    other."""
    dist.barrier()
    failures.stop()
    end_groups()


def make_grid(layout: Layout, *, owners: bool = False) -> ProcessGrid:
    """Initialises Megatron-core's groups for ``layout`` and returns this rank's place. Collective over all
    ranks.

    Args:
        owners: also the group in which the loaders' owners exchange rows (``data.balance``). Each owner holds
            a connection to every other one.
    """
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        tp_overlap.stop()
        mpu.destroy_model_parallel()  # forgets the groups
    with core_keeps_groups():  # all ranks begin a layout together
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            # for checkpoints of core's distributed optimizer, which are not used
            create_gloo_process_groups=False,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
    replica = mpu.get_model_parallel_group()
    rank = dist.get_rank()
    dp = mpu.get_data_parallel_world_size()
    gloo = replica
    if layout.tp * layout.pp > 1 and dist.get_backend() not in ("gloo", "fake"):
        # Every rank must take part in making every group.
        for d in range(dp):
            members = [
                p * layout.tp * dp + d * layout.tp + t for p in range(layout.pp) for t in range(layout.tp)
            ]
            group = kept_group(members, "gloo", "REPLICA_GLOO")
            if rank in members:
                gloo = group
    return ProcessGrid(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        tp=layout.tp,
        pp=layout.pp,
        dp=dp,
        vpp=layout.vpp,
        cut=layout.cut,
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        edp_rank=mpu.get_expert_data_parallel_rank(),
        rank=rank,
        world_size=dist.get_world_size(),
        replica_group=replica,
        replica_source=min(dist.get_process_group_ranks(replica)),
        replica_gloo=gloo,
        tp_group=mpu.get_tensor_model_parallel_group(),
        dp_group=mpu.get_data_parallel_group(),
        owners_gloo=_owners(layout.tp, dp, rank) if owners else None,
    )


def _owners(tp: int, dp: int, rank: int) -> dist.ProcessGroup | None:
    """The group of the loaders' owners, on its members. Collective over all ranks."""
    if dp == 1 or dist.get_backend() == "fake":
        return None
    members = [d * tp for d in range(dp)]
    group = kept_group(members, "gloo", "OWNERS_GLOO")
    return group if rank in members else None
