"""Options of ``megatron-vl bench``, and the run that they describe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
        None, metavar="N", minimum=1, shown_default="the GPUs of this machine, or 1"
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

    warm_up: int = field(default=2, metadata={"hidden": True})
    """Untimed steps of each workload before the timed ones."""
    part_steps: int = field(default=2, metadata={"hidden": True})
    """Steps after the timed ones whose parts are timed."""

    @property
    def steps_a_workload(self) -> int:
        """The last step is not measured: the trainer logs it."""
        return self.warm_up + self.timed + self.part_steps + 1


@dataclass(frozen=True)
class BenchRun:
    """One run of the trainer over all workloads, one after the other."""

    options: BenchOptions
    config: TrainConfig
    workloads: dict[str, DataConfig]
    """The rows of each workload: ``images`` and ``text`` are random, ``data`` those of a data set."""
    spec: ModelSpec
    """The model's sizes, with the numbers of layers that the options give."""

    def place_of(self, step: int) -> tuple[str, int]:
        """The workload of a step of the run, and its number from the first timed step, which is 0."""
        workload, number = divmod(step, self.options.steps_a_workload)
        return list(self.workloads)[workload], number - self.options.warm_up


def parse_bench_options(
    argv: list[str], program_name: str = "python -m toolkit.bench", **hidden_options: Any
) -> BenchRun:
    """Reads and checks the options of one benchmark and the fields of its run."""
    options = parse_command_line(BenchOptions, argv, program_name)
    return resolve_bench_run(replace(options, **hidden_options))


def resolve_bench_run(options: BenchOptions) -> BenchRun:
    """The run that the options describe.

    Raises:
        UsageError, RunConfigError: an option or field is invalid; the message names valid values.
    """
    config = parse_config(options.fields)
    if not config.model.hf:
        raise UsageError("--model.hf is missing; give a Hugging Face folder or a config.json")
    data = config.data
    paths: dict[str, DataPath] = {kind: f"synthetic:{kind}" for kind in RANDOM_WORKLOADS}
    if data.path:
        paths = {str(data.path).removeprefix("synthetic:") if data.is_synthetic else "data": data.path}
    spec = read_spec(config.model.hf, config.model.rope_scaling).replace_layers(
        num_language_layers=options.language_layers or None, num_vision_layers=options.vision_layers or None
    )
    if options.even_routing and not spec.language.moe:
        raise UsageError("--even-routing is for models with experts; leave it out")
    # Adapters that exist decide their rank and targets, as at the start of a run, but are not read.
    if config.lora.adapter:
        config = with_start_lora(config, spec, find_source_checkpoint(config))
    num_steps = len(paths) * options.steps_a_workload
    # A data set is opened when its turn comes.
    first_path = "synthetic:images" if "data" in paths else next(iter(paths.values()))
    config = replace(
        config,
        model=replace(config.model, checkpoint=RANDOM_WEIGHTS),
        lora=replace(config.lora, adapter=""),
        data=replace(data, path=first_path),
        log=LogConfig(interval=num_steps + 1, peak_tflops=config.log.peak_tflops),
        failures=replace(config.failures, check_memory=False),  # memory is measured here
        **{name: getattr(TrainConfig(), name) for name in UNMEASURED_SECTIONS},
        steps=max(config.steps, num_steps),
        stop_after=num_steps,
    )
    workloads = {name: replace(data, path=path) for name, path in paths.items()}
    return BenchRun(options, config, workloads, spec)
