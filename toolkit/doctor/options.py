"""Options of ``megatron-vl doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron_vl.errors import UsageError
from toolkit.options import CommandOptions, option


@dataclass(kw_only=True)
class DoctorOptions(CommandOptions):
    """Check this machine, a data set, a checkpoint, or a run before it starts.

    Checks Python packages, GPUs, NCCL, shared memory, open files and disk. With --config, it also checks
    everything about a run that can be known without a GPU: fields, layout, memory of each stage, model, data,
    weights and disk. Exit code 1 if something is broken.
    """

    run_fields: ClassVar[bool] = True

    config: Path | None = option(None, metavar="RUN.yaml", must_exist=True)
    """Check this run before it starts."""
    world_size: int | None = option(None, metavar="N", minimum=1, shown_default="those of this machine")
    """Number of GPUs of the whole run."""
    data: Path | None = option(None, metavar="DIR", must_exist=True)
    """Read this data set and compare it with its hashes."""
    checkpoint: Path | None = option(None, metavar="DIR", must_exist=True)
    """Read these weights or this run's checkpoint and compare them with their hashes."""
    nccl: bool = False
    """Reduce a tensor over all GPUs; without GPUs, over two gloo processes."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        if self.fields and not self.config:
            raise UsageError(
                f"{self.fields[0]}: a field of a run needs --config RUN.yaml; see megatron-vl doctor --help"
            )
