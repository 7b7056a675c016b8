"""Options of ``megatron-vl card``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_vl.errors import UsageError
from megatron_vl.spec.families import read_spec
from toolkit.bench.options import BenchOptions, BenchRun, resolve_bench_run
from toolkit.options import CommandOptions, option

TIMED_ROWS = 4
"""Rows in a timed step."""
TIMED_STEPS = 8
"""Number of timed steps."""
DISTINCT_ROWS = 16
"""Number of rows that are timed in turn, each equally often. The prediction is for the same rows."""


@dataclass(kw_only=True)
class CardOptions(CommandOptions):
    """Write a card of a model: its speed and memory, and its losses beside those of transformers.

    The model has random weights and the sizes of the config, perhaps with fewer layers. Rows of pictures are
    timed first, as `megatron-vl bench` does, and compared with what the planner predicts. Then the same
    weights learn the same conversations in the same order here and in transformers, in bfloat16 on a GPU and
    in float32 on CPU. A third training, in transformers with its eager attention, shows how far two correct
    programs come apart by rounding alone.
    """

    hf: str = option(metavar="HF", must_exist=True)
    """Hugging Face folder or config.json that gives the model's sizes."""
    language_layers: int = option(0, metavar="N", minimum=0, shown_default="as in the config")
    """Use N decoder layers instead of the config's number."""
    vision_layers: int = option(0, metavar="N", minimum=0, shown_default="as in the config")
    """Use N vision layers instead of the config's number."""
    seq_len: int = option(8192, metavar="N", minimum=512)
    """Time rows of N tokens."""
    steps: int = option(300, metavar="N", minimum=1)
    """Train for N steps on each side."""
    lr: float = option(3e-4, metavar="RATE", minimum=0)
    """Peak learning rate of the trainings."""
    platform: Literal["auto", "cuda", "cpu"] = option("auto")
    """Where to run. auto: cuda if there is a GPU, otherwise cpu."""
    commit: str = option("", metavar="ID", shown_default="what git says of this checkout")
    """Name this commit on the card."""
    out: Path = option(metavar="FILE")
    """Write the card to this JSON file."""
    picture: Path | None = option(None, metavar="FILE")
    """Draw the losses to this .svg file."""

    def check(self) -> None:
        if self.picture is not None and self.picture.suffix != ".svg":
            raise UsageError(f"--picture {self.picture} must end in .svg")

    @property
    def model_name(self) -> str:
        """The name of the config's file, or of its folder."""
        config_path = Path(self.hf).resolve()
        named_path = config_path.parent if config_path.name == "config.json" else config_path
        return named_path.name.removesuffix(".json")

    def bench_run(self, platform_name: str) -> BenchRun:
        """The benchmark of the card. Its spec is the card's model.

        Raises:
            ConfigError, RunConfigError, LayoutError: the config cannot be used.
        """
        dtype = "bfloat16" if platform_name == "cuda" else "float32"
        run_words = ["--platform", platform_name, "--dtype", dtype, "--data.seq_len", str(self.seq_len)]
        bench_run = resolve_bench_run(
            BenchOptions(
                fields=[*run_words, "--global_batch_size", str(TIMED_ROWS)],
                hf=self.hf,
                rows="images",
                warm_up=3,
                timed=TIMED_STEPS,
                part_steps=0,
                distinct_rows=DISTINCT_ROWS,
                language_layers=self.language_layers,
                vision_layers=self.vision_layers,
                # Predictions are for even loads.
                even_routing=read_spec(self.hf).language.moe is not None,
            )
        )
        bench_run.check_ranks(1)
        return bench_run
