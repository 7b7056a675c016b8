"""The closed form beside every measured run of the log (``measured_runs.json``).

Peaks of a tower on every rank with more than four rows a step were measured before their features moved to
host memory, and are left out.
"""

import itertools
import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig
from megatron_vl.estimate.gpus import find_gpu
from megatron_vl.estimate.memory import peak_stage_gib, stage_memories
from megatron_vl.estimate.split import run_layout
from megatron_vl.estimate.step import predict_layout
from megatron_vl.spec.families import read_spec, run_spec
from tests.support.planned import config_of

FOLDER = Path(__file__).parent
FULLEST_PATCHES, FULLEST_LOSS = 1.05, 1.2
"""Patches and loss tokens of the fullest row, over those of the mean row."""
TIME_BOUND, MEMORY_BOUND = 0.12, 0.04
UNSTEADY = {"30B-A3B, EP2, DP4, offload 0.5", "7B, 3 + 6 layers, DP2, H100"}
"""Runs whose timed steps differed by 15 % and more (benchmarks/log/speed.md)."""


@dataclass(frozen=True)
class MeasuredRun:
    facts: dict[str, Any]
    config: TrainConfig
    estimated_ms: float
    estimated_gib: float


@cache
def measured_runs() -> list[MeasuredRun]:
    return [_estimate(facts) for facts in json.loads((FOLDER / "measured_runs.json").read_text())]


def _estimate(facts: dict[str, Any]) -> MeasuredRun:
    spec = read_spec(FOLDER.parent / "hf_configs" / f"{facts['model']}.json")
    config = config_of(f"{facts['options']} --data.path synthetic:{facts['rows']}")
    layers = {f"num_{name}": facts.get(name) for name in ("language_layers", "vision_layers")}
    spec = run_spec(config, spec.replace_layers(**layers))
    layout = run_layout(config, spec, facts["gpus"])
    run = predict_layout(config, spec, facts["gpus"], layout, find_gpu(facts["gpu"]))
    fullest_row = run.rows._replace(
        patches=FULLEST_PATCHES * run.rows.patches, loss_tokens=FULLEST_LOSS * run.rows.loss_tokens
    )
    gib = peak_stage_gib(stage_memories(config, spec, layout, run.dp, fullest_row))
    return MeasuredRun(facts, config, 1e3 * run.step_seconds, gib)


def test_measured_runs_are_named_once_and_at_most_eight_are_fitted() -> None:
    runs = measured_runs()
    assert len({run.facts["name"] for run in runs}) == len(runs) > 100
    assert 4 <= sum(bool(run.facts.get("fit")) for run in runs) <= 8


def test_estimates_are_as_near_as_the_page_says() -> None:
    """docs/how-layouts-work.md; a run's error is that of its estimate over what was measured."""
    times = [abs(run.estimated_ms / run.facts["ms"] - 1) for run in measured_runs() if run.facts["ms"]]
    sizes = [abs(run.estimated_gib / run.facts["gib"] - 1) for run in measured_runs() if run.facts["gib"]]
    near_times = [error for error in times if error <= TIME_BOUND]
    near_sizes = [error for error in sizes if error <= MEMORY_BOUND]
    assert (len(near_times), len(times)) == (108, 115) and statistics.mean(near_times) < 0.06
    assert (len(near_sizes), len(sizes)) == (62, 76) and statistics.mean(near_sizes) < 0.02
    assert max(times) < 0.4 and max(sizes) < 0.2


def comparable(run: MeasuredRun) -> tuple:
    """Runs of one program, model, machine and work, which differ in layout, recompute or offload."""
    facts, config = run.facts, run.config
    cut = facts.get("language_layers"), facts.get("vision_layers")
    machine = facts["gpu"], facts["gpus"], facts["log"]
    work = facts["rows"], config.data.seq_len, config.global_batch_size, config.lora.rank
    return facts["model"], cut, machine, work


def test_faster_of_two_measured_layouts_is_predicted_faster() -> None:
    """Where they differ by more than 10 %."""
    compared, wrong = 0, []
    timed = [run for run in measured_runs() if run.facts["ms"] and run.facts["name"] not in UNSTEADY]
    for one, other in itertools.combinations(timed, 2):
        measured_ratio = one.facts["ms"] / other.facts["ms"]
        if comparable(one) != comparable(other) or 1 / 1.1 <= measured_ratio <= 1.1:
            continue
        compared += 1
        if (one.estimated_ms < other.estimated_ms) != (measured_ratio < 1):
            wrong.append((one.facts["name"], other.facts["name"]))
    assert compared > 25 and wrong == []
