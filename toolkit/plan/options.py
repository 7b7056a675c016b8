"""Options of ``megatron-vl plan``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_vl.errors import UsageError
from toolkit.options import CommandOptions, option


@dataclass(kw_only=True)
class PlanOptions(CommandOptions):
    """Find the fastest layout of a model on your GPUs, or predict what a given one does. Needs no GPU.

    The search chooses TP, PP, VPP, EP, ETP, the split of decoder layers, recompute and offload; CP stays as
    the run sets it. If the run sets one of parallel.tp, cp, pp, vpp, layers, ep or etp, that layout alone is
    predicted, unless --search is given.
    """

    run_fields: ClassVar[bool] = True

    hf: str = option("", metavar="HF", shown_default="model.hf of the run", must_exist=True)
    """Hugging Face folder or config.json that gives the model's sizes."""
    gpus: int = option(metavar="N", minimum=1)
    """GPUs of the whole run."""
    gpu: str = option("", metavar="KIND", shown_default="that of this machine, else H200")
    """Kind of GPU: H200, H100, A100 or B200. Rates were measured on H200, and are scaled for the others."""
    gpus_per_node: int = option(8, metavar="N", minimum=1)
    """GPUs that NVLink connects."""
    host_memory: int | None = option(
        None, metavar="GIB", minimum=1, shown_default="that of this machine if it has GPUs, else no limit"
    )
    """Host memory of a node in GiB, which offloaded state and inputs must fit."""
    data: Path | None = option(None, metavar="DIR", must_exist=True)
    """Measure tokens, pictures and patches of rows of this prepared data set (data.path of a run), with the
    trainer's own loader; model.hf must then be a whole Hugging Face folder."""
    rows: int = option(16, metavar="N", minimum=2)
    """Read N rows of the data set."""
    search: bool = False
    """Search, although the run sets a layout, and compare that one with the fastest."""
    keep: int = option(8, metavar="N", minimum=1)
    """Show the N fastest layouts."""
    picture: Path | None = option(None, metavar="FILE")
    """Draw the pipeline's timeline to a .png or .svg file."""
    yaml: Path | None = option(None, metavar="FILE")
    """Write the run with the chosen layout; `megatron-vl train --config FILE` takes it."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        if self.picture is not None and self.picture.suffix not in (".png", ".svg"):
            raise UsageError(f"--picture {self.picture} must end in .png or .svg")
        if self.yaml is not None and self.yaml.suffix not in (".yaml", ".yml"):
            raise UsageError(f"--yaml {self.yaml} must end in .yaml")
