"""Options of ``megatron-vl train``."""

from dataclasses import dataclass
from typing import ClassVar

from toolkit.common.options import option
from toolkit.common.record_options import RecordOptions


@dataclass(kw_only=True)
class TrainOptions(RecordOptions):
    """Train a model: start one rank per GPU or, under torchrun or srun with one task per GPU, act as a rank.

    On SIGTERM or SIGUSR1 all ranks finish the current step, save and exit with code 0. Run the same command
    again to continue from the latest checkpoint. If data.path is a file of conversations, it is converted
    once into checkpoint.dir/data; a model's name is downloaded.
    """

    run_fields: ClassVar[bool] = True
    explains_run: ClassVar[bool] = True

    nproc_per_node: int | None = option(
        None, metavar="N", minimum=1, shown_default="the GPUs of this node, or 1"
    )
    """Start N ranks on this node, with or without GPUs."""
    nnodes: int | None = option(None, metavar="N", minimum=1, shown_default="1, or those of the Slurm step")
    """Train on N nodes; start the same command on each of them."""
    master_addr: str = option("", metavar="HOST[:PORT]", shown_default="the first node of the Slurm step")
    """Host name of one of the nodes; give the same one on all nodes. Runs that share it need different, free
    ports. Without PORT: 29500, or one derived from the Slurm job's number."""
    dry_run: bool = False
    """Start nothing; make every check of a start, and print layout, split, memory of each pipeline stage and
    estimated speed. Needs no GPU."""
