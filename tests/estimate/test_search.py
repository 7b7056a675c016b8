"""The search finds what was measured to be best, and everything that it finds is a run that would start."""

import math
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_vl.config import RunConfigError, parse_config, validate_config
from megatron_vl.estimate.gpus import find_gpu
from megatron_vl.estimate.memory_check import check_host_memory
from megatron_vl.estimate.search import SearchRequest, search_layouts, smallest_layout
from megatron_vl.estimate.split import with_split
from megatron_vl.estimate.step import RunPrediction
from megatron_vl.spec.families import read_spec
from tests.support.planned import predict_run
from toolkit.plan.print_plan import run_options

CONFIGS = Path(__file__).parents[1] / "hf_configs"


ROWS = ["--data.seq_len", "8192", "--checkpoint.dir", "runs/x"]


def request_of(
    size: str, world: int, batch: int, *options: str, gpu: str = "H200", host_gib=math.inf, count: int = 5
) -> SearchRequest:
    spec = read_spec(CONFIGS / f"{size}-Instruct.json")
    config = parse_config([*ROWS, "--global_batch_size", str(batch), *options])
    return SearchRequest(config, spec, world, find_gpu(gpu), host_gib, count)


def find(*request: Any, **other: Any) -> list[RunPrediction]:
    return search_layouts(request_of(*request, **other))


def test_search_finds_data_parallelism_for_the_7b_on_eight_gpus() -> None:
    """The fastest measured layout (docs/pipelines.md), and its recompute: 8 GPUs have no room for none."""
    best = find("Qwen2.5-VL-7B", 8, 64)[0]
    assert (best.layout.tp, best.layout.pp, best.dp) == (1, 1, 8)
    assert best.config.recompute.language_modules == ["activation"]
    assert best.config.recompute.vision == "activation" and not best.config.optimizer.offload_fraction


def test_search_finds_layouts_that_fit_and_that_the_run_accepts() -> None:
    found = find("Qwen2.5-VL-7B", 4, 16, gpu="H100")
    steps = [prediction.step_seconds for prediction in found]
    assert found and steps == sorted(steps)
    for prediction in found:
        run = with_split(prediction.config, prediction.layout)
        assert validate_config(run, 4) == prediction.dp
        again = predict_run(run, prediction.spec, 4, find_gpu("H100"))
        assert again.step_seconds == pytest.approx(prediction.step_seconds)
        assert again.peak_gib + 8 <= 79.1
        given = parse_config([*ROWS, *run_options(prediction, parse_config(ROWS)).split()])
        assert given.parallel == run.parallel and given.recompute == run.recompute
        assert given.optimizer == run.optimizer


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 8, 64, 1024, 4096])
def test_search_ends_in_time_for_every_number_of_gpus(world: int) -> None:
    """2 s for the command on an idle machine; processor time of one that is twice as slow."""
    began = time.process_time()
    found = find("Qwen3-VL-235B-A22B", world, 8 * world)
    assert time.process_time() - began < 4
    assert all(prediction.layout.replica_ranks * prediction.dp == world for prediction in found)
    assert bool(found) == (world >= 64)


@pytest.mark.parametrize(
    ("size", "world", "batch"),
    [("Qwen2.5-VL-7B", 2, 8), pytest.param("Qwen3-VL-30B-A3B", 16, 32, marks=pytest.mark.full)],
)
def test_search_leaves_out_only_what_changes_nothing(size: str, world: int, batch: int) -> None:
    """A search that returns all layouts ends at none."""
    few, every = find(size, world, batch), find(size, world, batch, count=10**6)
    assert every[: len(few)] == few
    assert len(every) > len(few)


def test_offload_is_found_where_the_host_has_the_memory() -> None:
    """The check of a start counts host memory by itself."""
    shares = []
    for host_gib in (math.inf, 40.0, 0.1):
        found = find("Qwen2.5-VL-7B", 1, 8, gpu="H200", host_gib=host_gib)
        for prediction in found:
            spec, config = prediction.spec, prediction.config
            check_host_memory(config, spec, prediction.layout, prediction.dp, 139.8, host_gib)
        shares.append([prediction.config.optimizer.offload_fraction for prediction in found])
    assert shares == [[0.5], [0.5], []]


@pytest.mark.parametrize(
    ("size", "gpu", "options", "kept"),
    [
        ("Qwen3-VL-30B-A3B", "H200", (), {"attention", "experts"}),
        ("Qwen3-VL-30B-A3B", "H200", ("--fp8.recipe", "blockwise"), set()),
        ("Qwen3-VL-30B-A3B", "A100", (), set()),
        ("Qwen2.5-VL-7B", "H200", (), {"attention"}),
    ],
)
def test_search_keeps_only_outputs_that_a_run_can_keep(size, gpu, options, kept) -> None:
    request = request_of(size, 8, 32, *options, gpu=gpu)
    recomputes = request.recomputes[0]
    assert {kind for recompute in recomputes for kind in recompute.keep} == kept


def test_search_rejects_impossible_layouts_and_finds_none_if_the_smallest_does_not_fit() -> None:
    request = request_of("Qwen2.5-VL-72B", 2, 8)
    assert search_layouts(request) == [] and smallest_layout(request).peak_gib > 131.8
    with pytest.raises(RunConfigError, match="no layout of 29 GPUs is possible: global_batch_size 3 must"):
        find("Qwen2.5-VL-7B", 29, 3)
    with pytest.raises(RunConfigError, match="no layout of 8 GPUs is possible: fp8.recipe delayed needs"):
        find("Qwen2.5-VL-7B", 8, 8, "--fp8.recipe", "delayed", "--dtype", "float32")
