"""Options of ``megatron-vl train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from megatron_vl.errors import UsageError
from toolkit.options import CommandOptions, option


@dataclass(kw_only=True)
class TrainOptions(CommandOptions):
    """Train a model: start one rank a GPU, or, under torchrun or srun with a task a GPU, be a rank.

    SIGTERM or SIGUSR1 makes all ranks save after the step under way and end with exit code 0. The same
    command again goes on from the latest checkpoint.
    """

    run_fields: ClassVar[bool] = True

    nproc_per_node: int | None = option(None, metavar="N", least=1, shown_default="the GPUs of this node")
    """Ranks to start on this node; also on CPU."""
    nnodes: int | None = option(None, metavar="N", least=1, shown_default="1, or those of the Slurm step")
    """Nodes of the run; start the same command on each of them."""
    master_addr: str = option("", metavar="HOST", shown_default="the first node of the Slurm step")
    """Host name of one of the nodes, the same on all."""
    master_port: int | None = option(
        None, metavar="PORT", least=1, shown_default="29500, or by the Slurm job's number"
    )
    """A free port there."""
    job_id: str = option("", metavar="WORD", shown_default="megatron-vl, or the Slurm job's number")
    """Any word that tells this run from others on the same nodes."""
    dry_run: bool = False
    """Start nothing: print layout, schedule and the memory of each pipeline stage. Needs no GPU."""
    json: bool = False
    """With --dry-run: print JSON."""

    def check(self) -> None:
        if self.json and not self.dry_run:
            raise UsageError("--json goes with --dry-run")
