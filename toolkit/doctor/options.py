"""Options of ``megatron-vl doctor``."""

from dataclasses import dataclass

from toolkit.common.options import CommandOptions


@dataclass(kw_only=True)
class DoctorOptions(CommandOptions):
    """Find what is wrong with this machine, and say how to fix it.

    Checks packages, GPUs, NCCL's environment and shared memory. Exit code 1 if something is broken.
    `megatron-vl train --dry-run` checks a run.
    """

    nccl: bool = False
    """Reduce a tensor over all GPUs; without GPUs, over two gloo processes."""
    json: bool = False
    """Print JSON."""
