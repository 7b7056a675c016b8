"""The measured runs of the log beside the estimate: ``python -m tests.estimate.measured`` prints errors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.estimate.gpus import find_gpu
from megatron_vl.estimate.memory import peak_stage_gib, stage_memories
from megatron_vl.estimate.split import run_layout
from megatron_vl.estimate.step import predict_layout
from megatron_vl.spec.families import read_spec

FOLDER = Path(__file__).parent
FULLEST_PATCHES, FULLEST_LOSS = 1.05, 1.2
"""Patches and loss tokens of the fullest row, over those of the mean row."""


@dataclass(frozen=True)
class MeasuredRun:
    """A run of the log with its estimate; None where nothing was measured."""

    facts: dict[str, Any]
    config: TrainConfig
    estimated_ms: float
    estimated_gib: float

    @property
    def name(self) -> str:
        return f"{self.facts['name']} ({self.facts['log']})"

    @property
    def time_error(self) -> float | None:
        return self.estimated_ms / self.facts["ms"] - 1 if self.facts["ms"] else None

    @property
    def memory_error(self) -> float | None:
        return self.estimated_gib / self.facts["gib"] - 1 if self.facts["gib"] else None


@cache
def measured_runs() -> list[MeasuredRun]:
    return [_estimate(facts) for facts in json.loads((FOLDER / "measured_runs.json").read_text())]


def _estimate(facts: dict[str, Any]) -> MeasuredRun:
    spec = read_spec(FOLDER.parent / "hf_configs" / f"{facts['model']}.json")
    cut = {f"num_{name}": facts[name] for name in ("language_layers", "vision_layers") if name in facts}
    spec = spec.replace_layers(**cut) if cut else spec
    config = parse_config([*facts["options"].split(), "--data.path", f"synthetic:{facts['rows']}"])
    layout = run_layout(config, spec, facts["gpus"])
    run = predict_layout(config, spec, facts["gpus"], layout, find_gpu(facts["gpu"]))
    fullest_row = run.rows._replace(
        patches=FULLEST_PATCHES * run.rows.patches, loss_tokens=FULLEST_LOSS * run.rows.loss_tokens
    )
    gib = peak_stage_gib(stage_memories(config, spec, layout, run.data_parallel_size, fullest_row))
    return MeasuredRun(facts, config, 1e3 * run.step_seconds, gib)


def print_errors() -> None:
    """One line a run: fitted or not, the errors of time and memory, the name."""
    for run in measured_runs():
        errors = [
            f"{error:+7.1%}" if error is not None else "" for error in (run.time_error, run.memory_error)
        ]
        print(f"{'fit' if run.facts.get('fit') else '':3} {errors[0]:>8} {errors[1]:>8}  {run.name}")


if __name__ == "__main__":
    print_errors()
