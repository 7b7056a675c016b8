"""Options of ``megatron-vl bench``, and how they combine with the fields of a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_vl.config import TrainConfig, parse_config
from megatron_vl.data.source.location import check_data_path
from megatron_vl.errors import UsageError
from megatron_vl.planning.gpus import calibration_for_platform
from megatron_vl.planning.run_layout import run_layout
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout
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
    distinct_rows: int = option(0, metavar="N", minimum=0, shown_default="as many as it uses")
    """Draw N random rows on each data-parallel rank, then repeat them."""
    calibrate: bool = False
    """Also time single kernels, and store the rates of this machine for plan and train. The rates are
    scaled so that they explain the measured steps. Use a model and rows like those that you will train."""
    calibration: str = option("", metavar="FILE", shown_default="the user's folder of calibrations")
    """For --calibrate: write the rates to this file; `megatron-vl plan --calibration FILE` reads it."""
    out: str = option("", metavar="FILE")
    """Write the figures to this file as JSON."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(kw_only=True)
class BenchRun(BenchOptions):
    """The checked options of one benchmark."""

    config: TrainConfig = dataclasses.field(default_factory=TrainConfig, metadata={"hidden": True})

    @property
    def workloads(self) -> list[str]:
        return self.rows.split(",")

    @property
    def steps_per_workload(self) -> int:
        """Steps of one workload, including the profiled one."""
        return self.warm_up + self.timed + (self.part_steps + 1 if self.part_steps else 0)

    def read_model_spec(self) -> ModelSpec:
        """The model's sizes, with the numbers of layers that the options give."""
        return read_spec(self.hf).replace_layers(
            num_language_layers=self.language_layers or None, num_vision_layers=self.vision_layers or None
        )

    def resolve_layout(self, world_size: int) -> Layout:
        gpu_calibration = calibration_for_platform(self.config.platform)
        return run_layout(self.config, self.read_model_spec(), world_size, calibration=gpu_calibration)

    def check_ranks(self, world_size: int) -> None:
        """Checks that the run is possible on ``world_size`` ranks.

        Raises:
            UsageError, RunConfigError, LayoutError: it is not. The message names the option or field.
        """
        if self.calibrate and self.read_model_spec().language.moe and not self.even_routing:
            raise UsageError(
                "--calibrate with experts needs --even-routing, because the planner assumes even loads"
            )
        self.resolve_layout(world_size)
        if "data" in self.workloads:
            check_data_path(self.config.data.path)


def parse_bench_options(argv: list[str], program_name: str = "python -m toolkit.bench") -> BenchRun:
    """Reads and checks the options of one benchmark and the fields of its run.

    Raises:
        UsageError, RunConfigError: an option or field is invalid; the message names valid values.
    """
    return resolve_bench_run(command_line.parse_command_line(BenchOptions, argv, program_name))


def resolve_bench_run(given_options: BenchOptions) -> BenchRun:
    """Reads the fields of the run and fills in the defaults.

    It raises the errors of :func:`parse_bench_options`.
    """
    run_words = [*given_options.fields]
    if given_options.data:
        run_words += ["--data.path", str(given_options.data)]
    if given_options.processes:
        run_words += ["--platform", "cpu"]
    config = parse_config(run_words)

    bench_run = BenchRun(**vars(given_options), config=config)
    bench_run.hf = bench_run.hf or config.model.hf
    bench_run.rows = bench_run.rows or ("data" if config.data.path else "images,text")
    _check_bench_run(bench_run)
    # Adapters that are there already decide their own rank and targets, as at the start of a run.
    if config.lora.adapter:
        config = with_adapter_settings(config, bench_run.read_model_spec())
    # A benchmark saves nothing.
    bench_run.config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, dir=""))
    return bench_run


def _check_bench_run(bench_run: BenchRun) -> None:
    if not bench_run.hf:
        raise UsageError("--hf is missing; give a Hugging Face folder or a config.json")

    unknown_workloads = [name for name in bench_run.workloads if name not in WORKLOADS]
    if unknown_workloads:
        unknown_text, valid_text = ", ".join(unknown_workloads), ", ".join(WORKLOADS)
        raise UsageError(f"--rows {bench_run.rows}: unknown workload {unknown_text}; valid: {valid_text}")
    if "data" in bench_run.workloads and not bench_run.config.data.path:
        raise UsageError("--rows data needs --data, a folder written by `megatron-vl data convert`")
    if bench_run.calibration and not bench_run.calibrate:
        raise UsageError("--calibration needs --calibrate")
    if bench_run.even_routing and not bench_run.read_model_spec().language.moe:
        raise UsageError("--even-routing is for models with experts; leave it out")
