"""Options of ``megatron-vl bench``, and the run that they describe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from megatron_vl.config import RANDOM_WEIGHTS, DataConfig, LogConfig, TrainConfig, parse_config
from megatron_vl.data.source.location import DataPath
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.system.errors import UsageError
from megatron_vl.training.lora import with_start_lora
from megatron_vl.training.resolve import find_source_checkpoint
from toolkit.common.options import CommandOptions, option, parse_command_line

RANDOM_WORKLOADS = ("images", "text")
UNMEASURED_SECTIONS = ("checkpoint", "eval", "profile", "wandb")


@dataclass(kw_only=True)
class BenchOptions(CommandOptions):
    """Time a real-size model with random weights: tokens/s, MFU, memory and the parts of a step.

    The rows are those of data.path; without it, random ones (images, then text) with a fixed seed. model.hf
    may be a config.json, which gives the model's sizes.
    """

    run_fields: ClassVar[bool] = True

    nproc_per_node: int | None = option(
        None, metavar="N", minimum=1, shown_default="the GPUs of this machine"
    )
    """Start N ranks, with or without GPUs."""
    timed: int = option(4, metavar="N", minimum=1)
    """Time N steps of each workload."""
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

    warm_up: int = dataclasses.field(default=2, metadata={"hidden": True})
    """Untimed steps of each workload before the timed ones."""
    part_steps: int = dataclasses.field(default=2, metadata={"hidden": True})
    """Steps after the timed ones whose parts are timed."""


@dataclass(frozen=True)
class BenchRun:
    """One run of the trainer over all workloads, one after the other."""

    options: BenchOptions
    config: TrainConfig
    workloads: tuple[str, ...]
    """``images`` and ``text`` are random rows, ``data`` those of a data set."""
    dataset: DataPath
    """Path of the data set, or the blend, if there is one."""
    spec: ModelSpec
    """The model's sizes, with the numbers of layers that the options give."""

    @cached_property
    def schedule(self) -> list[tuple[str, int]]:
        """Phase and number of each step of a workload. The last one is not measured: the trainer logs it."""
        warm_up, timed, parts = self.options.warm_up, self.options.timed, self.options.part_steps
        counts = {"warm-up": warm_up, "timed": timed, "parts": parts, "logged": 1}
        return [(phase, number) for phase, count in counts.items() for number in range(count)]

    def place_of(self, step: int) -> tuple[str, str, int]:
        """Where a step of the run stands: its workload, its phase, and its number in the phase from 0."""
        workload, step_of_workload = divmod(step, len(self.schedule))
        return self.workloads[workload], *self.schedule[step_of_workload]

    def data_config(self, workload: str) -> DataConfig:
        path = self.dataset if workload == "data" else f"synthetic:{workload}"
        return dataclasses.replace(self.config.data, path=path)


def parse_bench_options(
    argv: list[str], program_name: str = "python -m toolkit.bench", **hidden_options: Any
) -> BenchRun:
    """Reads and checks the options of one benchmark and the fields of its run.

    Raises:
        UsageError, RunConfigError: an option or field is invalid; the message names valid values.
    """
    options = parse_command_line(BenchOptions, argv, program_name)
    return resolve_bench_run(dataclasses.replace(options, **hidden_options))


def resolve_bench_run(options: BenchOptions) -> BenchRun:
    """Reads the fields of the run. It raises the errors of :func:`parse_bench_options`."""
    config = parse_config(options.fields)
    if not config.model.hf:
        raise UsageError("--model.hf is missing; give a Hugging Face folder or a config.json")
    path = config.data.path
    dataset = "" if config.data.is_synthetic else path
    workloads = ("data",) if path else RANDOM_WORKLOADS
    if isinstance(path, str) and config.data.is_synthetic:
        workloads = (path.removeprefix("synthetic:"),)
    spec = read_spec(config.model.hf).replace_layers(
        num_language_layers=options.language_layers or None, num_vision_layers=options.vision_layers or None
    )
    if options.even_routing and not spec.language.moe:
        raise UsageError("--even-routing is for models with experts; leave it out")
    # Adapters that exist decide their rank and targets, as at the start of a run, but are not read.
    if config.lora.adapter:
        config = with_start_lora(config, spec, find_source_checkpoint(config))
    bench_run = BenchRun(options, config, workloads, dataset, spec)
    step_count = len(workloads) * len(bench_run.schedule)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, checkpoint=RANDOM_WEIGHTS),
        lora=dataclasses.replace(config.lora, adapter=""),
        data=dataclasses.replace(config.data, path=f"synthetic:{'images' if dataset else workloads[0]}"),
        log=LogConfig(interval=step_count + 1, peak_tflops=config.log.peak_tflops),
        failures=dataclasses.replace(config.failures, check_memory=False),  # memory is measured here
        **{name: getattr(TrainConfig(), name) for name in UNMEASURED_SECTIONS},
        steps=max(config.steps, step_count),
        stop_after=step_count,
    )
    return dataclasses.replace(bench_run, config=config)
