"""Options of ``megatron-vl bench``, and the run that they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from megatron_vl.config import (
    RANDOM_WEIGHTS,
    DataConfig,
    LogConfig,
    TrainConfig,
    parse_config,
    validate_config,
)
from megatron_vl.data.source.location import check_data_path
from megatron_vl.errors import UsageError
from megatron_vl.estimate.split import run_layout
from megatron_vl.spec.families import ModelSpec, read_spec
from toolkit import options as command_line
from toolkit.options import CommandOptions, option
from toolkit.run_adapters import with_adapter_settings

WORKLOADS = ("images", "text", "data")


@dataclass(kw_only=True)
class BenchOptions(CommandOptions):
    """Time a real-size model with random weights: tokens/s, MFU, memory and the parts of a step.

    The rows are random (pictures or text, with a fixed seed) or come from a data set.
    """

    run_fields: ClassVar[bool] = True

    hf: str = option("", metavar="HF", shown_default="model.hf of the run", must_exist=True)
    """Hugging Face folder or config.json that gives the model's sizes."""
    gpus: int | None = option(None, metavar="N", minimum=1)
    """Start N processes, one per GPU."""
    processes: int | None = option(None, metavar="N", minimum=1)
    """Start N processes on CPU, for small models."""
    data: Path | None = option(None, metavar="DIR", must_exist=True)
    """Time the rows of this data set, read by the trainer's loader (data.path of a run)."""
    rows: str = option("", metavar="LIST", shown_default="data with a data set, else images,text")
    """Time these workloads, separated by commas: images and text are random rows, data reads the data set."""
    warm_up: int = option(2, metavar="N", minimum=1)
    """Run N untimed steps of each workload first."""
    timed: int = option(4, metavar="N", minimum=1)
    """Time N steps of each workload."""
    part_steps: int = option(2, metavar="N", minimum=0)
    """After the timed steps, time the parts of a step in N more steps; 0 skips this."""
    language_layers: int = option(0, metavar="N", minimum=0, shown_default="as in the config")
    """Use N decoder layers instead of the config's number."""
    vision_layers: int = option(0, metavar="N", minimum=0, shown_default="as in the config")
    """Use N vision layers instead of the config's number."""
    even_routing: bool = False
    """Choose experts at random and evenly, as a trained router does. A router with random weights strongly
    prefers a few experts."""
    out: str = option("", metavar="FILE")
    """Write the figures to this file as JSON."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class BenchRun:
    """One run of the trainer over all workloads, one after the other."""

    options: BenchOptions
    config: TrainConfig
    workloads: list[str]
    dataset: str
    """Path of the data set, if there is one."""

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's sizes, with the numbers of layers that the options give."""
        return _read_spec(self.options, self.config)

    def place_of(self, step: int) -> tuple[str, str, int]:
        """Where a step of the run stands: its workload, its phase, and its number in the phase from 0."""
        schedule = _schedule(self.options)
        workload, step_of_workload = divmod(step, len(schedule))
        return self.workloads[workload], *schedule[step_of_workload]

    def data_config(self, workload: str) -> DataConfig:
        path = self.dataset if workload == "data" else f"synthetic:{workload}"
        return dataclasses.replace(self.config.data, path=path)

    def check_ranks(self, world_size: int) -> None:
        """Raises UserError, which names the option or field, if the run is impossible on so many ranks."""
        if "data" in self.workloads:
            check_data_path(self.dataset)
        validate_config(self.config, world_size)
        run_layout(self.config, self.spec, world_size)


def _schedule(options: BenchOptions) -> list[tuple[str, int]]:
    """Phase and number of each step of a workload.

    The profiler slows its step down, and the trainer logs the last one, so that neither is timed.
    """
    profiled = min(1, options.part_steps)
    counts = {
        "warm-up": options.warm_up,
        "timed": options.timed,
        "parts": options.part_steps,
        "profiled": profiled,
        "logged": 1 - profiled,
    }
    return [(phase, i) for phase, count in counts.items() for i in range(count)]


def parse_bench_options(argv: list[str], program_name: str = "python -m toolkit.bench") -> BenchRun:
    """Reads and checks the options of one benchmark and the fields of its run.

    Raises:
        UsageError, RunConfigError: an option or field is invalid; the message names valid values.
    """
    return resolve_bench_run(command_line.parse_command_line(BenchOptions, argv, program_name))


def resolve_bench_run(options: BenchOptions) -> BenchRun:
    """Reads the fields of the run. It raises the errors of :func:`parse_bench_options`."""
    run_words = [*options.fields, *(["--model.hf", options.hf] if options.hf else [])]
    config = parse_config([*run_words, *(["--platform", "cpu"] if options.processes else [])])
    if not config.model.hf:
        raise UsageError("--hf is missing; give a Hugging Face folder or a config.json")
    dataset = str(options.data or ("" if config.data.is_synthetic else config.data.path))
    workloads = (options.rows or ("data" if dataset else "images,text")).split(",")
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        valid_text = ", ".join(WORKLOADS)
        raise UsageError(f"--rows {options.rows}: unknown workload {', '.join(unknown)}; valid: {valid_text}")
    if "data" in workloads and not dataset:
        raise UsageError("--rows data needs --data, a folder written by `megatron-vl data convert`")
    if options.even_routing and not _read_spec(options, config).language.moe:
        raise UsageError("--even-routing is for models with experts; leave it out")

    # Adapters that exist decide their rank and targets, as at the start of a run, but are not read.
    if config.lora.adapter:
        config = with_adapter_settings(config, _read_spec(options, config))
    step_count = len(workloads) * len(_schedule(options))
    defaults = TrainConfig()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, checkpoint=RANDOM_WEIGHTS),
        lora=dataclasses.replace(config.lora, adapter=""),
        data=dataclasses.replace(config.data, path="synthetic:images"),
        log=LogConfig(interval=step_count + 1, peak_tflops=config.log.peak_tflops),
        failures=dataclasses.replace(config.failures, check_memory=False),  # memory is measured here
        **{name: getattr(defaults, name) for name in ("checkpoint", "eval", "profile", "wandb")},
        steps=max(config.steps, step_count),
        stop_after=step_count,
    )
    return BenchRun(options, config, workloads, dataset)


def _read_spec(options: BenchOptions, config: TrainConfig) -> ModelSpec:
    return read_spec(config.model.hf).replace_layers(
        num_language_layers=options.language_layers or None, num_vision_layers=options.vision_layers or None
    )
