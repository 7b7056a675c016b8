"""Options of the commands about a run's checkpoints."""

from dataclasses import dataclass
from pathlib import Path

from toolkit.common.options import CommandOptions, option


@dataclass(kw_only=True)
class ShowOptions(CommandOptions):
    """List a run's checkpoints and describe one of them. Exit code 1 if files are missing."""

    path: Path = option(metavar="PATH", positional=True, must_exist=True)
    """Describe this step_ folder, or the latest checkpoint in this folder of a run."""


@dataclass(kw_only=True)
class CheckpointVerifyOptions(ShowOptions):
    """Read every file of a checkpoint and compare it with its hashes. Exit code 1 if one differs."""


@dataclass(kw_only=True)
class RollbackOptions(CommandOptions):
    """Go back to a saved step of a run: its next start continues from there.

    Later checkpoints, their exports and their lines of the logs move to RUN/abandoned/after_step_STEP; delete
    that folder when you are sure. Run the same command again after an interruption.
    """

    run: Path = option(metavar="RUN", positional=True, must_exist=True)
    """The run's folder (checkpoint.dir). No run may be writing to it."""
    step: int = option(metavar="STEP", positional=True)
    """The step to go back to, one of those that `megatron-vl checkpoint show` lists."""


@dataclass(kw_only=True)
class RestartDataOptions(CommandOptions):
    """Let the next start of a run read its data set from the start.

    Weights, optimizer and step stay. The run may also have another data set then, or other fields that decide
    about its rows. Earlier checkpoints keep their position in the data.
    """

    run: Path = option(metavar="RUN", positional=True, must_exist=True)
    """The run's folder (checkpoint.dir). No run may be writing to it."""
