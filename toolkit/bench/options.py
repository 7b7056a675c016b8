"""Options of ``megatron-vl bench``, and what they and the fields of a run come to."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_vl.config import RunConfigError, TrainConfig, parse_config, validate
from megatron_vl.errors import UsageError
from megatron_vl.spec.families import ModelSpec, read_spec
from megatron_vl.spec.layout import Layout, run_layout
from megatron_vl.training.preflight import check_data_path
from toolkit import options as command_line
from toolkit.options import CommandOptions, option

WORKLOADS = ("images", "text", "data")


@dataclass(kw_only=True)
class BenchOptions(CommandOptions):
    """Time a model of real size with random weights: tokens/s, MFU, memory, and where the time of a step
    goes.

    The rows are seeded ones of pictures and of text, or those of a data set.
    """

    run_fields: ClassVar[bool] = True

    hf: str = option("", metavar="HF", shown_default="model.hf of the run", must_exist=True)
    """Hugging Face folder or config.json that gives the model's sizes."""
    gpus: int | None = option(None, metavar="N", least=1)
    """Start so many processes, one a GPU."""
    processes: int | None = option(None, metavar="N", least=1)
    """Start so many processes on CPU, for small models."""
    data: Path | None = option(None, metavar="DIR", must_exist=True)
    """Time the rows of this data set through the real loader (data.path of a run)."""
    rows: str = option("", metavar="LIST", shown_default="data with a data set, else images,text")
    """Workloads with commas between: images, text (both seeded), data (the data set)."""
    warm_up: int = option(2, metavar="N", least=1)
    """Untimed steps before the timed ones of each workload."""
    timed: int = option(4, metavar="N", least=1)
    """Timed steps of each workload."""
    part_steps: int = option(2, metavar="N", least=0)
    """Steps of each workload, after the timed ones, in which the parts of a step are timed; 0: none."""
    language_layers: int = option(0, metavar="N", least=0, shown_default="as in the config")
    """Decoder layers instead of the config's."""
    vision_layers: int = option(0, metavar="N", least=0, shown_default="as in the config")
    """Vision layers instead of the config's."""
    even_routing: bool = False
    """Choose experts at random, evenly: a trained router balances them, one with random weights prefers a few
    by far."""
    distinct_rows: int = option(0, metavar="N", least=0, shown_default="as many as it uses")
    """Seeded rows that each data-parallel rank draws before it repeats them."""
    peer: bool = False
    """Also time the Hugging Face model under FSDP2 with full activation checkpointing on the same seeded
    rows."""
    gradient_sync: Literal["every", "last"] = option("every")
    """Peer only: reduce gradients after every row (less memory) or after the last one of a step."""
    out: str = option("", metavar="FILE")
    """Write the figures as JSON."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(kw_only=True)
class BenchRun(BenchOptions):
    """One benchmark, of our program or (``peer``) of the other one: parsed and checked."""

    config: TrainConfig = dataclasses.field(default_factory=TrainConfig, metadata={"hidden": True})

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

    def check_ranks(self, ranks: int) -> None:
        """Refuses what cannot run on so many ranks; raises RunConfigError or LayoutError, naming the
        field."""
        self.layout()
        if "data" in self.workloads:
            check_data_path(self.config.data.path)
        if self.peer and self.config.global_batch_size % ranks:
            raise RunConfigError(
                f"global_batch_size {self.config.global_batch_size} must be a multiple of the {ranks} ranks"
            )
        if not self.peer:
            validate(self.config, ranks)


def parse(argv: list[str], program: str = "python -m toolkit.bench") -> BenchRun:
    """Reads and checks the options of one benchmark, and the fields of a run.

    Raises:
        UsageError, RunConfigError: names the option or field and what would be valid.
    """
    return resolve(command_line.parse(BenchOptions, argv, program))


def resolve(given: BenchOptions) -> BenchRun:
    """Options with the fields of the run read. Raises as :func:`parse`."""
    fields = [*given.fields]
    if given.data:
        fields += ["--data.path", str(given.data)]
    if given.processes:
        fields += ["--platform", "cpu"]
    config = parse_config(fields)
    config.checkpoint.dir = ""  # nothing is saved

    values = {field.name: getattr(given, field.name) for field in dataclasses.fields(BenchOptions)}
    options = BenchRun(**values, config=config)
    options.hf = options.hf or config.model.hf
    options.rows = options.rows or ("data" if config.data.path else "images,text")
    _check(options)
    return options


def _check(o: BenchRun) -> None:
    if not o.hf:
        raise UsageError("--hf is missing; give a Hugging Face folder or a config.json")
    unknown = [name for name in o.workloads if name not in WORKLOADS]
    if unknown:
        raise UsageError(f"--rows {o.rows}: {', '.join(unknown)} unknown; valid: {', '.join(WORKLOADS)}")
    if "data" in o.workloads and not o.config.data.path:
        raise UsageError("--rows data needs --data, a folder written by `megatron-vl data convert`")
    if "data" in o.workloads and o.peer:
        raise UsageError("--peer measures seeded rows only; give --rows images,text")
    if o.even_routing and o.peer:
        raise UsageError(
            "--even-routing with --peer: the peer's router cannot be made even; leave one of them out"
        )
    if o.even_routing and not o.spec().language.moe:
        raise UsageError("--even-routing is for models with experts; leave it out")
