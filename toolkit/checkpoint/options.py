"""Options of the commands about a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toolkit.options import CommandOptions, option


@dataclass(kw_only=True)
class ShowOptions(CommandOptions):
    """List a run's checkpoints by branch and describe one of them. Exit code 1 if files are missing."""

    path: Path = option(metavar="PATH", positional=True, must_exist=True)
    """Describe this step_ folder, or the latest checkpoint in this folder of a run."""
    json: bool = False
    """Print JSON."""


@dataclass(kw_only=True)
class CheckpointVerifyOptions(ShowOptions):
    """Read every file of a checkpoint and compare it with its hashes. Exit code 1 if one differs."""
