"""Options of ``megatron-vl bench``, and the run that they describe."""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from megatron_vl.config import RANDOM_WEIGHTS, DataConfig, LogConfig, TrainConfig, parse_config
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.system.errors import UsageError
from megatron_vl.training.lora import with_start_lora
from megatron_vl.training.resolve import find_source_checkpoint
from toolkit.common.options import CommandOptions, option, parse_command_line

WARM_UP, PART_STEPS = 2, 2
"""Untimed steps before the timed ones, and steps after them whose parts are timed."""


@dataclass(kw_only=True)
class BenchOptions(CommandOptions):
    """Time a real-size model with random weights: tokens/s, MFU, memory and the parts of a step.

    The rows are those of data.path; without it, random ones of images, then of text, with a fixed seed.
    model.hf may be a config.json, which gives the model's sizes.
    """

    run_fields: ClassVar[bool] = True

    nproc_per_node: int | None = option(None, metavar="N", minimum=1, shown_default="the GPUs, or 1")
    """Start N ranks, with or without GPUs."""
    timed: int = option(4, metavar="N", minimum=1)
    """Time N steps of each kind of rows."""
    language_layers: int = option(0, metavar="N", minimum=0, shown_default="as in the config")
    """Use N decoder layers instead of the config's number."""
    vision_layers: int = option(0, metavar="N", minimum=0, shown_default="as in the config")
    """Use N vision layers instead of the config's number."""
    even_routing: bool = False
    """Choose experts at random and evenly: a router with random weights strongly prefers a few."""
    out: str = option("", metavar="FILE")
    """Write the figures to this file as JSON."""


class BenchRun(NamedTuple):
    options: BenchOptions
    config: TrainConfig
    workloads: dict[str, DataConfig]
    """The rows. Those of ``config`` are random, because a run on a data set needs its own weights."""
    spec: ModelSpec
    """The model's sizes, with the numbers of layers that the options give."""


def parse_bench_options(argv: list[str]) -> BenchRun:
    """Reads the options of one benchmark and the fields of its run.

    Raises:
        UsageError, RunConfigError: an option or field is invalid; the message names valid values.
    """
    options = parse_command_line(BenchOptions, argv, "megatron-vl bench")
    config = parse_config(options.fields)
    if not config.model.hf:
        raise UsageError("--model.hf is missing; give a Hugging Face folder or a config.json")
    spec = read_spec(config.model.hf, config.model.rope_scaling).replace_layers(
        num_language_layers=options.language_layers or None, num_vision_layers=options.vision_layers or None
    )
    if options.even_routing and not spec.language.moe:
        raise UsageError("--even-routing is for models with experts; leave it out")
    # Adapters that exist decide their rank and targets, as at the start of a run, but are not read.
    if config.lora.adapter:
        config = with_start_lora(config, spec, find_source_checkpoint(config))
    paths = [config.data.path] if config.data.path else ["synthetic:images", "synthetic:text"]
    rows = [replace(config.data, path=path) for path in paths]
    num_steps = len(rows) * (WARM_UP + options.timed + PART_STEPS + 1)  # the trainer logs the last one
    config = replace(
        config,
        model=replace(config.model, checkpoint=RANDOM_WEIGHTS),
        lora=replace(config.lora, adapter=""),
        data=rows[0] if rows[0].is_synthetic else replace(config.data, path="synthetic:images"),
        log=LogConfig(interval=num_steps + 1, peak_tflops=config.log.peak_tflops),
        failures=replace(config.failures, check_memory=False),  # memory is measured here
        **{name: getattr(TrainConfig(), name) for name in ("checkpoint", "eval", "profile", "wandb")},
        epochs=0,
        steps=max(config.steps, num_steps),
        stop_after=num_steps,
    )
    workloads = {str(d.path).removeprefix("synthetic:") if d.is_synthetic else "data": d for d in rows}
    return BenchRun(options, config, workloads, spec)
