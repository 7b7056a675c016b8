"""Options of ``megatron-vl plan``."""

from dataclasses import dataclass
from typing import ClassVar

from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class PlanOptions(CommandOptions):
    """List the layouts of a model on your GPUs that fit, by the time of a step. Needs no GPU.

    TP, PP, VPP, EP, ETP, the split of decoder layers, recompute and offload are chosen; CP stays as the run
    sets it. If the run sets one of parallel.tp, cp, pp, vpp, layers, ep or etp, its own layout comes first.
    """

    run_fields: ClassVar[bool] = True

    hf: str = option("", metavar="HF", shown_default="model.hf of the run", must_exist="model")
    """Hugging Face folder or config.json that gives the model's sizes."""
    gpus: int = option(metavar="N", minimum=1)
    """GPUs of the whole run."""
    gpu: str = option("", metavar="KIND", shown_default="that of this machine, else H200")
    """Kind of GPU: RTX 4090, L40S, A100, H100, H200 or B200. H100 and H200 were measured."""
    host_memory: int | None = option(
        None, metavar="GIB", minimum=1, shown_default="that of this machine if it has GPUs, else no limit"
    )
    """Host memory of a node in GiB, which offloaded state and inputs must fit."""
    json: bool = False
    """Print JSON."""
