"""Options of the commands about data sets."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from megatron_vl.system.errors import UsageError
from toolkit.common.options import CommandOptions, option
from toolkit.common.record_options import MAX_QUARANTINED, RecordOptions


@dataclass(kw_only=True)
class DataConvertOptions(RecordOptions):
    """Convert conversations into tar shards prepared for Energon.

    Every media file is decoded once. Unusable records are counted by reason and listed with file, record and
    field in OUT/quarantine.jsonl; OUT/report.json has the counts. OUT appears when it is complete. Exit code
    1 if nothing could be written, 3 if a data set was written but more records than --max-quarantined allows
    are missing from it.
    """

    input: list[Path] = option(metavar="FILE", several=True)
    """Read conversations from these files or folders: JSON or JSON lines (also .gz, .zst), Parquet, Arrow,
    CSV, a folder of `datasets`, or LLaMA-Factory's dataset_info.json (dataset_info.json:NAME,NAME takes only
    these data sets of it)."""
    format: str | None = option(None, metavar="NAME", shown_default="the record's own")
    """Read all records in this format (see the documentation of data for the names)."""
    out: Path = option(metavar="DIR")
    """Folder for the data set, which must not exist or be empty."""
    workers: int | None = option(None, metavar="N", shown_default="the cores, 8 at most")
    """Processes."""
    duplicate_ids: Literal["refuse", "keep"] = option("refuse")
    """What to do with a record whose id occurred before: refuse it, or keep both."""
    max_quarantined: float = option(MAX_QUARANTINED, metavar="F", minimum=0, maximum=1)
    """Share of the records that may be quarantined before the exit code is 3; 0 allows none."""
    part: str | None = option(None, metavar="I/N", shown_default="everything")
    """Convert part I (from 0) of N of the records into a data set of its own, OUT/part-I-of-N. OUT with all
    parts is read as one data set. Ids are compared within a part."""

    def part_numbers(self) -> tuple[int, int]:
        """(I, N); (0, 1) for everything. Raises UsageError."""
        index, _, count = (self.part or "0/1").partition("/")
        if not (index.isdecimal() and count.isdecimal() and int(index) < int(count) < 100_000):
            raise UsageError(f"--part {self.part} must be I/N with I from 0 to N - 1, for instance 0/8")
        return int(index), int(count)


@dataclass(kw_only=True)
class DataIndexOptions(CommandOptions):
    """Write the sizes of all samples beside a data set, from which a run plans its batches: tokens of the
    text, and the stored sizes of images and videos. The first start of a run does so too.

    All text is tokenized once; nothing is decoded. The sizes serve every run whose tokenizer and chat
    template are the same, whatever its limits of pixels and tokens. Those that are there are kept.

    With --input and --out, make a data set of image-text pairs in WebDataset tars: a run reads them where
    they lie. What is no usable pair is counted, and listed in OUT/quarantine.jsonl.
    """

    run_fields: ClassVar[bool] = True

    input: list[str] = option([], metavar="TAR", several=True)
    """Make a data set of these tars: names with braces (DIR/{00000..01200}.tar, s3://BUCKET/DIR/{0..9}.tar,
    msc://PROFILE/DIR/{0..9}.tar), folders, or files that list them."""
    out: Path | None = option(None, metavar="DIR")
    """Folder for the data set of tars: their own, or any other. The same command reads only new and changed
    tars."""
    members: list[str] = option(
        [],
        metavar="NAME=EXTENSIONS",
        several=True,
        shown_default="image=jpg|jpeg|png|webp caption=txt|json:caption",
    )
    """Find image and caption of a pair by extension: the first caption that has text counts, and json:KEY is
    a field of a JSON file. With prompt=TEXT, each caption answers that question. text=txt|json:KEY instead
    takes texts alone."""
    workers: int | None = option(None, metavar="N", shown_default="the cores, 8 at most")
    """Processes."""

    def check(self) -> None:
        if bool(self.input) != (self.out is not None) or (self.members and not self.input):
            raise UsageError("a data set of tars needs --input and --out")


@dataclass(kw_only=True)
class DataShowOptions(CommandOptions):
    """Show what a data set holds: tokens, patches, images, videos and turns of its samples and sources, how
    many steps a pass takes, and what is left out and why.

    All samples are counted, from their sizes, which are written first if they are missing. Give a run with
    --config, or --data.path and --model.hf. With --sample, exit code 1 if a run would leave the sample out.
    """

    run_fields: ClassVar[bool] = True

    sample: str | None = option(None, metavar="SAMPLE", shown_default="the whole data set")
    """Show one sample as the model sees it: its key or SHARD[N], as the quarantine.jsonl of a run has it."""
    html: Path | None = option(None, metavar="FILE", shown_default="no page")
    """Also write an HTML page: the numbers with histograms, and samples as the model sees them. It is one
    file without scripts, which needs no network."""
    json: bool = False
    """Print JSON."""
