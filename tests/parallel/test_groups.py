"""Successive layouts in the same processes share their groups; tests how gloo groups are made and ended."""

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from megatron_vl.parallel.process_grid import end_distributed, init_distributed, make_grid
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import make_layout
from tests.support.ranks import call, in_ranks

SPEC = read_spec("tests/hf_configs/Qwen2.5-VL-7B-Instruct.json")


def join() -> None:
    init_distributed(get_platform("cpu"))


@in_ranks(2)
def test_layouts_share_groups() -> None:
    """After the first round no group and no thread is added; another default group starts from nothing."""
    rounds = []
    for world in range(2):
        join()
        for _ in range(3):
            for tp, pp in ((2, 1), (1, 2), (1, 1), (1, 1)):
                check_sums(SPEC, tp, pp)
            dist.barrier()
            rounds.append((len(dist.distributed_c10d._world.pg_map), psutil.Process().num_threads()))
        if world == 0:
            end_distributed()
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    assert rounds[0] == rounds[1] == rounds[2]
    assert {groups for groups, _ in rounds} == {rounds[0][0]}
    end_distributed()


def check_sums(spec: ModelSpec, tp: int, pp: int) -> None:
    """Asserts that a sum of ones over each group equals the size that the group should have."""
    grid = make_grid(make_layout(spec, tp, pp, 1, None))
    assert mpu.get_pipeline_model_parallel_world_size() == pp
    for group, size in (
        (mpu.get_tensor_model_parallel_group(), tp),
        (mpu.get_data_parallel_group(), 2 // tp // pp),
        (grid.replica_group, tp * pp),
    ):
        one = torch.ones(1)
        dist.all_reduce(one, group=group)
        assert group.size() == size == one.item(), (tp, pp)


@in_ranks(2)
def test_ranks_begin_a_layout_together(tmp_path: Path) -> None:
    """No rank uses a kept group while another rank, here a late one, may still be in the previous layout."""
    join()
    for number in range(3):
        if dist.get_rank() == 1:
            time.sleep(1)
            (tmp_path / str(number)).touch()
        make_grid(make_layout(SPEC, 2, 1, 1, None))
        assert (tmp_path / str(number)).exists()
    end_distributed()


@pytest.mark.parametrize("interface", ["", "lo"])
@in_ranks(2)
def test_gloo_groups_have_one_worker(interface: str) -> None:
    """With two workers, torch's default, operations that end together corrupt the heap."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    join()
    make_grid(make_layout(SPEC, 1, 1, 1, None))
    whole = mpu.get_data_parallel_group(with_context_parallel=True)
    groups = [dist.group.WORLD, mpu.get_data_parallel_group(), whole, dist.new_group([0, 1])]
    for group in groups:
        options = group._get_backend(torch.device("cpu")).options
        facts = options._threads, len(options._devices), options._timeout.total_seconds()
        assert facts == (1, 1, 1800.0)
    check_sums(SPEC, 1, 1)
    end_distributed()


@pytest.mark.ranks
def test_unknown_interface_is_refused() -> None:
    """GLOO_SOCKET_IFNAME applies: torch's own constructor refuses a name that does not exist too."""
    with pytest.raises(AssertionError, match="nowhere0"):
        call(join, environment={"GLOO_SOCKET_IFNAME": "nowhere0"})


@in_ranks(2)
def test_groups_are_freed_after_the_end() -> None:
    """A gloo group held while Python exits can abort the process; its threads live as long as the group."""
    join()
    for _ in range(2):
        grid = make_grid(make_layout(SPEC, 1, 2, 1, None))
    assert gloo_threads() > 0
    held: list[Any] = [grid]
    held.append(held)  # a cycle, as a wrapped model has one
    del grid, held
    end_distributed()
    assert gloo_threads() == 0


def gloo_threads() -> int:
    tasks = Path("/proc/self/task").iterdir()
    return sum("gloo" in (task / "comm").read_text() for task in tasks)
