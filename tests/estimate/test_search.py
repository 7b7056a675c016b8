"""The search finds what was measured to be best, and says why others lose."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from megatron_vl.planning.calibration import find_calibration
from megatron_vl.planning.layout_search import (
    SearchRequest,
    SearchResult,
    changed_options_text,
    explain_slowdown,
    search_layouts,
)
from megatron_vl.planning.memory import RESERVE_GIB
from megatron_vl.planning.memory_check import check_host_memory
from megatron_vl.planning.row_statistics import make_assumed_rows
from megatron_vl.planning.run_layout import with_split

from megatron_vl.config import RunConfigError, parse_config, validate_config
from megatron_vl.spec.families import read_spec
from tests.support.planned import predict_run

CONFIGS = Path(__file__).parents[1] / "hf_configs"


def find(
    size: str,
    world: int,
    batch: int,
    *options: str,
    seq_len: int = 8192,
    gpu: str = "H200",
    host_gib: float = math.inf,
    result_count: int = 5,
) -> SearchResult:
    words = ["--data.seq_len", str(seq_len), "--global_batch_size", str(batch), "--checkpoint.dir", "runs/x"]
    config = parse_config([*words, *options])
    spec = read_spec(CONFIGS / f"{size}-Instruct.json")
    return search_layouts(
        SearchRequest(
            config,
            spec,
            world,
            find_calibration(gpu),
            make_assumed_rows(spec, seq_len),
            result_count=result_count,
            host_gib=host_gib,
        )
    )


def test_the_7b_on_eight_gpus_is_data_parallel() -> None:
    """The fastest measured layout (docs/pipelines.md), and its recompute: 8 GPUs have no room for none,
    unless optimizer state is in host memory."""
    found = find("Qwen2.5-VL-7B", 8, 64)
    best = found.fitting_layouts[0]
    assert (best.layout.tp, best.layout.pp, best.data_parallel_size) == (1, 1, 8)
    resident = next(
        found_run for found_run in found.fitting_layouts if not found_run.config.optimizer.offload_fraction
    )
    assert resident.layout == best.layout
    assert resident.config.recompute.language_modules == ["activation"]
    assert resident.config.recompute.vision == "activation"
    assert all(explain_slowdown(best, slower).startswith("+") for slower in found.fitting_layouts[1:])
    assert "dp8" in found.rejected_layouts[0].text and "GiB" in found.rejected_layouts[0].why


def test_the_fastest_layout_does_not_depend_on_how_many_are_returned() -> None:
    """A search that tries 40 layouts finds one of 12.3 s a step here, where 11.2 s are possible."""
    options = ("--optimizer.moments_dtype", "bfloat16")
    steps = [
        find("Qwen3-VL-30B-A3B", 8, 32, *options, seq_len=32768, result_count=count)
        .fitting_layouts[0]
        .step_seconds
        for count in (1, 5)
    ]
    assert steps[0] == steps[1]


def test_all_that_is_found_fits_is_valid_and_is_what_the_run_would_do() -> None:
    found = find("Qwen2.5-VL-7B", 4, 16, gpu="H100")
    assert found.fitting_layouts
    steps = [prediction.step_seconds for prediction in found.fitting_layouts]
    assert steps == sorted(steps)
    for prediction in found.fitting_layouts:
        run = with_split(prediction.config, prediction.layout)
        assert validate_config(run, 4) == prediction.data_parallel_size
        again = predict_run(run, prediction.spec, 4, calibration=find_calibration("H100"))
        assert again.step_seconds == pytest.approx(prediction.step_seconds)
        assert again.peak_gib + RESERVE_GIB <= 79.1
        given = parse_config(
            ["--data.seq_len", "8192", "--global_batch_size", "16", "--checkpoint.dir", "runs/x"]
            + changed_options_text(prediction.config.__class__(), prediction).split()
        )
        assert given.parallel == run.parallel and given.recompute == run.recompute


@pytest.mark.slow
def test_the_72b_needs_more_than_data_parallelism() -> None:
    best = find("Qwen2.5-VL-72B", 32, 64).fitting_layouts[0]
    assert best.layout.tp * best.layout.pp >= 4 and best.mfu > 0.3


@pytest.mark.full
def test_4096_gpus_and_the_largest_model_take_seconds() -> None:
    began = time.process_time()
    found = find("Qwen3-VL-235B-A22B", 4096, 4096)
    assert time.process_time() - began < 20
    assert found.combination_count > 1000
    assert found.fitting_layouts[0].layout.ep > 1 and found.fitting_layouts[0].world_size == 4096


@pytest.mark.parametrize(
    ("size", "world", "batch"),
    [
        ("Qwen2.5-VL-7B", 2, 8),
        pytest.param("Qwen2.5-VL-7B", 8, 64, marks=pytest.mark.full),
        pytest.param("Qwen2.5-VL-72B", 32, 64, marks=pytest.mark.full),
        pytest.param("Qwen3-VL-30B-A3B", 16, 32, marks=pytest.mark.full),
    ],
)
def test_what_is_left_out_changes_nothing(size: str, world: int, batch: int, monkeypatch) -> None:
    """With a bound of 0 for all sizes, all combinations are estimated before the first is taken."""
    few = find(size, world, batch)
    counted = []

    def no_bound(wanted, config) -> float:
        counted.append(config)
        return 0.0

    monkeypatch.setattr("megatron_vl.planning.layout_search.step_lower_bound", no_bound)
    every = find(size, world, batch)
    assert counted and every == few


def test_offload_is_found_where_it_is_faster_and_the_host_has_the_memory() -> None:
    """What is found starts: the check of a start counts host memory by itself."""
    for host_gib in (math.inf, 4.4, 2.5, 0.1):
        found = find("Qwen2.5-VL-7B", 16, 16, host_gib=host_gib)
        seconds_by_sizes: dict[tuple, dict[float, float]] = {}
        for prediction in found.fitting_layouts:
            config, layout = prediction.config, prediction.layout
            check_host_memory(config, prediction.spec, layout, prediction.data_parallel_size, 139.8, host_gib)
            sizes = (layout.tp, layout.pp, layout.vpp, layout.decoupled)
            share = float(config.optimizer.offload_fraction)
            seconds_by_sizes.setdefault(sizes, {})[share] = prediction.step_seconds
        for by_share in seconds_by_sizes.values():
            seconds = [by_share[share] for share in sorted(by_share)]
            assert seconds == sorted(seconds, reverse=True), "a larger share is faster"
            assert len({round(step, 4) for step in seconds}) == len(seconds)

        best_share = found.fitting_layouts[0].config.optimizer.offload_fraction
        assert best_share == (1.0 if host_gib == math.inf else 0.0)
        reasons = [rejected.why for rejected in found.rejected_layouts]
        assert ("5 GiB of host memory for each GPU" in reasons) == (host_gib < math.inf)


def test_impossible_wishes_are_refused() -> None:
    with pytest.raises(RunConfigError, match="no layout of 29 GPUs is possible with global_batch_size 3"):
        find("Qwen2.5-VL-7B", 29, 3)
    assert find("Qwen2.5-VL-72B", 2, 8).fitting_layouts == ()
