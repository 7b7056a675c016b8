"""``megatron-vl data``: conversation files into data sets."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from .options import DataConvertOptions, DataVerifyOptions

if TYPE_CHECKING:
    from data_tools.convert import DataReport

MOST_SHOWN = 10
"""Ignored keys of a place that the summary names; the report has all."""
INSTEAD = {
    "min_pixels": "data.min_pixels of the run counts",
    "max_pixels": "data.max_pixels of the run counts, data.video_max_pixels for videos",
    "fps": "data.video_fps of the run counts",
    "nframes": "data.video_fps and data.video_max_frames of the run count",
    "max_frames": "data.video_max_frames of the run counts",
    "video_start": "the whole video is taken",
    "video_end": "the whole video is taken",
}
"""What counts in the place of a key without effect."""
TOO_MANY_QUARANTINED = 3
"""Exit code; 1 is a failure and 2 a wrong command line."""


def convert(given: DataConvertOptions) -> int:
    """Conversations -> a data set."""
    from data_tools.convert import ConversionOptions, ConvertError, convert, default_workers

    options = ConversionOptions(
        media_root=given.media_root,
        out=given.out,
        workers=given.workers if given.workers is not None else default_workers(),
        val_fraction=given.val_fraction,
        samples_per_shard=given.samples_per_shard,
        bytes_per_shard=given.shard_mb << 20,
        max_pixels=int(given.max_megapixels * 1e6),
        duplicate_ids=given.duplicate_ids,
        force=given.force,
    )
    report = convert(given.input, options, _show)
    quarantine = given.out / "quarantine.jsonl"
    if given.json:
        print(
            json.dumps(report.as_json() | {"quarantined": report.quarantined, "quarantine": str(quarantine)})
        )
    else:
        _print(report, given.out, quarantine)
    if not report.samples:
        raise ConvertError(
            f"none of {report.records} records could be used{_first_refusal(quarantine)}; see {quarantine}"
        )
    if given.val_fraction and not report.val:
        raise ConvertError(
            f"{report.samples} sample is too few for a validation split; give more, "
            "or leave out --val-fraction"
        )
    if report.quarantined > given.max_quarantined * report.records:
        share = report.quarantined / report.records
        print(
            f"megatron-vl data: {report.quarantined} of {report.records} records ({share:.2%}) "
            "were quarantined, more "
            f"than --max-quarantined {given.max_quarantined:g} allows; {given.out} is complete without them. "
            f"Correct what {quarantine} names and convert again with --force, or allow more",
            file=sys.stderr,
        )
        return TOO_MANY_QUARANTINED
    return 0


def _first_refusal(quarantine: Path) -> str:
    """Why the first record was refused: a wrong media root or format refuses all of them for one reason."""
    with quarantine.open(encoding="utf-8") as lines:
        entry = json.loads(next(lines, "null"))
    return f" (record {entry['record']}, {entry['reason']}: {entry['detail']})" if entry else ""


def verify(options: DataVerifyOptions) -> int:
    """Every byte of a data set against what was written."""
    from data_tools.verify import verify

    shards, problems = verify(options.dataset, _show)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if options.json:
        print(json.dumps({"shards": shards, "problems": problems}))
    else:
        print("\n".join(problems) or f"{shards} shards of {options.dataset} are whole")
    return 1 if problems else 0


def _show(line: str) -> None:
    print(
        f"\r{line}\033[K" if sys.stderr.isatty() else line,
        end="" if sys.stderr.isatty() else "\n",
        file=sys.stderr,
        flush=True,
    )


def _print(report: DataReport, out: Path, quarantine: Path) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    reasons: Counter[str] = Counter()
    for counts in report.refused.values():
        reasons.update(counts)
    why = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
    end = f" ({why}), listed in {quarantine}" if why else ""
    written = f"{report.samples} of {report.records} records written to {out} in {report.seconds:.1f} s"
    print(f"{written}, {report.quarantined} quarantined{end}")
    print(f"  train {report.train}, val {report.val}, images {report.images}, videos {report.videos}")
    print(f"  {report.shards} shards, {report.bytes / 2**20:.1f} MiB")
    for place, found in report.ignored.items():
        print(f"  ignored: {_ignored(place, found)}")
    if report.answer_media:
        print(
            f"  {report.answer_media} images or videos in the assistant's turns: "
            "seen by the model, not learnt"
        )
    if len(report.refused) > 1:
        for file, counts in report.refused.items():
            for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"  quarantined {count:6d}  {reason}  ({file})")


def _ignored(place: str, counts: dict[str, int]) -> str:
    """The keys without effect of a place, the most frequent first, with what counts instead."""
    shown = sorted(counts.items(), key=lambda item: -item[1])[:MOST_SHOWN]
    unit = {1: place.removesuffix("s")}
    told = {key: f" ({text})" for key, text in INSTEAD.items()}
    texts = [
        f"{key if key.isprintable() else ascii(key)} in {n} {unit.get(n, place)}{told.get(key, '')}"
        for key, n in shown
    ]
    more = len(counts) - len(shown)
    return ", ".join(texts) + (f", and {more} keys more (see report.json)" if more else "")
