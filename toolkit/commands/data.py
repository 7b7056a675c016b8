"""``megatron-vl data``: conversation files into data sets."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.commands.arguments import fraction

if TYPE_CHECKING:
    from data_tools.convert import Report

MAX_QUARANTINED = 0.01
"""As ``data.max_bad_share`` of a training: a few broken media among millions stop nobody, a wrong folder is noticed."""
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


def register(subparsers: argparse._SubParsersAction) -> None:
    data = subparsers.add_parser("data", help="convert conversations into a data set, and check it")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    convert = actions.add_parser(
        "convert",
        help="ShareGPT / OpenAI JSON or JSON lines -> WebDataset prepared for Energon",
        description="Converts ShareGPT or OpenAI conversations into tar shards prepared for Energon. Every medium is "
        "decoded once; what cannot be used is counted by reason and listed with file, record and field in "
        "OUT/quarantine.jsonl. A conversion that was interrupted goes on when it is started again with the same arguments. "
        "Exit code 1 when nothing could be written, 3 when a data set was written but more records than --max-quarantined "
        "allows are missing from it.",
    )
    convert.add_argument("--input", type=Path, required=True, nargs="+", metavar="FILE", help="JSON array(s) or JSON lines")
    convert.add_argument(
        "--media-root", type=Path, required=True, metavar="DIR", help="media paths are relative to it and stay inside"
    )
    convert.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the data set: new, empty, or one to go on with"
    )
    convert.add_argument("--workers", type=int, metavar="N", help="processes (default: the cores, 8 at most)")
    convert.add_argument(
        "--val-fraction", type=float, default=0.0, metavar="F", help="part of the samples for validation (default: 0)"
    )
    convert.add_argument(
        "--samples-per-shard", type=int, default=1000, metavar="N", help="most samples of a shard (default: 1000)"
    )
    convert.add_argument("--shard-mb", type=int, default=256, metavar="MB", help="most media of a shard in MiB (default: 256)")
    convert.add_argument(
        "--max-megapixels", type=float, default=128, metavar="MP", help="largest picture or video frame (default: 128)"
    )
    convert.add_argument(
        "--duplicate-ids",
        choices=("refuse", "keep"),
        default="refuse",
        help="a record whose id an earlier one has: refuse it, or take both (default: refuse)",
    )
    convert.add_argument(
        "--max-quarantined",
        type=fraction,
        default=MAX_QUARANTINED,
        metavar="F",
        help="part of the records that may be quarantined before the exit code is 3; 0: none (default: %(default)s, the share of "
        "unusable samples that a training allows)",
    )
    convert.add_argument("--force", action="store_true", help="remove what an earlier conversion left in OUT and start anew")
    convert.add_argument("--json", action="store_true", help="print the report as JSON")
    convert.set_defaults(run=run_convert, inputs=("input", "media_root"))
    verify = actions.add_parser(
        "verify",
        help="are all shards of a data set what was written",
        description="Compares every shard of a data set with the size and SHA-256 that were written down when it was "
        "converted. Exit code 1 when one differs.",
    )
    verify.add_argument("dataset", type=Path, metavar="DIR", help="folder written by `megatron-vl data convert`")
    verify.add_argument("--json", action="store_true", help="print the result as JSON")
    verify.set_defaults(run=run_verify, inputs=("dataset",))


def run_convert(args: argparse.Namespace) -> int:
    from data_tools.convert import ConvertError, Options, convert, default_workers

    options = Options(
        media_root=args.media_root,
        out=args.out,
        workers=args.workers if args.workers is not None else default_workers(),
        val_fraction=args.val_fraction,
        samples_per_shard=args.samples_per_shard,
        bytes_per_shard=args.shard_mb << 20,
        max_pixels=int(args.max_megapixels * 1e6),
        duplicate_ids=args.duplicate_ids,
        force=args.force,
    )
    report = convert(args.input, options, _show)
    quarantine = args.out / "quarantine.jsonl"
    if args.json:
        print(json.dumps(report.as_json() | {"quarantined": report.quarantined, "quarantine": str(quarantine)}))
    else:
        _print(report, args.out, quarantine)
    if not report.samples:
        raise ConvertError(f"none of {report.records} records could be used{_first_refusal(quarantine)}; see {quarantine}")
    if args.val_fraction and not report.val:
        raise ConvertError(f"{report.samples} sample is too few for a validation split; give more, or leave out --val-fraction")
    if report.quarantined > args.max_quarantined * report.records:
        share = report.quarantined / report.records
        print(
            f"megatron-vl data: {report.quarantined} of {report.records} records ({share:.2%}) were quarantined, more "
            f"than --max-quarantined {args.max_quarantined:g} allows; {args.out} is complete without them. "
            f"Mend what {quarantine} names and convert again with --force, or allow more",
            file=sys.stderr,
        )
        return TOO_MANY_QUARANTINED
    return 0


def _first_refusal(quarantine: Path) -> str:
    """Why the first record was refused: a wrong media root or format refuses all of them for one reason."""
    with quarantine.open(encoding="utf-8") as lines:
        entry = json.loads(next(lines, "null"))
    return f" (record {entry['record']}, {entry['reason']}: {entry['detail']})" if entry else ""


def run_verify(args: argparse.Namespace) -> int:
    from data_tools.verify import verify

    shards, problems = verify(args.dataset, _show)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    if args.json:
        print(json.dumps({"shards": shards, "problems": problems}))
    else:
        print("\n".join(problems) or f"{shards} shards of {args.dataset} are whole")
    return 1 if problems else 0


def _show(line: str) -> None:
    print(
        f"\r{line}\033[K" if sys.stderr.isatty() else line, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True
    )


def _print(report: Report, out: Path, quarantine: Path) -> None:
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
        print(f"  {report.answer_media} images or videos in the assistant's turns: seen by the model, not learnt")
    if len(report.refused) > 1:
        for file, counts in report.refused.items():
            for reason, count in sorted(counts.items(), key=lambda item: -item[1]):
                print(f"  quarantined {count:6d}  {reason}  ({file})")


def _ignored(place: str, counts: dict[str, int]) -> str:
    """The keys without effect of a place, the most frequent first, with what counts instead."""
    shown = sorted(counts.items(), key=lambda item: -item[1])[:MOST_SHOWN]
    unit = {1: place.removesuffix("s")}
    told = {key: f" ({text})" for key, text in INSTEAD.items()}
    texts = [f"{key if key.isprintable() else ascii(key)} in {n} {unit.get(n, place)}{told.get(key, '')}" for key, n in shown]
    more = len(counts) - len(shown)
    return ", ".join(texts) + (f", and {more} keys more (see report.json)" if more else "")
