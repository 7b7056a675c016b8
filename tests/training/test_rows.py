"""A row arrives as it was on its owner; the images of a step are spread evenly, at frames."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vl.estimate.flops import row_sizes, tower_forward_flops
from megatron_vl.models.frame_shares import frame_flops, make_tower_frames, split_by_cost
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import read_spec
from megatron_vl.spec.tensors import UNSHARDED
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, ReplicaLoaderError
from tests.support.ranks import in_ranks
from tests.tiny import tiny_checkpoint


@in_ranks()
def test_loader_that_ends_or_fails_is_named_by_its_replica() -> None:
    def broken() -> Iterator[Any]:
        raise OSError("train-000007.tar: Input/output error")
        yield

    grid: Any = SimpleNamespace(owns_loader=True, dp=1, dp_rank=3, replica_ranks=1, cp=1, sharding=UNSHARDED)
    grid.from_loader_owner = lambda value: value
    spec = read_spec("tests/hf_configs/Qwen2.5-VL-7B-Instruct.json")
    prefix = "data-parallel rank 3: the loader failed: "
    for loader, message in (
        (iter(()), "the data set ended; training needs a repeating loader"),
        (broken(), "OSError: train-000007.tar: Input/output error"),
    ):
        with pytest.raises(ReplicaLoaderError, match=f"^{prefix}{message}$"):
            BatchBroadcast(grid, get_platform("cpu"), loader, 2, spec=spec).next_batch()


def test_split_by_cost_worked_out_by_hand() -> None:
    assert split_by_cost(np.array([1, 1, 1, 1]), 2).tolist() == [0, 2, 4]
    assert split_by_cost(np.array([5, 1, 1, 1]), 2).tolist() == [0, 1, 4]
    assert split_by_cost(np.array([1, 1, 1, 5]), 2).tolist() == [0, 3, 4]
    assert split_by_cost(np.array([7]), 3).tolist() in ([0, 0, 0, 1], [0, 0, 1, 1], [0, 1, 1, 1])
    assert split_by_cost(np.array([], dtype=np.int64), 3).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("seed", range(20))
def test_split_by_cost_exceeds_the_mean_by_no_whole_frame(seed: int) -> None:
    rng = np.random.default_rng(seed)
    costs, parts = rng.uniform(0, 10, rng.integers(1, 60)), int(rng.integers(1, 9))
    bounds = split_by_cost(costs, parts)
    assert bounds[0] == 0 and bounds[-1] == len(costs) and (np.diff(bounds) >= 0).all()
    runs = [costs[a:b].sum() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    assert max(runs) <= costs.sum() / parts + costs.max() + 1e-9


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_costs_of_frames_are_the_flops_of_the_model(family: str) -> None:
    v = read_spec(tiny_checkpoint(family, dtype=torch.float32)).vision
    rows = [([64, 16], [16, 16, 16, 16, 16]), ([], []), ([32], [16, 16])]
    costs = frame_flops(v, make_tower_frames(rows))
    frames = [([64], [16] * 4), ([16], [16]), ([32], [16] * 2)]
    want = [sum(tower_forward_flops(v, row_sizes([], *frame, 0))) for frame in frames]
    assert costs == pytest.approx(want)
