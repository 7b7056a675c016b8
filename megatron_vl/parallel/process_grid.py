"""The process grid: each rank's coordinates in tensor, context, pipeline and data parallelism.

Ranks are ordered as in Megatron-core (``tp`` fastest, then ``cp``, ``dp``, ``pp``), so that tensor-parallel
peers share a node. For experts, the same ``tp * cp * dp`` ranks of a stage have ``etp`` fastest, then
``ep``, then expert-data-parallel. Training uses core's global groups. This module adds the groups that the
loader needs.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_vl.parallel import failures
from megatron_vl.parallel.joining import join_store, raise_open_file_limit
from megatron_vl.parallel.process_groups import cache_core_groups, current_groups, destroy_groups
from megatron_vl.platform import Platform
from megatron_vl.spec.layout import Layout
from megatron_vl.spec.tensors import Sharding, TensorInfo


@dataclass(frozen=True)
class ProcessGrid:
    """This rank's coordinates, and the groups over which rows are sent."""

    tp_rank: int
    cp_rank: int
    pp_rank: int
    dp_rank: int
    tp: int
    cp: int
    pp: int
    dp: int
    vpp: int
    key_ranks: int
    """Number of context-parallel ranks that gather each other's keys and values."""
    sharding: Sharding
    ep_rank: int
    etp_rank: int
    edp_rank: int
    rank: int
    world_size: int
    replica_group: dist.ProcessGroup
    """All tp x cp x pp ranks of this data-parallel replica."""
    replica_source_rank: int
    """Global rank of this replica's owner: the rank (stage 0, cp 0, tp 0) that owns the loader."""
    replica_gloo_group: dist.ProcessGroup
    """The same ranks over gloo, for small host-side messages."""
    stage_group: dist.ProcessGroup
    """The tp x cp ranks of this replica on this pipeline stage."""

    def shard_index(self, tensor_info: TensorInfo) -> int:
        """The number of the shard of a tensor that this rank holds (see :meth:`Sharding.shard_index`)."""
        return self.sharding.shard_index(
            tensor_info, tp_rank=self.tp_rank, ep_rank=self.ep_rank, etp_rank=self.etp_rank
        )

    def is_first_copy(self, tensor_info: TensorInfo) -> bool:
        """Whether this rank is the first of the ranks that hold the same part of a tensor."""
        if self.sharding.is_on_every_rank(tensor_info):
            return self.rank == 0
        return self.edp_rank == 0 if tensor_info.num_experts else self.is_first_dense_copy

    @property
    def is_first_dense_copy(self) -> bool:
        """Whether this rank is the first of the ranks that hold the same parts of the dense tensors."""
        return self.dp_rank == 0 and self.cp_rank == 0

    def from_loader_owner[T](self, owned_value: T) -> T:
        """The value of the rank that owns the replica's loader. Collective over the replica."""
        shared_values = [owned_value]
        if self.replica_ranks > 1:
            # Over gloo: a pickled object is on the host, and NCCL would copy it to the device and back.
            dist.broadcast_object_list(
                shared_values, src=self.replica_source_rank, group=self.replica_gloo_group
            )
        return shared_values[0]

    @property
    def replica_ranks(self) -> int:
        return self.tp * self.cp * self.pp

    @property
    def owns_loader(self) -> bool:
        return self.rank == self.replica_source_rank

    @property
    def has_vision(self) -> bool:
        return self.pp_rank == 0


_collective_timeout = timedelta(minutes=30)


def init_distributed(platform: Platform, timeout_minutes: int = 30, join_limit_s: float = 1800.0) -> None:
    """Joins the process group that torchrun's environment describes, or makes a group of one process.

    Raises JoinError or SystemExit, as :func:`join_store` does.
    """
    global _collective_timeout
    if dist.is_initialized():
        return

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    # Port 0 is any free one, so that two single processes do not use the same.
    os.environ.setdefault("MASTER_PORT", "29500" if world_size > 1 else "0")

    raise_open_file_limit()
    if platform.name == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    _collective_timeout = timedelta(minutes=timeout_minutes)
    store = join_store(rank, world_size, join_limit_s)
    store.set_timeout(_collective_timeout)
    dist.init_process_group(
        platform.distributed_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=_collective_timeout,
    )


