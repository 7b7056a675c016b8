"""``megatron-vl data``: conversation files into data sets."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from data_tools.convert import Report


def register(subparsers: argparse._SubParsersAction) -> None:
    data = subparsers.add_parser("data", help="convert conversations into a data set, and check it")
    actions = data.add_subparsers(dest="action", required=True, metavar="ACTION")
    convert = actions.add_parser(
        "convert",
        help="ShareGPT / OpenAI JSON or JSON lines -> WebDataset prepared for Energon",
        description="Converts ShareGPT or OpenAI conversations into tar shards prepared for Energon. Every medium is "
        "decoded once; what cannot be used is counted by reason and listed with file, record and field in "
        "OUT/quarantine.jsonl. A conversion that was interrupted goes on when it is started again with the same arguments. "
        "Exit code 1 when nothing could be written.",
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
    if args.json:
        print(json.dumps(report.as_json()))
    else:
        _print(report, args.out)
    if not report.samples:
        quarantine = args.out / "quarantine.jsonl"
        raise ConvertError(f"none of {report.records} records could be used{_first_refusal(quarantine)}; see {quarantine}")
    if args.val_fraction and not report.val:
        raise ConvertError(f"{report.samples} sample is too few for a validation split; give more, or leave out --val-fraction")
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


def _print(report: Report, out: Path) -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    print(f"{report.samples} of {report.records} records written to {out} in {report.seconds:.1f} s")
    print(f"  train {report.train}, val {report.val}, images {report.images}, videos {report.videos}")
    print(f"  {report.shards} shards, {report.bytes / 2**20:.1f} MiB")
    for file, reasons in report.refused.items():
        for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
            print(f"  refused {count:6d}  {reason}  ({file})")
    if report.refused:
        print(f"  listed in {out / 'quarantine.jsonl'}")
