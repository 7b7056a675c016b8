"""Layouts that follow each other in the same processes share their groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.process import run_ranks, run_single

HEAD = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
from megatron_vl.platform import get_platform
platform = get_platform("cpu")
from megatron.core import parallel_state as mpu
from megatron_vl.models.families import read_spec
from megatron_vl.parallel.grid import end_distributed, init_distributed, make_grid
from megatron_vl.parallel.layout import make_layout
from tests.tiny import tiny_checkpoint

spec = read_spec(tiny_checkpoint("qwen2_5_vl"))
"""

LAYOUTS = """
rounds, sums = [], []
for world in range(2):
    init_distributed(platform)
    for _ in range(3):
        for tp, pp in ((2, 1), (1, 2), (1, 1), (1, 1)):
            grid = make_grid(make_layout(spec, tp, pp, 1, None), owners=True)
            for group, size in ((grid.tp_group, tp), (grid.dp_group, 2 // tp // pp), (grid.replica_group, tp * pp)):
                assert group.size() == size, (tp, pp, size)
                one = torch.ones(1)
                dist.all_reduce(one, group=group)
                sums.append(one.item() == size)
            assert (grid.owners_gloo is not None) == (tp * pp == 1 and grid.owns_loader)
            assert mpu.get_pipeline_model_parallel_world_size() == pp
        dist.barrier()
        rounds.append([len(dist.distributed_c10d._world.pg_map), len(os.listdir("/proc/self/task"))])
    if world == 0:
        end_distributed()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
RESULT = {"rounds": rounds, "right": all(sums)}
"""


def test_layouts_share_groups() -> None:
    """Behind the first round no group and no thread is added; another default group begins anew."""
    out = run_ranks(2, HEAD + LAYOUTS)
    assert out["right"]
    first, second = out["rounds"][:3], out["rounds"][3:]
    assert first[0] == first[1] == first[2]
    assert [groups for groups, _ in second] == [first[0][0]] * 3


TOGETHER = """
init_distributed(platform)
layout = make_layout(spec, 2, 1, 1, None)
seen = []
for number in range(3):
    mark = Path(FOLDER) / f"late_{number}"
    if os.environ["RANK"] == "1":
        time.sleep(1)
        mark.touch()
    make_grid(layout)
    seen.append(mark.exists())
RESULT = seen
"""


def test_ranks_begin_a_layout_together(tmp_path: Path) -> None:
    """Nobody uses a kept group while another rank may still be in the layout before."""
    assert all(run_ranks(2, HEAD + TOGETHER, FOLDER=str(tmp_path)))


WORKERS = """
init_distributed(platform)
grid = make_grid(make_layout(spec, 1, 1, 1, None))
groups = [dist.group.WORLD, grid.dp_group, mpu.get_data_parallel_group(with_context_parallel=True), dist.new_group([0, 1])]
options = [group._get_backend(torch.device("cpu")).options for group in groups]
one = torch.ones(1)
dist.all_reduce(one, group=groups[-1])
RESULT = {
    "threads": [each._threads for each in options],
    "devices": [len(each._devices) for each in options],
    "timeouts": [each._timeout.total_seconds() for each in options],
    "sum": one.item(),
}
"""


@pytest.mark.parametrize("interfaces", ["", "lo"])
def test_gloo_groups_have_one_worker(interfaces: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two, as torch makes them, operations that end together break the heap (core_fixes/gloo_threads.py)."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    out = run_ranks(2, HEAD + WORKERS)
    assert out == {"threads": [1] * 4, "devices": [1] * 4, "timeouts": [1800.0] * 4, "sum": 2.0}


def test_an_unknown_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """GLOO_SOCKET_IFNAME counts: torch's own constructor refuses a name that does not exist too."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    with pytest.raises(AssertionError, match="nowhere0"):
        run_single(HEAD + "init_distributed(platform)")


ENDED = """
def gloo_threads():
    names = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    return sum("gloo" in name for name in names)

init_distributed(platform)
layout = make_layout(spec, 1, 2, 1, None)
for _ in range(2):
    grid = make_grid(layout)
before = gloo_threads()
held = [grid]
held.append(held)  # a cycle, as a wrapped model has one
del grid, held
end_distributed()
RESULT = [before, gloo_threads()]
"""


def test_nothing_holds_a_group_after_the_end() -> None:
    """A gloo group that is held while Python exits can abort the process; its threads live as long as it does."""
    before, after = run_ranks(2, HEAD + ENDED)
    assert before > 0
    assert after == 0
