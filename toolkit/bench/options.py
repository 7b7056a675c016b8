"""What a benchmark is asked to do: its own options, and any field of a run by its dotted name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jsonargparse import ArgumentParser, set_parsing_settings

from megatron_vl.config import RunConfigError, TrainConfig, read_arguments, validate
from megatron_vl.models.families import ModelSpec, read_spec
from megatron_vl.parallel.layout import Layout, run_layout
from megatron_vl.training.check import check_data_path

WORKLOADS = ("images", "text", "data")


@dataclass
class BenchOptions:
    """Options of the benchmark itself."""

    hf: str = ""
    """Hugging Face folder or config.json that gives the model's sizes; empty: model.hf of the run."""
    rows: str = ""
    """Workloads, comma-separated: images, text (both seeded), data (the data set of data.path through the real loader).
    Empty: data when data.path is given, else images,text."""
    warm_up: int = 2
    """Untimed steps before the timed ones of each workload."""
    timed: int = 4
    """Timed steps of each workload."""
    part_steps: int = 2
    """Steps of each workload, after the timed ones, in which the parts of a step are timed; 0: none."""
    language_layers: int = 0
    """Decoder layers instead of the config's; 0: as in the config."""
    vision_layers: int = 0
    """Vision layers instead of the config's; 0: as in the config."""
    even_routing: bool = False
    """Experts are chosen at random, evenly: a trained router balances them, one with random weights prefers a few by far."""
    distinct_rows: int = 0
    """Seeded rows each data-parallel rank draws before it repeats them; 0: as many as it uses."""
    out: str = ""
    """File for the figures as JSON; empty: none."""
    json: bool = False
    """Print JSON on standard output instead of a table."""
    peer: bool = False
    """Measure the Hugging Face model under FSDP2 with full activation checkpointing instead."""
    gradient_sync: str = "every"
    """Peer only: reduce gradients after every row (less memory) or after the last one of a step."""


@dataclass
class Options(BenchOptions):
    """Parsed and checked."""

    config: TrainConfig = dataclasses.field(default_factory=TrainConfig)

    @property
    def workloads(self) -> list[str]:
        return self.rows.split(",")

    @property
    def steps(self) -> int:
        """Steps of one workload, the profiled one included."""
        return self.warm_up + self.timed + (self.part_steps + 1 if self.part_steps else 0)

    def spec(self) -> ModelSpec:
        """The model's sizes, with fewer layers where that is asked for."""
        layers = {"language": self.language_layers, "vision": self.vision_layers}
        return read_spec(self.hf).replace_layers(**{name: n for name, n in layers.items() if n})

    def layout(self) -> Layout:
        return run_layout(self.spec(), self.config.parallel)

    def check(self, ranks: int) -> None:
        """Refuses what cannot run on so many ranks; raises ValueError, naming the field."""
        self.layout()
        if "data" in self.workloads:
            check_data_path(self.config.data.path)
        if self.peer and self.config.global_batch_size % ranks:
            raise RunConfigError(f"global_batch_size {self.config.global_batch_size} must be a multiple of the {ranks} ranks")
        if not self.peer:
            validate(self.config, ranks)


def build_parser(program: str = "python -m toolkit.bench") -> ArgumentParser:
    """``--config RUN.yaml``, the options above, and one dotted option for each field of a run."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=program,
        usage=f"{program} --hf FOLDER_OR_CONFIG [options] [--section.field value ...]",
        description="Time a real-size Qwen-VL model with random weights.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML of a run; later options override it.")
    parser.add_class_arguments(BenchOptions)
    parser.add_class_arguments(TrainConfig)
    return parser


def parse(argv: list[str], program: str = "python -m toolkit.bench") -> Options:
    """Reads and checks the options.

    Raises:
        RunConfigError: names the option or field and what would be valid.
    """
    parser = build_parser(program)
    namespace = read_arguments(parser, argv)
    values = {field.name: namespace.pop(field.name) for field in dataclasses.fields(BenchOptions)}
    instance = parser.instantiate_classes(namespace)
    config = TrainConfig(**{field.name: getattr(instance, field.name) for field in dataclasses.fields(TrainConfig)})
    config.checkpoint.dir = ""  # nothing is saved
    options = Options(**values, config=config)
    options.hf = options.hf or config.model.hf
    options.rows = options.rows or ("data" if config.data.path else "images,text")
    _check(options)
    return options


def _check(o: Options) -> None:
    if not o.hf:
        raise RunConfigError("--hf is missing; give a Hugging Face folder or a config.json")
    unknown = [name for name in o.workloads if name not in WORKLOADS]
    if unknown:
        raise RunConfigError(f"--rows {o.rows}: {', '.join(unknown)} unknown; valid: {', '.join(WORKLOADS)}")
    if "data" in o.workloads and not o.config.data.path:
        raise RunConfigError("--rows data needs --data.path, a folder written by `megatron-vl data convert`")
    if "data" in o.workloads and o.peer:
        raise RunConfigError("--peer measures seeded rows only; give --rows images,text")
    if o.even_routing and o.peer:
        raise RunConfigError("--even_routing with --peer: the peer's router cannot be made even; leave one of them out")
    if o.even_routing and not o.spec().language.moe:
        raise RunConfigError("--even_routing is for models with experts; leave it out")
    if o.gradient_sync not in ("every", "last"):
        raise RunConfigError(f"--gradient_sync {o.gradient_sync} is unknown; valid: every, last")
    for name, least in (("warm_up", 1), ("timed", 1), ("part_steps", 0), ("language_layers", 0), ("vision_layers", 0)):
        if getattr(o, name) < least:
            raise RunConfigError(f"--{name} {getattr(o, name)} must be at least {least}")
