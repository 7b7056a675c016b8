"""Rows of a loader that ends or fails, images of a step that are spread evenly, and runs on random rows."""

import json
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_vl.config import DataConfig
from megatron_vl.data.state_json import LoaderStateError
from megatron_vl.data.synthetic import SyntheticRows
from megatron_vl.estimate.flops import row_sizes, tower_forward_flops
from megatron_vl.models.frame_shares import frame_flops, make_tower_frames, split_by_cost
from megatron_vl.platform import get_platform
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.tensors import UNSHARDED
from megatron_vl.training.rows.batch_broadcast import BatchBroadcast, ReplicaLoaderError
from tests.support.ranks import in_ranks
from tests.support.tiny_run import metrics, trained
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


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_spec("tests/hf_configs/Qwen3-VL-2B-Instruct.json")


def rows_of(spec: ModelSpec, dp: int, rows_per_step: int, steps: int, state=None, **data) -> list:
    config = DataConfig(**{"path": "synthetic:images", "seq_len": 96} | data)
    loaders = [SyntheticRows(config, spec, rank, dp, rows_per_step) for rank in range(dp)]
    rows = []
    for loader in loaders if state else ():
        loader.load_state_dict(json.loads(json.dumps(state)))
    for loader in loaders * steps:
        rows += islice(loader, rows_per_step // dp)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    return [rows, states[0]]


def same(rows: list, others: list) -> bool:
    pairs = list(zip(rows, others, strict=True))
    assert all(row.sample_keys == other.sample_keys for row, other in pairs)
    return all(
        torch.equal(row.tokens, other.tokens) and torch.equal(row.vision.planes, other.vision.planes)
        for row, other in pairs
    )


def test_rows_do_not_depend_on_the_layout(spec: ModelSpec) -> None:
    rows, _ = rows_of(spec, 1, 12, 7)  # 84 rows, more than are different
    assert same(rows, rows_of(spec, 4, 12, 7)[0])
    assert same(rows, rows_of(spec, 6, 42, 2)[0])
    assert torch.equal(rows[0].tokens, rows[64].tokens) and not torch.equal(rows[0].tokens, rows[1].tokens)
    assert not same(rows, rows_of(spec, 1, 12, 7, seed=2)[0])


def test_state_continues_on_other_ranks_and_with_other_steps(spec: ModelSpec) -> None:
    rows, _ = rows_of(spec, 1, 42, 2)
    first, state = rows_of(spec, 2, 6, 3)
    assert same(rows, first + rows_of(spec, 3, 33, 2, state)[0])


def test_state_of_other_rows_is_refused(spec: ModelSpec) -> None:
    _, state = rows_of(spec, 1, 2, 1)
    for other in ({"path": "synthetic:text"}, {"seed": 5}):
        with pytest.raises(LoaderStateError, match="set data.path and data.seed back"):
            rows_of(spec, 1, 2, 1, state, **other)


@pytest.mark.parametrize("seq_len", [4, 5, 31, 2_500])
def test_rows_of_any_length(spec: ModelSpec, seq_len: int) -> None:
    for path in ("synthetic:images", "synthetic:text"):
        [row], _ = rows_of(spec, 1, 1, 1, path=path, seq_len=seq_len)
        assert row.seq_len == seq_len and row.loss_mask.any() and bool(row.num_images) == ("images" in path)


@pytest.mark.ranks
def test_run_on_random_rows_resumes_bitwise(tiny_checkpoint, tmp_path: Path) -> None:
    """On two stages. Only the config is read of the model's folder."""
    config = shutil.copy(tiny_checkpoint("qwen2_5_vl") / "config.json", tmp_path)
    prepared = {"hf": Path(config), "weights": "random", "data": "synthetic:images", "folder": tmp_path}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for run, *stop in ((whole,), (parts, "--stop_after", "2"), (parts,)):
        options = ("--parallel.pp", "2", "--log.samples", "true", *stop)
        said = trained(prepared, run, *options, ranks=2, steps=3)
        assert "64 different rows of random tokens" in said
    for name in ("step", "loss", "grad_norm", "samples", "images"):
        assert [line[name] for line in metrics(parts)] == [line[name] for line in metrics(whole)]
    assert len({line["loss"] for line in metrics(whole)}) == 3
    keys = metrics(parts, "samples.jsonl")
    assert keys == metrics(whole, "samples.jsonl")
    assert [row[0] for line in keys for row in line["rows"]] == [f"{number}/0" for number in range(12)]
    manifests = [run / "step_00000003" / "weights" / "manifest.json" for run in (whole, parts)]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
