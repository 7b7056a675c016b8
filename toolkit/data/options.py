"""Options of the commands about data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.options import CommandOptions, option

MAX_QUARANTINED = 0.01
"""As ``data.max_bad_share`` of a training: a few broken media among millions stop nobody, a wrong folder is
noticed."""


@dataclass(kw_only=True)
class DataConvertOptions(CommandOptions):
    """Convert ShareGPT or OpenAI conversations into tar shards prepared for Energon.

    Every medium is decoded once. What cannot be used is counted by reason and listed with file, record and
    field in OUT/quarantine.jsonl. A conversion that was interrupted goes on when it is started again with the
    same arguments. Exit code 1 when nothing could be written, 3 when a data set was written but more records
    than --max-quarantined allows are missing from it.
    """

    input: list[Path] = option(metavar="FILE", several=True, must_exist=True)
    """JSON arrays or JSON lines."""
    media_root: Path = option(metavar="DIR", must_exist=True)
    """Media paths are relative to it and stay inside."""
    out: Path = option(metavar="DIR")
    """Folder of the data set: new, empty, or one to go on with."""
    workers: int | None = option(None, metavar="N", shown_default="the cores, 8 at most")
    """Processes."""
    val_fraction: float = option(0.0, metavar="F", shown_default="0")
    """Part of the samples for validation."""
    samples_per_shard: int = option(1000, metavar="N")
    """Most samples of a shard."""
    shard_mb: int = option(256, metavar="MB")
    """Most media of a shard in MiB."""
    max_megapixels: float = option(128, metavar="MP")
    """Largest picture or video frame."""
    duplicate_ids: Literal["refuse", "keep"] = option("refuse")
    """A record whose id an earlier one has: refuse it, or take both."""
    max_quarantined: float = option(MAX_QUARANTINED, metavar="F", share=True)
    """Part of the records that may be quarantined before the exit code is 3; 0: none."""
    force: bool = False
    """Remove what an earlier conversion left in OUT and start anew."""
    json: bool = False
    """Print the report as JSON."""


@dataclass(kw_only=True)
class DataVerifyOptions(CommandOptions):
    """Compare every shard of a data set with the size and SHA-256 that were written when it was converted.

    Exit code 1 when one differs.
    """

    dataset: Path = option(metavar="DIR", positional=True, must_exist=True)
    """Folder written by `megatron-vl data convert`."""
    json: bool = False
    """Print the result as JSON."""
