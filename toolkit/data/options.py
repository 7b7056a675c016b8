"""Options of the commands about data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolkit.options import CommandOptions, option

MAX_QUARANTINED = 0.01
"""Like ``data.max_bad_share`` of a run: a few broken files among millions pass, a wrong folder does not."""


@dataclass(kw_only=True)
class DataConvertOptions(CommandOptions):
    """Convert conversations into tar shards prepared for Energon.

    Every media file is decoded once. Unusable records are counted by reason and listed with file, record and
    field in OUT/quarantine.jsonl. Run the same command again to continue an interrupted conversion. Exit code
    1 if nothing could be written, 3 if a data set was written but more records than --max-quarantined allows
    are missing from it.
    """

    input: list[Path] = option(metavar="FILE", several=True, must_exist=True)
    """Read conversations from these files or folders: JSON or JSON lines (also .gz, .zst), Parquet, Arrow,
    a folder of `datasets`, or LLaMA-Factory's dataset_info.json."""
    dataset: list[str] | None = option(None, metavar="NAME", several=True, shown_default="all")
    """Take only these data sets of a dataset_info.json."""
    format: str | None = option(None, metavar="NAME", shown_default="the record's own")
    """Read all records in this format (see the documentation of data for the names)."""
    media_root: Path = option(metavar="DIR", must_exist=True)
    """Resolve media paths relative to this folder; paths that leave it are refused."""
    out: Path = option(metavar="DIR")
    """Folder for the data set: a new or empty one, or one with an interrupted conversion to continue."""
    workers: int | None = option(None, metavar="N", shown_default="the cores, 8 at most")
    """Processes."""
    val_fraction: float = option(0.0, metavar="F", shown_default="0")
    """Put this share of the samples into the validation split."""
    samples_per_shard: int = option(1000, metavar="N")
    """Put at most N samples into a shard."""
    shard_mb: int = option(256, metavar="MB")
    """Put at most this many MiB of media into a shard."""
    max_megapixels: float = option(128, metavar="MP")
    """Refuse pictures and video frames with more megapixels than this."""
    duplicate_ids: Literal["refuse", "keep"] = option("refuse")
    """What to do with a record whose id occurred before: refuse it, or keep both."""
    max_quarantined: float = option(MAX_QUARANTINED, metavar="F", share=True)
    """Share of the records that may be quarantined before the exit code is 3; 0 allows none."""
    force: bool = False
    """Delete what an earlier conversion left in OUT and start over."""
    dry_run: bool = False
    """Say what is understood of the first 200 records of each file, and write nothing."""
    shard: str | None = option(None, metavar="I/N", shown_default="everything")
    """Only verify part I (from 0) of N of the records, on any node; `megatron-vl data merge` follows."""
    json: bool = False
    """Print the report as JSON."""


@dataclass(kw_only=True)
class DataMergeOptions(CommandOptions):
    """Write the data set whose parts `megatron-vl data convert --shard` has verified.

    The result is that of one conversion, byte for byte, however many parts there were. Run the same command
    again to continue an interrupted merge. Exit codes are those of `megatron-vl data convert`.
    """

    out: Path = option(metavar="DIR", positional=True, must_exist=True)
    """Folder that was --out of all parts."""
    workers: int | None = option(None, metavar="N", shown_default="the cores, 8 at most")
    """Processes."""
    max_quarantined: float = option(MAX_QUARANTINED, metavar="F", share=True)
    """Share of the records that may be quarantined before the exit code is 3; 0 allows none."""
    json: bool = False
    """Print the report as JSON."""


@dataclass(kw_only=True)
class DataVerifyOptions(CommandOptions):
    """Compare every shard of a data set with the size and SHA-256 recorded by its conversion.

    Exit code 1 if one differs.
    """

    dataset: Path = option(metavar="DIR", positional=True, must_exist=True)
    """Folder written by `megatron-vl data convert`."""
    json: bool = False
    """Print the result as JSON."""
