"""Functions that the tests of this folder run in separate processes (:func:`tests.support.ranks.call`)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_vl.parallel.ddp import ReplicaDDP
from megatron_vl.parallel.process_grid import end_distributed, init_distributed, make_grid
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.layout import make_layout


class Several(torch.nn.Module):
    """Six small weights, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(6):
            weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=number != 3)
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(x @ weight for weight in self.parameters())


def order_of_gathers() -> dict[str, list[Any]]:
    """For core's DDP and for ours: the order in which gathers start, and how many are pending as
    each module runs."""
    init_distributed(get_platform("cpu"))
    mpu.initialize_model_parallel()
    core = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, calculate_per_token_loss=True
    )
    config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, bucket_size=40
    )
    result = {
        kind.__name__: _gathers_of(kind(core, config, torch.nn.Sequential(*(Several() for _ in range(3)))))
        for kind in (DistributedDataParallel, ReplicaDDP)
    }
    end_distributed()
    return result


def _gathers_of(ddp: Any) -> list[Any]:
    happened: list[Any] = []

    def under_way() -> int:
        return sum(group.param_gather_handle is not None for group in ddp.bucket_groups)

    for number, group in enumerate(ddp.bucket_groups):

        def start(
            *args: Any, number: int = number, original: Any = group.start_param_sync, **kwargs: Any
        ) -> Any:
            happened.append(["start", number])
            return original(*args, **kwargs)

        group.start_param_sync = start
    for module in ddp.module:
        module.register_forward_pre_hook(lambda *_: happened.append(["run", under_way()]))

    for _ in range(2):
        for group in ddp.bucket_groups:
            group.param_gather_dispatched = False
        for _ in range(2):
            ddp(torch.ones(2, 4))
    happened.append(["groups", len(ddp.bucket_groups)])
    return happened


def groups_of_layouts(hf: str) -> dict[str, Any]:
    """Groups and threads after each round of layouts, in two successive default groups; whether all
    sums were right."""
    platform = get_platform("cpu")
    spec = read_spec(hf)
    rounds, sums = [], []
    for world in range(2):
        init_distributed(platform)
        for _ in range(3):
            for tp, pp in ((2, 1), (1, 2), (1, 1), (1, 1)):
                grid = make_grid(make_layout(spec, tp, pp, 1, None))
                sums += _sums_over(grid, tp, pp)
                assert mpu.get_pipeline_model_parallel_world_size() == pp
            dist.barrier()
            rounds.append([len(dist.distributed_c10d._world.pg_map), psutil.Process().num_threads()])

        if world == 0:
            end_distributed()
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    end_distributed()
    return {"rounds": rounds, "right": all(sums)}


def _sums_over(grid: Any, tp: int, pp: int) -> list[bool]:
    """Whether a sum of ones over each group equals the size that the group should have."""
    right = []
    sizes = (
        (mpu.get_tensor_model_parallel_group(), tp),
        (mpu.get_data_parallel_group(), 2 // tp // pp),
        (grid.replica_group, tp * pp),
    )
    for group, size in sizes:
        assert group.size() == size, (tp, pp, size)
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        right.append(one.item() == size)
    return right


def late_rank(hf: str, folder: str) -> list[bool]:
    """Whether rank 1, which is late for each of three layouts, was present when this rank's
    layout was ready."""
    init_distributed(get_platform("cpu"))
    layout = make_layout(read_spec(hf), 2, 1, 1, None)
    seen = []
    for number in range(3):
        mark = Path(folder) / f"late_{number}"
        if os.environ["RANK"] == "1":
            time.sleep(1)
            mark.touch()
        make_grid(layout)
        seen.append(mark.exists())
    end_distributed()
    return seen


def gloo_options(hf: str) -> dict[str, Any]:
    """Threads, devices and timeouts of groups made by torch and by core, and a sum over the last of them."""
    init_distributed(get_platform("cpu"))
    make_grid(make_layout(read_spec(hf), 1, 1, 1, None))
    whole = mpu.get_data_parallel_group(with_context_parallel=True)
    groups = [dist.group.WORLD, mpu.get_data_parallel_group(), whole, dist.new_group([0, 1])]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    one = torch.ones(1)
    dist.all_reduce(one, group=groups[-1])

    result = {
        "threads": [each._threads for each in options],
        "devices": [len(each._devices) for each in options],
        "timeouts": [each._timeout.total_seconds() for each in options],
        "sum": one.item(),
    }
    end_distributed()
    return result


def join() -> None:
    """Joins a process group."""
    init_distributed(get_platform("cpu"))
    end_distributed()


def gloo_threads_at_the_end(hf: str) -> list[int]:
    """Gloo threads before and after the end of the groups, some of which a reference cycle holds."""
    init_distributed(get_platform("cpu"))
    layout = make_layout(read_spec(hf), 1, 2, 1, None)
    for _ in range(2):
        grid = make_grid(layout)
    before = _gloo_threads()
    held: list[Any] = [grid]
    held.append(held)  # a cycle, as a wrapped model has one
    del grid, held
    end_distributed()
    return [before, _gloo_threads()]


def _gloo_threads() -> int:
    names = [
        Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")
    ]
    return sum("gloo" in name for name in names)
