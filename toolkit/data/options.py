"""Options of the commands about data sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_vl.errors import UsageError
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
    media_root: Path | None = option(None, metavar="DIR", shown_default="no files of media", must_exist=True)
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
    max_quarantined: float = option(MAX_QUARANTINED, metavar="F", minimum=0, maximum=1)
    """Share of the records that may be quarantined before the exit code is 3; 0 allows none. With
    --processor, also the share of the samples that its checkpoint cannot use."""
    processor: Path | None = option(None, metavar="HF_DIR", shown_default="none", must_exist=True)
    """Also write the sizes of all samples for the tokenizer and chat template in this Hugging Face folder, as
    `megatron-vl data index` does."""
    force: bool = False
    """Delete what an earlier conversion left in OUT and start over."""
    dry_run: bool = False
    """Say what is understood of the first 200 records of each file, and write nothing. The exit code is that
    of a conversion of these records without --processor."""
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
    max_quarantined: float = option(MAX_QUARANTINED, metavar="F", minimum=0, maximum=1)
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


@dataclass(kw_only=True)
class PreparedOptions(CommandOptions):
    """A prepared data set as a run reads it."""

    run_fields: ClassVar[bool] = True

    data: Path | None = option(None, metavar="DIR", shown_default="data.path of the run", must_exist=True)
    """Folder written by `megatron-vl data convert`, or an Energon metadataset YAML."""
    processor: Path | None = option(
        None, metavar="HF_DIR", shown_default="model.hf of the run", must_exist=True
    )
    """Hugging Face folder of the config, tokenizer, chat template and image processor."""
    split: str = option("train", metavar="NAME")
    """Split of the data set: train or val."""


@dataclass(kw_only=True)
class DataIndexOptions(PreparedOptions):
    """Write the sizes of all samples beside a data set, from which a run plans its batches: tokens of the
    text, and the stored sizes of pictures and videos. The first start of a run does so too.

    All text is tokenized once; nothing is decoded. The sizes serve every run whose tokenizer and chat
    template are the same, whatever its limits of pixels and tokens. Those that are there are kept. Run the
    same command again to continue after an interruption.
    """

    workers: int | None = option(None, metavar="N", shown_default="the cores, 8 at most")
    """Processes."""
    shard: str | None = option(None, metavar="I/N", shown_default="everything")
    """Only measure part I (from 0) of N of the data set's shards, on any node. The last part to finish joins
    all of them; the command without --shard does itself what no part has done."""
    json: bool = False
    """Print JSON."""


def _check_page(html_path: Path | None) -> None:
    if html_path is not None and html_path.suffix not in (".html", ".htm"):
        raise UsageError(f"--html {html_path} must end in .html")


@dataclass(kw_only=True)
class DataStatsOptions(PreparedOptions):
    """Show what a data set holds: tokens, patches, pictures, videos and turns of its samples and sources, how
    full packed rows get, how many steps a pass takes, and what is left out and why.

    All samples are counted, from the sizes that `megatron-vl data index` writes. Give a run with --config, or
    --data and --processor.
    """

    html: Path | None = option(None, metavar="FILE", shown_default="no page")
    """Also write an HTML page: the numbers with their distributions, and samples as the model sees them. It
    is one file without scripts, which needs no network."""
    shown: int = option(12, metavar="N", minimum=1)
    """Show N samples with their pictures on the page."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        _check_page(self.html)


@dataclass(kw_only=True)
class DataInspectOptions(PreparedOptions):
    """Show one sample as the model sees it: tokens, loss mask, positions, and its pictures before and after
    resizing.

    Exit code 1 if the loader would leave the sample out; the reason is printed.
    """

    index: int | None = option(None, metavar="N", minimum=0)
    """Number of the sample in the split, from 0."""
    key: str = option("", metavar="KEY")
    """Key of the sample, or SHARD[N], as the quarantine.jsonl of a run names it."""
    html: Path | None = option(None, metavar="FILE", shown_default="no page")
    """Also write the sample with its pictures to an HTML page."""
    json: bool = False
    """Print JSON."""

    def check(self) -> None:
        if self.index is not None and self.key:
            raise UsageError("give --index or --key, not both")
        _check_page(self.html)