def end_distributed() -> None:
    """Ends all process groups. Collective.

    No rank leaves while another one still communicates, because with gloo, that would abort the other rank.
    """
    dist.barrier()
    failures.stop_watching()
    destroy_groups()


def make_grid(layout: Layout) -> ProcessGrid:
    """Initialises Megatron-core's groups for ``layout``, and returns this rank's grid. Collective."""
    from megatron.core import parallel_state as mpu

    if mpu.model_parallel_is_initialized():
        mpu.destroy_model_parallel()  # drops core's references to groups
    with cache_core_groups():  # all ranks start a layout together, and share the groups of earlier ones
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            # Only core's distributed checkpoints need these groups, and they are not used.
            create_gloo_process_groups=False,
            distributed_timeout_minutes=int(_collective_timeout.total_seconds() // 60),
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
        )
    # Core has no group of a whole replica under context parallelism.
    replica_group, stage_group = mpu.get_model_parallel_group(), mpu.get_tensor_model_parallel_group()
    if layout.cp > 1:
        replica_group, stage_group = _replica_group(layout), mpu.get_tensor_and_context_parallel_group()
    groups = current_groups()
    groups.replica_group, groups.nested_context_groups = replica_group, _nested_context_groups(layout)
    # NCCL would move small messages between hosts through the GPUs.
    has_gloo = layout.replica_ranks == 1 or dist.get_backend() in ("gloo", "fake")
    return ProcessGrid(
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        dp=mpu.get_data_parallel_world_size(),
        vpp=layout.vpp,
        key_ranks=layout.key_ranks,
        sharding=layout.sharding,
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        edp_rank=mpu.get_expert_data_parallel_rank(),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        replica_group=replica_group,
        replica_source_rank=min(dist.get_process_group_ranks(replica_group)),
        replica_gloo_group=replica_group if has_gloo else _replica_group(layout, "gloo"),
        stage_group=stage_group,
    )


def _nested_context_groups(layout: Layout) -> list[dist.ProcessGroup] | None:
    """The groups of this rank that exchange heads and that gather keys. Collective over all ranks.

    Returns:
        None if the heads divide among all context-parallel ranks, whose group then exchanges them.
    """
    if layout.key_ranks == 1:
        return None
    ranks = torch.arange(dist.get_world_size()).view(-1, layout.key_ranks, layout.head_ranks, layout.tp)
    return [
        _own_group(ranks.transpose(2, 3).flatten(0, 2), "HEADS"),
        _own_group(ranks.movedim(1, 3).flatten(0, 2), "KEYS"),
    ]


def _replica_group(layout: Layout, backend: str | None = None) -> dist.ProcessGroup:
    """The group of the tp x cp x pp ranks of this rank's replica. Collective over all ranks.

    Megatron-core's group of a replica leaves out the context-parallel ranks.
    """
    ranks = torch.arange(dist.get_world_size()).view(layout.pp, -1, layout.tp * layout.cp)
    purpose = "REPLICA_GLOO" if backend == "gloo" else "REPLICA"
    return _own_group(ranks.transpose(0, 1).flatten(1), purpose, backend)


def _own_group(members_by_group: torch.Tensor, purpose: str, backend: str | None = None) -> dist.ProcessGroup:
    """The one of these groups that has this rank. Collective over all ranks."""
    get_group = current_groups().get_group
    groups = [  # every rank must take part in the creation of every group
        (members, get_group(members, backend=backend, group_desc=purpose, timeout=_collective_timeout))
        for members in members_by_group.tolist()
    ]
    return next(group for members, group in groups if dist.get_rank() in members)
