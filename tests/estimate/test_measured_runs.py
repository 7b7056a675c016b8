"""The closed form beside every measured run of the log (``measured_runs.json``)."""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys

from tests.estimate.measured import FOLDER, MeasuredRun, measured_runs

TIME_BOUND, MEMORY_BOUND = 0.12, 0.04
SLOWER_THAN_ESTIMATED = {
    "experts 512 wide, of which each gets few rows": {
        "35B-A3B, PP4 x VPP3, again",
        "35B-A3B, PP4 x VPP3",
        "35B-A3B, EP4, DP4",
        "35B-A3B, 4 layers, text, full recompute",
        "35B-A3B, 4 + 3 layers, one row of 131,072",
        "35B-A3B, 4 + 3 layers",
        "35B-A3B, 4 + 3 layers, bf16 moments",
        "35B-A3B, 4 + 3 layers, bf16 moments, second kernel",
    },
    "the processor launches the kernels of experts for rows of 8,192": {
        "30B-A3B, 6 layers, rows of 8,192",
        "35B-A3B, 8 layers, EP2",
        "35B-A3B, 8 layers, EP2, text",
    },
    "adapters are narrow products, and frozen matrices leave the rest of a layer as long": {
        "9B, 12 layers, LoRA, H100",
        "9B, LoRA, 2 rows of 4,096, H100",
        "9B, 16 + 9 layers, LoRA, one row of 131,072",
        "9B, 16 + 9 layers, LoRA, inputs in host memory",
        "35B-A3B, LoRA, EP2, H100",
    },
    "linear attention of short rows, and before the kernels of 26 November": {
        "9B, 4 + 3 layers, CP2, rows of 8,192, H100",
        "9B, 12 layers, activations recomputed",
        "9B, 12 layers, beside the peer",
    },
    "one of its timed steps was slow": {"7B, 3 + 6 layers, DP2, H100"},
}
FASTER_THAN_ESTIMATED = {"the rows of a long pipeline": {"30B-A3B, PP4 x VPP4, 16 rows"}}
"""Why a step is more than :data:`TIME_BOUND` off, and of which runs."""
OTHER_MEMORY = {
    "with experts, the estimate is too high": {
        "30B-A3B, PP2 x VPP4, EP2, DP2",
        "30B-A3B, EP2, DP4, offload 0.5",
        "35B-A3B, EP4, DP4",
    },
    "copies of the optimizer state waited on the GPU": {
        "7B, 10 layers, DP2",
        "7B, 10 layers, DP2, second machine",
        "7B, 10 layers, DP2, offload 0.5",
        "7B, 10 layers, DP2, offload 1",
    },
    "small pieces of memory weigh more in small runs": {
        "9B, 4 + 3 layers, CP2, rows of 8,192, H100",
        "9B, 4 + 3 layers, CP2, rows of 16,384, H100",
        "7B, 6 + 3 layers, TP2, H100",
        "7B, 3 + 6 layers, TP2, H100",
        "7B, 3 + 6 layers, DP2, H100",
    },
    "not known": {
        "9B, 16 + 9 layers, LoRA, one row of 131,072",
        "9B, 16 + 9 layers, LoRA, inputs in host memory",
    },
}
UNSTEADY = {"30B-A3B, EP2, DP4, offload 0.5", "7B, 3 + 6 layers, DP2, H100"}
"""Runs whose timed steps differed by 15 % and more (benchmarks/log/speed.md)."""


def names_of(reasons: dict[str, set[str]]) -> set[str]:
    return set().union(*reasons.values())


def test_every_run_is_named_once_and_at_most_eight_are_fitted() -> None:
    runs = measured_runs()
    assert len({run.facts["name"] for run in runs}) == len(runs) > 100
    fitted = [run.name for run in runs if run.facts.get("fit")]
    assert 4 <= len(fitted) <= 8


def test_steps_are_within_12_percent_of_what_was_measured() -> None:
    errors = {run.facts["name"]: run.time_error for run in measured_runs() if run.time_error is not None}
    assert {name for name, error in errors.items() if error < -TIME_BOUND} == names_of(SLOWER_THAN_ESTIMATED)
    assert {name for name, error in errors.items() if error > TIME_BOUND} == names_of(FASTER_THAN_ESTIMATED)
    within = [abs(error) for error in errors.values() if abs(error) <= TIME_BOUND]
    assert statistics.mean(within) < 0.06


def test_memory_is_within_4_percent_of_what_was_measured() -> None:
    errors = {run.facts["name"]: run.memory_error for run in measured_runs() if run.memory_error is not None}
    off = {name for name, error in errors.items() if abs(error) > MEMORY_BOUND}
    assert off == names_of(OTHER_MEMORY)
    assert statistics.mean(abs(errors[name]) for name in errors.keys() - off) < 0.02


def comparable(run: MeasuredRun) -> tuple:
    """Runs of one program, model, machine and work, which differ in layout, recompute or offload."""
    facts, config = run.facts, run.config
    cut = facts.get("language_layers"), facts.get("vision_layers")
    machine = facts["gpu"], facts["gpus"], facts["log"]
    work = facts["rows"], config.data.seq_len, config.global_batch_size, config.lora.rank
    return facts["model"], cut, machine, work


def test_the_faster_of_two_measured_layouts_is_predicted_faster() -> None:
    """Where they differ by more than 10 %."""
    compared, wrong = 0, []
    timed = [
        run for run in measured_runs() if run.time_error is not None and run.facts["name"] not in UNSTEADY
    ]
    for one, other in itertools.combinations(timed, 2):
        measured_ratio = one.facts["ms"] / other.facts["ms"]
        if comparable(one) != comparable(other) or 1 / 1.1 <= measured_ratio <= 1.1:
            continue
        compared += 1
        if (one.estimated_ms < other.estimated_ms) != (measured_ratio < 1):
            wrong.append((one.name, other.name))
    assert compared > 25 and wrong == []


def test_the_errors_can_be_printed() -> None:
    command = [sys.executable, "-m", "tests.estimate.measured"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1], check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(measured_runs()) and sum(line.startswith("fit") for line in lines) <= 8
